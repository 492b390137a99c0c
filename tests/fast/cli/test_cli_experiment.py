"""``det-core experiment`` and ``det-core trial`` against a master whose trials end as a test says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import Command
from support.processes import until
from support.running_master import TOKEN, Running

GRID = """
name: tried
entrypoint: "true"
hyperparameters: {lr: {type: categorical, vals: [0.1, 0.01]}}
searcher: {name: grid, metric: loss, max_length: 2}
max_restarts: 0
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a master for all tests of this file."""
    found = Running(tmp_path_factory.mktemp("master"), limit=1 << 24)
    yield found
    found.close()


@pytest.fixture
def master(running: Running, home: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Return the master, named by the environment."""
    monkeypatch.setenv("DET_MASTER", running.url)
    monkeypatch.setenv("DET_USER_TOKEN", TOKEN)
    return running


@pytest.fixture
def command() -> Command:
    return Command()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(GRID)
    return path


def train(master: Running, experiment_id: int, trials: int = 2) -> None:
    """Have each trial report, log, complete its operation and exit, as its script would."""
    for _ in range(trials):
        spec = master.launched(experiment_id)[0]
        loss = float(spec.hparams["lr"])
        for step in (1, 2):
            master.report(spec, "validation", step, {"loss": loss / step})
        master.log(spec, f"lr is {loss}\n", rank_id=1, level="LOG_LEVEL_WARNING", stdtype="stderr")
        master.complete(spec, 2, loss / 2)
        master.end(spec.allocation_id)
        until(lambda: spec.allocation_id not in master.engine.running)  # noqa: B023


def test_an_experiment_from_its_creation_to_its_end(master: Running, command: Command, config: Path) -> None:
    said = command("experiment", "create", config)
    found = re.match(r"created experiment (\d+) \(tried\)\n", said)
    assert found is not None and f"det-core experiment logs {found[1]} -f" in command.errors
    number = int(found[1])
    train(master, number)
    said = command("e", "wait", number, "--timeout", "20")
    assert f"experiment {number} (tried): COMPLETED, 2 trials in " in said
    assert re.search(r"best trial: \d+, loss 0.005 at step 2: lr=0.01\n", said)
    told = command.json("experiment", "describe", number)
    assert (told["state"], told["best_metric"], told["best_trial"]["hparams"]) == ("COMPLETED", 0.005, {"lr": 0.01})
    assert [trial["hparams"]["lr"] for trial in told["trials"]] == [0.01, 0.1]
    best = told["best_trial"]["id"]
    assert "tried" in command("e", "list") and command.json("e", "list", "--limit", "1")[0]["id"] == number
    table = command("trial", "list", "latest").splitlines()
    assert table[0].split()[:4] == ["TRIAL", "STATE", "BEST", "loss"] and table[1].split()[0] == str(best)
    assert (
        command("t", "metrics", best, "--csv") == "group,steps_completed,loss\nvalidation,1,0.01\nvalidation,2,0.005\n"
    )
    assert re.search(r"^hparams.lr: +0.01$", command("t", "describe", best), re.M)
    command("t", "metrics", best, "--group", "validaton", status=1)
    assert "has reported no group 'validaton': there are validation" in command.errors
    assert command("t", "logs", best) == "[rank=1] WARNING: lr is 0.01\n"
    logs = command("e", "logs", number).splitlines()
    assert sorted(logs) == sorted(
        f"[trial {t['id']}] [rank=1] WARNING: lr is {t['hparams']['lr']}" for t in told["trials"]
    )
    (line,) = [json.loads(text) for text in command("t", "logs", best, "--json").splitlines()]
    assert (line["rank"], line["level"], line["stream"], line["text"]) == (1, "WARNING", "stderr", "lr is 0.01")
    followed = command("e", "logs", number, "-f")
    assert all(text in followed for text in (*logs, "best trial"))
    assert f"experiment {number} COMPLETED" in command.errors
    command("e", "delete", number, status=2)
    assert command("e", "delete", number, "--yes") == f"deleted experiment {number} (tried)\n"


def test_steering(master: Running, command: Command, config: Path) -> None:
    number = command.json("e", "create", config, "--config", "searcher.max_concurrent_trials=1", "--paused")["id"]
    assert command.json("e", "describe", number)["state"] == "PAUSED"
    assert command("e", "wait", number, "--timeout", "0", status=5) == ""
    assert "paused" in command.errors and "is still PAUSED" in command.errors
    assert command("e", "activate", number) == f"experiment {number} (tried): ACTIVE\n"
    (spec,) = master.launched(number)
    command("e", "delete", number, "--yes", status=1)
    assert "has not ended: cancel or kill it first" in command.errors
    command("t", "kill", spec.trial_id)
    assert master.launched(number)[0].trial_id != spec.trial_id
    assert re.search(r"\(tried\): (STOPPING_KILLED|CANCELED)$", command("e", "kill", number).strip())
    assert f"experiment {number} (tried): CANCELED" in command("e", "wait", number, status=4)
    command("e", "pause", number, status=1)
    assert command.errors == f"det-core: error: experiment {number} has ended (CANCELED)\n"
    assert command("e", "kill", number) == f"experiment {number} (tried): CANCELED\n"


def test_ids_complete_from_a_master(
    master: Running, command: Command, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = command.json("e", "create", config)["id"]
    trial = master.launched(number)[0].trial_id
    with monkeypatch.context() as patch:
        patch.setenv("_DET_CORE_COMPLETE", "bash_complete")
        patch.setenv("COMP_CWORD", "3")
        for group, complete in (("experiment", number), ("trial", trial)):
            patch.setenv("COMP_WORDS", f"det-core {group} logs ")
            assert f"plain,{complete}" in command().split()
    command("e", "kill", number)


def test_several_are_steered_and_waited_for_together(master: Running, command: Command, config: Path) -> None:
    first, second = (command.json("e", "create", config, "--paused")["id"] for _ in "12")
    assert len(command("e", "cancel", first, 9999, second, status=1).splitlines()) == 2
    assert command.errors == ("det-core: error: experiment 9999 not found\n")
    assert len(command("e", "list", "--limit", "1").splitlines()) == 2
    assert re.fullmatch(r"det-core: \d+ older: --limit 0\n", command.errors)
    third = command.json("e", "create", config, "--paused")["id"]
    (ended,) = command.json("e", "wait", first, third, "--timeout", "0", status=5)
    assert (ended["id"], ended["state"]) == (first, "CANCELED")
    command("e", "kill", third)
    assert [e["state"] for e in command.json("e", "wait", first, second, status=4)] == ["CANCELED"] * 2
    command("e", "delete", first, 9999, "--yes", status=1)
    assert "deleted" in command("e", "delete", first, "--yes")


def test_an_error_has_its_own_status_and_continues(master: Running, command: Command, tmp_path: Path) -> None:
    path = tmp_path / "single.yaml"
    path.write_text(
        'name: one\nentrypoint: "true"\nsearcher: {name: single, metric: loss, max_length: 2}\nmax_restarts: 0\n'
    )
    number = command.json("e", "create", path)["id"]
    master.end(master.launched(number)[0].allocation_id, status=9)
    said = command("e", "wait", number, status=3)
    assert f"experiment {number} (one): ERROR" in said
    found = re.search(r"^error: trial (\d+): as the test says$", said, re.M)
    assert found is not None and f"for more: det-core trial logs {found[1]}\n" in said
    assert re.search(rf"^error: +trial {found[1]}: ", command("e", "describe", number), re.M)
    assert command.json("e", "describe", number)["error"].startswith(f"trial {found[1]}: ")
    longer = command("e", "continue", number, "--config", "searcher.max_length=5")
    assert longer == f"continued experiment {number} (one)\n"
    assert command.json("e", "describe", number)["config"]["searcher"]["max_length"] == 5
    command("e", "continue", number, "--config", "max_restarts", status=1)
    assert "override 'max_restarts'" in command.errors or "has ended" in command.errors
    command("e", "kill", number)
    command("e", "wait", number, status=4)


def test_mistakes_of_a_configuration_are_a_line_each(master: Running, command: Command, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "name: 3\nentrypoint: []\nmax_restarts: -1\nresourcez: {}\n"
        "hyperparameters: {lr: {type: dubble}}\nsearcher: {name: randon, metric: loss}\n"
    )
    assert command("e", "create", path, status=2) == ""
    lines = command.errors.splitlines()
    assert len(lines) == 6 and all(line.startswith("det-core: error: ") for line in lines)
    assert any("did you mean double?" in line for line in lines)
    path.write_text(GRID)
    assert "can be run" in command("e", "create", path, "--check") and command.errors == ""
    assert command.json("e", "create", path, "--check")["config"]["max_restarts"] == 0


def test_a_script_that_is_not_in_the_folder_is_said(master: Running, command: Command, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "fit.py").touch()
    path = tmp_path / "search.yaml"

    def missing(entrypoint: str, *folder: Path) -> list[str]:
        path.write_text(GRID.replace('"true"', json.dumps(entrypoint)))
        command("e", "create", path, *folder, "--check")
        return [line.removeprefix("det-core: warning: ").split(",")[0] for line in command.errors.splitlines()]

    launched = "python -m det_core.launch.torch_distributed --nproc-per-node 2 ./sub/fit.py --lr 1"
    assert missing(launched, tmp_path) == missing("cd sub && python fit.py", tmp_path) == []
    assert missing("python fit.py", tmp_path) == ["entrypoint names fit.py"]
    assert missing(launched) == ["entrypoint names sub/fit.py"] and "create CONFIG DIR" in command.errors
    (tmp_path / "startup-hook.sh").touch()  # may bring it
    assert missing("python fit.py", tmp_path) == []


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("e create nothing.yaml", 2, "File 'nothing.yaml' does not exist"),
        ("e create . .", 2, "File '.' is a directory"),
        ("e create {config} nowhere", 2, "Directory 'nowhere' does not exist"),
        ("e create {config} --slots many", 2, "'many' is not a valid integer"),
        ("e create {config} --slots 999", 2, "slots_per_trial is 999"),
        ("e describe three", 2, "'three' is not the number of an experiment; `det-core experiment list` shows them"),
        ("t logs 0", 2, "'0' is not the number of a trial"),
        ("t logs 9999", 1, "trial 9999 not found"),
        ("e pause 9999", 1, "experiment 9999 not found"),
        ("e wait 1 --timeout soon", 2, "'soon' is not a valid float"),
        ("e list --master http://127.0.0.1:1", 1, "no master answers at http://127.0.0.1:1 (--master): "),
        ("e list --master ftp://there", 1, "invalid master address 'ftp://there'"),
        ("run", 2, "no command to run: det-core run -- python train.py"),
        ("e create {config} --slots -1", 2, "-1 is not in the range x>=0"),
        ("run -- fit.py --lr 1", 2, "fit.py is not a command, but a script; to run it: det-core run -- python fit.py"),
        ("run list", 2, "did you mean `det-core runs list`?"),
        ("experimnt list", 2, "did you mean `det-core experiment list`?"),
        ("e lst", 2, "no command 'lst': did you mean `det-core experiment list`?"),
        ("t xyz", 2, "no command 'xyz': there are describe, kill, list, logs, metrics"),
        ("e list --state FOO", 2, "'FOO' is not one of '"),
    ],
)
def test_bad_input_is_one_clear_line(
    master: Running,
    command: Command,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    status: int,
    message: str,
) -> None:
    monkeypatch.setattr("det_core.client._master.RETRY_TIMEOUT", 0.0)
    assert command(*shlex.split(line.format(config=config)), status=status) == ""
    assert message in command.errors
    assert command.errors.count("error: ") == 1


def test_logs_of_an_experiment_are_whole_and_in_order(master: Running, command: Command, config: Path) -> None:
    number = command.json("e", "create", config)["id"]
    specs = master.launched(number, 2)
    for begin in (0, 700):
        for spec in specs:
            texts = [f"{n}\n" for n in range(begin, begin + 700)]
            master.log(spec, *texts, timestamp=f"2026-01-01T00:00:0{begin // 700}Z", stdtype="stdout")
    printed = command("e", "logs", number).splitlines()
    for spec in specs:
        head = f"[trial {spec.trial_id}] "
        assert [line for line in printed if line.startswith(head)] == [f"{head}{n}" for n in range(1400)]
    assert len(printed) == 2800 and printed[1400].endswith(" 700"), "by time, not one trial after the other"
    trial = specs[1].trial_id
    assert command("e", "logs", number, "--tail", 2).splitlines() == [f"[trial {trial}] 1398", f"[trial {trial}] 1399"]
    assert command("t", "logs", trial, "-n", 1) == "1399\n"
    assert command("t", "logs", trial, "--level", "error") == command("t", "logs", trial, "--rank", 7) == ""
    command("e", "kill", number)
    followed = command("e", "logs", number, "-n", 1, "-f", status=4)
    assert "CANCELED" in followed and not re.search("] (1398|0)$", followed, re.M), "from the last line on"
    lines = [json.loads(line) for line in command("e", "logs", number, "-f", "--json").splitlines()]
    assert [line["text"] for line in lines if line["trial"] == trial][:1400] == [str(n) for n in range(1400)]


def test_an_empty_token_file_is_one_line(home: Path, command: Command, tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o600)
    command("master", "up", "--token-file", tmp_path / "token", status=1)
    assert command.errors.count("error: ") == 1
    assert f"--token-file {tmp_path}/token: expected one word of at least " in command.errors


def test_a_wrong_token_is_said(master: Running, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_USER_TOKEN", "wrong")
    command("e", "list", status=1)
    assert "expects its user's token, and this one is wrong: set DET_USER_TOKEN" in command.errors


def test_which_master_is_meant_is_the_same_for_all_commands(
    home: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("det_core.client._master.RETRY_TIMEOUT", 0.0)
    command("e", "list", "--master", "http://127.0.0.1:1", status=1)
    assert "no master answers at http://127.0.0.1:1 (--master): connection refused" in command.errors
    monkeypatch.setenv("DET_MASTER", "http://127.0.0.1:1")
    command("e", "list", status=1)
    assert "no master answers at http://127.0.0.1:1 (DET_MASTER): connection refused" in command.errors
    command("master", "down", status=1)
    assert f"To stop the one of {home}: det-core master down --home {home}" in command.errors
    command("master", "down", "--home", home)
    assert "no master runs" in command.errors
    monkeypatch.setenv("DET_MASTER", "ftp://x")
    command("e", "list", status=1)
    assert "DET_MASTER: invalid master address 'ftp://x'" in command.errors


def test_without_a_master_none_is_started_to_look(home: Path, command: Command) -> None:
    assert command.json("master", "status", status=1) == {"running": False, "home": str(home)}
    assert command("master", "down") == ""
    assert not (home / "master").exists()
