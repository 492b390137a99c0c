"""Parsing of experiment files: scalars, overrides, defaults, commands, warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from det_core.config import (
    ConfigError,
    Experiment,
    entrypoint_command,
    parse_experiment,
    read_changes,
    read_overrides,
)
from det_core.config._entrypoint import LAUNCHERS

GOOD = "entrypoint: python3 train.py\nsearcher: {name: single, metric: loss}\n"


def experiment(more: str = "", **options: Any) -> Experiment:
    return parse_experiment(GOOD + more, **options)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-3", -3),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("12:30", "12:30"),
        ("'7'", "7"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("=", "="),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_parse_reads_scalars_of_yaml_1_2(text: str, value: Any) -> None:
    found = experiment(f"data: {{x: {text}}}").data["data"]["x"]
    assert found == value
    assert type(found) is type(value)


def test_parse_follows_anchors_and_merges() -> None:
    data = experiment("data: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}, c: *a}").data["data"]
    assert data == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}
    assert data["a"] is not data["c"]


def test_parse_reads_powers_as_integers_and_words_as_booleans() -> None:
    made = experiment("max_restarts: 1e3\ndebug: yes\nhyperparameters: {n: {type: int, minval: 1e1, maxval: 1e2}}")
    assert (made.max_restarts, type(made.max_restarts), made.data["debug"]) == (1000, int, True)
    assert made.hyperparameters["n"] == {"type": "int", "minval": 10, "maxval": 100, "count": None}


def test_parse_does_not_change_its_argument() -> None:
    given = {"entrypoint": "a", "searcher": {"name": "single", "metric": "b"}, "data": {"x": [1]}}
    made = parse_experiment(given, overrides=["data.x.0=2"], defaults={"labels": ["a"]})
    assert made.data["data"] == {"x": [2]}
    assert given == {"entrypoint": "a", "searcher": {"name": "single", "metric": "b"}, "data": {"x": [1]}}


def test_override_changes_value_and_creates_sections() -> None:
    overrides = ["searcher.metric=accuracy", "resources.slots_per_trial=2", "labels=[a, b]", "labels.1=c", "name=x=y",
                 "data.deep.er=1e-3", "hyperparameters={lr: 0.1}", "max_restarts=0", "description="]  # fmt: skip
    made = experiment("description: words", overrides=overrides)
    assert (made.metric, made.slots_per_trial, made.data["labels"], made.name) == ("accuracy", 2, ["a", "c"], "x=y")
    assert made.data["data"] == {"deep": {"er": 1e-3}}
    assert made.hyperparameters == {"lr": {"type": "const", "val": 0.1}}
    assert (made.max_restarts, made.description) == (0, None)


def test_override_that_is_invalid_is_listed_with_mistakes_of_file() -> None:
    with pytest.raises(ConfigError) as e:
        experiment(
            "labels: [a]\nmax_restarts: -1",
            overrides=["name", "=x", "a..b=1", "labels.4=b", "name.x=1", "entrypoint.a=2", "data=[", "data.x=.nan"],
        )
    assert str(e.value).splitlines() == [
        "override 'name': should be a change such as searcher.max_trials=8",
        "override '': should be a change such as searcher.max_trials=8",
        "override 'a..b': should be a change such as searcher.max_trials=8",
        "override 'labels.4': should be about one of the items 0 to 0 of labels",
        "override 'entrypoint.a': should be about entrypoint itself, which is not an object",
        "override 'data': should have a value as YAML has it",
        "override 'data.x': should have a value as YAML has it",
        "name: should be a valid string",
        "max_restarts is -1: should be greater than or equal to 0",
    ]


def test_read_overrides_returns_nested_object() -> None:
    assert read_overrides(["searcher.max_length=5", "searcher.metric=a"]) == {
        "searcher": {"max_length": 5, "metric": "a"}
    }
    assert read_changes("searcher: {max_length: 1e2}") == {"searcher": {"max_length": 100.0}}
    assert read_changes(" ") == {}
    for read in (lambda: read_overrides(["a"]), lambda: read_changes("[1]"), lambda: read_changes("a: .inf")):
        with pytest.raises(ConfigError):
            read()


def test_parse_with_defaults_of_master_fills_missing_keys() -> None:
    defaults = {
        "max_restarts": 1,
        "name": "default",
        "resources": {"slots_per_trial": 4},
        "checkpoint_storage": {"type": "directory", "container_path": "/here", "save_trial_best": 3},
    }
    made = experiment(
        "name: mine\nresources: {priority: 7}\ncheckpoint_storage: {save_trial_latest: 9}", defaults=defaults
    )
    assert (made.name, made.max_restarts, made.slots_per_trial, made.priority) == ("mine", 1, 4, 7)
    assert made.data["checkpoint_storage"] == {
        "save_experiment_best": 0,
        "save_trial_best": 3,
        "save_trial_latest": 9,
        "type": "directory",
        "container_path": "/here",
    }
    other = experiment("checkpoint_storage: {type: s3, bucket: b, prefix: /a//b/}", defaults=defaults)
    assert "container_path" not in other.data["checkpoint_storage"]
    assert (other.data["checkpoint_storage"]["prefix"], other.save_trial_best) == ("a/b", 3)


def test_parse_of_unmanaged_experiment_needs_no_entrypoint() -> None:
    made = parse_experiment("searcher: {name: single, metric: unmanaged, max_length: 100000000}", managed=False)
    assert made.entrypoint is None
    with pytest.raises(ConfigError, match="entrypoint: missing"):
        parse_experiment("searcher: {name: single, metric: unmanaged}")


def test_parse_of_custom_searcher_keeps_its_own_keys() -> None:
    made = parse_experiment(
        "entrypoint: a\nsearcher: {name: custom, metric: m, class: 'mine:Method', population: 8, unit: epochs}"
    )
    assert made.searcher["class"] == "mine:Method"
    assert made.searcher["population"] == 8
    assert parse_experiment(made.data) == made


def test_environment_variables_of_list_apply_to_every_device() -> None:
    everywhere = experiment("environment: {environment_variables: [A=1, A=2, B=]}")
    for device in ("cpu", "cuda", "rocm"):
        assert everywhere.environment_variables_for(device) == {"A": "2", "B": ""}
    old = experiment("environment: {environment_variables: {gpu: [A=1], cuda: [B=2]}}")
    assert (old.environment_variables_for("cpu"), old.environment_variables_for("cuda")) == ({}, {"A": "1", "B": "2"})


@pytest.mark.parametrize(
    ("entrypoint", "command"),
    [
        (["python3", "train.py", "a b"], ["python3", "train.py", "a b"]),
        ("python3 train.py --a 'b c' && date", ["sh", "-c", "python3 train.py --a 'b c' && date"]),
        (
            "python3 -m determined.launch.torch_distributed python3 train.py",
            ["sh", "-c", "python3 -m det_core.launch.torch_distributed python3 train.py"],
        ),
        (
            ["python3", "-m", "determined.launch.torch_distributed", "train.py"],
            ["python3", "-m", "det_core.launch.torch_distributed", "train.py"],
        ),
        (
            "model_def:MNISTTrial",
            ["python3", "-m", "det_core.launch.torch_distributed", "--", "--trial", "model_def:MNISTTrial"],
        ),
        ("ls my.determined.launch.x /determined/launch", ["sh", "-c", "ls my.determined.launch.x /determined/launch"]),
    ],
)
def test_entrypoint_command_returns_command(entrypoint: str | list[str], command: list[str]) -> None:
    assert entrypoint_command(entrypoint) == command


def test_launchers_of_config_equal_modules_of_launch() -> None:
    import det_core.launch as launch

    folder = launch.__path__[0]
    assert sorted(LAUNCHERS) == sorted(p.stem for p in Path(folder).glob("[a-z]*.py"))


def test_parse_of_file_of_defaults_does_not_warn() -> None:
    made = experiment()
    assert made.warnings == ()
    assert parse_experiment(made.data).warnings == ()


def test_parse_with_lengths_beside_time_metric_warns() -> None:
    made = parse_experiment(
        "entrypoint: a\nsearcher: {name: async_halving, metric: m, max_trials: 3, num_rungs: 2, max_length: 9, "
        "time_metric: epochs, max_time: 9, stop_once: true}"
    )
    assert made.warnings == ("no effect beside searcher.time_metric: searcher.max_length, searcher.stop_once",)


def test_parse_reads_empty_section_as_missing() -> None:
    empty = "data:\nlabels:\nresources:\nhyperparameters:\ncheckpoint_storage:\nmin_validation_period:\ndescription:\n"
    name = "name: x\n"
    assert experiment(name + empty, default_seed=1).data == experiment(name, default_seed=1).data
