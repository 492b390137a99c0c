"""``det-core`` as a person uses it: real commands, an embedded master that starts by itself, real scripts."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from support.commands import det_core
from support.person import Person
from support.processes import until

FIT = """
import sys, time
from det_core import core, get_cluster_info
hparams = get_cluster_info().trial.hparams
print("lr is", hparams.get("lr"), flush=True)
with core.init(max_length=3, tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:  # else torch is imported
    step = 0
    for op in ctx.searcher.operations():
        while step < op.length:
            step += 1
            ctx.train.report_validation_metrics(step, {"loss": hparams.get("lr", 1.0) / step})
            while hparams.get("patience") and not ctx.preempt.should_preempt():
                time.sleep(0.01)
        op.report_completed(hparams.get("lr", 1.0))
"""
GRID = """
name: fit
entrypoint: python fit.py
hyperparameters: {lr: {type: categorical, vals: [0.5, 0.25]}}
searcher: {name: grid, metric: loss, max_length: 2}
"""


@pytest.fixture
def person(home: Path, tmp_path: Path) -> Person:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "fit.py").write_text(FIT)
    (folder / "grid.yaml").write_text(GRID)
    (folder / ".detignore").write_text("*.yaml\n")
    return Person(folder)


def test_a_search_from_nothing_to_the_best_model(person: Person, home: Path) -> None:
    followed = person.types("det-core", "experiment", "create", "grid.yaml", ".", "--follow")
    assert sorted(re.findall(r"^\[trial (\d)\] lr is (.*)$", followed.stdout, re.M)) == [("1", "0.25"), ("2", "0.5")]
    assert "experiment 1 (fit): COMPLETED, 2 trials" in followed.stdout
    assert re.search(r"best trial: 1, loss 0.125 at step 2: lr=0.25", followed.stdout)
    assert "det-core: trial 1 COMPLETED (loss 0.125)" in followed.stderr
    told = json.loads(det_core("master", "status", "--json").stdout)
    assert (told["home"], told["slots"], told["active"]) == (str(home), 1, 0)
    assert "runs already at" in det_core("master", "up", "--slots", "2", check=1).stderr
    assert "runs already" in det_core("master", "up").stdout
    det_core("master", "down")
    det_core("master", "status", check=1)
    det_core("master", "up", "--slots", "2")
    assert json.loads(det_core("master", "status", "--json").stdout)["slots"] == 2
    det_core("master", "down")
    det_core("master", "up")
    assert "0 of 2 in use, as last time" in det_core("master", "status").stdout
    assert [e["state"] for e in json.loads(det_core("e", "list", "--json").stdout)] == ["COMPLETED"]


def test_one_script_without_a_file(person: Person) -> None:
    done = person.types("det-core", "run", "--", "sh", "-c", "echo out; echo err >&2; ls; exit 7", status=7)
    assert done.stdout.splitlines() == ["out", "fit.py"]
    assert (
        next(line for line in done.stderr.splitlines() if " …" not in line) == "err"
        and "the script exited with status 7" in done.stderr
    )
    killed = person.types("det-core", "run", "--", "sh", "-c", "kill -9 $$", status=137)
    assert "SIGKILL" in killed.stderr
    person.types("det-core", "run", "--name", "once", "--", "python", "fit.py")
    last = json.loads(det_core("e", "describe", "latest", "--json").stdout)
    assert (last["name"], last["state"], last["trials"][0]["steps_completed"]) == ("once", "COMPLETED", 3)
    refused = person.types("det-core", "run", "--slots", "9", "--", "true", status=2)
    assert refused.stderr.splitlines()[-1].startswith("det-core: error: resources.slots_per_trial is 9: ")


def test_ctrl_c_stops_watching_and_pause_the_script(person: Person) -> None:
    det_core("master", "up")
    watching = person.begins("det-core", "run", "--config", "hyperparameters.patience=true", "--", "python", "fit.py")
    assert watching.stdout is not None and watching.stderr is not None
    try:
        assert watching.stdout.readline() == "lr is None\n"
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate()
    finally:
        watching.kill()
        watching.wait()
    assert watching.returncode == 130
    assert "experiment 1 goes on; to watch it: det-core experiment logs 1 -f" in said and "Traceback" not in said
    assert re.fullmatch(r"experiment 1 \(fit.py\): PAUS(ED|ING)\n", det_core("e", "pause", "1").stdout)
    until(lambda: json.loads(det_core("t", "describe", "1", "--json").stdout)["state"] == "PAUSED")
    det_core("e", "kill", "1")
    assert "CANCELED" in det_core("e", "wait", "1", check=4).stdout


def test_bare_runs_are_brought_to_a_master(person: Person) -> None:
    script = (
        "from det_core import core\n"
        "with core.init(name='bare', tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:\n"
        "    ctx.train.report_validation_metrics(1, {'loss': 0.5})\n"
    )
    person.types("python", "-c", script)
    assert re.search(r"run \S+: \d+ new record\(s\), experiment 1, trial 1\n", det_core("sync").stdout)
    assert "nothing new" in det_core("sync", "latest").stdout
    assert "validation  1                0.5" in det_core("t", "metrics", "1").stdout
    (told,) = json.loads(det_core("sync", "--json").stdout)
    assert (told["experiment_id"], told["records"], told["refused"]) == (1, 0, [])
    (run,) = json.loads(det_core("runs", "list", "--json").stdout)
    (told,) = json.loads(det_core("e", "list", "--json").stdout)
    assert (told["metric"], told["progress"]) == (None, 1.0)
    assert told["start_time"] == pytest.approx(run["created"], abs=0.01)
    person.types("python", "-c", script)
    person.types("det-core", "run", "--", "true")
    det_core("sync")
    newest = json.loads(det_core("e", "describe", "latest", "--json").stdout)
    assert (newest["id"], newest["name"]) == (2, "true"), "it began last, whatever came here after it"
    described = det_core("e", "describe", "3").stdout
    assert re.search(r"^search: +none; it is run by others$", described, re.M) and re.search(
        "^progress: +100%$", described, re.M
    )
