"""Mistakes in experiment files: all at once, each with its key, value and cause, and without secrets."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from det_core.config import ConfigError, ConfigProblem, parse_experiment
from det_core.errors import DetCoreError

FILES = Path(__file__).parent / "files"
GOOD: dict[str, Any] = {"entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}
ASHA = {"name": "async_halving", "metric": "loss", "num_rungs": 3, "max_trials": 4, "max_length": 9}
S3 = {"type": "s3", "bucket": "b"}
LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in itertools.pairwise("abcde")
)
"""Each line ten times the one before."""
SECRET = "hunter2hunter2"


def wrong(changes: Any, **more: Any) -> list[ConfigProblem]:
    """Return the mistakes of a valid file with changes."""
    with pytest.raises(ConfigError) as e:
        parse_experiment({**GOOD, **changes}, **more)
    assert str(e.value).splitlines() == [str(error) for error in e.value.errors]
    assert isinstance(e.value, DetCoreError) and isinstance(e.value, ValueError)
    return e.value.errors


def lines(changes: Any, **more: Any) -> list[str]:
    return [str(error) for error in wrong(changes, **more)]


def searcher(**more: Any) -> dict[str, Any]:
    return {"searcher": {**ASHA, **more}}


def test_parse_with_six_mistakes_lists_six_lines() -> None:
    with pytest.raises(ConfigError) as e:
        parse_experiment((FILES / "six_mistakes.yaml").read_text())
    assert str(e.value).splitlines() == [
        "searcher.max_length: should be one of {batches: N}, {records: N} and {epochs: N}, N at least 1",
        "searcher.max_trials: missing",
        "searcher.max_trails: unknown key; did you mean max_trials?",
        "hyperparameters.lr: minval should be less than maxval",
        "hyperparameters.momentum.type is 'float': should be one of const, int, double, log, categorical; "
        "did you mean double?",
        "resources.slots_per_trial is -1: should be greater than or equal to 0",
    ]
    assert e.value.errors[-1] == ConfigProblem(
        "resources.slots_per_trial", "should be greater than or equal to 0", found="-1"
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"entrypoint": None}, "entrypoint: missing; give a command"),
        ({"entrypoint": []}, "entrypoint: should be a command"),
        ({"entrypoint": ["a", 1]}, "entrypoint: should be a command"),
        ({"entrypoint": " "}, "entrypoint is ' ': should be a command"),
        (
            {"entrypoint": "python3 -m determined.launch.dsat train.py"},
            "entrypoint is 'python3 -m determined.launch.dsat train.py': should do without determined.launch.dsat: "
            "there is det_core.launch.torch_distributed, ",
        ),
        (
            {"entrypoint": "model:Trial", "searcher": {**GOOD["searcher"], "max_length": 16}},
            "the experiment file: searcher.max_length needs a unit for a trial class: {batches: N}, ",
        ),
        ({"max_restarts": True}, "max_restarts is true: should be a valid integer"),
        ({"max_restarts": 1.5}, "max_restarts is 1.5: should be a valid integer"),
        ({"max_restarts": None}, "max_restarts is null: should be a valid integer"),
        ({"debug": "maybe"}, "debug is 'maybe': should be a valid boolean"),
        ({"labels": "a"}, "labels is 'a': should be a list"),
        ({"labels": ["a", 2]}, "labels[1] is 2: should be a valid string"),
        ({"labels": ["a", " "]}, "labels[1] is ' ': should be a text that is not empty"),
        ({"data": []}, "data: should be an object"),
        ({"name": ""}, "name is '': should be a text that is not empty"),
        ({"preemption_timeout": -1}, "preemption_timeout is -1: should be greater than or equal to 0"),
        ({"checkpoint_policy": "al"}, "checkpoint_policy is 'al': should be one of best, all, none; did you mean all?"),
        ({"min_validation_period": {"batches": 1, "epochs": 1}}, "min_validation_period: should be one of {batches: "),
        ({"reproducibility": {"experiment_seed": 2**32}}, "reproducibility.experiment_seed is 4294967296: should be "),
        ({"resources": {"priority": 100}}, "resources.priority is 100: should be less than or equal to 99"),
        ({"resources": {"slots_per_trial": 4, "max_slots": 2}}, "resources: max_slots should be at least slots_per"),
        ({"resources": 2}, "resources is 2: should be an object"),
        (
            {"environment": {"environment_variables": ["A=1", "B"]}},
            "environment.environment_variables.cpu[1]: should be a text of the form NAME=VALUE",
        ),
        ({"environment": {"environment_variables": {"gpu": ["=1"]}}}, "environment.environment_variables.gpu[0]: "),
        ({"environment": {"environment_variables": "A=1"}}, "environment.environment_variables: should be an object"),
    ],
)
def test_parse_with_invalid_value_names_key_and_expectation(changes: dict[str, Any], line: str) -> None:
    assert lines(changes)[0].startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"max_restart": 1}, "max_restart: unknown key; did you mean max_restarts?"),
        ({"slots_per_trial": 2}, "slots_per_trial: unknown key; did you mean resources.slots_per_trial?"),
        ({"resources": {"max_restarts": 2}}, "resources.max_restarts: unknown key; max_restarts belongs at the top"),
        ({"resources": {"pool": 2}}, "resources.pool: unknown key; allowed: slots_per_trial, max_slots, "),
        (searcher(max_trails=3), "searcher.max_trails: unknown key; did you mean max_trials?"),
        ({"searcher": {**GOOD["searcher"], "max_trials": 2}}, "searcher.max_trials: unknown key; only random, async_"),
        ({"searcher": {**ASHA, "name": "adaptive_asha"}}, "searcher.num_rungs: unknown key; only async_halving takes"),
        ({"checkpoint_storage": {**S3, "acess_key": "A"}}, "checkpoint_storage.acess_key: unknown key; did you mean a"),
        (
            {"hyperparameters": {"x": {"y": {"type": "const", "val": 1, "value": 1}}}},
            "hyperparameters.x.y.value: unknown key; did you mean val?",
        ),
        (
            {"environment": {"environment_variables": {"A": "1"}}},
            "environment.environment_variables.A: unknown key; allowed: cpu, cuda, rocm, gpu",
        ),
    ],
)
def test_parse_with_unknown_key_suggests_nearest(changes: dict[str, Any], line: str) -> None:
    (found,) = lines(changes)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"searcher": None}, " is null: should be an object"),
        ({"searcher": {"metric": "a"}}, ".name: should be one of single, random, grid, "),
        ({"searcher": {"name": "singel", "metric": "a"}}, ".name is 'singel': should be one of single, random, "),
        ({"searcher": {"name": ["single"], "metric": "a"}}, ".name: should be one of single, random, grid, "),
        ({"searcher": {"name": "single"}}, ".metric: missing"),
        (searcher(max_trials=0), ".max_trials is 0: should be greater than or equal to 1"),
        (searcher(divisor=1), ".divisor is 1: should be greater than 1"),
        (searcher(num_rungs=101), ".num_rungs is 101: should be less than or equal to 100"),
        (searcher(max_concurrent_trials=-1), ".max_concurrent_trials is -1: should be greater than or equal to 0"),
        (searcher(max_length=-1), ".max_length is -1: should be an integer, or one of {batches: N}"),
        (searcher(max_length={"batches": 0}), ".max_length: should be one of {batches: N}, {records: N} and {epochs"),
        (searcher(max_length=0), ": max_length is missing: how long to train at most"),
        (searcher(max_length=None), ": max_length is missing: how long to train at most"),
        (searcher(time_metric="epochs"), ": time_metric and max_time go together"),
        (searcher(max_time=3), ": time_metric and max_time go together"),
        (
            {"searcher": {"name": "optuna", "metric": "a", "max_trials": 2, "sampler": "gpp"}},
            ".sampler is 'gpp': should be one of tpe, gp, cmaes, random, qmc, nsgaii; did you mean gp?",
        ),
        ({"searcher": {"name": "custom", "metric": "a"}}, ".class: missing"),
        (
            {"searcher": {"name": "custom", "metric": "a", "class": "nowhere"}},
            ".class is 'nowhere': should be a text of the form module:Class",
        ),
    ],
)
def test_parse_with_invalid_searcher_names_key(changes: dict[str, Any], line: str) -> None:
    (found,) = lines(changes)
    assert found.startswith("searcher" + line)


@pytest.mark.parametrize(
    ("former", "now"), [("adaptive", "adaptive_asha"), ("sync_halving", "adaptive_asha"), ("randon", "random")]
)
def test_parse_with_renamed_or_misspelled_searcher_suggests_name(former: str, now: str) -> None:
    assert lines(searcher(name=former))[0].endswith(f"; did you mean {now}?")


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"type": "int", "minval": 1, "maxval": 1}, ": minval should be less than maxval"),
        ({"type": "int", "minval": 0.5, "maxval": 2}, ".minval is 0.5: should be a valid integer"),
        ({"type": "int", "minval": 0, "maxval": 2**60}, f".maxval is {2**60}: should be less than or equal to {2**53}"),
        ({"type": "int", "minval": 1, "maxval": 3, "count": 0}, ".count is 0: should be greater than or equal to 1"),
        ({"type": "double", "minval": "a", "maxval": 2}, ".minval is 'a': should be a valid number"),
        ({"type": "double", "minval": -1e308, "maxval": 1e308}, ": minval should be so close to maxval that their"),
        ({"type": "double", "minval": 1}, ".maxval: missing"),
        ({"type": "log", "minval": -3, "maxval": -1}, ".base: missing"),
        ({"type": "log", "base": 0, "minval": -3, "maxval": -1}, ".base is 0: should be greater than 0"),
        ({"type": "log", "base": 10, "minval": 1, "maxval": 1000}, ": maxval should be the logarithm of the value"),
        ({"type": "log", "base": 10, "minval": -1000, "maxval": 1}, ": minval should be the logarithm of the value"),
        ({"type": "categorical", "vals": []}, ".vals: should have at least 1 item"),
        ({"type": "categorical", "vals": "ab"}, ".vals is 'ab': should be a list"),
        ({"type": "const"}, ".val: missing"),
        ({"type": 3}, ".type is 3: should be one of const, int, double, log, categorical"),
        ({"inner": {"type": "int", "minval": 3, "maxval": 2}}, ".inner: minval should be less than maxval"),
    ],
)
def test_parse_with_invalid_hyperparameter_names_key(value: Any, line: str) -> None:
    (found,) = lines({"hyperparameters": {"x": value}})
    assert found.startswith("hyperparameters.x" + line)


@pytest.mark.parametrize(
    "value",
    [1.5, "a", None, {"type": "double", "minval": 1, "maxval": 2}, {"a": 1}, {"type": "categorical", "vals": [1, 1.5]}],
)
def test_parse_with_fractional_global_batch_size_is_rejected(value: Any) -> None:
    (line,) = lines({"hyperparameters": {"global_batch_size": value}})
    assert line == "hyperparameters: global_batch_size should be an integer, or an int or categorical of integers"
    for good in (1, {"type": "int", "minval": 1, "maxval": 2}, {"type": "categorical", "vals": [1, 2]}):
        parse_experiment({**GOOD, "hyperparameters": {"global_batch_size": good}})


def test_parse_grid_without_counts_or_too_large_is_rejected() -> None:
    grid = {"searcher": {"name": "grid", "metric": "loss"}}
    range_ = {"minval": 1, "maxval": 4}
    b = {"c": {"type": "double", **range_}, "d": {"type": "log", "base": 2, "count": 2, **range_}}
    (line,) = lines({**grid, "hyperparameters": {"a": {"type": "int", **range_}, "b": b, "e": 7}})
    assert line.endswith("needs a count, an integer of at least 1, in hyperparameters.a, hyperparameters.b.c")
    axis = {"type": "double", "minval": 0, "maxval": 1, "count": 100}
    (line,) = lines({**grid, "hyperparameters": {name: axis for name in "abc"}})
    assert line.endswith("should be a grid of at most 100,000 points; these make 1,000,000")
    few = {"type": "int", "minval": 1, "maxval": 3, "count": 10**6}
    parse_experiment({**GOOD, **grid, "hyperparameters": {"a": few, "b": axis, "c": axis}})


@pytest.mark.parametrize(
    ("storage", "line"),
    [
        ({"type": "s4"}, ".type: should be one of directory, shared_fs, s3, gcs, azure, fsspec"),
        ({"bucket": "b"}, ".bucket: unknown key; only s3, gcs take it"),
        ({"type": "directory", "container_path": "here"}, ".container_path: should be an absolute path"),
        ({"type": "shared_fs"}, ".host_path: missing"),
        ({"type": "shared_fs", "host_path": "/a", "storage_path": "../b"}, ": storage_path must lie inside host_path"),
        ({"type": "gcs", "bucket": "b/c"}, ".bucket: should be a bucket's bare name; the rest is its prefix"),
        ({**S3, "prefix": "a/../b"}, ".prefix: should have no '..' between its slashes"),
        ({**S3, "save_trial_best": -1}, ".save_trial_best: should be greater than or equal to 0"),
        ({**S3, "endpoint_url": "ftp://a"}, ".endpoint_url: should be a URL that begins with http:// or https://"),
        ({**S3, "access_key": "k"}, ": access_key and secret_key belong together"),
        ({**S3, "session_token": "t"}, ": session_token needs the access_key and secret_key"),
        ({**S3, "access_key": "a", "secret_key": "b", "anonymous": True}, ": anonymous=true excludes access_key"),
        ({"type": "azure", "container": "c"}, ": give exactly one of connection_string and account_url"),
        (
            {"type": "azure", "container": "c", "connection_string": "a", "account_url": "https://a"},
            ": give exactly one of",
        ),
        (
            {"type": "azure", "container": "c", "connection_string": "a", "credential": "k"},
            ": credential is only used with account_url",
        ),
        ("s3://b", ": should be an object"),
    ],
)
def test_parse_with_invalid_checkpoint_storage_names_key(storage: Any, line: str) -> None:
    (found,) = lines({"checkpoint_storage": storage})
    assert found.startswith("checkpoint_storage" + line)


AUTH = {"environment": {"registry_auth": {"password": SECRET}}}


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({"checkpoint_storage": {**S3, "access_key": SECRET}}, []),
        ({"checkpoint_storage": {**S3, "acess_key": SECRET}}, []),
        ({"checkpoint_storage": {**S3, "access_key": [SECRET], "secret_key": "k"}}, []),
        ({"checkpoint_storage": {**S3, "access_key": SECRET + "\0"}}, []),
        ({"checkpoint_storage": {"type": SECRET, "access_key": SECRET}}, []),
        ({"checkpoint_storage": SECRET}, []),
        ({"checkpoint_storag": {**S3, "secret_key": SECRET}}, []),
        ({"checkpoint_storage": {"type": "fsspec", "url": SECRET}}, []),
        ({"environment": [AUTH]}, []),
        ({"environment": {"registry_auth": SECRET}}, []),
        ({"environment": {"registry_aut": AUTH}}, []),
        ({"environment": {"environment_variables": [f"KEY {SECRET}"]}}, []),
        ({"resources": [AUTH]}, []),
        ({"data": {"x": {SECRET}}}, []),
        ({}, [f"max_restarts={SECRET}"]),
        ({}, [f"labels=[1, {SECRET}]"]),
        ({"labels": [1, 2]}, [f"labels.1=[{SECRET}]"]),
        ({}, [f"searcher.name={SECRET}"]),
        ({}, [f"data.x: {SECRET}"]),
        ({}, [f"data.x=*{SECRET}"]),
        ({}, [f"data.x={{a: {SECRET}, a: {SECRET}}}"]),
    ],
)
def test_config_error_contains_no_secret(changes: dict[str, Any], overrides: list[str]) -> None:
    assert SECRET not in "".join(lines(changes, overrides=overrides)).replace("override 'data.x: hunter2hunter2'", "")


@pytest.mark.parametrize("value", [f"*{SECRET}", f"!{SECRET} x", f"!a!{SECRET} x", f"{SECRET}\n  secret_key: {SECRET}"])
def test_config_error_of_unreadable_text_contains_no_secret(value: str) -> None:
    with pytest.raises(ConfigError, match=r"not readable as YAML or JSON \(line ") as e:
        parse_experiment(f"checkpoint_storage:\n  secret_key: {value}\n")
    assert SECRET not in str(e.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "the experiment file: empty"),
        ("- a", "the experiment file: should be an object with sections"),
        ("just words", "the experiment file: should be an object with sections"),
        ("a: [1,\nb", "the experiment file: not readable as YAML or JSON (line 2, column 2: expected ',' or ']'"),
        ("a: 1\nb: {x: 1, x: 2}\n", "the experiment file: not readable as YAML or JSON (line 2, column 11: found dup"),
        ("a:\n\t- b", "the experiment file: not readable as YAML or JSON (line 2, column 1: a tab; indent by spaces"),
        ('{"a": 1, "b": {"a": 1, "a": 2}}', "a: given a second time"),
        ("a: !!python/name:os.system", "the experiment file: not readable as YAML or JSON (line 1, column 4: could "),
        ("a: !!set {b}", "a: set is not a type of JSON"),
        ("a: \x01", "the experiment file: not readable as YAML or JSON (a character that YAML does not know)"),
        ("a: " + "9" * 5000, "the experiment file: not readable as YAML or JSON (an invalid number)"),
        ('{"a": ' + "9" * 5000 + "}", "the experiment file: not readable as YAML or JSON (an invalid number)"),
        ("a: 1\n---\nb: 1", "the experiment file: not readable as YAML or JSON (line 2, column 1: but found another"),
        ("[" * 1000, "the experiment file: nested without end"),
        ("x: " + "y" * (1 << 20), "the experiment file: 1,048,579 characters long"),
        ("a: &a [*a]", "a: too large, or repeats itself without end; 100,000 values and 50 levels are the limit"),
        (LAUGHS, "e: too large, or repeats itself without end; 100,000 values and 50 levels are the limit"),
    ],
)
def test_parse_of_unreadable_text_names_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as e:
        parse_experiment(text)
    assert str(e.value).startswith(line)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (float("nan"), "data.x: should be a finite number"),
        (float("-inf"), "data.x: should be a finite number"),
        (2**64, "data.x: should be an integer of 64 bits"),
        ("a\0b", "data.x: should be a text that Unicode can hold, without NUL"),
        ("\ud800", "data.x: should be a text that Unicode can hold, without NUL"),
        ({1, 2}, "data.x: set is not a type of JSON"),
        ({None: 1}, "data.x: has a key that is not a text"),
        ({1: 1, "1": 2}, "1: given a second time"),
    ],
)
def test_parse_of_value_outside_json_is_rejected(value: Any, line: str) -> None:
    assert lines({"data": {"x": value}}) == [line]


def test_config_error_shortens_long_values() -> None:
    (line,) = lines({"data": "first\nsecond" * 1000})
    assert line.startswith("data is 'first\\nsecondfirst")
    assert len(line) < 130


def test_config_error_escapes_control_characters() -> None:
    missing, unknown = lines({"a\nb\x1b[2J": 1, "hyperparameters": {"\u2028": {"type": "int", "minval": 1}}})
    assert unknown.startswith(r"a\nb\x1b[2J: unknown key")
    assert missing.startswith(r"hyperparameters.\u2028.maxval: missing")


def test_parse_of_text_and_of_object_find_same_mistakes() -> None:
    mistaken = {**GOOD, **searcher(max_trials=0), "labels": [1]}
    for text in (json.dumps(mistaken), f"# YAML\n{json.dumps(mistaken)}"):
        with pytest.raises(ConfigError) as e:
            parse_experiment(text)
        assert e.value.errors == wrong(mistaken)
