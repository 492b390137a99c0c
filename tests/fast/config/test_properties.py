"""Properties of the parser, for random experiment files."""

from __future__ import annotations

import io
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from det_core.config import ConfigError, parse_experiment
from det_core.search import Started, create_search

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
words = st.text("abcxyz_-. 0", min_size=1, max_size=6).filter(str.strip)
numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
counts = st.none() | st.integers(1, 50)


def ends(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    pairs = st.tuples(values, values).filter(lambda pair: pair[0] < pair[1])
    return pairs.map(lambda pair: {"minval": pair[0], "maxval": pair[1]})


def of(kind: str, *parts: st.SearchStrategy[dict[str, Any]], **values: st.SearchStrategy[Any]) -> Any:
    """Return objects of a type without some of their optional keys."""
    return st.tuples(st.fixed_dictionaries({}, optional=values), *parts).map(
        lambda made: {"type": kind, **{k: v for part in made for k, v in part.items()}}
    )


floats = st.floats(-50, 50)
hyperparameter = st.deferred(
    lambda: (
        st.none()
        | numbers
        | texts
        | st.lists(plain, max_size=3)
        | st.fixed_dictionaries({"type": st.just("const"), "val": plain})
        | of("int", ends(st.integers(-1000, 1000)), count=counts)
        | of("double", ends(floats), count=counts)
        | of("log", ends(floats), st.fixed_dictionaries({"base": st.floats(0.5, 16)}), count=counts)
        | of("categorical", st.fixed_dictionaries({"vals": st.lists(plain, min_size=1, max_size=3)}))
        | st.dictionaries(words.filter(lambda w: w != "type"), hyperparameter, max_size=3)
    )
)
units = st.sampled_from(["batches", "records", "epochs"])
lengths = st.integers(1, 10**6) | st.dictionaries(units, st.integers(1, 10**6), min_size=1, max_size=1)
common = {"metric": words}
more = {"smaller_is_better": st.booleans(), "source_trial_id": st.none() | st.integers(0, 99)}
trials = {"max_trials": st.integers(1, 10**6)}
halving = {"max_concurrent_trials": st.integers(0, 99), "divisor": st.integers(2, 9) | st.floats(1.1, 9)}
searchers = st.one_of(
    st.fixed_dictionaries({"name": st.just("single"), **common}, optional={"max_length": lengths, **more}),
    st.fixed_dictionaries({"name": st.just("random"), **common, **trials}, optional={"max_length": lengths, **more}),
    st.fixed_dictionaries(
        {"name": st.just("async_halving"), **common, **trials, "max_length": lengths, "num_rungs": st.integers(1, 9)},
        optional={"stop_once": st.booleans(), **halving, **more},
    ),
    st.fixed_dictionaries(
        {"name": st.just("adaptive_asha"), **common, **trials, "time_metric": words, "max_time": st.integers(1, 999)},
        optional={"bracket_rungs": st.lists(st.integers(1, 5), max_size=3), **halving, **more},
    ),
    st.fixed_dictionaries({"name": st.just("custom"), "class": st.just("a.b:C"), **common}, optional={"mine": plain}),
)
storages = st.one_of(
    st.fixed_dictionaries({}, optional={"save_trial_best": st.integers(0, 9)}),
    st.fixed_dictionaries({"type": st.just("directory"), "container_path": words.map(lambda w: f"/{w}")}),
    st.fixed_dictionaries({"type": st.just("s3"), "bucket": st.just("b")}, optional={"prefix": st.just("/a/./b/")}),
)
files = st.fixed_dictionaries(
    {"entrypoint": words | st.lists(words, min_size=1, max_size=3), "searcher": searchers},
    optional={
        "name": words,
        "hyperparameters": st.dictionaries(
            words.filter(lambda w: w != "global_batch_size"), hyperparameter, max_size=4
        ),
        "checkpoint_storage": storages,
        "data": st.dictionaries(texts, plain, max_size=3),
        "labels": st.lists(words, max_size=3),
        "description": st.none() | texts,
        "max_restarts": st.integers(0, 9),
        "preemption_timeout": st.none() | st.integers(0, 9) | st.floats(0, 1e6),
        "resources": st.fixed_dictionaries({}, optional={"slots_per_trial": st.integers(0, 9), "weight": st.just(2)}),
        "environment": st.fixed_dictionaries(
            {"environment_variables": st.lists(words.map(lambda w: f"A={w}"), max_size=3)}, optional={"image": words}
        ),
        "min_validation_period": st.dictionaries(units, st.integers(0, 99), min_size=1, max_size=1),
        "reproducibility": st.fixed_dictionaries({"experiment_seed": st.integers(0, 2**32 - 1)}),
    },
)


@given(files)
def test_parse_of_any_file_gives_valid_file(file: dict[str, Any]) -> None:
    first = parse_experiment(file)
    assert json.loads(json.dumps(first.data)) == first.data
    assert parse_experiment(first.data) == first
    assert parse_experiment(json.dumps(file)) == first
    for section, value in file.items():
        if section in ("name", "data", "labels", "description", "max_restarts", "min_validation_period"):
            assert first.data[section] == value
    assert first.searcher.items() >= file["searcher"].items()


@given(files, st.integers(0, 2**31))
def test_parse_of_yaml_equals_parse_of_json(file: dict[str, Any], seed: int) -> None:
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(file, text)
    assert parse_experiment(text.getvalue(), default_seed=seed) == parse_experiment(json.dumps(file), default_seed=seed)


# The class of a custom search is a user's own, which this file does not have.
@given(files.filter(lambda file: file["searcher"]["name"] != "custom"), st.integers(0, 2**32 - 1))
def test_search_of_any_accepted_file_starts(file: dict[str, Any], seed: int) -> None:
    searcher = dict(file["searcher"])
    if "max_trials" in searcher:
        searcher["max_trials"] = min(searcher["max_trials"], 20)
    made = parse_experiment({**file, "searcher": searcher}, default_seed=seed)
    for action in create_search(made.searcher, made.hyperparameters, made.seed).handle(Started()):
        json.dumps(action.to_dict(), allow_nan=False)


KEYS = """
    searcher name metric hyperparameters type resources environment checkpoint_storage labels environment_variables
    entrypoint minval count a
"""
nearly = st.recursive(
    plain, lambda inner: st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=5), max_leaves=12
)


@given(nearly)
def test_parse_of_any_object_returns_or_raises_config_error(given_: Any) -> None:
    try:
        parse_experiment(json.dumps(given_))
    except ConfigError as e:
        assert e.errors
        assert all(str(error) and "\n" not in str(error) for error in e.errors)


@given(texts)
def test_parse_of_any_text_returns_or_raises_config_error(text: str) -> None:
    try:
        parse_experiment(text)
    except ConfigError as e:
        assert e.errors
