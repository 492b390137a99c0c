"""Values as JSON has them: what an experiment's configuration is made of, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from det_core.errors import ConfigError, ConfigErrors

MAX_VALUES = 100_000
"""How many values a configuration may have in all, with those that a YAML alias repeats."""
MAX_DEPTH = 50
_INTEGERS = range(-(2**63), 2**64)

Path = tuple["str | int", ...]
"""Keys and indices from the root to a value."""


def path_text(path: Sequence[str | int]) -> str:
    """A path for people: ``searcher.bracket_rungs[0]``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def short(value: Any) -> str:
    """A value for people, on one line, and not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} … {text[-15:]}"


def plain(value: Any, path: Path = ()) -> tuple[Any, list[ConfigError]]:
    """A copy of ``value``, and what JSON cannot hold of it, or should not.

    Raises:
        ConfigErrors: it is too much, or has no end, so that there is no copy.
    """
    copier = _Copier()
    return copier.copy(value, path), copier.errors


class _Copier:
    def __init__(self) -> None:
        self.errors: list[ConfigError] = []
        self._left = MAX_VALUES

    def copy(self, value: Any, path: Path) -> Any:
        self._left -= 1
        if self._left < 0 or len(path) > MAX_DEPTH:
            bounds = f"of at most {MAX_VALUES:,} values, and {MAX_DEPTH} levels"
            raise ConfigErrors([ConfigError(path_text(path[:1]), "too large, or repeats itself without end", bounds)])
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list | tuple):
            return [self.copy(item, (*path, n)) for n, item in enumerate(value)]
        if (wrong := _unfit(value)) is not None:
            self._wrong(path, short(value) if isinstance(value, float | int | str) else type(value).__name__, wrong)
            return None
        return value

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str | int | float) or _unfit(key) is not None:
                self._wrong(path, f"an object with the key {short(key)}", "one whose keys are texts")
                continue
            text = key if isinstance(key, str) else str(key).lower()
            if text in made:
                self._wrong((*path, text), "given a second time", "given once")
            made[text] = self.copy(item, (*path, text))
        return made

    def _wrong(self, path: Path, found: str, allowed: str) -> None:
        self.errors.append(ConfigError(path_text(path), found, allowed))


def _unfit(value: Any) -> str | None:
    """What a single value must be, if it is not."""
    if isinstance(value, str):
        fits = "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
        return None if fits else "a text that Unicode can hold, without NUL"
    if isinstance(value, float):
        return None if math.isfinite(value) else "a finite number"
    if isinstance(value, int):
        return None if value in _INTEGERS else "an integer of 64 bits"
    return None if value is None else "a text, a number, true, false, null, a list or an object"
