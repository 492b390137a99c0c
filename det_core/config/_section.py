"""Sections of an experiment file as pydantic models that find all their mistakes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from det_core.config._rules import NOT_ALLOWED, not_allowed

TAG = "\0"
"""How the names of the kinds of a section begin in pydantic's paths; no key of a user's can begin so."""


class Cross(NamedTuple):
    """A mistake that shows only when several values are seen together."""

    path: tuple[str | int, ...]
    """From the section on."""
    allowed: str
    hint: str | None = None


class Section(BaseModel):
    """An object with known keys."""

    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=(), defer_build=True)

    @classmethod
    def cross(cls, given: Mapping[str, Any]) -> Iterator[Cross]:
        """The mistakes between values as the user wrote them: they may be missing, or wrong in themselves."""
        return iter(())

    @model_validator(mode="wrap")
    @classmethod
    def _everything(cls, given: Any, read: Callable[[Any], Section]) -> Section:
        errors: list[InitErrorDetails] = []
        made = None
        try:
            made = read(given)
        except ValidationError as e:
            errors = [_once_more(dict(detail)) for detail in e.errors(include_url=False)]
        if isinstance(given, Mapping):
            errors += [_detail(cross, given) for cross in cls.cross(given)]
        if errors or made is None:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return made


def _once_more(error: dict[str, Any]) -> InitErrorDetails:
    ctx = error.get("ctx") or {}
    kind = PydanticCustomError(NOT_ALLOWED, error["msg"], ctx) if error["type"] == NOT_ALLOWED else error["type"]
    return InitErrorDetails(type=kind, loc=error["loc"], input=error["input"], ctx=ctx)


def _detail(cross: Cross, given: Mapping[str, Any]) -> InitErrorDetails:
    return InitErrorDetails(type=not_allowed(cross.allowed, cross.hint), loc=cross.path, input=at(given, cross.path))


class Missing:
    """Stands for a value that is not there."""


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    """The value at a path; :class:`Missing` if there is none."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return Missing
    return value


def option(
    default: Any,
    description: str,
    *,
    alias: str | None = None,
    unused: bool = False,
    anyway: Any = None,
    secret: bool = False,
) -> Any:
    """A key of a section.

    Args:
        default: what it is if it is left out; ``...`` if it must not be.
        description: for the reference of the experiment file.
        alias: its name in the file, where Python does not allow that name.
        unused: it has no effect here, and the user is told so.
        anyway: a value of an unused key that the user is not told of, as it asks for what is done in any case.
        secret: no message repeats its value.
    """
    marks = {"unused": unused, "anyway": anyway, "secret": secret}
    if isinstance(default, list | dict):
        return Field(default_factory=default.copy, description=description, json_schema_extra={**marks})
    if alias is None:
        return Field(default, description=description, json_schema_extra={**marks})
    return Field(default, alias=alias, description=description, json_schema_extra={**marks})


def marked(info: FieldInfo, mark: str) -> Any:
    """What :func:`option` was given for a key as ``unused``, ``anyway`` or ``secret``; None: it is no option."""
    extra = info.json_schema_extra
    return extra.get(mark) if isinstance(extra, dict) else None


class Kinds:
    """A section that is of one of several kinds; stands in ``Annotated``.

    Args:
        kinds: kind -> its section. One of them, ``""``, is for what is of no known kind: it finds what can be found.
        which: gives the kind of what the user wrote.
        before: changes what the user wrote before it is read.
        after: changes what was read.
    """

    def __init__(
        self,
        kinds: Callable[[], Mapping[str, type[BaseModel]]],
        which: Callable[[Any], str],
        before: Callable[[Any], Any] = lambda given: given,
        after: Callable[[Any], Any] = lambda made: made,
    ) -> None:
        self.kinds = kinds
        self._which = which
        self._before = before
        self._after = after

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        tags = {kind: TAG + cls.__name__ for kind, cls in self.kinds().items()}
        union = core_schema.tagged_union_schema(
            {tags[kind]: handler.generate_schema(cls) for kind, cls in self.kinds().items()},
            lambda given: tags.get(self._which(given), tags[""]),
        )
        read = core_schema.no_info_before_validator_function(self._before, union)
        written = core_schema.simple_ser_schema("any")  # as what it is, whatever the field is declared to be
        return core_schema.no_info_after_validator_function(self._after, read, serialization=written)
