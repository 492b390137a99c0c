"""The embedded master, as clients find, start and stop it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from det_core.client._embedded import ensure_master, living, stop_master
from det_core.errors import MasterUnreachable

_ASK = "from pathlib import Path; from det_core.client._embedded import ensure_master as e; print(*e(Path({!r})))"


@pytest.fixture
def stopped(home: Path) -> Iterator[Path]:
    """Yield the home directory; its master is stopped at the end."""
    yield home
    stop_master(home)


def test_those_who_start_it_at_a_time_share_one(stopped: Path) -> None:
    command = [sys.executable, "-c", _ASK.format(str(stopped))]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {process.communicate()[0].strip() for process in several}
    assert [process.returncode for process in several] == [0] * 4
    assert len(answers) == 1
    url, token = answers.pop().split()
    assert (url, token) == ensure_master(stopped)
    headers = {"Authorization": f"Bearer {token}"}
    assert requests.get(f"{url}/api/v1/me", headers=headers).status_code == 200
    assert (stopped / "master" / "master.log").read_text().count("is the master of") == 1


def test_what_a_dead_one_left_is_noticed(stopped: Path) -> None:
    url, _ = ensure_master(stopped)
    folder = stopped / "master"
    told = living(folder)
    assert told is not None
    os.kill(told["pid"], 9)
    os.waitpid(told["pid"], 0)
    assert (folder / "master.json").exists()
    assert living(folder) is None
    assert ensure_master(stopped)[0] == url
    assert living(folder)["pid"] != told["pid"]
    assert stop_master(stopped)
    assert not stop_master(stopped)


@pytest.mark.parametrize("change", [{"start_time": 1}, {"host": "elsewhere"}, {"pid": "x"}, {"url": None}])
def test_a_process_that_is_none_of_ours_is_no_master(tmp_path: Path, change: dict[str, object]) -> None:
    from det_core.master._home import HomeFiles

    files = HomeFiles(tmp_path)
    files.announce("http://127.0.0.1:1", 1, "c")
    assert living(tmp_path)["pid"] == os.getpid()
    path = tmp_path / "master.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert living(tmp_path) is None


def test_one_that_does_not_start_says_why(home: Path) -> None:
    (home / "master" / "master.db").mkdir(parents=True)
    with pytest.raises(MasterUnreachable, match=r"cannot start: [^\n]*master\.db") as refused:
        ensure_master(home)
    assert "Traceback" not in str(refused.value)
