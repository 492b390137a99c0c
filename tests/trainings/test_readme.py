"""Commands and scripts of the README, run as written, on the wheel and the packages that its extras name themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from support import ROOT, pages
from support.environments import README_EXTRAS
from support.processes import until

README = pages.page("README.md")


@pytest.fixture(autouse=True)
def no_python_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of this process's Python, which must not reach that of the wheel."""
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)


def test_it_is_read_in_five_minutes() -> None:
    assert len(README.splitlines()) <= 200 and len(README.split()) <= 1600


def test_its_pip_install_is_what_the_tests_install() -> None:
    assert f"'.[{','.join(README_EXTRAS)}]'" in README


def test_all_that_it_shows_runs_and_can_be_removed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page, by a person who has set nothing; the pauses in place of real steps are short."""
    monkeypatch.delenv("DET_CORE_HOME")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    found = [replace(each, text=each.text.replace("sleep(0.3)", "sleep(0.01)")) for each in pages.blocks("README.md")]
    said = pages.play(found, tmp_path, installed, HOME=str(tmp_path))
    assert "COMPLETED, 6 trials" in said and "best trial: " in said
    assert "[rank=0] 0 ['hello', 'hello']" in said and "[rank=1] 1 ['hello', 'hello']" in said
    assert (tmp_path / "model" / "state.json").exists()
    assert not (tmp_path / ".local" / "share" / "det_core").exists()


def test_the_script_that_stops_goes_on(installed: Path, tmp_path: Path, home: Path) -> None:
    (tmp_path / "fit.py").write_text(pages.block("README.md", "fit.py").replace("sleep(0.3)", "sleep(0.05)"))
    command = [installed, "fit.py"]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    journals = home.glob  # the second report comes after the first should_preempt()
    until(lambda: any(f.read_text().count('"validation"') > 1 for f in journals("runs/*/journal-*.jsonl")), of=first)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate()
    assert first.returncode == 0 and "preempted; to resume it: DET_CORE_RESUME=" in said
    resume = {**os.environ, "DET_CORE_RESUME": "latest"}
    second = subprocess.run(command, cwd=tmp_path, env=resume, stderr=subprocess.PIPE, text=True)
    assert "from checkpoint" in second.stderr and "completed" in second.stderr
    export = [installed.parent / "det-core", "runs", "export", "latest", "--format", "jsonl"]
    rows = subprocess.run(export, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(row)["steps_completed"] for row in rows] == list(range(1, 21))


def test_every_page_that_it_names_is_there() -> None:
    paths = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", README)
    assert len(paths) > 15
    assert all((ROOT / path).exists() for path in paths)
