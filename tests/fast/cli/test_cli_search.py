"""`det-core search preview`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from det_core.cli import main

pytest.importorskip("pydantic")

HALVING = {
    "name": "async_halving",
    "metric": "loss",
    "num_rungs": 3,
    "max_trials": 12,
    "divisor": 3,
    "max_length": 9000,
}
SPACE = {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}}


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def written(searcher: Any, hyperparameters: Any = SPACE) -> str:
        path = tmp_path / "search.yaml"
        whole = {"name": "x", "entrypoint": "true", "searcher": searcher, "hyperparameters": hyperparameters}
        path.write_text(json.dumps(whole))
        return str(path)

    return written


def previewed(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main(["search", "preview", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_says_how_many_trials_reach_each_rung(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "preview", config(HALVING)]) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()]
    rows = rows[rows.index([]) + 1 :]
    assert rows[0] == ["bracket", "max_trials", "at", "a", "time", "rung", "length", "trials"]
    assert rows[1] == ["0", "12", "12", "0", "1,000", "12"]
    assert rows[2][:2] == ["1", "3,000"] and rows[3][:2] == ["2", "9,000"]
    assert "of 108,000, what training all of them fully takes" in said.out
    assert said.err == ""


def test_values_are_as_scripts_get_them_and_which_end_is_best_is_said(
    config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {**SPACE, "net": {"layers": {"type": "int", "minval": 2, "maxval": 8}}, "opt": "sgd"}
    assert main(["search", "preview", config({**HALVING, "metric": "accuracy"}, space)]) == 0
    said = capsys.readouterr()
    rows = [line.split(maxsplit=1) for line in said.out.splitlines()]
    assert rows[1:4] == [["lr", "0.0001 to 0.1, logarithmic"], ["net.layers", "2 to 8"], ["opt", "sgd"]]
    assert "async_halving, the smallest accuracy is best: 12 trials" in said.out
    assert "to maximize it: smaller_is_better: false" in said.err
    assert main(["search", "preview", config({**HALVING, "metric": "accuracy", "smaller_is_better": False})]) == 0
    said = capsys.readouterr()
    assert "the largest accuracy is best" in said.out and said.err == ""


def test_the_budget_is_that_of_the_search(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = previewed(capsys, config({**HALVING, "max_concurrent_trials": 0}))
    first, second, third = (rung["trials"] for rung in found["brackets"][0]["rungs"])
    assert first == 12 and 4 <= second <= 12 and 1 <= third <= second
    assert found["units"] == pytest.approx(1000 * first + 2000 * second + 6000 * third)
    assert found["units_if_all_trained_fully"] == 12 * 9000


def test_a_rung_that_nobody_reaches_is_told(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "preview", config({**HALVING, "num_rungs": 5, "max_trials": 4})]) == 0
    assert "max_trials is 4 there, too few for 5 rungs" in capsys.readouterr().err


def test_each_rung_below_one_trial_is_told(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = previewed(capsys, config({**HALVING, "num_rungs": 5, "max_trials": 4}))
    assert [text[:18] for text in found["warnings"]] == [f"bracket 0: rung {n} " for n in (2, 3, 4)]
    found = previewed(capsys, config({**HALVING, "divisor": 4, "max_trials": 11}))
    top = found["brackets"][0]["rungs"][2]
    assert 0 < top["trials"] < 1 and top["trials_range"] == [0, 1]
    assert ["less than one trial on average" in text for text in found["warnings"]] == [True]


def test_what_chance_changes_is_a_range(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = config({**HALVING, "max_trials": 40})
    found = previewed(capsys, path)
    least, most = found["brackets"][0]["rungs"][1]["trials_range"]
    assert least < found["brackets"][0]["rungs"][1]["trials"] < most
    units = found["units_range"]
    assert main(["search", "preview", path]) == 0
    said = capsys.readouterr().out
    assert f"  {least} to {most}\n" in said
    assert f"40 trials, {units[0]:,} to {units[1]:,} units in all (" in said


def test_what_a_unit_is_with_a_time_metric_is_told(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    timed = {key: value for key, value in HALVING.items() if key != "max_length"}
    assert main(["search", "preview", config({**timed, "time_metric": "epoch", "max_time": 9000})]) == 0
    said = capsys.readouterr()
    assert "units are values of the validation metric 'epoch'" in said.err and "of 108,000, " in said.out
    assert main(["search", "preview", config(HALVING)]) == 0
    assert "validation metric" not in capsys.readouterr().err


def test_rungs_of_one_length_are_told(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = previewed(capsys, config(HALVING), "--config", "searcher.max_length=5")
    assert any("rungs 0 and 1 have the same length, 1" in text for text in found["warnings"])


@pytest.mark.parametrize(
    "searcher, trials, units",
    [
        ({"name": "single", "metric": "loss", "max_length": 7}, 1, 7),
        ({"name": "random", "metric": "loss", "max_length": {"batches": 7}, "max_trials": 5}, 5, 35),
        ({"name": "random", "metric": "loss", "max_trials": 5}, 5, None),
        ({"name": "grid", "metric": "loss", "max_length": 2}, 6, 12),
        ({"name": "optuna", "metric": "loss", "max_length": 7, "max_trials": 5}, 5, 35),
    ],
)
def test_methods_without_rungs(
    searcher: Any, trials: int, units: int | None, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {
        "a": {"type": "int", "minval": 1, "maxval": 3, "count": 9},
        "b": {"type": "categorical", "vals": ["x", "y"]},
    }
    found = previewed(capsys, config(searcher, space))
    assert (found["trials"], found["units"], found["brackets"]) == (trials, units, [])


def test_a_custom_method_beside_the_file_is_run(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.py").write_text(
        "from det_core.search import Close, SearchMethod, Started, TrainTo\n"
        "class Pairs(SearchMethod):\n"
        "    def handle(self, event):\n"
        "        if not isinstance(event, Started):\n"
        "            return []\n"
        "        new = [self.create(), self.create()]\n"
        "        return [*new, *(a for n in new for a in (TrainTo(n.request_id, 4), Close(n.request_id)))]\n"
    )
    found = previewed(capsys, config({"name": "custom", "metric": "loss", "class": "pairs:Pairs"}))
    assert (found["trials"], found["units"]) == (2, 8)


def test_what_cannot_be_previewed_is_an_error(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "preview", config({"name": "custom", "metric": "loss"})]) == 2
    assert "searcher.class: missing" in capsys.readouterr().err
    assert main(["search", "preview", config({"name": "random", "metric": "loss"}), "--config", "max_restarts=x"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("det-core: error: ") and second.startswith("det-core: error: ")
    assert "searcher.max_trials" in first + second and "max_restarts" in first + second


def test_a_missing_extra_is_one_line_with_its_command(config: Any, home: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'pydantic']))\n"
        "from det_core.cli import main\n"
        "print([main([*words, sys.argv[1]]) for words in (['search', 'preview'], ['experiment', 'create'])])"
    )
    done = subprocess.run([sys.executable, "-c", code, config(HALVING)], capture_output=True, text=True)
    assert done.stdout == "[1, 1]\n"
    errors = [line for line in done.stderr.splitlines() if "error" in line]  # a slow machine says what it waits for
    said = r"det-core: error: .* needs \w+, which is not installed. Install it: pip install .*\[master\]'.*"
    assert len(errors) == 2 and all(re.fullmatch(said, line) for line in errors) and "Traceback" not in done.stderr
