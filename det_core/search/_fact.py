"""What events and actions have in common: they are facts that can be kept as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

JSON = dict[str, Any]


class Fact:
    """Something that happened or was decided: equal to another one if it says the same."""

    __slots__ = ()
    kind: ClassVar[str]
    """What it is called in the record."""

    def to_dict(self) -> JSON:
        """The fact for JSON; numbers that are not finite as the strings NaN, Infinity, -Infinity."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind, **{name: _plain(value) for name, value in values.items()}}


def named(kinds: Mapping[str, type[Fact]], data: Mapping[str, Any], what: str) -> tuple[type[Fact], JSON]:
    """The class that ``data`` names, and its fields.

    Raises:
        ValueError: no such kind, or the fields are not those of the kind.
    """
    kind = data.get("kind")
    cls = kinds.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"{what} has kind {kind!r}; there are {', '.join(sorted(kinds))}")
    wanted = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    given = {name: value for name, value in data.items() if name != "kind"}
    if set(given) != wanted:
        raise ValueError(f"{what} {kind!r} has the fields {sorted(given)}, and must have {sorted(wanted)}")
    return cls, given


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, tuple):
        return [item.to_dict() if isinstance(item, Fact) else item for item in value]
    return value
