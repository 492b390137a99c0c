"""``make stats``: what it counts in a small repository, and what a test run with pytest-xdist tells it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import TESTS, stats

BURN = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
SERVER = f"import sys\nfor line in sys.stdin:\n    exec({BURN!r})\n    print(flush=True)\n"
FILES = {
    "det_core/__init__.py": "from det_core.room import first\n",  # what lies in it runs it no second time
    "det_core/room/__init__.py": "from .first import One\n\n__all__ = ['One']\n",
    "det_core/room/first.py": "# why\nfrom det_core.room import second\n\nOne = 1  # and why not two\n",
    "det_core/room/second.py": "from det_core.other.third import Three\n\nTwo = Three\n",
    "det_core/other/__init__.py": "",
    "det_core/other/third.py": "import det_core.room.first\n\n\n\n\n\n\nThree = '# 3'\n",
    "det_core/other/lazy.py": "def late():\n    from . import later\n\n    return later\n",
    "det_core/other/later.py": "from det_core.other.lazy import late\n",
    "det_core/other/typed.py": "import typing as t\n\nif t.TYPE_CHECKING:\n    from . import types\nelse:\n    A = 1\n",
    "det_core/other/types.py": "from .typed import A\nfrom .lazy import late\n",
    "det_core/other/apart.py": "from det_core.other import later, typed\n",
    "tests/conftest.py": "from support import nest\n\nnest.adopt_orphans()\n",
    "tests/fast/room/test_burns.py": f"""
import subprocess, sys
import pytest

@pytest.fixture(scope="session")
def server():
    with subprocess.Popen([sys.executable, "-c", {SERVER!r}], stdin=-1, stdout=-1) as process:
        yield process

def test_fails():
    raise AssertionError

def test_own():
    exec({BURN!r})

def test_child():
    subprocess.run([sys.executable, "-c", {BURN!r}], check=True)

def test_orphan():
    subprocess.run(["sh", "-c", '"$@" &', "sh", sys.executable, "-c", {BURN!r}], check=True, capture_output=True)

def test_server(server):
    server.stdin.write(b"burn\\n")
    server.stdin.flush()
    assert server.stdout.readline()
""",
    "tests/fast/quick/test_quick.py": "import pytest\n\n@pytest.mark.skip\ndef test_skipped():\n    pass\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a small repository.

    It has a circle at import of three modules, a lazy one, one for typing, and tests that burn 0.2 s each.
    """
    for name, text in {"pytest.ini": "[pytest]\n", **FILES}.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "repository"


def shown(repository: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    stats.main(["--root", str(repository), *words])
    return capsys.readouterr().out


def run(repository: Path, *words: str) -> str:
    """Return the last output of a run of its tests."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables |= {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "support.cpu", "-p", "xdist", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True).stdout


def test_lines_and_comments_by_room(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(repository, capsys, "--json"))
    assert found["source"]["room"] == {
        "modules": 3,
        "lines": 10,
        "median": 3,
        "longest": 4,
        "comments/100": 20.0,
        "named": "det_core.room.first",
    }
    assert list(found["source"]) == [".", "other", "room", "all"]
    assert list(found["tests"]) == [".", "fast/quick", "fast/room", "all"]
    assert found["source"]["all"]["modules"] == 11 and found["source"]["all"]["named"] == "det_core.other.third"


def test_import_circles(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(repository, capsys)
    lines = printed[printed.index("import circles") :].splitlines()
    assert lines[:4] == [
        "import circles  1 at import  1 lazily  1 for typing",
        "at import: other.third → room.first → room.second → other.third; and 1 more: room",
        "lazily: other.lazy → other.later → other.lazy",
        "for typing: other.typed → other.types → other.typed",
    ]


def test_stats_run_of_whole_target_reports_cpu_seconds(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(repository, "-n", "2", "tests/fast")
    assert "\ncpu: " in printed and " s, wall: " in printed, printed
    record = json.loads((repository / ".stats" / "fast.json").read_text())
    assert [record[name] for name in ("passed", "failed", "error", "skipped")] == [4, 1, 0, 1]
    # A burn takes a fifth of a second; the last twentieth is left to the kernel's clocks.
    used = {test.partition("::")[2]: times for test, times in record["tests"].items()}
    assert used["test_own"][0] > 0.15
    assert min(used[name][1] for name in ("test_child", "test_orphan", "test_server")) > 0.15
    assert len(used) == 6 and record["CPU s"] > sum(map(sum, used.values())) and record["wall s"] > 0.15

    found = json.loads(shown(repository, capsys, "--json", "--tests", "4"))
    assert set(found["costliest tests"]) == {t for t in record["tests"] if sum(record["tests"][t]) > 0.15}
    assert found["tests"]["fast/room"]["CPU s"] == found["last run"]["fast"]["in tests"] > 0.6

    before = (repository / ".stats" / "fast.json").read_bytes()
    for part in (["tests/fast/quick"], ["tests/fast", "-k", "skipped"], ["tests/fast", "-x"]):
        assert "\ncpu: " in run(repository, *part)
    assert [p.read_bytes() for p in (repository / ".stats").iterdir()] == [before]
