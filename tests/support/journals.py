"""Journals for tests: opened in a folder, read back, failed on purpose."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from det_core.journal import Journal, RunFolder, RunRecord, read_run


def open_journal(folder: Path, *, restart: int = 0, rank: int = 0, **options: Any) -> Journal:
    """Return a journal of run ``r`` in ``folder``."""
    return Journal(folder, run_id="r", restart=restart, rank=rank, **options)


def written(folder: Path, group: str = "training", **options: Any) -> dict[int | None, dict[str, Any]]:
    """Return the metrics of a group by step; fail if a step occurs twice."""
    rows = read_run(folder).rows(group, **options)
    found = {row.steps_completed: row.metrics for row in rows}
    assert len(found) == len(rows), "a step occurs twice"
    return found


def lines(folder: Path) -> list[bytes]:
    """Return all lines of all journal files in a directory, in the order of the files' names."""
    return [line for path in sorted(folder.glob("journal-*.jsonl")) for line in path.read_bytes().split(b"\n") if line]


def same(a: Any, b: Any) -> bool:
    """Return whether two values are the same JSON: NaN is NaN, True is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def one_run(home: Path, *, name: str = "job", outcome: str | None = "completed", steps: int = 3) -> RunRecord:
    """Create a run with a few training rows and this outcome (None: it died)."""
    folder = RunFolder.create(home, name=name)
    folder.begin_restart({"argv": ["python", "train.py"]})
    journal = Journal(folder.path, run_id=folder.run_id, restart=folder.restart, rank=0)
    for step in range(1, steps + 1):
        journal.metrics("training", step, {"loss": 1 / step})
    if outcome is not None:
        journal.record("run_end", {"outcome": outcome})
    journal.close()
    folder.release()
    return read_run(folder.path)


def rich_run(home: Path) -> str:
    """Create a run of two restarts that has reported values of every kind; return its ID."""
    folder = RunFolder.create(home, name="/work/train.py")
    for restart in range(2):
        folder.begin_restart({"argv": ["python", "train.py", "a b"]})
        journal = Journal(folder.path, run_id=folder.run_id, restart=restart, rank=0)
        for step in range(1 + 2 * restart, 4 + 2 * restart):
            metrics = {"loss": 1 / step, "acc": {"top1": step, "bad": -math.inf}, "words": ["a", "b"]}
            journal.metrics("training", step, metrics, [{"x": step}, {"x": math.nan}])
        journal.metrics("validation", step, {"acc": 0.5, "name": "NaN", "ok": True, "big": 2**64 - 1})
        journal.record("checkpoint", {"storage_id": f"abc-{restart}", "metadata": {"steps_completed": step}})
        journal.record("metadata", {"metadata": {"note": "x"}})
        journal.record("run_end", {"outcome": "preempted"})
        journal.close()
        folder.release()
    return folder.run_id


class Os:
    """The module ``os`` as a journal's file sees it; a subclass overrides what it wants to be otherwise."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class FailingOs(Os):
    """System calls of which the N-th fails, and after it ``more`` further ones.

    Args:
        at: the number of the first call that fails, from 0.
        more: how many calls after it fail too.
        code: with which errno.
        part: a failing write takes the first half of its bytes.
        only: the calls that count and fail.
    """

    def __init__(self, at: int, more: int = 0, code: int = errno.EIO, part: bool = False, only: str = "") -> None:
        self.calls: list[str] = []
        self._range = range(at, at + more + 1)
        self._code, self._part = code, part
        names = only or "open write pread fsync fstat close unlink makedirs rename dup ftruncate"
        for name in names.split():
            setattr(self, name, self._failing(name, getattr(os, name)))

    @property
    def failed(self) -> bool:
        """Whether a call has failed."""
        return len(self.calls) > self._range.start

    def mend(self) -> None:
        """Fail no more."""
        self._range = range(0)

    def _failing(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.calls)
            self.calls.append(name)
            if number not in self._range:
                return real(*args, **kwargs)
            if name == "close":
                real(*args)  # as Linux does: the descriptor is gone although close fails
            if name == "write" and self._part:
                fd, data = args
                return real(fd, data[: len(data) // 2])
            raise OSError(self._code, os.strerror(self._code))

        return call


@contextmanager
def failing(at: int, more: int = 0, **how: Any) -> Iterator[FailingOs]:
    """Let system calls of journal files fail as :class:`FailingOs` says; they are retried with the next report."""
    with pytest.MonkeyPatch.context() as patch:
        system = FailingOs(at, more, **how)
        patch.setattr("det_core.journal._file.os", system)
        patch.setattr("det_core.journal._file.RETRY_INTERVAL", 0.0)
        patch.setattr("det_core.journal._file.DELETION_CHECK_INTERVAL", 0.0)
        yield system
