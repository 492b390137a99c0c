"""How an experiment file is read: scalars, overrides, defaults, commands, notices."""

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
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = experiment(f"data: {{x: {text}}}").data["data"]["x"]
    assert found == value
    assert type(found) is type(value)


def test_anchors_and_merges_are_followed() -> None:
    data = experiment("data: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}, c: *a}").data["data"]
    assert data == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}
    assert data["a"] is not data["c"]


def test_integers_may_be_written_as_powers_and_switches_as_words() -> None:
    made = experiment("max_restarts: 1e3\ndebug: yes\nhyperparameters: {n: {type: int, minval: 1e1, maxval: 1e2}}")
    assert (made.max_restarts, type(made.max_restarts), made.data["debug"]) == (1000, int, True)
    assert made.hyperparameters["n"] == {"type": "int", "minval": 10, "maxval": 100, "count": None}


def test_the_given_object_is_not_changed() -> None:
    given = {"entrypoint": "a", "searcher": {"name": "single", "metric": "b"}, "data": {"x": [1]}}
    made = parse_experiment(given, overrides=["data.x.0=2"], defaults={"labels": ["a"]})
    assert made.data["data"] == {"x": [2]}
    assert given == {"entrypoint": "a", "searcher": {"name": "single", "metric": "b"}, "data": {"x": [1]}}


def test_overrides_change_values_and_make_sections() -> None:
    overrides = ["searcher.metric=accuracy", "resources.slots_per_trial=2", "labels=[a, b]", "labels.1=c", "name=x=y",
                 "data.deep.er=1e-3", "hyperparameters={lr: 0.1}", "max_restarts=0", "description="]  # fmt: skip
    made = experiment("description: words", overrides=overrides)
    assert (made.metric, made.slots_per_trial, made.labels, made.name) == ("accuracy", 2, ["a", "c"], "x=y")
    assert made.data["data"] == {"deep": {"er": 1e-3}}
    assert made.hyperparameters == {"lr": {"type": "const", "val": 0.1}}
    assert (made.max_restarts, made.description) == (0, None)


def test_overrides_that_change_nothing_are_mistakes_beside_those_of_the_file() -> None:
    with pytest.raises(ConfigError) as e:
        experiment(
            "labels: [a]\nmax_restarts: -1",
            overrides=["name", "=x", "a..b=1", "labels.4=b", "name.x=1", "entrypoint.a=2", "data=[", "data.x=.nan"],
        )
    assert str(e.value).splitlines() == [
        "override 'name': should be a change as searcher.max_trials=8",
        "override '': should be a change as searcher.max_trials=8",
        "override 'a..b': should be a change as searcher.max_trials=8",
        "override 'labels.4': should be about one of the items 0 to 0 of labels",
        "override 'entrypoint.a': should be about entrypoint itself, which is no object",
        "override 'data': should have a value as YAML has it",
        "override 'data.x': should have a value as YAML has it",
        "name: should be a valid string",
        "max_restarts is -1: should be greater than or equal to 0",
    ]


def test_changes_can_be_read_without_a_file() -> None:
    assert read_overrides(["searcher.max_length=5", "searcher.metric=a"]) == {
        "searcher": {"max_length": 5, "metric": "a"}
    }
    assert read_changes("searcher: {max_length: 1e2}") == {"searcher": {"max_length": 100.0}}
    assert read_changes(" ") == {}
    for read in (lambda: read_overrides(["a"]), lambda: read_changes("[1]"), lambda: read_changes("a: .inf")):
        with pytest.raises(ConfigError):
            read()


def test_a_masters_defaults_stand_where_the_file_says_nothing() -> None:
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


def test_one_that_is_only_kept_needs_no_entrypoint() -> None:
    made = parse_experiment("searcher: {name: single, metric: unmanaged, max_length: 100000000}", managed=False)
    assert made.entrypoint is None
    with pytest.raises(ConfigError, match="entrypoint: missing"):
        parse_experiment("searcher: {name: single, metric: unmanaged}")


def test_a_custom_search_takes_keys_of_its_own() -> None:
    made = parse_experiment(
        "entrypoint: a\nsearcher: {name: custom, metric: m, class: 'mine:Method', population: 8, unit: epochs}"
    )
    assert made.searcher["class"] == "mine:Method"
    assert made.searcher["population"] == 8
    assert parse_experiment(made.data) == made


def test_variables_of_a_list_are_set_on_every_device_and_gpu_is_cuda() -> None:
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
def test_the_command_of_an_entrypoint(entrypoint: str | list[str], command: list[str]) -> None:
    assert entrypoint_command(entrypoint) == command


def test_the_launchers_that_stand_in_are_those_there_are() -> None:
    import det_core.launch as launch

    folder = launch.__path__[0]
    assert sorted(LAUNCHERS) == sorted(p.stem for p in Path(folder).glob("[a-z]*.py"))


def test_a_full_file_of_defaults_gets_no_warning() -> None:
    made = experiment()
    assert made.warnings == ()
    assert parse_experiment(made.data).warnings == ()


def test_lengths_that_have_no_effect_are_said() -> None:
    made = parse_experiment(
        "entrypoint: a\nsearcher: {name: async_halving, metric: m, max_trials: 3, num_rungs: 2, max_length: 9, "
        "time_metric: epochs, max_time: 9, stop_once: true}"
    )
    assert made.warnings == (
        "searcher.max_length and searcher.stop_once have no effect, as there is searcher.time_metric",
    )


def test_a_section_with_nothing_below_it_is_as_if_it_were_not_there() -> None:
    empty = "data:\nlabels:\nresources:\nhyperparameters:\ncheckpoint_storage:\nmin_validation_period:\ndescription:\n"
    name = "name: x\n"
    assert experiment(name + empty, default_seed=1).data == experiment(name, default_seed=1).data
