"""What the README shows, run as it stands there, on the wheel and the packages that its extras name themselves."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from support import ROOT
from support.person import Person

README = (ROOT / "README.md").read_text()
BLOCKS = [
    (language, textwrap.dedent(code))
    for _, language, code in re.findall(r"^( *)```(\w*)\n(.*?)^\1```", README, re.M | re.S)
]
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line for language, code in BLOCKS if not language for line in code.splitlines() if line.startswith("det-core ")
]
WITH_MASTER = ("run", "experiment", "trial", "search", "master")
"""Commands about searches; the others are about runs without a master."""


@pytest.fixture(autouse=True)
def the_wheel(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python`` and ``det-core`` are those of README's ``pip install … '.[torch,master]'``."""
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{installed.parent}:{os.environ['PATH']}")


def _run(*command: str, folder: Path, status: int = 0, **env: str) -> str:
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_every_block_of_python_runs(tmp_path: Path) -> None:
    assert len(PYTHON) >= 4
    try:
        for number, code in enumerate(PYTHON):
            script = tmp_path / f"block{number}.py"
            script.write_text(code)
            _run("python", str(script), folder=tmp_path)
    finally:
        Person(tmp_path).leaves()


def test_the_five_steps_to_a_search(tmp_path: Path) -> None:
    (code,) = [code for code in PYTHON if 'name="fit"' in code]
    (config,) = [code for language, code in BLOCKS if language == "yaml"]
    (tmp_path / "fit.py").write_text(code)
    (tmp_path / "search.yaml").write_text(config)
    commands = [line.split() for line in COMMANDS if line.split()[1] in WITH_MASTER and "--host" not in line]
    assert len(commands) >= 10
    folder = tmp_path
    _run("python", "fit.py", folder=folder)
    try:
        for words in commands:
            if words[2] == "pause":
                said = _run("det-core", "experiment", "create", "search.yaml", ".", folder=folder)
                number = re.findall(r"created experiment (\d+)", said)[0]
            said = _run(*(number if word == "ID" else word for word in words), folder=folder)
            if "--follow" in words:
                assert "COMPLETED, 6 trials" in said and "best trial: " in said and "download-checkpoint" in said
    finally:
        Person(tmp_path).leaves()
    assert (folder / "model" / "state.json").exists()


def test_the_counting_script_resumes(tmp_path: Path) -> None:
    (code,) = [code for code in PYTHON if 'name="counting"' in code]
    stopped = "step += 1; step < 20 or ctx.preempt._ask_for('signal')"  # in the last step
    (tmp_path / "count.py").write_text(code.replace("step += 1", stopped, 1))
    said = _run("python", "count.py", folder=tmp_path)
    assert "preempted; to resume it: DET_CORE_RESUME=" in said
    (tmp_path / "count.py").write_text(code)
    said = _run("python", "count.py", folder=tmp_path, DET_CORE_RESUME="latest")
    assert "from checkpoint" in said and "completed" in said
    rows = _run("det-core", "runs", "export", "latest", "--format", "csv", folder=tmp_path).strip().splitlines()
    assert len(rows) == 1 + 20


def test_every_command_runs(tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    (code,) = [code for code in PYTHON if 'name="counting"' in code]
    script.write_text(code)
    _run("python", str(script), folder=tmp_path)
    assert len(COMMANDS) >= 10
    for command in sorted(
        (c for c in COMMANDS if c.split()[1] not in WITH_MASTER), key=lambda c: (" rm " in c, "runs rm " in c)
    ):
        words = command.split()
        _run(
            *[("latest" if w in ("RUN", "ID") else w) for w in words],
            *(["--yes"] if "rm" in words else []),
            folder=tmp_path,
        )


@pytest.mark.parametrize("variable", re.findall(r"`(DET_[A-Z_]+)`", README))
def test_every_variable_is_read_somewhere(variable: str) -> None:
    sources = [*ROOT.glob("det_core/**/*.py"), *ROOT.glob("launchers/**/*.py")]
    assert any(f'"{variable}"' in p.read_text() for p in sources)


def test_every_room_of_the_map_is_there() -> None:
    rooms = re.findall(r"`((?:det_core|examples|benchmarks|launchers)/[\w/]*)`", README)
    assert len(rooms) >= 8
    assert all((ROOT / room).exists() for room in rooms)
