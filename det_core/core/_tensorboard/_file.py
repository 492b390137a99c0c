"""One TensorBoard event file, of the messages that TensorBoard itself reads."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from det_core._optional import require
from det_core.core._tensorboard._records import Records
from det_core.core._tensorboard._values import Scalar


class EventFile:
    """A file ``events.out.tfevents.<time>.<host>.<pid>`` in ``folder``, which it makes.

    Args:
        folder: a folder; file names sort by the time at which they were opened.
        older: whether an earlier session has left event files there. If so, the first step is written as the start
            of a session: TensorBoard then drops from that step on what it has read so far.
    """

    def __init__(self, folder: Path, *, older: bool) -> None:
        # These two modules need nothing but protobuf; the rest of the package imports numpy, boto3 and more.
        event = require("tensorboard.compat.proto.event_pb2", extra="tensorboard", purpose="writing event files")
        summary = require("tensorboard.compat.proto.summary_pb2", extra="tensorboard", purpose="writing event files")
        self._event, self._session, self._value, self._summary = (
            event.Event,
            event.SessionLog,
            summary.Summary.Value,
            summary.Summary,
        )
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._records = Records(self.path)
        self._write(self._event(wall_time=now, file_version="brain.Event:2"))
        self._older = older
        self._started_at: int | None = None

    def write(self, wall_time: float, step: int, values: Sequence[tuple[str, Scalar]]) -> None:
        """Append one point to each tag.

        Args:
            wall_time: seconds since the epoch.
            step: the step of the points.
            values: tag and number of each; kept with the precision of a 32-bit float, as TensorBoard does. None: the
                session starts here, points follow.
        """
        if self._older and (self._started_at is None or step < self._started_at):
            start = self._session(status=self._session.START)
            self._write(self._event(wall_time=wall_time, step=step, session_log=start))
            self._started_at = step
        if not values:
            return
        self._older = False
        points = [self._value(tag=t, simple_value=v if isinstance(v, float) else v()) for t, v in values]
        self._write(self._event(wall_time=wall_time, step=step, summary=self._summary(value=points)))

    def flush(self) -> None:
        """Bring what was written to the disk."""
        self._records.flush()

    def close(self) -> None:
        """Close the file; what was not flushed may be lost."""
        self._records.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
