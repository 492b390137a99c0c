"""The command line that all launchers have in common, and the variables that all ranks get."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from det_core._env import Environment
from det_core.launch._cli import Framework, HelpRequested, Parser, job_variables, number, script_command
from det_core.launch._hosts import Host, Layout, UsageError
from det_core.launch.torch_distributed import FRAMEWORK as TORCH


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def parser(grace: float = 60.0) -> Parser:
    made = Parser(Framework("some", "", lambda *_: [], program="someprogram"), grace)
    made.add_argument("-np", dest="processes", type=number("a number", 1))
    return made


RUN = [sys.executable, "train.py"]


@pytest.mark.parametrize(
    ("words", "run", "theirs"),
    [
        (["train.py"], RUN, []),
        (["train.py", "--lr", "1", "--", "x", "-h"], [*RUN, "--lr", "1", "--", "x", "-h"], []),
        (["--nproc-per-node", "2", "train.py", "--nproc-per-node", "3"], [*RUN, "--nproc-per-node", "3"], []),
        (["--nproc_per_node=2", "--", "train.py", ""], [*RUN, ""], []),
        (["--", sys.executable, "train.py"], RUN, []),
        ([sys.executable, "-u", "train.py"], [sys.executable, "-u", "train.py"], []),
        (["-m", "package.module", "-m"], [sys.executable, "-m", "package.module", "-m"], []),
        (["--fast", "7", "--", "train.py", "--", "y"], [*RUN, "--", "y"], ["--fast", "7"]),
        (["--fast", "--grace", "3", "-x=1", "--", "train.py"], RUN, ["--fast", "-x=1"]),
        (["--tail=0", "train.py", "-m", "x", "--unknown"], [*RUN, "-m", "x", "--unknown"], []),
    ],
)
def test_split_ends_options_at_the_script(words: list[str], run: list[str], theirs: list[str]) -> None:
    read = parser().split(words)
    assert (read.command, read.framework_options) == (run, theirs)


def test_split_returns_none_for_options_not_given() -> None:
    options = ["--nnodes=2", "--node-rank", "0", "--master-addr", "a", "--master-port", "4711", "--grace", "7"]
    words = [*options, "--tail", "3", "--launcher-port", "4712", "train.py"]
    asked = parser(grace=9.0).split(words).options
    assert (asked.nnodes, asked.node_rank, asked.master_addr, asked.master_port) == (2, 0, "a", 4711)
    assert (asked.nproc_per_node, asked.processes, asked.hostfile, asked.hosts) == (None, None, None, None)
    assert (asked.grace, asked.tail, asked.launcher_port) == (7.0, 3, 4712)
    assert parser(grace=9.0).split(["train.py"]).options.grace == 9.0
    assert parser().split(["train.py"]).options.grace == 60.0


def test_split_quotes_the_command_line_for_a_shell() -> None:
    assert parser().split(["train.py", "a b"]).text == "python -m det_core.launch.some train.py 'a b'"


def test_split_accepts_options_of_the_framework() -> None:
    assert parser().split(["-np", "4", "train.py"]).options.processes == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script to run"),
        (["--nproc-per-node", "2"], "no script to run"),
        (["--nproc-per-node", "2", "--"], "no script to run"),
        (["nowhere.py"], "nowhere.py does not exist"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0: expected a number, 1 or more"),
        (["--nproc-per-node=-1", "train.py"], "--nproc-per-node=-1: expected a number, 1 or more"),
        (["-np", "0", "train.py"], "-np 0: expected"),
        (["--nproc_per_node", "two", "train.py"], "--nproc_per_node two: expected"),
        (["--master-port", "70000", "train.py"], "--master-port 70000: expected a port"),
        (["--node-rank", "-1", "train.py"], "--node-rank"),
        (["--grace", "soon", "train.py"], "--grace soon: expected a number of seconds"),
        (["--nproc-per-node", "gpu", "train.py"], "--nproc-per-node gpu: leave the option out"),
        (["--nproc-per-node=auto", "train.py"], "--nproc-per-node=auto: leave the option out"),
        (["--nproc-per-node", "cpu", "train.py"], '"$(nproc)"'),
        (["--nproc-per-node"], "--nproc-per-node: expected one argument"),
        (["--fast", "train.py"], "unknown option: --fast"),
        (["--grace", "-1", "train.py"], "--grace -1: expected a number of seconds"),
        (["--tail", "some", "train.py"], "--tail some: expected a number of lines"),
        (["--nproc", "2", "train.py"], "unknown option: --nproc"),
        (["--trial", "module:Class"], "--trial: trial classes run under torch_distributed, horovod, deepspeed, not"),
        (["--", "--trial", "module:Class"], "--trial: trial classes run under"),
        (["-m", "--no-python", "train.py"], "are exclusive: pass one of them"),
    ],
)
def test_split_of_an_invalid_command_line_names_the_word(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        print(parser().split(words).command)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_split_of_a_program_option_asks_for_a_separator() -> None:
    with pytest.raises(UsageError, match="an option of someprogram needs a -- before the script"):
        parser().split(["--fast", "7", "train.py"])


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["--nproc-per-node", "2", "-h", "train.py"]])
def test_split_with_help_raises_help_requested(words: list[str]) -> None:
    with pytest.raises(HelpRequested):
        parser().split(words)


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "train.py").touch()
    (tmp_path / "data.txt").touch()
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    os.chmod(tmp_path / "run.sh", 0o755)
    os.chmod(tmp_path / "train.py", 0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        patch.chdir(tmp_path)
        yield


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--lr", "1", "--", "x"], [sys.executable, "train.py", "--lr", "1", "--", "x"]),
        (["python3", "train.py", "a"], ["HERE/python3", "train.py", "a"]),
        (["./python3", "-u", "train.py"], ["./python3", "-u", "train.py"]),
        ([sys.executable, "-c", "pass"], [sys.executable, "-c", "pass"]),
        (["./run.sh", "a"], ["HERE/run.sh", "a"]),
        (["run.sh"], ["HERE/run.sh"]),
        (["data.txt"], [sys.executable, "data.txt"]),
        (["env", "A=1"], [shutil.which("env"), "A=1"]),
    ],
)
def test_script_command_runs_scripts_pythons_and_commands(
    words: list[str], expected: list[str], tmp_path: Path
) -> None:
    expected = [word.replace("HERE", str(tmp_path)) for word in expected]
    assert script_command(words[0], words[1:]) == expected


@pytest.mark.usefixtures("scripts")
def test_script_command_runs_modules_and_commands_by_option(tmp_path: Path) -> None:
    assert script_command("a.b", ["-x"], module=True) == [sys.executable, "-m", "a.b", "-x"]
    assert script_command("train.py", [], no_python=True) == [str(tmp_path / "train.py")]
    assert script_command("python3", ["nowhere.py"], no_python=True) == [str(tmp_path / "python3"), "nowhere.py"]


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere.py"], "nowhere.py"),
        (["nowhere"], "nowhere"),
        (["python3", "nowhere.py"], "nowhere.py"),
        (["python9.9", "train.py"], "python9.9"),
    ],
)
def test_script_command_of_a_missing_file_names_it(words: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named.replace(".", r"\.")) as error:
        script_command(words[0], words[1:])
    assert "\n" not in str(error.value)


def test_script_command_with_module_and_no_python_raises() -> None:
    with pytest.raises(UsageError, match="--no-python"):
        script_command("a.b", [], module=True, no_python=True)


@pytest.mark.parametrize("before", [["--trial"], ["--", "--trial"], ["--nproc-per-node", "2", "--trial"]])
def test_split_after_a_trial_leaves_options_to_the_harness(before: list[str]) -> None:
    """As torch_distributed takes them; options of the launcher count on both sides of the class."""
    harness = [sys.executable, "-m", "det_core.exec.harness", "model_def:T"]
    command = Parser(TORCH).split([*before, "model_def:T", "--config", "a.yaml"]).command
    assert command == [*harness, "--config", "a.yaml"]
    read = Parser(TORCH).split(["--trial", "model_def:T", "--nproc-per-node", "3", "--config=a"])
    assert read.command == [*harness, "--config=a"] and read.options.nproc_per_node == 3


def test_split_of_a_torchrun_option_shows_the_command_for_it() -> None:
    message = "unknown option: --max-restarts .*torchrun … --no-python python -m det_core.launch.wrap_rank RANK"
    with pytest.raises(UsageError, match=message):
        Parser(TORCH).split(["--max-restarts", "3", "train.py"])
    assert Parser(TORCH).split(["--standalone", "train.py"]).command == RUN


def test_job_variables_make_a_secret_for_one_node_and_warn_several(tmp_path: Path) -> None:
    none, some = Environment(home=tmp_path), Environment(home=tmp_path, secret="the secret of a job")
    words = parser().split(["train.py"])
    one = Layout("here", (Host("127.0.0.1", 2),), notice="a notice")
    two = Layout("there", (Host("10.0.0.1", 2), Host("10.0.0.2", 2)))
    made = [job_variables(one, words, none) for _ in range(2)]
    first, second = (found["DET_CORE_SECRET"] for found, _ in made)
    assert len(bytes.fromhex(first)) == 32 and first != second
    assert made[0][1] == "a notice" and "DET_CHIEF_IP" not in made[0][0]
    found, notice = job_variables(two, words, none)
    assert "DET_CORE_SECRET" not in found and found["DET_CHIEF_IP"] == "10.0.0.1"
    assert re.search(r"DET_CORE_SECRET is not set: .* on each node:\n    export DET_CORE_SECRET=[0-9a-f]{64}$", notice)
    _, others = job_variables(replace(two, node_rank=1), words, none)
    assert re.fullmatch(r"DET_CORE_SECRET is not set: .* node 0's launcher shows the command", others), "one command"
    for place in (one, two):
        assert job_variables(place, words, some)[0]["DET_CORE_SECRET"] == "the secret of a job"
    assert found["DET_CORE_COMMAND"] == "python -m det_core.launch.some train.py"
