from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from det_core import core


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"distributed": 3}, "distributed must be a core.DistributedContext, not int"),
        ({"preempt_mode": "ChiefOnly"}, "preempt_mode must be a core.PreemptMode"),
        ({"tensorboard_mode": "AUTO"}, "tensorboard_mode must be a core.TensorboardMode"),
        ({"name": " "}, "name="),
        ({"name": "caf\udce9"}, "name='caf\\udce9': expected one line of printable text"),
        ({"name": "a\nb"}, "name='a\\nb'"),
        ({"resume": ""}, "resume="),
        ({"searcher_metric": 3}, "searcher_metric="),
        ({"max_length": 0}, "max_length="),
        ({"hparams": 3}, "hparams must be a mapping, not int"),
        ({"checkpoint_storage": {"type": "floppy"}}, "floppy"),
        ({"checkpoint_storage": 7}, "checkpoint_storage"),
    ],
)
def test_init_invalid_arguments_are_rejected_before_anything_is_created(
    home: Path, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises((TypeError, ValueError)) as e:
        core.init(**arguments)
    assert said in str(e.value)
    assert not (home / "runs").exists()


def test_init_several_ranks_without_distributed_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError,
        match=r"core\.init\(distributed=core\.DistributedContext\.from_torch_distributed\(\)\), or "
        r"core\.DistributedContext\.detect\(\) for any launcher",
    ):
        core.init()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DET_CORE_RESUME", "nosuch", "RunNotFound: no run 'nosuch' in .*/home/runs; det-core runs list shows"),
        ("DET_CORE_HOME", "/proc/no", "RunError: cannot create a run in /proc/no/runs: .* set DET_CORE_HOME"),
        ("DET_CORE_HOME", "FOLDER/file", "RunError: cannot create a run in .*/file/runs: .* set DET_CORE_HOME"),
        ("DET_CORE_HOME", "~nosuch/home", "ValueError: DET_CORE_HOME=~nosuch/home: ~nosuch has no home directory"),
        ("DET_CORE_GRACE", "abc", "ValueError: DET_CORE_GRACE='abc': expected a number of seconds above 0"),
        ("DET_CORE_TIMEOUT", "-1", "ValueError: DET_CORE_TIMEOUT='-1': expected a number of seconds above 0"),
        ("DET_CORE_SECRET_FILE", "/nowhere", "ValueError: DET_CORE_SECRET_FILE=/nowhere: No such file or directory"),
    ],
)  # fmt: skip
def test_init_invalid_variable_hides_internal_frames(tmp_path: Path, variable: str, value: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("from det_core import core\n\nwith core.init():\n    print('trains')\n")
    (tmp_path / "file").touch()
    environment = {**os.environ, variable: value.replace("FOLDER", str(tmp_path))}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    *frames, error = done.stderr.splitlines()
    assert re.search(said, error) and done.returncode == 1 and not done.stdout
    places = [line for line in frames if line.startswith("  File ")]
    assert places[0].startswith(f'  File "{script}", line 3')
    assert len(places) == 2 and places[1].endswith("in called")  # Python's own: where it is raised
