"""From what pydantic finds to lines that a person understands."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from det_core.config._model import ExperimentFile
from det_core.config._plain import path_text, short
from det_core.config._rules import NOT_ALLOWED, Rule, nearest
from det_core.config._searchers import of_another_searcher
from det_core.config._section import TAG, Kinds, Missing, Section, marked
from det_core.errors import ConfigError

_SHAPES = {"list_type": "a list", "dict_type": "an object"}


def mistakes(error: ValidationError) -> list[ConfigError]:
    """What is wrong, in the order of the file's sections, each mistake once."""
    found = [_mistake(e["type"], e["loc"], e["input"], e.get("ctx") or {}) for e in error.errors()]
    return list(dict.fromkeys(found))


def _mistake(kind: str, loc: Sequence[str | int], given: Any, ctx: dict[str, Any]) -> ConfigError:
    section, info = _place(loc)
    path = path_text([part for part in loc if not _is_tag(part)])
    text = None if given is Missing else "•••" if info is not None and marked(info, "secret") else short(given)
    if kind == NOT_ALLOWED:
        return ConfigError(path, text, ctx["allowed"], ctx.get("hint"))
    if kind == "missing":
        return ConfigError(path, None, allowed_of(info) if info is not None else "a value")
    if kind == "extra_forbidden":
        names = keys_of(section)
        if any(marked(known, "secret") for known in section.model_fields.values()):
            text = "•••"  # the key may be a misspelt one of those
        return ConfigError(path, text, ", ".join(names), _meant(str(loc[-1]), section), unknown=True)
    if kind in _SHAPES:
        return ConfigError(path, text, _SHAPES[kind])
    inner = sections_below(info)[0] if info is not None and sections_below(info) else section
    return ConfigError(path, text, f"an object with keys out of {', '.join(keys_of(inner))}")


def _is_tag(part: str | int) -> bool:
    return isinstance(part, str) and part.startswith(TAG)


def keys_of(section: type[BaseModel]) -> list[str]:
    """The keys of a section, as they are written in the file."""
    return [info.alias or name for name, info in section.model_fields.items()]


def allowed_of(info: FieldInfo) -> str:
    """What a key may be, in words."""
    for part in (*info.metadata, *_parts(info.annotation)):
        if isinstance(part, Rule):
            return part.allowed
    return "a value"


def _parts(annotation: Any) -> Iterable[Any]:
    """What an annotation is made of: its types, and what stands beside them in ``Annotated``."""
    yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        if not isinstance(part, str | type(None)) and part is not types.NoneType:
            yield from _parts(part)


def sections_below(info: FieldInfo) -> list[type[BaseModel]]:
    """The sections that a key's value may be."""
    parts = [*info.metadata, *_parts(info.annotation)]
    found = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return found + [cls for part in parts if isinstance(part, Kinds) for cls in part.kinds().values()]


def _place(loc: Sequence[str | int]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The section that holds the last part of a path, and what it says of that key."""
    section: type[BaseModel] = ExperimentFile
    info: FieldInfo | None = None
    for part in loc:
        if _is_tag(part):
            section, info = _tagged(str(part)), None
            continue
        if info is not None and sections_below(info):
            section = sections_below(info)[0]
        info = next((i for name, i in section.model_fields.items() if part in (name, i.alias)), None)
    return section, info


def _tagged(tag: str) -> type[BaseModel]:
    pending: list[type[BaseModel]] = [Section]
    while pending:
        cls = pending.pop()
        if cls.__name__ == tag.removeprefix(TAG):
            return cls
        pending += cls.__subclasses__()
    return Section  # a list or a table of names: nothing is known of the keys


def _meant(key: str, section: type[BaseModel]) -> str | None:
    if hint := of_another_searcher(key, section):
        return hint
    if key in keys_of(ExperimentFile) and section is not ExperimentFile:
        return f"{key} belongs at the top of the file"
    for name, info in ExperimentFile.model_fields.items():
        for below in sections_below(info)[:1]:
            if below is not section and key in keys_of(below):
                return f"did you mean {name}.{key}?"
    return nearest(key, keys_of(section))
