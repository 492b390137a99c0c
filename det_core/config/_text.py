"""From YAML or JSON text to values. Scalars are read as YAML 1.2 has them: ``1e-4`` is a number, ``no`` is a text."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from typing import Any, ClassVar

import yaml

from det_core.config._plain import short
from det_core.errors import ConfigError, ConfigErrors

MAX_TEXT = 1 << 20
"""Bytes of an experiment file: far more than anybody writes by hand."""
_TAG = "tag:yaml.org,2002:"


def read_text(text: str) -> Any:
    """The value of a document; an empty one is None.

    Raises:
        ConfigErrors: it is neither YAML nor JSON, or gives keys twice.
    """
    if len(text) > MAX_TEXT:
        raise ConfigErrors([ConfigError("", f"{len(text):,} characters long", f"of at most {MAX_TEXT:,}")])
    try:
        if text.lstrip().startswith("{"):
            try:
                return _read_json(text)
            except json.JSONDecodeError:
                pass  # a flow mapping of YAML's begins so too
        return _read_yaml(text)
    except RecursionError:
        raise ConfigErrors([ConfigError("", "nested without end", "of fewer levels")]) from None


def _read_json(text: str) -> Any:
    twice: list[ConfigError] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                twice.append(_second(key))
            found[key] = value
        return found

    value = json.loads(text, object_pairs_hook=made)
    if twice:
        raise ConfigErrors(twice)
    return value


def _second(what: str) -> ConfigError:
    return ConfigError(what, "given a second time", "given once")


def _read_yaml(text: str) -> Any:
    try:
        loader = _Loader(text)
    except yaml.YAMLError as e:  # a character that YAML does not know
        raise _broken(e) from None
    try:
        value = loader.get_single_data()
    except yaml.YAMLError as e:
        raise _broken(e) from None
    finally:
        loader.dispose()
    if loader.twice:
        raise ConfigErrors(loader.twice)
    return value


def _broken(e: yaml.YAMLError) -> ConfigErrors:
    mark = getattr(e, "problem_mark", None) or getattr(e, "context_mark", None)
    problem = getattr(e, "problem", None) or getattr(e, "reason", None) or str(e)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return ConfigErrors([ConfigError("", f"not readable ({where}{problem})", "YAML or JSON")])


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads the core schema of YAML 1.2, and no other types; keys are texts, and none is given twice."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    yaml_constructors: ClassVar[dict[str, Any]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[ConfigError] = []

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _TAG + "merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                self.twice.append(_second(f"{key.value} (line {key.start_mark.line + 1})"))
            seen.add(key.value)
        super().flatten_mapping(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        made: dict[Hashable, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
            made[key.value] = self.construct_object(value, deep=deep)
        return made


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
    if len(node.value) > 100:
        raise yaml.constructor.ConstructorError(None, None, f"{short(node.value)} is no number", node.start_mark)
    return int(node.value[2:] if base != 10 else node.value, base)


def _float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _unknown(loader: _Loader, node: yaml.Node) -> Any:
    raise yaml.constructor.ConstructorError(None, None, f"there is no type {node.tag!r} here", node.start_mark)


def _teach() -> None:
    scalars = {
        "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
        "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
        "float": (
            r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
            "-+.0123456789",
        ),
        "merge": (r"<<", "<"),
    }
    for tag, (pattern, first) in scalars.items():
        _Loader.add_implicit_resolver(_TAG + tag, re.compile(f"^(?:{pattern})$"), list(first))
    _Loader.add_constructor(_TAG + "bool", lambda _, node: node.value.lower() == "true")
    _Loader.add_constructor(_TAG + "int", _integer)
    _Loader.add_constructor(_TAG + "float", _float)
    for tag in ("null", "str", "seq", "map"):
        _Loader.add_constructor(_TAG + tag, yaml.SafeLoader.yaml_constructors[_TAG + tag])
    _Loader.add_constructor(None, _unknown)


_teach()
