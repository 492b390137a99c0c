"""Trainings that an earlier version has stopped in their second epoch go on, and end as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from golden.make import lay_out, run, told
from support import warm


def rows_of(name: str, group: str) -> tuple[list[Any], list[int]]:
    """Step and metrics of the rows that stand, and in which start each was reported."""
    (found,) = told(f"runs list --name {name}")
    assert found["state"] == "completed"
    rows = [row for row in told(f"runs export {found['run_id']} --group {group}") if not row["superseded"]]
    for row in rows:
        row["metrics"].pop("samples_per_second", None)
    return [[row["steps_completed"], row["metrics"]] for row in rows], [row["restart"] for row in rows]


@pytest.mark.parametrize(("ranks", "length"), [(1, 16), (2, 8)])
def test_a_trainer_and_a_trial_end_as_straight_ones(tmp_path: Path, home: Path, ranks: int, length: int) -> None:
    """One script goes on with both, and trains each once more from its beginning."""
    lay_out(tmp_path)
    kinds = ("trainer", "trial")
    words = [f"{kind}={name}" for kind in kinds for name in (f"{kind}-{ranks}", f"straight-{kind}")]
    for rank, output in enumerate(run(tmp_path, "training.py", *words, ranks=ranks, start=warm.start)):
        assert output.endswith("\n0"), output
        said = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("ENDED ")]
        ends = {name: end for name, its_rank, end in said if its_rank == rank}
        assert len(ends) == 4
        for kind in kinds:
            assert ends[f"{kind}-{ranks}"] == ends[f"straight-{kind}"]
    before = json.loads((tmp_path / "told.json").read_text()).values()
    for kind in kinds:
        (shown,) = [said for said in before if isinstance(said, dict) and said["name"] == f"{kind}-{ranks}"]
        stopped = shown["checkpoints"][-1]["steps_completed"]
        assert length / 2 < stopped < length  # in the second epoch
        for group in ("training", "validation"):
            (rows, starts), (straight, _) = rows_of(f"{kind}-{ranks}", group), rows_of(f"straight-{kind}", group)
            assert [step for step, _ in rows] == [step for step, _ in straight] and rows[-1][0] == length
            for (_, mine), (_, expected) in zip(rows, straight, strict=True):
                assert mine == pytest.approx(expected, rel=1e-12)  # squares do not fit in doubles, as the weights do
            assert starts == [int(step > stopped) for step, _ in rows]
