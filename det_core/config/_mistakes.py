"""Messages about an experiment file: a line for each mistake, and warnings of surprises."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from det_core.config._entrypoint import foreign_launchers
from det_core.config._fields import IGNORED, Section, UnknownKind, sections_of
from det_core.config._model import (
    HYPERPARAMETERS,
    SEARCHERS,
    STORAGES,
    ExperimentFile,
    Halving,
    Log,
    PerDevice,
    Single,
    flatten_hyperparameters,
)
from det_core.errors import ConfigProblem

Path = tuple["str | int", ...]
SECRET: tuple[Path, ...] = (("checkpoint_storage",), ("environment",))
"""Sections whose values never appear in messages: credentials, and variables that hold some."""
_RENAMED_VALUES = {
    "float": "double",
    "choice": "categorical",
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "sync_halving": "adaptive_asha",
}
_LARGER_IS_BETTER = re.compile(r"acc|auc|auroc|f1|recall|precision|score|reward|bleu|rouge|iou|dice|psnr|ssim|r2|top\d")
"""Parts of names of metrics that are mostly maximized."""
_REWORDED = {
    "missing": "missing",
    "model_type": "should be an object",
    "dict_type": "should be an object",
    "list_type": "should be a list",
}


def to_problems(error: ValidationError, hidden: Sequence[Path]) -> list[ConfigProblem]:
    """Return the mistakes that pydantic found, in the order of the file's sections.

    Args:
        error: Error of `ExperimentFile`.
        hidden: Paths below which values are hidden, besides those of `SECRET`.
    """
    return [_to_problem(dict(one), (*SECRET, *hidden)) for one in error.errors(include_url=False)]


def _to_problem(error: dict[str, Any], hidden: Sequence[Path]) -> ConfigProblem:
    path = error["loc"]
    value = error["input"]
    context = error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        # Without its value, which may be a secret under a misspelled key.
        return ConfigProblem.at(path, f"unknown key; {_suggest(path)}")
    if isinstance(cause := context.get("error"), UnknownKind):
        key, names = cause.args
        path = (*path, key)
        value = value.get(key, ())
        message = _one_of(names, value)
    elif error["type"] == "literal_error":
        message = _one_of(re.findall(r"'(\w+)'", context["expected"]), value)
    else:
        message = _REWORDED.get(error["type"]) or re.sub("^(Value error, |Input |String |List )", "", error["msg"])
    if any(path[: len(above)] == above for above in hidden):
        return ConfigProblem.at(path, message)
    return ConfigProblem.at(path, message, _shorten(value))


def _shorten(value: Any) -> str | None:
    """Return a single value on one line; None for a list or an object, which may contain a secret."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str | int | float):
        return None
    text = repr(value)
    if len(text) > 80:
        return f"{text[:60]} … {text[-15:]}"
    return text


def _one_of(names: Sequence[str], value: Any) -> str:
    message = f"should be one of {', '.join(names)}"
    near = difflib.get_close_matches(str(value).lower(), names, 1)
    if isinstance(value, str) and _RENAMED_VALUES.get(value) in names:
        near = [_RENAMED_VALUES[value]]
    if near:
        message += f"; did you mean {near[0]}?"
    return message


def _keys(*sections: type[Section]) -> list[str]:
    """Return the keys of sections as written in the file, each once."""
    fields = (item for section in sections for item in section.model_fields.items())
    return list(dict.fromkeys(info.alias or name for name, info in fields))


_KINDS = {"searcher": SEARCHERS, "hyperparameters": HYPERPARAMETERS, "checkpoint_storage": STORAGES}
_KEYS = {
    "": _keys(ExperimentFile),
    **{name: keys for name, info in ExperimentFile.model_fields.items() if (keys := _keys(*sections_of(info)))},
    "environment.environment_variables": _keys(PerDevice),
    "hyperparameters": _keys(*HYPERPARAMETERS.sections.values()),
}
"""Keys of each section; of a section of several kinds, those of all."""


def _suggest(path: Path) -> str:
    """Return advice on an unknown key: the kinds that take it, its place, the nearest key, or all keys."""
    section = ".".join(map(str, path[:-1]))
    key = str(path[-1])
    if section not in _KEYS:
        section = str(path[0])
    if section in _KINDS:
        kinds = _KINDS[section].sections
        takers = [name for name, kind in kinds.items() if key in _keys(kind)]
        if takers:
            return f"only {', '.join(takers)} {'takes' if len(takers) == 1 else 'take'} it"
    if key in _KEYS[""]:
        return f"{key} belongs at the top of the file"
    if homes := [name for name, keys in _KEYS.items() if key in keys and name != "hyperparameters"]:
        return f"did you mean {homes[0]}.{key}?"
    for near in difflib.get_close_matches(key.lower(), _KEYS[section], 1):
        return f"did you mean {near}?"
    return f"allowed: {', '.join(_KEYS[section])}"


def warnings(file: ExperimentFile) -> Iterator[str]:
    """Yield warnings about an experiment file without mistakes, one sentence each."""
    if names := list(_ignored(file, "")):
        yield f"these keys have no effect here: {', '.join(names)}"
    if launchers := foreign_launchers(file.entrypoint or ""):
        pairs = ", ".join(f"determined.launch.{name} by det_core.launch.{name}" for name in launchers)
        yield f"entrypoint: launcher replaced by det_core's of the same name: {pairs}"
    searcher = file.searcher
    is_default = not isinstance(searcher, Single) and "smaller_is_better" not in searcher.model_fields_set
    if is_default and _LARGER_IS_BETTER.search(searcher.metric.lower()):
        yield f"the search minimizes {searcher.metric!r}; to maximize it: smaller_is_better: false"
    for path, section in flatten_hyperparameters(file.hyperparameters, "hyperparameters"):
        # Exponents from 0 to 1 give nearly one value: most likely the values themselves were written.
        if isinstance(section, Log) and section.minval > 0 and section.maxval <= 1:
            span = f"{section.base**section.minval:g} to {section.base**section.maxval:g}"
            yield f"{path}: minval and maxval are exponents of base {section.base:g}: its values are {span}"
    if isinstance(searcher, Halving) and searcher.time_metric is not None:
        ignored = [f"searcher.{key}" for key in ("max_length", "stop_once") if getattr(searcher, key)]
        if ignored:
            yield f"no effect beside searcher.time_metric: {', '.join(ignored)}"


def _ignored(section: Section, path: str) -> Iterator[str]:
    """Yield the keys without effect here whose value is neither off nor empty nor the default."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _ignored(value, f"{path}{name}.")
        elif info.json_schema_extra == IGNORED and not (
            _is_empty(value) or value == info.get_default(call_default_factory=True)
        ):
            yield path + name


def _is_empty(value: Any) -> bool:
    # 0 asks for something: that logs are not retained, for one.
    return not value and type(value) not in (int, float)
