"""What is wrong with an experiment file is said all at once: where, what is there, what may be there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from det_core.config import ConfigError, ConfigErrors, parse_experiment
from det_core.errors import DetCoreError

FILES = Path(__file__).parent / "files"
GOOD: dict[str, Any] = {"entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}
ASHA = {"name": "async_halving", "metric": "loss", "num_rungs": 3, "max_trials": 4, "max_length": 9}
LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in itertools.pairwise("abcde")
)
"""Each line ten times the one before."""
S3 = {"type": "s3", "bucket": "b"}


def wrong(changes: Any, **more: Any) -> list[ConfigError]:
    """The mistakes of a good file with changes."""
    with pytest.raises(ConfigErrors) as e:
        parse_experiment({**GOOD, **changes}, **more)
    assert str(e.value).splitlines() == [str(error) for error in e.value.errors]
    assert isinstance(e.value, DetCoreError) and isinstance(e.value, ValueError)
    return e.value.errors


def lines(changes: Any, **more: Any) -> list[str]:
    return [str(error) for error in wrong(changes, **more)]


def searcher(**more: Any) -> dict[str, Any]:
    return {"searcher": {**ASHA, **more}}


def hyperparameters(**more: Any) -> dict[str, Any]:
    return {"hyperparameters": more}


def test_a_file_with_six_mistakes_shows_six_lines() -> None:
    with pytest.raises(ConfigErrors) as e:
        parse_experiment((FILES / "six_mistakes.yaml").read_text())
    length = "an integer of at least 0, or one of {batches: N}, {records: N} and {epochs: N}, N at least 1"
    known = (
        "name, metric, smaller_is_better, source_trial_id, source_checkpoint_uuid, max_concurrent_trials, max_length, "
        "max_trials"
    )
    assert str(e.value).splitlines() == [
        f"searcher.max_length is {{'batchs': 100}}: it must be {length}",
        "searcher.max_trials is missing: give it an integer from 1 to 1000000",
        f"searcher.max_trails (it has 8) is no key here: there are {known}; did you mean max_trials?",
        "hyperparameters.lr.minval is -1: it must be less than maxval, which is -4",
        "hyperparameters.momentum.type is 'float': it must be one of const, int, double, log, categorical; "
        "did you mean double?",
        "resources.slots_per_trial is -1: it must be an integer of at least 0",
    ]
    unknown = next(error for error in e.value.errors if error.unknown)
    assert (unknown.allowed, unknown.found, unknown.hint) == (known, "8", "did you mean max_trials?")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"entrypoint": None}, "entrypoint is missing: give it a command: a text for sh, or a list of texts"),
        ({"entrypoint": []}, "entrypoint is []: it must be a command: a text for sh, or a list of texts"),
        ({"entrypoint": ["a", 1]}, "entrypoint is ['a', 1]: it must be a command: a text for sh, or a list of texts"),
        ({"entrypoint": " "}, "entrypoint is ' ': it must be a command: a text for sh, or a list of texts"),
        (
            {"entrypoint": "model:Trial", "searcher": {"name": "single", "metric": "loss", "max_length": 16}},
            "searcher.max_length is 16: it must be {batches: 16}, {epochs: 16} or {records: 16}, "
            "as a trial class counts for you",
        ),
        (
            {"entrypoint": "python3 -m determined.launch.dsat train.py"},
            "entrypoint is 'python3 -m determined.launch.dsat train.py': it must be a command without "
            "determined.launch.dsat: there is det_core.launch.torch_distributed, det_core.launch.deepspeed, "
            "det_core.launch.horovod, det_core.launch.tensorflow, det_core.launch.wrap_rank",
        ),
        ({"max_restarts": True}, "max_restarts is true: it must be an integer of at least 0"),
        ({"max_restarts": 1.5}, "max_restarts is 1.5: it must be an integer of at least 0"),
        ({"max_restarts": None}, "max_restarts is null: it must be an integer of at least 0"),
        ({"debug": "maybe"}, "debug is 'maybe': it must be true or false"),
        ({"labels": "a"}, "labels is 'a': it must be a list"),
        ({"labels": ["a", 2]}, "labels[1] is 2: it must be a text that is not empty"),
        ({"data": []}, "data is []: it must be an object"),
        ({"name": ""}, "name is '': it must be a text that is not empty"),
        ({"preemption_timeout": -1}, "preemption_timeout is -1: it must be a number of at least 0"),
        (
            {"checkpoint_policy": "al"},
            "checkpoint_policy is 'al': it must be one of best, all, none; did you mean all?",
        ),
        (
            {"min_validation_period": {"batches": 1, "epochs": 1}},
            "min_validation_period is {'batches': 1, 'epochs': 1}: it must be one of {batches: N}, {records: N} and "
            "{epochs: N}, N at least 0",
        ),
        (
            {"reproducibility": {"experiment_seed": 2**32}},
            "reproducibility.experiment_seed is 4294967296: it must be an integer from 0 to 4294967295",
        ),
        ({"resources": {"priority": 100}}, "resources.priority is 100: it must be an integer from 1 to 99"),
        (
            {"resources": {"slots_per_trial": 4, "max_slots": 2}},
            "resources.max_slots is 2: it must be at least slots_per_trial, which is 4, or no trial could ever start",
        ),
        ({"resources": {"weight": 0}}, "resources.weight is 0: it must be a number above 0"),
        (
            {"environment": {"environment_variables": ["A=1", "B"]}},
            "environment.environment_variables[1] is 'B': it must be a text of the form NAME=VALUE",
        ),
        (
            {"environment": {"environment_variables": {"cpu": ["=1"]}}},
            "environment.environment_variables.cpu[0] is '=1': it must be a text of the form NAME=VALUE",
        ),
        (
            {"environment": {"environment_variables": {"A": "1"}}},
            "environment.environment_variables.A (it has '1') is no key here: there are cpu, cuda, rocm, gpu",
        ),
        (
            {"environment": {"environment_variables": "A=1"}},
            "environment.environment_variables is 'A=1': it must be a list",
        ),
        ({"slots_per_trial": 2}, "slots_per_trial (it has 2) is no key here; did you mean resources.slots_per_trial?"),
        (
            {"resources": {"max_restarts": 2}},
            "resources.max_restarts (it has 2) is no key here: there are "
            "slots_per_trial, max_slots, priority, weight, resource_pool, shm_size, is_single_node, native_parallel, "
            "devices; max_restarts belongs at the top of the file",
        ),
        ({"description": "x" * 200}, ""),
    ],
)
def test_fields(changes: dict[str, Any], line: str) -> None:
    if not line:
        assert parse_experiment({**GOOD, **changes}).description == "x" * 200
        return
    assert lines(changes) == [line]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"searcher": None}, "searcher is null: it must be an object with keys out of name, "),
        ({"searcher": {"metric": "a"}}, "searcher.name is missing: give it one of single, random, grid, "),
        ({"searcher": {"name": "singel", "metric": "a"}}, "searcher.name is 'singel': it must be one of single, "),
        (
            {"searcher": {"name": "adaptive", "metric": "a"}},
            "searcher.name is 'adaptive': it must be one of single, random, grid, async_halving, adaptive_asha, "
            "optuna, custom; searches of that kind are adaptive_asha now",
        ),
        (
            {"searcher": {"name": "single"}},
            "searcher.metric is missing: give it a text that is not empty",
        ),
        (searcher(max_trials=0), "searcher.max_trials is 0: it must be an integer from 1 to 1000000"),
        (searcher(divisor=1), "searcher.divisor is 1: it must be a number above 1 and at most 1000"),
        (searcher(num_rungs=0), "searcher.num_rungs is 0: it must be an integer from 1 to 100"),
        (searcher(max_concurrent_trials=-1), "searcher.max_concurrent_trials is -1: it must be an integer from 0 to"),
        (searcher(max_length=0), "searcher.max_length is 0: it must be an integer of at least 1, or one of {batches"),
        (searcher(max_length={"batches": 0}), "searcher.max_length is {'batches': 0}: it must be an integer of"),
        (searcher(max_length=None), "searcher.max_length is null: it must be how long to train at most"),
        (searcher(time_metric="epochs"), "searcher.max_time is missing: give it an integer of at least 1, as there is"),
        (searcher(max_time=3), "searcher.time_metric is missing: give it the name of the validation metric"),
        (
            {"searcher": {**ASHA, "name": "adaptive_asha"}},
            "searcher.num_rungs (it has 3) is no key here: there are name, metric, ",
        ),
        (
            {
                "searcher": {
                    "name": "adaptive_asha",
                    "metric": "a",
                    "max_trials": 2,
                    "max_length": 2,
                    "mode": "agressive",
                }
            },
            "searcher.mode is 'agressive': it must be one of standard, aggressive, conservative; did you mean "
            "aggressive?",
        ),
        (
            {"searcher": {"name": "optuna", "metric": "a", "max_trials": 2, "sampler": "gpp"}},
            "searcher.sampler is 'gpp': it must be one of tpe, gp, cmaes, random, qmc, nsgaii; did you mean gp?",
        ),
        (
            {"searcher": {"name": "custom", "metric": "a", "class": "nowhere"}},
            "searcher.class is 'nowhere': it must be a text of the form module:Class",
        ),
    ],
)
def test_searchers(changes: dict[str, Any], line: str) -> None:
    (found,) = lines(changes)
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"type": "int", "minval": 1, "maxval": 1}, ".minval is 1: it must be less than maxval, which is 1"),
        (
            {"type": "int", "minval": 0.5, "maxval": 2},
            ".minval is 0.5: it must be an integer from -9007199254740992 to 9007199254740992",
        ),
        ({"type": "int", "minval": 1, "maxval": 3, "count": 0}, ".count is 0: it must be an integer of at least 1"),
        ({"type": "double", "minval": "a", "maxval": 2}, ".minval is 'a': it must be a number"),
        (
            {"type": "double", "minval": -1e308, "maxval": 1e308},
            ".minval is -1e+308: it must be so close to maxval, which is 1e+308, that their difference is a finite "
            "number",
        ),
        ({"type": "double", "minval": 1}, ".maxval is missing: give it a number"),
        ({"type": "log", "minval": -3, "maxval": -1}, ".base is missing: give it a number above 0"),
        ({"type": "log", "base": 0, "minval": -3, "maxval": -1}, ".base is 0: it must be a number above 0"),
        (
            {"type": "log", "base": 10, "minval": 1, "maxval": 1000},
            ".maxval is 1000: it must be an exponent, so that 10 to the power of it is a number above 0, and finite; "
            "give the logarithm of the value",
        ),
        ({"type": "categorical", "vals": []}, ".vals is []: it must be a list of at least one value"),
        ({"type": "categorical", "vals": "ab"}, ".vals is 'ab': it must be a list of at least one value"),
        ({"type": "const"}, ".val is missing: give it anything"),
        (
            {"type": "const", "val": 1, "value": 1},
            ".value (it has 1) is no key here: there are type, val; did you mean val?",
        ),
        ({"type": 3}, ".type is 3: it must be one of const, int, double, log, categorical"),
        (
            {"inner": {"type": "int", "minval": 3, "maxval": 2}},
            ".inner.minval is 3: it must be less than maxval, which is 2",
        ),
    ],
)
def test_hyperparameters(value: Any, line: str) -> None:
    assert lines(hyperparameters(x=value)) == ["hyperparameters.x" + line]


@pytest.mark.parametrize(
    "value",
    [1.5, "a", None, {"type": "double", "minval": 1, "maxval": 2}, {"a": 1}, {"type": "categorical", "vals": [1, 1.5]}],
)
def test_the_global_batch_size_is_an_integer(value: Any) -> None:
    (line,) = lines(hyperparameters(global_batch_size=value))
    assert line.endswith("it must be an integer, or an int or categorical of integers")


def test_a_grid_needs_counts_also_where_other_things_are_wrong() -> None:
    range_ = {"minval": 1, "maxval": 4}
    found = lines(
        {
            "searcher": {"name": "grid", "metric": 1},
            "hyperparameters": {
                "a": {"type": "int", **range_},
                "b": {"c": {"type": "double", **range_}, "d": {"type": "log", "base": 2, "count": 2, **range_}},
                "e": 7,
            },
        }
    )
    assert found == [
        "searcher.metric is 1: it must be a text that is not empty",
        "hyperparameters.a.count is missing: give it an integer of at least 1, for the grid",
        "hyperparameters.b.c.count is missing: give it an integer of at least 1, for the grid",
    ]


def test_a_grid_has_a_bound() -> None:
    axis = {"type": "double", "minval": 0, "maxval": 1, "count": 100}
    grid = {"searcher": {"name": "grid", "metric": "loss"}}
    (line,) = lines({**grid, "hyperparameters": {name: axis for name in "abc"}})
    assert line.endswith("it must be a grid of at most 100,000 points: these make 1,000,000")
    few = {"type": "int", "minval": 1, "maxval": 3, "count": 10**6}
    parse_experiment({**GOOD, **grid, "hyperparameters": {"a": few, "b": axis, "c": axis}})


@pytest.mark.parametrize(
    ("storage", "line"),
    [
        (
            {"type": "s4"},
            ".type is 's4': it must be one of directory, shared_fs, s3, gcs, azure, fsspec",
        ),
        ({"bucket": "b"}, ".type is missing: give it one of directory, shared_fs, s3, gcs, azure, fsspec"),
        ({"type": "directory", "container_path": "here"}, ".container_path is 'here': it must be an absolute path"),
        ({"type": "shared_fs"}, ".host_path is missing: give it an absolute path"),
        (
            {"type": "shared_fs", "host_path": "/a", "storage_path": "../b"},
            ".storage_path is '../b': it must be inside host_path, which is '/a'",
        ),
        ({"type": "gcs", "bucket": "b/c"}, ".bucket is 'b/c': it must be a bucket's bare name; the rest is its prefix"),
        ({**S3, "prefix": "a/../b"}, ".prefix is 'a/../b': it must be a text without '..' between its slashes"),
        ({**S3, "save_trial_best": -1}, ".save_trial_best is -1: it must be an integer of at least 0"),
        ({**S3, "access_key": "k"}, ".secret_key is missing: give it the key that belongs to access_key"),
        ({**S3, "acces_key": "AKIA"}, ".acces_key (it has •••) is no key here: there are type, save_"),
        ({**S3, "access_key": 7, "secret_key": "k"}, ".access_key is •••: it must be a text that is not empty"),
        (
            {**S3, "session_token": "t"},
            ".access_key is missing: give it the keys that belong to session_token, with secret_key",
        ),
        (
            {"type": "azure", "container": "c"},
            ".account_url is missing: give it a URL that begins with https://, or instead of it a connection_string",
        ),
        (
            {"type": "azure", "container": "c", "connection_string": "a", "account_url": "https://a"},
            ".account_url is 'https://a': it must be left out, as there is connection_string",
        ),
        (
            {"type": "azure", "container": "c", "connection_string": "a", "credential": "k"},
            ".credential is •••: it must be left out, as there is no account_url",
        ),
        ("s3://b", " is 's3://b': it must be an object with keys out of "),
    ],
)
def test_checkpoint_storage(storage: Any, line: str) -> None:
    (found,) = lines({"checkpoint_storage": storage})
    assert found.startswith("checkpoint_storage" + line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "the experiment file is empty: it must be an object with sections"),
        ("- a", "the experiment file is no object: it must be an object with sections"),
        ("just words", "the experiment file is no object: it must be an object with sections"),
        ("a: [1,\nb", "the experiment file is not readable (line 2, column 2: "),
        ("a: 1\nb: {x: 1, x: 2}\n", "x (line 2) is given a second time: it must be given once"),
        ('{"a": 1, "b": {"a": 1, "a": 2}}', "a is given a second time: it must be given once"),
        ("a: !!python/name:os.system", "the experiment file is not readable (line 1, column 4: there is no type "),
        ("[" * 1000, "the experiment file is nested without end"),
        ("x: " + "y" * (1 << 20), "the experiment file is 1,048,579 characters long"),
        ("a: &a [*a]", "a is too large, or repeats itself without end: it must be of at most 100,000 values"),
        (LAUGHS, "e is too large, or repeats itself without end: it must be of at most 100,000 values, and 50"),
    ],
)
def test_what_cannot_be_read(text: str, line: str) -> None:
    with pytest.raises(ConfigErrors) as e:
        parse_experiment(text)
    assert str(e.value).startswith(line)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (float("nan"), "data.x is nan: it must be a finite number"),
        (float("-inf"), "data.x is -inf: it must be a finite number"),
        (2**64, "data.x is 18446744073709551616: it must be an integer of 64 bits"),
        ("a\0b", "data.x is 'a\\x00b': it must be a text that Unicode can hold, without NUL"),
        ("\ud800", "data.x is '\\ud800': it must be a text that Unicode can hold, without NUL"),
        ({1, 2}, "data.x is set: it must be a text, a number, true, false, null, a list or an object"),
        ({None: 1}, "data.x is an object with the key null: it must be one whose keys are texts"),
        ({1: 1, "1": 2}, "data.x.1 is given a second time: it must be given once"),
    ],
)
def test_what_json_cannot_hold(value: Any, line: str) -> None:
    assert lines({"data": {"x": value}}) == [line]


def test_long_values_are_shortened_and_everything_stays_on_one_line() -> None:
    (line,) = lines({"data": "first\nsecond" * 1000})
    assert line.startswith("data is 'first\\nsecondfirst")
    assert len(line) < 130


def test_a_key_that_ends_a_line_or_steers_a_terminal_is_spelled_out() -> None:
    missing, unknown = lines({"a\nb\x1b[2J": 1, "hyperparameters": {"\u2028": {"type": "int", "minval": 1}}})
    assert unknown.startswith(r"a\nb\x1b[2J (it has 1) is no key here")
    assert missing.startswith(r"hyperparameters.\u2028.maxval is missing")


def test_mistakes_are_found_in_a_text_as_in_what_it_means() -> None:
    mistaken = {**GOOD, **searcher(max_trials=0), "labels": [1]}
    with pytest.raises(ConfigErrors) as e:
        parse_experiment(yaml.safe_dump(mistaken))
    assert e.value.errors == wrong(mistaken)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("grid", "grid takes no max_trials: it tries every point"),
        ("single", "single takes no max_trials: it is one trial"),
    ],
)
def test_a_key_that_another_searcher_knows(name: str, hint: str) -> None:
    (line,) = lines({"searcher": {"name": name, "metric": "loss", "max_trials": 6}})
    assert "is no key here: there are name, metric, " in line and line.endswith(f"; {hint}")


def test_the_searchers_that_know_a_key_are_named() -> None:
    (line,) = lines({"searcher": {"name": "random", "metric": "loss", "max_trials": 6, "num_rungs": 2}})
    assert line.endswith("; random takes no num_rungs; async_halving do")


def test_mistakes_below_a_searcher_of_a_wrong_name_are_told_too() -> None:
    first, *more = lines({"searcher": {"name": "adaptive_ash", "metric": "", "max_trials": 0, "max_length": 3}})
    assert first.endswith("did you mean adaptive_asha?")
    assert [line.split(" is ")[0] for line in more] == ["searcher.metric", "searcher.max_trials"]
    (only,) = lines({"searcher": {"name": "bayes", "metric": "loss", "max_trials": 0}})
    assert only.startswith("searcher.name is 'bayes'")
