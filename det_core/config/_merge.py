"""What is laid over an experiment file, and what it is laid over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from det_core.config._plain import plain
from det_core.config._text import read_text
from det_core.errors import ConfigError, ConfigErrors


def override(data: dict[str, Any], overrides: Sequence[str]) -> list[ConfigError]:
    """Set values in ``data``, each given as ``a.b=value``, the value as in YAML; returns those that cannot be set."""
    errors: list[ConfigError] = []
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        where = f"override {path!r}"  # without the value, which may be a secret
        if not equals or not all(keys):
            errors.append(ConfigError(where, "no change of a value", "such as searcher.max_trials=8"))
            continue
        try:
            made, wrong = plain(read_text(value), tuple(keys))
        except ConfigErrors as e:
            errors.append(ConfigError(where, e.errors[0].found, "a value as YAML has it"))
            continue
        errors += wrong or _set(data, keys, made, where)
    return errors


def _set(data: Any, keys: list[str], value: Any, where: str) -> list[ConfigError]:
    for n, key in enumerate(keys):
        last = n == len(keys) - 1
        if isinstance(data, list):
            if not (key.isascii() and key.isdigit() and int(key) < len(data)):
                allowed = f"about one of the items 0 to {len(data) - 1}"
                return [ConfigError(where, f"about item {key} of a list of {len(data)}", allowed)]
            key = int(key)  # type: ignore[assignment]
        elif not isinstance(data, dict):
            outer = ".".join(keys[:n])
            return [ConfigError(where, f"about {key} in {outer}", f"about {outer} itself, which is no object")]
        if last:
            data[key] = value
        else:
            if isinstance(data, dict) and data.get(key) is None:
                data[key] = {}
            data = data[key]
    return []


def complete(given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a user gave, with a cluster's defaults where there is nothing.

    Objects are completed key by key; but where checkpoints go is one thing: a default of another type adds nothing but
    what stays of them.
    """
    made = dict(given)
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(given.get(key), dict):
            if key == "checkpoint_storage" and given[key].get("type") not in (None, default.get("type")):
                default = {name: value for name, value in default.items() if name.startswith("save_")}
            made[key] = complete(given[key], default)
        elif given.get(key) is None:
            made[key] = default
    return made
