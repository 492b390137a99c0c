"""What is said of an experiment file: its mistakes, one line each, and what works otherwise than it reads."""

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
"""No value below these is ever repeated: keys, passwords, and variables that hold such."""
_RENAMED_VALUES = {
    "float": "double",
    "choice": "categorical",
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "sync_halving": "adaptive_asha",
}
_LARGER_IS_BETTER = re.compile(r"acc|auc|auroc|f1|recall|precision|score|reward|bleu|rouge|iou|dice|psnr|ssim|r2|top\d")
"""Names of metrics, or pieces of such, of which the largest is mostly meant."""
_REWORDED = {
    "missing": "missing",
    "model_type": "should be an object",
    "dict_type": "should be an object",
    "list_type": "should be a list",
}


def to_problems(error: ValidationError, hidden: Sequence[Path]) -> list[ConfigProblem]:
    """What pydantic found, in the order of the file's sections.

    Args:
        error: of `ExperimentFile`.
        hidden: paths below which no value is shown, beside those of `SECRET`.
    """
    return [_to_problem(dict(one), (*SECRET, *hidden)) for one in error.errors(include_url=False)]


def _to_problem(error: dict[str, Any], hidden: Sequence[Path]) -> ConfigProblem:
    path, found, ctx = error["loc"], error["input"], error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        return ConfigProblem.at(path, f"no such key; {_suggest(path)}")  # its value may be a misspelt secret
    if isinstance(cause := ctx.get("error"), UnknownKind):
        key, names = cause.args
        path, found = (*path, key), found.get(key, ())
        message = _one_of(names, found)
    elif error["type"] == "literal_error":
        message = _one_of(re.findall(r"'(\w+)'", ctx["expected"]), found)
    else:
        message = _REWORDED.get(error["type"]) or re.sub("^(Value error, |Input |String |List )", "", error["msg"])
    secret = any(path[: len(above)] == above for above in hidden)
    return ConfigProblem.at(path, message, None if secret else _short(found))


def _short(value: Any) -> str | None:
    """A single value on one line; None for a list or an object, in which there may be anything."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, str | int | float):
        return None
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} … {text[-15:]}"


def _one_of(names: Sequence[str], found: Any) -> str:
    former = _RENAMED_VALUES.get(found) if isinstance(found, str) else None
    near = [former] if former in names else difflib.get_close_matches(str(found).lower(), names, 1)
    return f"should be one of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")


def _keys(*sections: type[Section]) -> list[str]:
    """The keys of sections as they are written in the file, each once."""
    fields = (item for section in sections for item in section.model_fields.items())
    return list(dict.fromkeys(info.alias or name for name, info in fields))


_KINDS = {"searcher": SEARCHERS, "hyperparameters": HYPERPARAMETERS, "checkpoint_storage": STORAGES}
_KEYS = {
    "": _keys(ExperimentFile),
    **{name: keys for name, info in ExperimentFile.model_fields.items() if (keys := _keys(*sections_of(info)))},
    "environment.environment_variables": _keys(PerDevice),
    "hyperparameters": _keys(*HYPERPARAMETERS.sections.values()),
}
"""The keys of each section; of one of several kinds, those of all."""


def _suggest(path: Path) -> str:
    """What to say of an unknown key: which kinds take it, where else it belongs, the nearest one, or all there are."""
    above, key = ".".join(map(str, path[:-1])), str(path[-1])
    section = above if above in _KEYS else str(path[0])
    kinds = _KINDS[section].sections if section in _KINDS else {}
    if takers := [name for name, kind in kinds.items() if key in _keys(kind)]:
        return f"only {', '.join(takers)} {'takes' if len(takers) == 1 else 'take'} it"
    if key in _KEYS[""]:
        return f"{key} belongs at the top of the file"
    if homes := [name for name, keys in _KEYS.items() if key in keys and name != "hyperparameters"]:
        return f"did you mean {homes[0]}.{key}?"
    near = difflib.get_close_matches(key.lower(), _KEYS[section], 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(_KEYS[section])}"


def warnings(file: ExperimentFile) -> Iterator[str]:
    """What to know of an experiment file that has no mistakes, one sentence each."""
    if names := list(_unused(file, "")):
        yield f"these have no effect here, and are kept as they are: {', '.join(names)}"
    if launchers := foreign_launchers(file.entrypoint or ""):
        said = ", ".join(f"determined.launch.{name} by det_core.launch.{name}" for name in launchers)
        yield f"in entrypoint, a launcher is replaced by ours of the same name: {said}"
    searcher = file.searcher
    unsaid = not isinstance(searcher, Single) and "smaller_is_better" not in searcher.model_fields_set
    if unsaid and _LARGER_IS_BETTER.search(searcher.metric.lower()):
        yield f"the smallest {searcher.metric!r} is taken for the best; if the largest is: smaller_is_better: false"
    for path, section in flatten_hyperparameters(file.hyperparameters, "hyperparameters"):
        # Exponents from 0 to 1 give nearly one value: a person has most likely written the values themselves.
        if isinstance(section, Log) and section.minval > 0 and section.maxval <= 1:
            low, high = (f"{section.base**exponent:g}" for exponent in (section.minval, section.maxval))
            yield f"{path}: minval and maxval are exponents of base {section.base:g}: its values are {low} to {high}"
    by_metric = isinstance(searcher, Halving) and searcher.time_metric is not None
    ignored = [f"searcher.{key}" for key in ("max_length", "stop_once") if by_metric and getattr(searcher, key)]
    if ignored:
        verb = "has" if len(ignored) == 1 else "have"
        yield f"{' and '.join(ignored)} {verb} no effect, as there is searcher.time_metric"


def _unused(section: Section, path: str) -> Iterator[str]:
    """Keys without effect here that ask for something: what is off, empty or the default does not."""
    for name, info in type(section).model_fields.items():
        value, default = getattr(section, name), info.get_default(call_default_factory=True)
        if isinstance(value, Section):
            yield from _unused(value, f"{path}{name}.")
        elif info.json_schema_extra == IGNORED and value != default and (value or type(value) in (int, float)):
            yield path + name
