"""Warnings about scripts whose resumed run would differ from an undisturbed one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from det_core import client, core
from support.ranks import running


class Restarts:
    """Starts one run again and again, and collects its notices."""

    def __init__(self, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], root: Path) -> None:
        self._caplog = caplog
        self._capsys = capsys
        self.root = root

    def start(self) -> core.Context:
        mode = core.TensorboardMode.MANUAL  # which loads less
        return core.init(
            name="port", resume="latest", checkpoint_storage=str(self.root / "store"), tensorboard_mode=mode
        )

    def warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        found = [record.message for record in self._caplog.records if record.name == "det_core.core"]
        self._caplog.clear()
        return found

    def notices(self) -> str:
        return self._capsys.readouterr().err


@pytest.fixture
def port(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Restarts:
    return Restarts(caplog, capsys, tmp_path)


def save(ctx: core.Context, steps: int) -> None:
    with ctx.checkpoint.store_path({"steps_completed": steps}) as (path, _):
        (path / "state").write_text(str(steps))


def resumed_steps(ctx: core.Context) -> int:
    with ctx.checkpoint.resume() as path:
        return 0 if path is None else int((path / "state").read_text())


def report(ctx: core.Context, steps: Iterable[int], group: str = "training") -> None:
    for step in steps:
        ctx.train.report_metrics(group, step, {"loss": 1 / (step + 1)})


def first_run(port: Restarts, steps: Iterable[int], saved: int, later: Iterable[int] = ()) -> None:
    """Report steps, save, report what is lost by a kill, and expect no word about it."""
    with port.start() as ctx:
        report(ctx, steps)
        save(ctx, saved)
        report(ctx, later)
    assert port.warnings() == []
    port.notices()


# Whether the script asks for its checkpoint.


def test_resumed_is_printed_when_the_script_gets_its_checkpoint(port: Restarts) -> None:
    first_run(port, range(1, 6), 5)
    with port.start() as ctx:
        begun = port.notices()
        assert "started again (restart 1)" in begun and "resumed from" not in begun
        resumed_steps(ctx)
        assert f"run {ctx.run_id} resumed from checkpoint {ctx.latest_checkpoint} (step 5)\n" in port.notices()
        resumed_steps(ctx)
        assert "resumed from" not in port.notices()
        report(ctx, range(6, 10))
    assert port.warnings() == []


@pytest.mark.parametrize("group", ["training", "validation", "mine"])
@pytest.mark.parametrize("first", [1, 6])
def test_run_that_never_asks_for_its_checkpoint_is_warned_at_its_first_report(
    port: Restarts, group: str, first: int
) -> None:
    first_run(port, range(1, 6), 5)
    with port.start() as ctx:
        assert ctx.steps_completed == 5  # the counter alone is not what was trained
        ctx.train.report_metrics("gpu", None, {"load": 1})
        assert port.warnings() == []
        report(ctx, range(first, first + 3), group)
        (warning,) = port.warnings()
        report(ctx, range(1, 9), "another")
    assert f"no checkpoint was restored before its first report (step {first} of group '{group}')" in warning
    assert "(step 5) with ctx.checkpoint.resume()" in warning
    assert ("the last is of step 5) do not count any more" in warning) is (group == "training" and first == 1)
    assert port.warnings() == [] and "resumed from" not in port.notices()


def test_run_without_a_checkpoint_that_repeats_rows_is_warned(port: Restarts) -> None:
    with port.start() as ctx:
        report(ctx, range(1, 3000))  # more than what is read of a journal's end for other questions
        report(ctx, range(1, 2000), "other")
    with port.start() as ctx:
        report(ctx, range(1, 3), "validation")
        report(ctx, range(1, 9))
    (warning,) = port.warnings()
    assert "step 1 of group 'training' is reported again; earlier rows" in warning and "step 2999" in warning
    assert warning.endswith("It has saved none, so start a new run instead")


@pytest.mark.parametrize("how", ["download", "restore_path", "its own way", "validates first"])
def test_run_that_restores_in_another_way_is_not_warned(port: Restarts, how: str) -> None:
    first_run(port, range(1, 6), 5, later=range(6, 9))
    with port.start() as ctx:
        if how == "its own way":
            assert (port.root / "store" / str(ctx.latest_checkpoint) / "state").read_text() == "5"
        elif how == "validates first":
            resumed_steps(ctx)
            report(ctx, [5], "validation")
        elif how == "download":
            ctx.checkpoint.download(str(ctx.latest_checkpoint), port.root / "copy")
        else:
            with ctx.checkpoint.restore_path(str(ctx.latest_checkpoint)):
                pass
        report(ctx, range(6, 9))
    assert port.warnings() == []
    assert ("resumed from checkpoint" in port.notices()) is (how != "its own way")


# The first row after a resume.


WRONG = {
    # rows before the checkpoint, its steps, first row after the resume, words of the warning
    "counter not loaded": (range(1, 31), 30, 1, "is of step 1, and step 30 was reported before"),
    "counter saved before it goes up": (range(1, 31), 30, 30, "is of step 30, and step 30 was reported before"),
    "counter not loaded, reports every 100": (range(100, 1001, 100), 1050, 100, "of step 100, and step 1000 was"),
    "rest of the epoch not trained": (range(1, 31), 30, 41, "is of step 41, and the last before it of step 30: what"),
    "rest of the epoch not trained, reports every 10": (range(10, 51, 10), 55, 110, "step 110, and the last before"),
    "last step not reported": (range(1, 30), 30, 31, "step 30 was trained, saved and never reported"),
    "last step not reported, reports every 10": (range(10, 41, 10), 50, 60, "step 50 was trained, saved and never"),
}


@pytest.mark.parametrize("case", WRONG)
def test_first_row_after_a_resume_that_is_not_the_next_one_is_warned(port: Restarts, case: str) -> None:
    steps, saved, first, words = WRONG[case]
    first_run(port, steps, saved, later=[saved + 1000])
    with port.start() as ctx:
        resumed_steps(ctx)
        report(ctx, range(first, first + 5))
    (warning,) = port.warnings()
    assert words in warning


def powers(base: int, last: int) -> list[int]:
    return [base**exponent for exponent in range(last + 1)]


RIGHT: dict[str, tuple[Iterable[int], int, int]] = {
    "every step": (range(1, 31), 30, 31),
    "counted from 0": (range(30), 30, 30),
    "counted from 0, saved as its last": (range(30), 29, 30),
    "every 100 steps": (range(100, 1001, 100), 1050, 1100),
    "every 100 steps since the start": (range(100, 1001, 100), 1050, 1150),
    "the first, then every 100": ([1, *range(100, 1001, 100)], 1000, 1100),
    "the first of 100": ([1], 50, 100),
    "nothing yet": ([], 50, 100),
    "every 100 steps, and at the end of an epoch": (sorted({*range(100, 1001, 100), 250, 500, 750}), 1010, 1100),
    "every so many seconds": ([97, 190, 296, 391, 480], 500, 610),
    "powers of 10": (powers(10, 4), 20_000, 100_000),
    "epochs, saved by batches": (range(1, 5), 4000, 5),
    "steps that were passed over, as their loss was NaN": ([1, 2, 3, 5, 6, 9, 10], 10, 12),
    "begun at a large step": (range(100_001, 100_031), 100_030, 100_031),
}


@pytest.mark.parametrize("case", RIGHT)
def test_first_row_after_a_resume_that_goes_on_is_not_warned(port: Restarts, case: str) -> None:
    steps, saved, first = RIGHT[case]
    first_run(port, steps, saved, later=[first, first + 1])
    for _ in range(2):  # also where the restart before has saved nothing
        with port.start() as ctx:
            resumed_steps(ctx)
            report(ctx, [0], "epochs")
            report(ctx, [first])
        assert port.warnings() == []


def test_row_reported_while_a_checkpoint_is_saved_is_not_one_before_it(port: Restarts) -> None:
    with port.start() as ctx:
        report(ctx, range(5))
        handle = ctx.checkpoint.begin({"steps_completed": 5})
        (handle.path / "state").write_text("5")
        report(ctx, [5, 6])  # at the top of the loop, from 0 on
        handle.commit()
    with port.start() as ctx:
        assert resumed_steps(ctx) == 5
        report(ctx, [5, 6])
    assert port.warnings() == []


def test_start_from_another_runs_checkpoint_is_not_warned(port: Restarts) -> None:
    first_run(port, range(1, 31), 30)
    (warm,) = client.run("latest").checkpoints()
    with core.init(name="other", checkpoint_storage=str(port.root / "store")) as ctx:
        with ctx.checkpoint.restore_path(warm["storage_id"]):
            pass
        report(ctx, range(1, 9))
        save(ctx, 8)
    assert port.warnings() == []


# Checkpoints behind the reports.


def test_checkpoint_behind_the_reports_is_warned_once(port: Restarts) -> None:
    with port.start() as ctx:
        for epoch in range(1, 4):
            report(ctx, range(10 * epoch, 10 * epoch + 10))
            save(ctx, epoch)
    (warning,) = port.warnings()
    assert "has steps_completed=1, and step 19 was reported before it" in warning
    assert "supersedes the rows after step 1. Count both in one unit" in warning


@pytest.mark.parametrize("write", ["begin", "validation in epochs", "earlier restart"])
def test_checkpoint_that_is_not_behind_the_reports_is_not_warned(port: Restarts, write: str) -> None:
    with port.start() as ctx:
        report(ctx, range(1, 6))
        if write == "begin":
            handle = ctx.checkpoint.begin({"steps_completed": 5})
            report(ctx, range(6, 20))
            handle.commit()
        elif write == "validation in epochs":
            report(ctx, [400], "validation")
            save(ctx, 5)
    if write == "earlier restart":
        with port.start() as ctx:
            save(ctx, 3)
    assert port.warnings() == []


# Several ranks.

RANKS = """
    from det_core import core

    distributed = core.DistributedContext.from_torch_distributed()
    rank = distributed.rank
    with core.init(distributed=distributed, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
        for step in range(1, 4):
            {report}
            distributed.allgather(None)
"""


@pytest.mark.parametrize(
    "report, is_told",
    [
        ('ctx.train.report_training_metrics(step, {"loss": float(rank)})', True),
        ('ctx.train.report_training_metrics(step, {"loss": 1.0, f"loss of rank {rank}": float(rank)})', False),
        ('ctx.train.report_metrics(f"rank {rank}", step, {"loss": float(rank)})', False),
        ('rank == 1 and ctx.train.report_validation_metrics(step, {"loss": 0.5})', False),
    ],
)
def test_values_of_other_ranks_that_do_not_count_are_warned_at_the_first_report(
    tmp_path: Path, report: str, is_told: bool
) -> None:
    with running(RANKS.replace("{report}", report), 3, tmp_path) as ranks:
        assert ranks.wait() == [0, 0, 0], "\n".join(map(ranks.output, range(3)))
    said = [ranks.output(rank).count("only those of rank 0 count") for rank in range(3)]
    assert said == [int(is_told), 0, 0]
    if is_told:
        assert "report different values for group 'training', step 1, key 'loss'" in ranks.output(0)
