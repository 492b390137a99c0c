"""A script that a test gives as text, run to its end in a process that has torch and det_core loaded."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from support import TESTS, warm


def run(code: str, folder: Path, *args: object, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """Run code that may import from ``tests`` and return the ended process; stderr is within stdout."""
    script = folder / f"script-{time.monotonic_ns()}.py"
    script.write_text(textwrap.dedent(code))
    return warm.run([script, *map(str, args)], env={**os.environ, "PYTHONPATH": str(TESTS), **(env or {})})
