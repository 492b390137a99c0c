"""Where a master writes what happens."""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

SIZE = 5 << 20
"""Bytes after which a new log file is begun."""
KEPT = 3
"""Log files that stay beside the one that is written."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def write_log(file: Path | None) -> None:
    """Have the root logger write to ``file``, and this process's stdout and stderr too; None: all to stderr."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr) if file is None else _AllOutput(file)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("uvicorn.error", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class _AllOutput(RotatingFileHandler):
    """A log of bounded size, which also gets what others write to the file descriptors 1 and 2."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, maxBytes=SIZE, backupCount=KEPT, encoding="utf-8")
        self._point()

    def doRollover(self) -> None:
        super().doRollover()
        self._point()

    def _point(self) -> None:
        assert self.stream is not None
        for descriptor in (1, 2):
            os.dup2(self.stream.fileno(), descriptor)
