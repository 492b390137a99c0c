"""The command line as a whole: help, version, errors, completion."""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import det_core
from det_core.cli import main
from det_core.cli._commands import ALIASES, COMMANDS
from support.journals import one_run
from support.stored import run_with_checkpoints

SCRIPT = Path(sys.executable).with_name("det-core")


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "det_core.cli", *arguments], capture_output=True, text=True, timeout=60
    )


def test_help_teaches_with_examples_that_are_understood(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_with_checkpoints(home, tmp_path, losses=[0.3, 0.2, 0.1])
    help_text = run("--help").stdout
    assert run().stdout == help_text
    examples = [line.strip() for line in help_text.splitlines() if line.startswith("  det-core ")]
    assert len(examples) >= 5
    for example in examples:
        for command in example.split("  ")[0].split(" > ")[0].split("; "):
            words = command.split()[1:]
            understood(words)
            if words[0] in ("runs", "checkpoint") and "--output" not in words and "rm" not in words:
                assert main(["latest" if word.startswith("2026") else word for word in words]) == 0, example
    capsys.readouterr()


def understood(words: list[str]) -> None:
    """Have a command's parser read its arguments; it ends the process if it cannot."""
    command = COMMANDS[ALIASES.get(words[0], words[0])]
    parser = argparse.ArgumentParser()
    importlib.import_module(command.module).configure(parser)
    parser.parse_args(words[1:])


def test_the_installed_script_is_the_same_command() -> None:
    done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True)
    assert done.stdout == f"det-core {det_core.__version__}\n"
    assert run("--version").stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nope"], 2, "invalid choice: 'nope'"),
        (["list"], 2, "no command 'list': did you mean `det-core"),
        (["show", "latest"], 2, "did you mean `det-core runs show`?"),
        (["run", "list"], 2, "did you mean `det-core runs list`?"),
        (["checkpoints", "gc"], 2, "did you mean `det-core checkpoint gc`?"),
        (["runs", "lst"], 2, "did you mean `det-core runs list`?"),
        (["runs", "show"], 2, "required: RUN"),
        (["runs", "export", "latest"], 2, "--format"),
        (["runs", "show", "latest"], 1, "there are no runs in"),
        (["runs", "show", "latest", "--home", "/dev/null"], 1, "/dev/null"),
        (["runs", "list", "--home", "/dev/null"], 1, "Not a directory"),
    ],
)
def test_an_error_is_a_line_on_stderr(arguments: list[str], status: int, message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if status == 1:
        assert done.stderr.startswith("det-core: error: ")
        assert done.stderr.count("\n") == 1


def test_a_variable_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_CORE_TIMEOUT", "soon")
    done = run("runs", "list")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "DET_CORE_TIMEOUT='soon'" in done.stderr


def test_traceback_shows_where() -> None:
    done = run("--traceback", "runs", "show", "latest")
    assert "RunNotFound" in done.stderr and "Traceback" in done.stderr


def test_each_command_has_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit) as e:
            main([name, "--help"])
        assert e.value.code == 0
        text = capsys.readouterr().out
        for word in command.subcommands:
            assert word in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_parse(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(run("completion", shell).stdout)
    assert "runs" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert subprocess.run([shell, "-n", script]).returncode == 0


def complete(*words: str) -> set[str]:
    """What bash offers for the last of ``words``."""
    code = (
        'eval "$(det-core completion bash)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; _det_core; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {"PATH": f"{SCRIPT.parent}:/usr/bin:/bin"}
    import os

    done = subprocess.run(
        ["bash", "-c", code, "bash", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_run_ids(home: Path) -> None:
    run_id = one_run(home).run_id
    assert complete("det-core", "") == set(COMMANDS)
    assert complete("det-core", "ru") == {"run", "runs"}
    assert complete("det-core", "runs", "") == {"list", "show", "export", "rm"}
    assert complete("det-core", "runs", "s") == {"show"}
    assert complete("det-core", "runs", "rm", "--") == {"--help", "--home", "--yes"}
    assert complete("det-core", "runs", "show", "") == {run_id, "latest"}
    assert complete("det-core", "runs", "rm", run_id[:4]) == {run_id}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_checkpoint_ids(home: Path, tmp_path: Path) -> None:
    older, store = run_with_checkpoints(home, tmp_path, [10])
    newest, _ = run_with_checkpoints(home, tmp_path, [20, 30])
    assert complete("det-core", "checkpoint", "") == set(COMMANDS["checkpoint"].subcommands)
    of_newest = {f"c{step}-{newest[-6:]}" for step in (20, 30)}
    for command in ("describe", "download", "verify", "rm"):
        assert complete("det-core", "checkpoint", command, "") == {*of_newest, "latest"}
    assert complete("det-core", "checkpoint", "verify", "c2") == {f"c20-{newest[-6:]}"}
    of_older = {f"c10-{older[-6:]}", "latest"}
    assert complete("det-core", "checkpoint", "rm", "--run", older, "") == of_older
    assert complete("det-core", "checkpoint", "rm", f"--storage={store.root}", "") == of_older
    assert complete("det-core", "checkpoint", "gc", "--run", "") == {older, newest, "latest"}
