"""Parsing of an experiment file: read, changed by overrides, completed, checked."""

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

MAX_CHARACTERS = 1 << 20
"""Characters of an experiment file: far more than people write by hand."""
MAX_VALUES = 100_000
"""Values of a configuration in all, those that a YAML alias repeats included."""
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
        text: YAML or JSON, or an object read from it.
        overrides: Changes such as ``searcher.max_trials=8``; the value is read as YAML.
        defaults: Values of the master for keys that the file leaves out, such as its ``checkpoint_storage``.
        default_seed: Seed if the file gives none. Defaults to one that follows from the content.
        managed: Whether a master will run it. Only then an ``entrypoint`` is required.

    Raises:
        ConfigError: If it has mistakes; ``errors`` has all of them, except conflicts between keys, which appear once
            each key is valid.
        MissingExtra: If pydantic or ruamel.yaml is not installed; the message is the command that installs it.
    """
    require("pydantic", extra="master", purpose=_PURPOSE)
    from pydantic import ValidationError

    from det_core.config._mistakes import to_problems, warnings
    from det_core.config._model import ExperimentFile

    given = _object(_read(text) if isinstance(text, str) else text)
    errors, overridden = _override(given, overrides)
    given = _complete(given, _copy(defaults or {}))
    if managed and given.get("entrypoint") is None:
        errors.append(ConfigProblem("entrypoint", "missing; give a command: a text for sh, or a list of texts"))
    try:
        file = ExperimentFile.model_validate(given)
    except ValidationError as e:
        raise ConfigError(errors + to_problems(e, hidden=overridden)) from None
    if errors:
        raise ConfigError(errors)
    data = file.model_dump(by_alias=True)
    digest = _digest([given, default_seed])
    if data["name"] is None:
        data["name"] = generate_name(digest)
    if data["reproducibility"]["experiment_seed"] is None:
        if default_seed is None:
            default_seed = digest % 2**31
        data["reproducibility"]["experiment_seed"] = default_seed
    return Experiment(data, tuple(warnings(file)))


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return changes such as ``searcher.max_trials=8`` as one object of nested sections.

    Raises:
        ConfigError: If one of them is invalid.
        MissingExtra: If ruamel.yaml is not installed; the message is the command that installs it.
    """
    changes: dict[str, Any] = {}
    errors, _ = _override(changes, overrides)
    if errors:
        raise ConfigError(errors)
    return changes


def read_changes(text: str) -> dict[str, Any]:
    """Return a part of an experiment file, to be merged into a whole one, unchecked; an empty text gives no changes.

    Raises:
        ConfigError: If it is not an object in YAML or JSON.
        MissingExtra: If ruamel.yaml is not installed; the message is the command that installs it.
    """
    changes = _read(text)
    if changes is None:
        return {}
    return _object(changes)


def _object(given: Any) -> dict[str, Any]:
    if given is None:
        raise ConfigError([ConfigProblem("", "empty")])
    if not isinstance(given, Mapping):
        raise ConfigError([ConfigProblem("", "should be an object with sections")])
    copy: dict[str, Any] = _copy(given)
    return copy


def _read(text: str) -> Any:
    """Return the value of a document in JSON or YAML 1.2; an empty one is None.

    Raises:
        ConfigError: If it is neither, or has a key twice.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError([ConfigProblem("", f"{len(text):,} characters long, and {MAX_CHARACTERS:,} are the limit")])
    if text.lstrip().startswith("{"):
        # YAML would read the escape of an emoji in JSON as two halves of a character.
        try:
            return json.loads(text, object_pairs_hook=_each_key_once)
        except ConfigError:
            raise
        except (ValueError, RecursionError):
            pass  # a flow mapping of YAML begins with a brace, too
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
        """Constructor without types that JSON lacks: dates, and ``=`` of YAML 1.1, are texts."""

    for tag in ("timestamp", "value"):
        Constructor.add_constructor(f"tag:yaml.org,2002:{tag}", lambda _, node: node.value)
    # Pure: libyaml reads YAML 1.1 alone, where 1e-4 is a text, no is false, and 012 is ten.
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = Constructor
    try:
        return yaml.load(text)
    except YAMLError as e:
        raise ConfigError([ConfigProblem("", f"not readable as YAML or JSON ({_yaml_problem(e)})")]) from None
    except RecursionError:
        raise ConfigError([ConfigProblem("", "nested without end")]) from None
    except ValueError:  # of int() or float()
        raise ConfigError([ConfigProblem("", "not readable as YAML or JSON (an invalid number)")]) from None


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "a character that YAML does not know"
    if "'\\t'" in problem:
        problem = "a tab; indent by spaces"
    # A quotation, other than of a single character or a <token>, is from the file: it may be a secret.
    problem = re.sub(r"""('.'|'<[^']*>')|['"].*""", lambda match: match[1] or "…", problem)
    if mark is None:
        return problem
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _copy(value: Any) -> Any:
    """Return a copy of a value of JSON, in which no object appears twice.

    Raises:
        ConfigError: If JSON or a database cannot hold a value, or there are too many. The message has no value, which
            may be a secret.
    """
    number = itertools.count(1)

    def check(value: Any, path: Path) -> Any:
        # An alias of YAML's repeats what it names: a file of a few lines may mean millions of values.
        if next(number) > MAX_VALUES or len(path) > MAX_DEPTH:
            limits = f"{MAX_VALUES:,} values and {MAX_DEPTH} levels"
            raise _error_at(path[:1], f"too large, or repeats itself without end; {limits} are the limit")
        if isinstance(value, Mapping | list | tuple):
            return value
        if problem := _problem(value):
            raise _error_at(path, problem)
        return value

    return copy_json(value, check, key=_key, to_dict=_each_key_once)


def _key(key: Any, path: Path) -> str:
    if not isinstance(key, str | int | float) or _problem(key):
        raise _error_at(path, "has a key that is not a text")
    if isinstance(key, str):
        return key
    return json.dumps(key)


def _problem(value: Any) -> str | None:
    """Return the reason for which JSON or a database cannot hold a single value, or None."""
    if value is None:
        return None
    if isinstance(value, str):
        # PostgreSQL's JSON refuses NUL, and UTF-8 has no lone surrogates.
        if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
            return "should be a text that Unicode can hold, without NUL"
    elif isinstance(value, float):
        if not math.isfinite(value):
            return "should be a finite number"
    elif isinstance(value, int):
        if value not in _INTEGERS:
            return "should be an integer of 64 bits"
    else:
        return f"{type(value).__name__} is not a type of JSON"
    return None


def _error_at(path: Path, message: str) -> ConfigError:
    return ConfigError([ConfigProblem.at(path, message)])


def _override(data: dict[str, Any], overrides: Sequence[str]) -> tuple[list[ConfigProblem], list[Path]]:
    """Set values in ``data``, each given as ``a.b=value``.

    Returns:
        Problems of overrides that cannot be set; and the paths that were set, whose values may be secrets.
    """
    errors: list[ConfigProblem] = []
    overridden: list[Path] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        try:
            if not equals or not all(keys):
                raise ValueError("should be a change such as searcher.max_trials=8")
            overridden.append(_set(data, keys, _copy(_read(value))))
        except ConfigError:
            errors.append(ConfigProblem(f"override {path!r}", "should have a value as YAML has it"))
        except ValueError as e:
            errors.append(ConfigProblem(f"override {path!r}", str(e)))
    return errors, overridden


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
            raise ValueError(f"should be about {'.'.join(keys[:n])} itself, which is not an object")
        if n == len(keys) - 1:
            data[path[-1]] = value
        elif isinstance(data, dict) and data.get(key) is None:
            data[key] = {}
        data = data[path[-1]]
    return path


def _complete(given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's values, with a cluster's defaults for keys that are missing or null; objects key by key."""
    completed = dict(given)
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(given.get(key), dict):
            # Keys of one storage make no sense in another type of storage; those of retention do.
            if key == "checkpoint_storage" and given[key].get("type") not in (None, default.get("type")):
                default = {name: value for name, value in default.items() if name.startswith("save_")}
            completed[key] = _complete(given[key], default)
        elif given.get(key) is None:
            completed[key] = default
    return completed


def _digest(value: Any) -> int:
    # Sorted, so that a file has one name and seed whatever the order of its keys.
    text = json.dumps(value, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
