"""Types of the keys of an experiment file: single values, sections, and sections of several kinds.

Numbers and texts are never converted into each other, and an unknown key is a mistake. Messages contain no value, as it
may be a secret: `_mistakes` adds those that may be shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from det_core._length import UNITS, split_length

IGNORED: JsonDict = {"ignored": True}
MAX_TRIALS = 1_000_000
_EXACT = 2**53
"""Largest integer up to which a float holds each; a grid computes with floats."""
_BOOLEANS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


def _matches(pattern: str, what: str) -> AfterValidator:
    """Return a validator of texts that match a pattern; pydantic's own would show users the regular expression."""

    def check(given: str) -> str:
        if re.fullmatch(pattern, given, re.DOTALL) is None:
            raise ValueError(f"should be {what}")
        return given

    return AfterValidator(check)


def _float_to_int(given: Any) -> Any:
    """Return a float such as ``1e3`` as the integer that it is, and any other value as it is."""
    if type(given) is float and given.is_integer() and abs(given) < _EXACT:
        return int(given)
    return given


def _parse_bool(given: Any) -> Any:
    """Return the bool for a text such as ``yes``, and any other value as it is."""
    # Booleans of YAML 1.1, which files of Determined's users have; YAML 1.2 reads them as texts.
    if isinstance(given, str):
        return _BOOLEANS.get(given.lower(), given)
    return given


def _unit_and_count(given: Any, least: int) -> dict[str, int]:
    """Validate ``{batches: 100}``."""
    count, unit = split_length(given)
    count = _float_to_int(count)
    if unit in UNITS and type(count) is int and count >= least:
        return {unit: count}
    raise ValueError(f"should be one of {{batches: N}}, {{records: N}} and {{epochs: N}}, N at least {least}")


def _length(given: Any) -> int | dict[str, int]:
    if isinstance(given, Mapping):
        return _unit_and_count(given, 1)
    count = _float_to_int(given)
    if type(count) is not int or count < 0:
        raise ValueError("should be an integer, or one of {batches: N}, {records: N} and {epochs: N}")
    return count


def _prefix(given: str) -> str:
    if ".." in given.split("/"):
        raise ValueError("should have no '..' between its slashes")
    return "/".join(part for part in given.split("/") if part not in ("", "."))


WHOLE = BeforeValidator(_float_to_int)
Flag = Annotated[bool, BeforeValidator(_parse_bool)]
Count = Annotated[int, Field(ge=0), WHOLE]
Positive = Annotated[int, Field(ge=1), WHOLE]
Trials = Annotated[int, Field(ge=1, le=MAX_TRIALS), WHOLE]
Concurrency = Annotated[int, Field(ge=0, le=MAX_TRIALS), WHOLE]
Rungs = Annotated[int, Field(ge=1, le=100), WHOLE]
Priority = Annotated[int, Field(ge=1, le=99), WHOLE]
Seed = Annotated[int, Field(ge=0, lt=2**32), WHOLE]
Days = Annotated[int, Field(ge=-1, lt=2**15), WHOLE]
ExactInt = Annotated[int, Field(ge=-_EXACT, le=_EXACT), WHOLE]
Text = Annotated[str, _matches(r".*\S.*", "a text that is not empty")]
Variable = Annotated[str, _matches(r"[^=]+=.*", "a text of the form NAME=VALUE")]
HttpUrl = Annotated[str, _matches(r"https?://\S+", "a URL that begins with http:// or https://")]
Url = Annotated[str, _matches(r"[\w+.-]+://.*", "a URL of a protocol that fsspec knows")]
AbsolutePath = Annotated[str, _matches(r"/.*", "an absolute path")]
Bucket = Annotated[str, _matches(r"[^/\s]+", "a bucket's bare name; the rest is its prefix")]
ClassName = Annotated[str, _matches(r"[\w.]+:\w+", "a text of the form module:Class")]
Prefix = Annotated[str, AfterValidator(_prefix)]
Length = Annotated[int | dict[str, int], PlainValidator(_length)]
Period = Annotated[dict[str, int], PlainValidator(lambda given: _unit_and_count(given, 0))]


class Section(BaseModel):
    """Base of objects with known keys."""

    # Strict: without it "5" would be read as 5, and true as 1.
    model_config = ConfigDict(extra="forbid", strict=True)


def key(default: Any, about: str, **options: Any) -> Any:
    """Return a key of a section from its default (``...``: required), description and further options of `Field`."""
    return Field(default, description=about, **options)


def ignored(default: Any, about: str) -> Any:
    """Return a key that is accepted, so that files of clusters run unchanged, and has no effect here."""
    return Field(default, description=about, json_schema_extra=IGNORED)


class SectionUnion:
    """Validator of an object as the section that one of its keys names, for ``PlainValidator``.

    Args:
        key: ``name`` or ``type``, a ``Literal`` in each section.
        sections: The kinds.
        default: Section of an object without that key.
    """

    # Pydantic's discriminated unions put the name of the kind into the path of each error. Errors of a section's own
    # validation, raised here, pydantic adds to its own under the right path.

    def __init__(self, key: str, sections: list[type[Section]], default: type[Section] | None = None) -> None:
        self._key = key
        self._default = default
        self.sections = {get_args(section.model_fields[key].annotation)[0]: section for section in sections}

    def __call__(self, given: Any) -> Section:
        """Return the section.

        Raises:
            ValueError: If the value is not an object, or of an unknown kind.
            ValidationError: If the object has mistakes.
        """
        if not isinstance(given, Mapping):
            raise ValueError("should be an object")
        name = given.get(self._key)
        section = None
        if name is None:
            section = self._default
        elif isinstance(name, str):  # a list or an object is not hashable
            section = self.sections.get(name)
        if section is None:
            raise UnknownKind(self._key, list(self.sections))
        return section.model_validate(given)


class UnknownKind(ValueError):
    """Error for an object of an unknown kind; ``args`` are the key that names it, and the known names."""


def sections_of(info: FieldInfo) -> list[type[Section]]:
    """Return the sections that a key's value may be."""
    for mark in info.metadata:
        if isinstance(mark, PlainValidator) and isinstance(mark.func, SectionUnion):
            return list(mark.func.sections.values())
    parts = (info.annotation, *get_args(info.annotation))
    return [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
