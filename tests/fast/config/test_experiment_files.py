"""Whole experiment files: values, defaults, warnings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from det_core.config import Experiment, parse_experiment

FILES = Path(__file__).parent / "files"
GOOD = ["everything.yaml", "smallest.yaml", "asha_by_validations.json"]


def read(name: str, **more: Any) -> Experiment:
    return parse_experiment((FILES / name).read_text(), **more)


@pytest.mark.parametrize("name", GOOD)
def test_experiment_data_are_a_valid_experiment_file(name: str) -> None:
    experiment = read(name)
    assert json.loads(json.dumps(experiment.data)) == experiment.data
    assert parse_experiment(experiment.data) == experiment
    assert parse_experiment(json.dumps(experiment.data)) == experiment


def test_experiment_properties_equal_values_of_file() -> None:
    e = read("everything.yaml")
    assert (e.name, e.description, e.data["labels"]) == ("mnist-grid", "Each point of a grid.", ["mnist", "grid"])
    assert e.entrypoint == "python3 -m determined.launch.torch_distributed -- python3 train.py --data /data"
    assert (e.max_restarts, e.slots_per_trial, e.max_slots, e.priority) == (2, 2, 8, 10)
    assert e.preemption_timeout == 600
    assert e.data["checkpoint_storage"]["host_path"] == "/tmp/checkpoints"
    assert (e.save_experiment_best, e.save_trial_best, e.save_trial_latest) == (2, 1, 1)
    assert (e.metric, e.smaller_is_better, e.time_metric) == ("validation_loss", True, None)
    assert e.searcher["max_length"] == {"batches": 937}
    assert e.seed == 1337
    assert e.hyperparameters["optimizer"] == {
        "name": {"type": "categorical", "vals": ["adam", "sgd"]},
        "betas": {"type": "const", "val": [0.9, 0.999]},
        "eps": {"type": "const", "val": 1e-8},
    }
    assert e.data["data"] == {"url": "s3://bucket/mnist", "1": "one"}
    assert e.environment_variables_for("cpu") == {"OMP_NUM_THREADS": "4"}
    assert e.environment_variables_for("cuda") == {"NCCL_DEBUG": "INFO", "URL": "http://a/?b=c"}
    assert e.environment_variables_for("rocm") == {}
    assert e.data["min_checkpoint_period"] == {"epochs": 1}
    assert e.data["profiling"] == {"enabled": True, "begin_on_batch": 0, "end_after_batch": None, "sync_timings": True}


def test_parse_with_ignored_keys_and_replaced_launcher_warns() -> None:
    warnings = read("everything.yaml").warnings
    assert len(warnings) == 2
    nothing, launcher = warnings
    assert nothing.partition(": ")[2].split(", ") == [
        "resources.weight",
        "resources.resource_pool",
        "resources.shm_size",
        "resources.is_single_node",
        "checkpoint_storage.propagation",
        "environment.image",
        "environment.pod_spec",
        "retention_policy.log_retention_days",
        "bind_mounts",
        "log_policies",
        "slurm",
    ]
    assert "determined.launch.torch_distributed by det_core.launch.torch_distributed" in launcher


@pytest.mark.parametrize(
    ("key", "value", "warned"),
    [
        ("log_policies", [{"pattern": "x", "action": {"type": "cancel_retries"}}], True),
        ("log_policies", [], False),
        ("retention_policy.log_retention_days", 0, True),
        ("retention_policy.log_retention_days", 30, True),
        ("retention_policy.log_retention_days", None, False),
        ("retention_policy.log_retention_days", -1, False),
        ("environment.force_pull_image", False, False),
    ],
)
def test_parse_with_ignored_keys_at_defaults_does_not_warn(key: str, value: object, warned: bool) -> None:
    *sections, last = key.split(".")
    wanted: object = {last: value}
    for section in reversed(sections):
        wanted = {section: wanted}
    searcher = {"name": "single", "metric": "loss", "max_length": 1}
    assert isinstance(wanted, dict)
    warnings = parse_experiment({"name": "a", "entrypoint": "b", "searcher": searcher, **wanted}).warnings
    assert [w.partition(": ")[2] for w in warnings] == ([key] if warned else [])


@pytest.mark.parametrize(("minval", "maxval", "warned"), [(1e-5, 1e-2, True), (-5, -2, False), (0, 1, False)])
def test_parse_with_log_range_of_values_warns(minval: float, maxval: float, warned: bool) -> None:
    space = {"optimizer": {"lr": {"type": "log", "base": 10, "minval": minval, "maxval": maxval}}}
    searcher = {"name": "random", "metric": "loss", "max_length": 1, "max_trials": 2}
    found = parse_experiment({"name": "a", "entrypoint": "b", "searcher": searcher, "hyperparameters": space}).warnings
    text = "hyperparameters.optimizer.lr: minval and maxval are exponents of base 10: its values are 1.00002 to 1.02329"
    assert list(found) == ([text] if warned else [])


def test_parse_fills_in_defaults_of_contract() -> None:
    e = read("smallest.yaml", default_seed=7)
    assert e.warnings == ()
    assert e.name == e.data["name"] != ""
    assert e.data == {
        "name": e.name,
        "entrypoint": "python3 train.py",
        "searcher": {
            "name": "single",
            "metric": "loss",
            "smaller_is_better": True,
            "source_trial_id": None,
            "source_checkpoint_uuid": None,
            "max_length": None,
        },
        "hyperparameters": {},
        "max_restarts": 5,
        "resources": {
            "slots_per_trial": 1,
            "max_slots": None,
            "priority": None,
            "weight": 1,
            "resource_pool": "",
            "shm_size": None,
            "is_single_node": None,
            "native_parallel": False,
            "devices": [],
        },
        "checkpoint_storage": {
            "type": None,
            "save_experiment_best": 0,
            "save_trial_best": 1,
            "save_trial_latest": 1,
        },
        "preemption_timeout": None,
        "environment": {
            "environment_variables": {"cpu": [], "cuda": [], "rocm": []},
            "image": None,
            "ports": None,
            "proxy_ports": [],
            "force_pull_image": False,
            "registry_auth": None,
            "add_capabilities": [],
            "drop_capabilities": [],
            "pod_spec": None,
        },
        "data": {},
        "description": None,
        "labels": [],
        "workspace": None,
        "project": None,
        "debug": False,
        "reproducibility": {"experiment_seed": 7},
        "profiling": {"enabled": False, "begin_on_batch": 0, "end_after_batch": None, "sync_timings": True},
        "min_validation_period": {"batches": 0},
        "min_checkpoint_period": {"batches": 0},
        "perform_initial_validation": False,
        "scheduling_unit": 100,
        "records_per_epoch": 0,
        "checkpoint_policy": "best",
        "optimizations": {
            "aggregation_frequency": 1,
            "average_aggregated_gradients": True,
            "average_training_metrics": True,
            "gradient_compression": False,
            "mixed_precision": "O0",
            "tensor_fusion_threshold": 64,
            "tensor_fusion_cycle_time": 1,
            "auto_tune_tensor_fusion": False,
            "grad_updates_size_file": None,
        },
        "retention_policy": None,
        "bind_mounts": [],
        "log_policies": [],
        "slurm": {},
        "pbs": {},
        "security": None,
        "integrations": None,
        "unmanaged": False,
    }
    assert (e.preemption_timeout, e.priority, e.max_slots) == (3600, None, None)
    assert (e.source_trial_id, e.source_checkpoint_uuid, e.description) == (None, None, None)


def test_parse_fills_in_defaults_of_searches() -> None:
    asha = read("asha_by_validations.json")
    assert asha.time_metric == "epochs"
    assert asha.searcher == {
        "name": "adaptive_asha",
        "metric": "accuracy",
        "smaller_is_better": False,
        "source_trial_id": None,
        "source_checkpoint_uuid": None,
        "max_concurrent_trials": 16,
        "max_length": None,
        "time_metric": "epochs",
        "max_time": 27,
        "max_trials": 40,
        "divisor": 3,
        "stop_once": False,
        "mode": "conservative",
        "max_rungs": 5,
        "bracket_rungs": [],
    }


def test_generated_name_and_seed_follow_from_content() -> None:
    first, again, other = read("smallest.yaml"), read("smallest.yaml"), read("smallest.yaml", default_seed=3)
    assert (first.name, first.seed) == (again.name, again.seed)
    assert (other.name, other.seed) != (first.name, first.seed)
    assert read("smallest.yaml", overrides=["max_restarts=1"]).name != first.name
    assert read("everything.yaml", default_seed=3).seed == 1337


def test_experiment_from_stored_data_equals_parsed_one() -> None:
    experiment = read("everything.yaml")
    stored = Experiment(json.loads(json.dumps(experiment.data)))
    assert stored.environment_variables_for("cuda") == experiment.environment_variables_for("cuda")
    assert stored.searcher == experiment.searcher
