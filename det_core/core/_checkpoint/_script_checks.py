"""Warnings about scripts whose resumed run would differ from an undisturbed one, as far as the API can see it.

Each is given once. They look at the first row of each group and at checkpoints, so that other reports do not pay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

from det_core._json import equal_json
from det_core.core._checkpoint._start import StartCheckpoint
from det_core.core._distributed import DistributedContext
from det_core.core._run import Run
from det_core.errors import DistributedError
from det_core.journal import Report, records_before

logger = logging.getLogger("det_core.core")
TOPIC = "first rows"
MIN_ROWS = 3
"""Minimum number of rows before a checkpoint that show how often a script reports."""
MAX_ROWS = 20
"""Maximum number of rows that are compared."""
UNEVEN = 10
"""Widths between two rows, the largest of them, that may follow on each other where widths differ."""


class ScriptChecks:
    """Compares what a script does with its checkpoints and reports with what a resume needs.

    Rows and checkpoints are the chief's. Of another rank it looks only at whether its rows differ from the chief's.

    Args:
        distributed: the ranks.
        run: the run, whose journal has the rows of earlier restarts.
        start: the checkpoint to start from.
        say: prints a line for a person.
    """

    def __init__(
        self, distributed: DistributedContext, run: Run, start: StartCheckpoint, say: Callable[[str], None]
    ) -> None:
        self._distributed = distributed
        self._run = run
        self._start = start
        self._say = say
        self._given: str | None = None
        self._reported: dict[str, int] = {}  # by storage_id, the last training step when it was begun
        self._first_rows: dict[tuple[str, bool], _FirstRow] = {}  # by group, and whether it is the chief's
        self._warned: set[str] = set()
        run.journal.on_first_row = self._on_first_row
        if distributed.rank == 0 and distributed.communicator is not None:
            distributed.communicator.subscribe(TOPIC, self._on_other_rank)

    @property
    def name(self) -> str:
        """The run in messages."""
        trial = None
        if self._run.managed and self._run.info is not None:
            trial = self._run.info.trial
        if trial is None:
            return f"run {self._run.run_id}"
        return f"trial {trial.trial_id}"

    def on_given(self, storage_id: str) -> None:
        """Note that the script has been given the files of a checkpoint."""
        if self._given is None and self._start.is_start(storage_id):
            self._say(f"{self.name} resumed from checkpoint {storage_id} (step {self._start.steps})")
        self._given = storage_id

    def on_begun(self, storage_id: str) -> None:
        """Note what was reported when the script began a checkpoint, on the chief."""
        self._reported[storage_id] = self._run.journal.last_step("training")

    def reported(self, storage_id: str) -> int | None:
        """Return the last training step that was reported before a checkpoint was begun here; None: none was."""
        step = self._reported.get(storage_id, -1)
        if step < 0:
            return None
        return step

    def on_committed(self, storage_id: str, steps_completed: int) -> None:
        """Warn of a checkpoint behind the reports: a resume from it takes good rows away."""
        reported = self._reported.pop(storage_id, -1)
        if steps_completed < reported:
            self._warn(
                "behind",
                f"checkpoint {storage_id} has steps_completed={steps_completed}, and step {reported} was reported "
                f"before it: a resume from it supersedes the rows after step {steps_completed}. Count both in one "
                "unit, and save after the step counter has gone up",
            )

    def _on_first_row(self, row: Report) -> None:
        if row.steps is None:  # of the machine, such as the profiler's
            return
        values = {key: value for key, value in row.metrics.items() if isinstance(value, (int, float, str))}
        first = _FirstRow(self._distributed.rank, row.group, row.steps, values)
        if self._distributed.rank != 0:
            if self._distributed.communicator is not None:
                with suppress(DistributedError):
                    self._distributed.communicator.post(TOPIC, first.to_message())
            return
        self._first_rows[row.group, True] = first
        self._compare_ranks(row.group)
        if self._given is None:
            self._check_asked(row.group, row.steps)
        elif row.group == "training":
            self._check_next_step(self._given, row.steps)

    # Whether the script has asked for its checkpoint.

    def _check_asked(self, group: str, step: int) -> None:
        storage_id = self._start.peek()
        # A script may fetch the files in a way of its own: it needs the id for that, and goes on behind their step.
        if storage_id is not None and self._start.is_id_read and step > self._start.steps:
            return
        if storage_id is None and self._run.journal_restart == 0:
            return
        last = self._last_step_before(group)
        superseded = ""
        if last is not None and step <= last:
            superseded = f"; earlier rows from that step on (the last is of step {last}) do not count any more"
        if storage_id is not None:
            self._warn(
                "never asked",
                f"{self.name} was resumed, and no checkpoint was restored before its first report (step {step} of "
                f"group {group!r}), so it starts from the beginning{superseded}. Restore checkpoint {storage_id} "
                f"(step {self._start.steps}) with ctx.checkpoint.resume(), or start a new run",
            )
        elif superseded:
            self._warn(
                "never asked",
                f"{self.name} was resumed, no checkpoint was restored, and step {step} of group {group!r} is reported "
                f"again{superseded}. It has saved none, so start a new run instead",
            )

    def _records_before(self) -> Iterator[dict[str, Any]]:
        run = self._run
        return records_before(run.path, run.journal_restart, 0, run.journal.run_id)

    def _last_step_before(self, group: str) -> int | None:
        """Return the step of the last row of a group in earlier restarts, or None."""
        steps = (_step_of(record, group) for record in self._records_before())
        return next((step for step in steps if step is not None), None)

    # Whether the first row after a resume follows on the last one before the checkpoint.

    def _check_next_step(self, storage_id: str, step: int) -> None:
        rows = self._rows_before(storage_id)
        if not rows:
            return
        last = rows[0]
        head = f"the first training report after the resume from checkpoint {storage_id} is of step {step}"
        if step <= last:
            self._warn(
                "first step",
                f"{head}, and step {last} was reported before that was saved: begin at ctx.steps_completed, save after "
                "the step counter has gone up, and skip the batches that are done",
            )
            return
        if len(rows) < MIN_ROWS:
            return
        widths = {later - earlier for earlier, later in pairwise(reversed(rows))}
        if len(widths) == 1:
            width = max(widths)
        else:
            width = UNEVEN * max(widths)
        saved = last
        if self._start.is_start(storage_id):
            saved = self._start.steps
        if step > max(saved, last) + width:
            self._warn(
                "first step",
                f"{head}, and the last before it of step {last}: what lies between is not trained, such as the rest of "
                "an epoch. Go on within the epoch at ctx.steps_completed, or save at its end",
            )
        elif len(widths) == 1 and last + width <= saved and last + width < step and (step - last) % width == 0:
            self._warn(
                "first step",
                f"{head}, and the last before it of step {last}: step {last + width} was trained, saved and never "
                "reported. Report before saving, and before leaving the loop",
            )

    def _rows_before(self, storage_id: str) -> list[int]:
        """Return the training steps that were reported before a checkpoint was begun, falling; empty: not known."""
        rows: list[int] = []
        for record in self._records_before():
            if not rows:
                if record["kind"] == "checkpoint_commit" and record["body"].get("storage_id") == storage_id:
                    reported = record["body"].get("reported")
                    if not isinstance(reported, int):
                        break
                    rows.append(reported)
                continue
            step = _step_of(record, "training")
            if step is not None and step < rows[-1]:  # others were superseded, or reported while it was saved
                rows.append(step)
                if len(rows) == MAX_ROWS:
                    break
        return rows

    # Whether ranks report different values in one place.

    def _on_other_rank(self, rank: int, message: tuple[str, int, dict[str, Any]]) -> None:
        first = _FirstRow(rank, *message)
        self._first_rows.setdefault((first.group, False), first)
        self._compare_ranks(first.group)

    def _compare_ranks(self, group: str) -> None:
        chiefs = self._first_rows.get((group, True))
        others = self._first_rows.get((group, False))
        if chiefs is None or others is None or (key := chiefs.conflict(others)) is None:
            return
        self._warn(
            "ranks",
            f"ranks 0 and {others.rank} report different values for group {group!r}, step {others.steps}, key {key!r}, "
            "and only those of rank 0 count: report under `if ctx.distributed.rank == 0:`, such as the mean of all "
            "ranks, or give each rank a key of its own",
        )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)


class _FirstRow:
    """The first row of a rank in a group: its step, and those of its values that are numbers or texts."""

    def __init__(self, rank: int, group: str, steps: int, values: Mapping[str, Any]) -> None:
        self.rank = rank
        self.group = group
        self.steps = steps
        self._values = dict(values)

    def to_message(self) -> tuple[str, int, dict[str, Any]]:
        """Return what another rank makes it from again."""
        return self.group, self.steps, self._values

    def conflict(self, other: _FirstRow) -> str | None:
        """Return a key of which two rows of one step have different values, or None."""
        if self.steps != other.steps:
            return None
        common = self._values.keys() & other._values.keys()
        return min((key for key in common if not equal_json(self._values[key], other._values[key])), default=None)


def _step_of(record: Mapping[str, Any], group: str) -> int | None:
    if record["kind"] != "metrics" or record["group"] != group:
        return None
    step: int | None = record["steps_completed"]
    return step
