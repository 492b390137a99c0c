"""The variables of a trial: the user's for the device it gets, and none that is too large to start a process with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from det_core.master.engines import Claim, Ticket
from det_core.master.engines._environment import run_variables, seen_config
from det_core.master.engines._slots import Slots

GPUS = Slots(2, ("0", "1"))


def told(folder: Path, gpus: Slots, **more: Any) -> dict[str, str]:
    known: dict[str, Any] = {
        "allocation_id": "1.a.1",
        "task_id": "1.a",
        "experiment_id": 1,
        "trial_id": 1,
        "trial_run_id": 1,
        "trial_seed": 1,
        "hparams": {},
        "config": {},
        "slots": 1,
        "slot_ids": [1],
        "code": "c",
        "master_url": "http://127.0.0.1:1",
        "command": ["true"],
        "environment": {"ON": "cpu"},
    }
    return run_variables(Ticket(**{**known, **more}), Claim("n", "t"), folder, folder, gpus)


def test_the_users_variables_are_those_for_the_device_it_gets(tmp_path: Path) -> None:
    assert told(tmp_path, GPUS, gpu_environment={"ON": "gpu"})["ON"] == "gpu"
    assert told(tmp_path, GPUS, gpu_environment={"ON": "gpu"}, slots=0)["ON"] == "cpu"
    assert told(tmp_path, Slots(2), gpu_environment={"ON": "gpu"})["ON"] == "cpu"
    assert told(tmp_path, GPUS)["ON"] == "cpu"


def test_trial_asks_an_absent_master_as_long_as_its_ticket_says(tmp_path: Path) -> None:
    assert told(tmp_path, GPUS, patience=7.5)["DET_CORE_MASTER_TIMEOUT"] == "7.5"
    own = {"DET_CORE_MASTER_TIMEOUT": "3"}
    assert told(tmp_path, GPUS, patience=7.5, environment=own)["DET_CORE_MASTER_TIMEOUT"] == "3"


def test_a_configuration_that_is_too_large_for_a_variable_stays_out(tmp_path: Path) -> None:
    small = told(tmp_path, GPUS, config={"data": "x"}, hparams={"a": 1})
    assert json.loads(small["DET_EXPERIMENT_CONFIG"]) == {"data": "x"}
    large = told(tmp_path, GPUS, config={"data": "x" * 200_000}, hparams={"a": 1})
    assert "DET_EXPERIMENT_CONFIG" not in large
    assert json.loads(large["DET_HPARAMS"]) == {"a": 1}
    subprocess.run(["true"], env=large, check=True)


def test_a_shared_storage_is_seen_as_the_folder_that_it_is() -> None:
    shared = {
        "type": "shared_fs",
        "host_path": "/data/",
        "storage_path": "a/b",
        "propagation": "x",
        "save_trial_best": 2,
    }
    assert seen_config({"name": "x", "checkpoint_storage": shared}) == {
        "name": "x",
        "checkpoint_storage": {"type": "directory", "container_path": "/data/a/b", "save_trial_best": 2},
    }
    for path, folder in ((None, "/data"), ("/data/c", "/data/c")):
        config = {"checkpoint_storage": {"type": "shared_fs", "host_path": "/data", "storage_path": path}}
        assert seen_config(config)["checkpoint_storage"]["container_path"] == folder
    bucket = {"checkpoint_storage": {"type": "s3", "bucket": "b"}}
    assert seen_config(bucket) == bucket
    assert seen_config({}) == {}
