"""From the text of an experiment file to an `Experiment`: read, changed by overrides, completed, checked."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from det_core._json import Path, copy_json
from det_core._optional import require
from det_core.config._experiment import Experiment
from det_core.config._names import generate_name
from det_core.errors import ConfigError, ConfigProblem

MAX_TEXT = 1 << 20
"""Characters of an experiment file: far more than anybody writes by hand."""
MAX_VALUES = 100_000
"""How many values a configuration may have in all, with those that a YAML alias repeats."""
MAX_DEPTH = 50
_INTEGERS = range(-(2**63), 2**64)
_PURPOSE = "reading an experiment file"


def parse_experiment(
    text: str | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    default_seed: int | None = None,
    managed: bool = True,
) -> Experiment:
    """Read an experiment file, check all of it, and fill in what it leaves out.

    Args:
        text: YAML or JSON; or what such a text means.
        overrides: changes as ``searcher.max_trials=8``; the value is read as YAML.
        defaults: what the master adds where the file says nothing, such as its ``checkpoint_storage``.
        default_seed: the seed if the file gives none: the time, say. None: one that follows from the content.
        managed: whether the master is to run it. Only then there must be an ``entrypoint``.

    Raises:
        ConfigError: it has mistakes; ``errors`` are all of them, but that keys which do not fit together are told
            once each of them is right.
        MissingExtra: pydantic or ruamel.yaml is not installed; the message is the command that installs it.
    """
    require("pydantic", extra="master", purpose=_PURPOSE)
    from pydantic import ValidationError

    from det_core.config._mistakes import to_problems, warnings
    from det_core.config._model import ExperimentFile

    given = _object(_read(text) if isinstance(text, str) else text)
    errors, changed = _override(given, overrides)
    given = _complete(given, _copy(defaults or {}))
    if managed and given.get("entrypoint") is None:
        errors.append(ConfigProblem("entrypoint", "missing; give a command: a text for sh, or a list of texts"))
    try:
        file = ExperimentFile.model_validate(given)
    except ValidationError as e:
        raise ConfigError(errors + to_problems(e, hidden=changed)) from None
    if errors:
        raise ConfigError(errors)
    data = file.model_dump(by_alias=True)
    digest = _digest([given, default_seed])
    if data["name"] is None:
        data["name"] = generate_name(digest)
    if data["reproducibility"]["experiment_seed"] is None:
        data["reproducibility"]["experiment_seed"] = digest % 2**31 if default_seed is None else default_seed
    return Experiment(data, tuple(warnings(file)))


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Changes as ``searcher.max_trials=8`` as one object of nested sections.

    Raises:
        ConfigError: some of them cannot be read.
        MissingExtra: ruamel.yaml is not installed; the message is the command that installs it.
    """
    changes: dict[str, Any] = {}
    errors, _ = _override(changes, overrides)
    if errors:
        raise ConfigError(errors)
    return changes


def read_changes(text: str) -> dict[str, Any]:
    """A part of an experiment file, that is to be laid over a whole one: read, but not checked. Empty text: nothing.

    Raises:
        ConfigError: it is no object in YAML or JSON.
        MissingExtra: ruamel.yaml is not installed; the message is the command that installs it.
    """
    changes = _read(text)
    return {} if changes is None else _object(changes)


def _object(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError([ConfigProblem("", "empty" if given is None else "should be an object with sections")])
    copy: dict[str, Any] = _copy(given)
    return copy


def _read(text: str) -> Any:
    """The value of a document in JSON or YAML 1.2; an empty one is None.

    Raises:
        ConfigError: it is neither, or gives a key twice.
    """
    if len(text) > MAX_TEXT:
        raise ConfigError([ConfigProblem("", f"{len(text):,} characters long, and {MAX_TEXT:,} are the limit")])
    if text.lstrip().startswith("{"):
        try:  # YAML reads the escape of an emoji in JSON as two halves of a character
            return json.loads(text, object_pairs_hook=_each_key_once)
        except ConfigError:
            raise
        except (ValueError, RecursionError):
            pass  # a flow mapping of YAML's begins so too
    return _read_yaml(text)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ConfigError([ConfigProblem(key, "given a second time")])
    return dict(pairs)


def _read_yaml(text: str) -> Any:
    require("ruamel.yaml", extra="master", purpose=_PURPOSE)
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import SafeConstructor
    from ruamel.yaml.error import YAMLError

    class Constructor(SafeConstructor):
        """Without the types that JSON has not: dates, and ``=`` of YAML 1.1, are texts."""

    for tag in ("timestamp", "value"):
        Constructor.add_constructor(f"tag:yaml.org,2002:{tag}", lambda _, node: node.value)
    # Pure: libyaml knows YAML 1.1 alone, where 1e-4 is a text, no is false, and 012 is ten.
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = Constructor
    try:
        return yaml.load(text)
    except YAMLError as e:
        raise ConfigError([ConfigProblem("", f"not readable as YAML or JSON ({_yaml_problem(e)})")]) from None
    except RecursionError:
        raise ConfigError([ConfigProblem("", "nested without end")]) from None
    except ValueError:  # what int() or float() does not take
        raise ConfigError([ConfigProblem("", "not readable as YAML or JSON (a number that is none)")]) from None


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "a character that YAML does not know"
    if "'\\t'" in problem:
        problem = "a tab; indent by spaces"
    # What is quoted, but for single characters and <tokens>, is a piece of the file: it may be a secret.
    problem = re.sub(r"""('.'|'<[^']*>')|['"].*""", lambda found: found[1] or "…", problem)
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _copy(value: Any) -> Any:
    """A copy of what JSON can hold, in which nothing is there twice as one object.

    Raises:
        ConfigError: there is something that JSON, or a database, cannot hold, or too much. No value is told: it may
            be a secret.
    """
    number = itertools.count(1)

    def check(value: Any, path: Path) -> Any:
        # An alias of YAML's repeats what it names: a file of a few lines may mean millions of values.
        if next(number) > MAX_VALUES or len(path) > MAX_DEPTH:
            limits = f"{MAX_VALUES:,} values and {MAX_DEPTH} levels"
            raise _refused(path[:1], f"too large, or repeats itself without end; {limits} are the limit")
        if isinstance(value, Mapping | list | tuple):
            return value
        if problem := _problem(value):
            raise _refused(path, problem)
        return value

    return copy_json(value, check, key=_key, to_dict=_each_key_once)


def _key(key: Any, path: Path) -> str:
    if not isinstance(key, str | int | float) or _problem(key):
        raise _refused(path, "has a key that is no text")
    return key if isinstance(key, str) else json.dumps(key)


def _problem(value: Any) -> str | None:
    """Why JSON, or a database, cannot hold a single value."""
    if isinstance(value, str):
        fits = "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)
        return None if fits else "should be a text that Unicode can hold, without NUL"
    if isinstance(value, float):
        return None if math.isfinite(value) else "should be a finite number"
    if isinstance(value, int):
        return None if value in _INTEGERS else "should be an integer of 64 bits"
    return None if value is None else f"{type(value).__name__} is no type of JSON's"


def _refused(path: Path, message: str) -> ConfigError:
    return ConfigError([ConfigProblem.at(path, message)])


def _override(data: dict[str, Any], overrides: Sequence[str]) -> tuple[list[ConfigProblem], list[Path]]:
    """Set values in ``data``, each given as ``a.b=value``.

    Returns:
        Those that cannot be set; and the paths that were set. The value of an override may be a secret.
    """
    errors: list[ConfigProblem] = []
    changed: list[Path] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        try:
            if not equals or not all(keys):
                raise ValueError("should be a change as searcher.max_trials=8")
            changed.append(_set(data, keys, _copy(_read(value))))
        except ConfigError:
            errors.append(ConfigProblem(f"override {path!r}", "should have a value as YAML has it"))
        except ValueError as e:
            errors.append(ConfigProblem(f"override {path!r}", str(e)))
    return errors, changed


def _set(data: Any, keys: list[str], value: Any) -> Path:
    path: Path = ()
    for n, key in enumerate(keys):
        if isinstance(data, list):
            if not (key.isascii() and key.isdigit() and int(key) < len(data)):
                raise ValueError(f"should be about one of the items 0 to {len(data) - 1} of {'.'.join(keys[:n])}")
            path = (*path, int(key))
        elif isinstance(data, dict):
            path = (*path, key)
        else:
            raise ValueError(f"should be about {'.'.join(keys[:n])} itself, which is no object")
        if n == len(keys) - 1:
            data[path[-1]] = value
        elif isinstance(data, dict) and data.get(key) is None:
            data[key] = {}
        data = data[path[-1]]
    return path


def _complete(given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a user gave, with a cluster's defaults where there is nothing.

    Objects are completed key by key; but where checkpoints go is one thing: a default of another type adds nothing but
    what stays of them.
    """
    made = dict(given)
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(given.get(key), dict):
            if key == "checkpoint_storage" and given[key].get("type") not in (None, default.get("type")):
                default = {name: value for name, value in default.items() if name.startswith("save_")}
            made[key] = _complete(given[key], default)
        elif given.get(key) is None:
            made[key] = default
    return made


def _digest(value: Any) -> int:
    text = json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
