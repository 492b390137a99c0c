"""The files by which a cluster describes a task: read, checked, and absent when bare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import det_core as det
from det_core._info import canonical_url
from det_core.errors import InfoError

CLUSTER: dict[str, Any] = {
    "master_url": "http://master:8080/",
    "cluster_id": "c1",
    "agent_id": "agent-3",
    "slot_ids": [0, 1],
    "task_id": "1.req",
    "allocation_id": "1.req.1",
    "session_token": "secret",
    "task_type": "TRIAL",
    "master_cert_name": None,
    "master_cert_file": "noverify",
    "latest_checkpoint": "uuid-1",
}
TRIAL: dict[str, Any] = {
    "trial_id": 5,
    "experiment_id": 7,
    "trial_seed": 42,
    "hparams": {"lr": 0.1},
    "config": {"data": {"url": "s3://d"}},
    "steps_completed": 3,
    "trial_run_id": 2,
    "debug": False,
    "inter_node_network_interface": None,
}
RENDEZVOUS: dict[str, Any] = {
    "container_addrs": ["10.0.0.1", "10.0.0.2"],
    "container_rank": 1,
    "container_slot_counts": [2, 2],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DET_CORE_INFO_DIR", str(tmp_path))
    return tmp_path


def write(folder: Path, **files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def read() -> det.ClusterInfo:
    info = det.get_cluster_info()
    assert info is not None
    return info


def test_get_cluster_info_without_files_returns_none(folder: Path) -> None:
    assert det.get_cluster_info() is None


def test_get_cluster_info_of_trial_returns_its_files(folder: Path) -> None:
    write(folder, cluster=CLUSTER, trial=TRIAL, rendezvous=RENDEZVOUS, resources={"gpu_uuids": ["GPU-1"]})
    info = read()
    assert info.master_url == "http://master:8080"
    assert (info.cluster_id, info.agent_id, info.slot_ids) == ("c1", "agent-3", [0, 1])
    assert (info.task_id, info.allocation_id, info.session_token) == ("1.req", "1.req.1", "secret")
    assert (info.master_cert_name, info.master_cert_file) == (None, "noverify")
    assert info.latest_checkpoint == "uuid-1"
    assert info.user_data == {"url": "s3://d"}
    assert info.container_addrs == ["10.0.0.1", "10.0.0.2"]
    assert (info.container_rank, info.container_slot_counts) == (1, [2, 2])
    assert info.gpu_uuids == ["GPU-1"]
    trial = info.trial
    assert (trial.trial_id, trial.experiment_id, trial.trial_seed, trial.hparams) == (5, 7, 42, {"lr": 0.1})
    assert "secret" not in repr(info)


def test_unknown_keys_are_accepted(folder: Path) -> None:
    write(folder, cluster={**CLUSTER, "new": 1}, trial={**TRIAL, "new": []}, rendezvous={**RENDEZVOUS, "x": 0})
    assert read().container_rank == 1


@pytest.mark.parametrize("key", sorted(set(CLUSTER) - {"master_cert_name", "master_cert_file", "latest_checkpoint"}))
def test_get_cluster_info_missing_cluster_key_raises_with_its_name(folder: Path, key: str) -> None:
    write(folder, cluster={k: v for k, v in CLUSTER.items() if k != key}, trial=TRIAL)
    with pytest.raises(InfoError, match=rf"cluster\.json: the required key '{key}' is missing"):
        det.get_cluster_info()


@pytest.mark.parametrize("key", sorted(set(TRIAL) - {"inter_node_network_interface"}))
def test_get_cluster_info_missing_trial_key_raises_with_its_name(folder: Path, key: str) -> None:
    write(folder, cluster=CLUSTER, trial={k: v for k, v in TRIAL.items() if k != key})
    with pytest.raises(InfoError, match=rf"trial\.json: the required key '{key}' is missing"):
        det.get_cluster_info()


@pytest.mark.parametrize("key", sorted(RENDEZVOUS))
def test_get_cluster_info_missing_rendezvous_key_raises_with_its_name(folder: Path, key: str) -> None:
    write(folder, cluster=CLUSTER, trial=TRIAL, rendezvous={k: v for k, v in RENDEZVOUS.items() if k != key})
    with pytest.raises(InfoError, match=rf"rendezvous\.json: the required key '{key}' is missing"):
        _ = read().container_addrs


def test_get_cluster_info_unusable_value_raises_with_its_key(folder: Path) -> None:
    write(folder, cluster={**CLUSTER, "master_url": "ftp://m"}, trial=TRIAL)
    with pytest.raises(InfoError, match=r"cluster\.json .*invalid master address 'ftp://m': expected http or https"):
        det.get_cluster_info()


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_get_cluster_info_file_without_object_raises_with_its_name(folder: Path, text: str) -> None:
    (folder / "cluster.json").write_text(text, encoding="latin-1")
    with pytest.raises(InfoError, match=r"cluster\.json"):
        det.get_cluster_info()


def test_get_cluster_info_missing_file_raises_on_access(folder: Path) -> None:
    write(folder, cluster=CLUSTER, trial=TRIAL)
    info = read()
    with pytest.raises(InfoError, match=r"resources\.json: No such file"):
        _ = info.gpu_uuids
    with pytest.raises(InfoError, match=r"rendezvous\.json: No such file"):
        _ = info.container_rank
    write(folder, rendezvous=RENDEZVOUS)
    assert info.container_rank == 1


def test_task_other_than_trial_has_one_container(folder: Path) -> None:
    write(folder, cluster={**CLUSTER, "task_type": "NOTEBOOK"})
    info = read()
    assert (info.container_addrs, info.container_rank, info.container_slot_counts) == (["127.0.0.1"], 0, [2])
    assert info.latest_checkpoint is None
    assert info.user_data == {}
    with pytest.raises(RuntimeError, match=r"task 1\.req is of type NOTEBOOK"):
        _ = info.trial


def test_empty_optional_values_are_none(folder: Path) -> None:
    write(folder, cluster={**CLUSTER, "latest_checkpoint": "", "master_cert_file": ""}, trial=TRIAL)
    info = read()
    assert (info.latest_checkpoint, info.master_cert_file) == (None, None)


def test_constructors_take_arguments_of_reference() -> None:
    trial = det.TrialInfo(1, 2, 3, {"lr": 1}, {}, 0, 1, False, None)
    assert (trial.trial_id, trial.experiment_id, trial.trial_seed, trial.hparams) == (1, 2, 3, {"lr": 1})
    assert trial._config is trial.config  # published trials read it under this name
    with pytest.raises(AttributeError):
        trial._config = {}  # type: ignore[misc]
    rendezvous = det.RendezvousInfo(["a"], 0, [1])
    info = det.ClusterInfo("m", "c", "a", [], "t", "al", "s", "TRIAL", None, None, "ck", trial, rendezvous)
    assert info.trial is trial and info.container_addrs == ["a"] and info.latest_checkpoint == "ck"
    with pytest.raises(RuntimeError, match=r"no resources\.json"):
        _ = info.gpu_uuids


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("master", "http://master:8080"),
        ("master:9000/", "http://master:9000"),
        ("http://master", "http://master:80"),
        ("https://master", "https://master:443"),
        ("HTTPS://Master:8443/det/", "https://master:8443/det"),
        ("http://[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_an_address_gets_its_canonical_form(given: str, canonical: str) -> None:
    assert canonical_url(given) == canonical == canonical_url(canonical)


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://", "http://me:pw@master", "http://master?x=1", "http://master#top", "ws://master", "a b"),
        *("http://master:99999", "master:port", "http://master:0", "http://mas\nter"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"invalid master address .*: expected http or https"):
        canonical_url(url)
