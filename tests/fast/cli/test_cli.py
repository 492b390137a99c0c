"""The command line as a whole: help, version, errors, completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import det_core
from det_core.cli import app, main
from det_core.cli._groups import COMMANDS
from det_core.slurm import Chain
from support import commands
from support.journals import one_run
from support.stored import run_with_checkpoints

SCRIPT = Path(sys.executable).with_name("det-core")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process."""
    return subprocess.run([sys.executable, "-m", "det_core.cli", *arguments], capture_output=True, text=True)


def test_help_teaches_with_examples_that_are_understood(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "search.yaml").touch()
    run_with_checkpoints(home, tmp_path, losses=[0.3, 0.2, 0.1])
    help_text = run("--help").stdout
    assert commands.det_core().stdout == help_text
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
    """Have commands read their arguments, files among them, without running."""
    command: click.Command = app
    context = click.Context(app, info_name="det-core")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, parent=context, info_name=name)
    command.make_context(name, words, parent=context)


def test_skill_prints_paths_of_files_in_every_form() -> None:
    card, index = commands.det_core("skill").stdout.split()
    assert Path(card).name == "SKILL.md" and Path(card).is_file()
    assert Path(index).name == "llms.txt" and Path(index).is_file()
    assert json.loads(commands.det_core("skill", "--json").stdout) == {"skill": card, "llms": index}
    assert commands.det_core("skill", "--folder").stdout == f"{Path(card).parent}\n"


def test_the_installed_script_is_the_same_command() -> None:
    done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True)
    assert done.stdout == f"det-core {det_core.__version__}\n"
    assert commands.det_core("--version").stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nope"], 2, "no command 'nope': there are experiment, "),
        (["list"], 2, "no command 'list': did you mean `det-core"),
        (["show", "latest"], 2, "did you mean `det-core runs show`?"),
        (["run", "list"], 2, "did you mean `det-core runs list`?"),
        (["checkpoints", "gc"], 2, "did you mean `det-core checkpoint gc`?"),
        (["runs", "lst"], 2, "did you mean `det-core runs list`?"),
        (["runs", "show"], 2, "missing argument 'RUN'"),
        (["runs", "export", "latest"], 2, "--format"),
        (["runs", "show", "latest"], 1, "no runs in"),
        (["runs", "show", "latest", "--home", "/dev/null"], 1, "/dev/null"),
        (["runs", "list", "--home", "/dev/null"], 1, "Not a directory"),
    ],
)
def test_an_error_is_a_line_on_stderr(arguments: list[str], status: int, message: str) -> None:
    done = commands.det_core(*arguments, check=status)
    assert done.stdout == ""
    assert message in done.stderr
    if status == 1:
        assert done.stderr.startswith("det-core: error: ")
        assert done.stderr.count("\n") == 1


def test_a_variable_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_CORE_TIMEOUT", "soon")
    done = commands.det_core("runs", "list", check=1)
    assert done.stderr.count("\n") == 1
    assert "DET_CORE_TIMEOUT='soon'" in done.stderr


def test_traceback_shows_where() -> None:
    done = run("--traceback", "runs", "show", "latest")
    assert "RunNotFound" in done.stderr and "Traceback" in done.stderr


def test_each_command_has_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in subcommands(name)), text


def subcommands(name: str) -> set[str]:
    """Return the names of a group's commands."""
    command = app.get_command(click.Context(app), name)
    return set(command.commands) if isinstance(command, click.Group) else set()


def complete(*lines: str) -> list[set[str]]:
    """Return bash's completions of the last word of each line."""
    code = (
        'eval "$(det-core completion bash)"; for line; do COMP_WORDS=($line); '
        '[[ $line = *" " ]] && COMP_WORDS+=(""); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); '
        'COMPREPLY=(); _det_core_completion det-core; echo "${COMPREPLY[@]}"; done'
    )
    environment = {**os.environ, "PATH": f"{SCRIPT.parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", code, "bash", *lines], capture_output=True, text=True, env=environment, check=True
    )
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_parse(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(commands.det_core("completion", shell).stdout)
    assert shutil.which(shell) is None or subprocess.run([shell, "-n", script]).returncode == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_ids(home: Path, tmp_path: Path) -> None:
    run_id = one_run(home).run_id
    chain_id = Chain.create(home, "fit", ["fit.py"]).run_id
    saved, store = run_with_checkpoints(home, tmp_path, [10, 20])
    lines = {
        "det-core ": set(COMMANDS),
        "det-core ru": {"run", "runs"},
        "det-core runs ": {"list", "show", "export", "rm"},
        "det-core runs s": {"show"},
        "det-core runs rm --": {"--folder-only", "--help", "--home", "--yes"},
        "det-core runs show ": {run_id, chain_id, saved, "latest"},
        f"det-core runs rm {run_id}": {run_id},
        f"det-core runs show --home {home / 'other'} ": {one_run(home / "other").run_id, "latest"},
        "det-core slurm logs -f ": {chain_id, "latest"},
        f"det-core slurm cancel {chain_id}": {chain_id},
        f"det-core checkpoint rm --storage={store.root} c2": {f"c20-{saved[-6:]}"},
    }
    assert complete(*lines) == list(lines.values())
