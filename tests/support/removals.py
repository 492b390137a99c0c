"""A training whose checkpoints another process removes at random, and what must hold all the same.

The other process is this module as a program. It removes what it is asked to remove as ``det-core checkpoint rm`` does,
and answers with what it removed and when; ``time.monotonic()`` is one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from det_core import client, core
from det_core.errors import CheckpointError
from det_core.storage import Candidate

POLICY = core.KeepLatest(2) | core.KeepBest(2, "loss")
LONGEST_PAUSE = 0.05
"""Seconds that the other process may wait before it removes, so that it comes in the midst of something."""


@dataclass
class Saved:
    """A checkpoint that was committed.

    Attributes:
        began: when its commit was about to begin.
        committed: when that was over, with the retention that follows it.
        removed: when the other process began to remove it, and had removed it.
        expired_after: the place in the order of commits of the one after which retention deleted it.
    """

    storage_id: str
    candidate: Candidate
    began: float
    committed: float
    removed: tuple[float, float] = (float("inf"), float("inf"))
    expired_after: int | None = None


class Training:
    """Starts one run again and again, and saves, beside the other process.

    Args:
        storage: where checkpoints go.
        seed: for what is drawn.
    """

    def __init__(self, storage: Mapping[str, Any], seed: int) -> None:
        self._storage = dict(storage)
        self._rng = random.Random(seed)
        self._saved: dict[str, Saved] = {}
        self._deleted = _Deleted()
        self._asked = 0
        self._pending: dict[str, tuple[float, float]] = {}
        """Removals reported before the commit of their checkpoint was over."""
        self.removals = 0
        self.expired = 0

    def run(self, rounds: int) -> None:
        """Train that often, each time from a new start; at the end undisturbed."""
        logger = logging.getLogger("det_core.checkpoint")
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self._deleted)
        try:
            with _other(self._storage) as other:
                for _ in range(rounds):
                    self._round(other)
            self._finish()
        finally:
            logger.removeHandler(self._deleted)
            logger.setLevel(level)

    def _round(self, other: subprocess.Popen[str]) -> None:
        self._disturb(other)
        began = time.monotonic()
        with self._open() as ctx:
            self._disturb(other)
            start, failure = self._resume(ctx)
            resumed = time.monotonic()
            self._settle(other)
            self._check_start(start, failure, began, resumed)
            step = 0 if start is None else start.candidate.steps_completed
            for _ in range(self._rng.randint(1, 4)):
                step += 1
                self._disturb(other)
                self._save(ctx, step)
            self._settle(other)
        self._check_retention()

    def _open(self) -> core.Context:
        manual = core.TensorboardMode.MANUAL
        return core.init(
            name="removed", resume="latest", retention=POLICY, checkpoint_storage=self._storage, tensorboard_mode=manual
        )

    def _resume(self, ctx: core.Context) -> tuple[Saved | None, Exception | None]:
        try:
            with ctx.checkpoint.resume() as path:
                try:
                    return None if path is None else self._saved[(path / "name").read_text()], None
                except FileNotFoundError:
                    # The folder of a store is removed while the script reads it: nothing can be promised there.
                    assert path is not None
                    return self._saved[path.name], None
        except CheckpointError as e:
            return None, e

    def _save(self, ctx: core.Context, step: int) -> None:
        loss = self._rng.random()
        with ctx.checkpoint.store_path({"steps_completed": step, "loss": loss}) as (path, storage_id):
            (path / "name").write_text(storage_id)
            began = time.monotonic()
        order = len(self._saved)
        candidate = Candidate(storage_id, step, 0.0, ordinal=order, metrics={"loss": loss})
        self._saved[storage_id] = Saved(storage_id, candidate, began, time.monotonic())
        for gone in self._deleted.take():
            self._saved[gone].expired_after = order
            self.expired += 1

    # The other process.

    def _disturb(self, other: subprocess.Popen[str]) -> None:
        """Have it remove one, any or the newest, some time; half of the times wait until it has."""
        if self._rng.random() < 0.4:
            return
        _tell(other, {"newest": self._rng.random() < 0.5, "pause": self._rng.uniform(0, LONGEST_PAUSE)})
        self._asked += 1
        if self._rng.random() < 0.5:
            self._settle(other)

    def _settle(self, other: subprocess.Popen[str]) -> None:
        """Take all of its answers that are due."""
        while self._asked:
            self._asked -= 1
            answer = _hear(other)
            if answer["storage_id"] is not None:
                self.removals += 1
                self._pending[answer["storage_id"]] = (answer["began"], answer["over"])
        for storage_id in [i for i in self._pending if i in self._saved]:
            self._saved[storage_id].removed = self._pending.pop(storage_id)

    # What must hold.

    def _check_start(self, start: Saved | None, failure: Exception | None, began: float, resumed: float) -> None:
        """Check that no start fails, or is from an older checkpoint, while an intact one exists all the time."""
        there = [
            s
            for s in self._saved.values()
            if s.expired_after is None and s.committed < began and s.removed[0] > resumed
        ]
        if failure is not None and there:
            raise failure
        newest = max((s.candidate.ordinal for s in there), default=-1)
        assert newest <= (-1 if start is None else start.candidate.ordinal), (newest, start)

    def _check_retention(self) -> None:
        """Check that each checkpoint deleted by retention was one that its policy did not keep.

        The policy had to choose among those that others had not removed before the commit.
        """
        for gone in self._saved.values():
            if gone.expired_after is None:
                continue
            commit = list(self._saved.values())[gone.expired_after]
            there = [
                s.candidate
                for s in self._saved.values()
                if s.candidate.ordinal <= gone.expired_after
                and (s.expired_after is None or s.expired_after >= gone.expired_after)
                and s.removed[1] > commit.began
            ]
            assert gone.storage_id not in POLICY.keep(there, 0.0), (gone, there)

    def _finish(self) -> None:
        """Check that undisturbed, the kept checkpoints are those of the policy, and intact."""
        with self._open() as ctx:
            self._save(ctx, 1)
        with client.checkpoints(storage=self._storage) as checkpoints:
            found = {c.storage_id for c in checkpoints}
            assert {problem for c in checkpoints for problem in c.verify()} == set()
        there = [s for s in self._saved.values() if s.expired_after is None and s.removed[0] == float("inf")]
        assert found == {s.storage_id for s in there}
        assert found == POLICY.keep([s.candidate for s in there], 0.0)


class _Deleted(logging.Handler):
    """Handler of retention's reports of deletions."""

    def __init__(self) -> None:
        super().__init__()
        self._ids: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("deleted checkpoint"):
            assert isinstance(record.args, tuple)
            self._ids.append(str(record.args[0]))

    def take(self) -> list[str]:
        """Return the IDs since the last call."""
        ids = self._ids
        self._ids = []
        return ids


@contextmanager
def _other(storage: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__)), json.dumps(storage)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:  # which closes its stdin at the end, and so ends it
        yield process
    assert process.returncode == 0


def _tell(other: subprocess.Popen[str], what: Mapping[str, Any]) -> None:
    assert other.stdin is not None
    print(json.dumps(what), file=other.stdin, flush=True)


def _hear(other: subprocess.Popen[str]) -> dict[str, Any]:
    assert other.stdout is not None
    line = other.stdout.readline()
    assert line, "the other process has died"
    return dict(json.loads(line))


def main(storage: str, asked: IO[str]) -> None:
    """Remove checkpoints as each line asks; the last one that there is, and one that is read, stays."""
    no_runs = Path(__file__).parent  # else each removal would wait for the record of the run, which is being written
    with client.checkpoints(storage=json.loads(storage), home=no_runs) as checkpoints:
        for line in asked:
            wanted = json.loads(line)
            time.sleep(wanted["pause"])
            there = list(checkpoints)
            chosen = there[-1] if wanted["newest"] and there else random.choice(there or [None])
            answer: dict[str, Any] = {"storage_id": None}
            if len(there) > 1 and chosen is not None and chosen.storage_id not in checkpoints.in_use:
                answer = {"storage_id": chosen.storage_id, "began": time.monotonic()}
                chosen.delete()
                answer["over"] = time.monotonic()
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin)
