"""What single values of an experiment's configuration may be, each with the words that an error says it in."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

NOT_ALLOWED = "not_allowed"
"""The type of the errors that rules and :meth:`Section.cross` make."""
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
LENGTH_UNITS = ("batches", "records", "epochs")


def not_allowed(allowed: str, hint: str | None = None) -> PydanticCustomError:
    """The error of a value that may not be."""
    return PydanticCustomError(NOT_ALLOWED, "it must be {allowed}", {"allowed": allowed, "hint": hint})


def nearest(given: object, names: Any) -> str | None:
    """The one of ``names`` that was probably meant."""
    if not isinstance(given, str):
        return None
    found = difflib.get_close_matches(given.lower(), [str(name) for name in names], 1, 0.6)
    return f"did you mean {found[0]}?" if found else None


@dataclass(frozen=True)
class Rule:
    """What a value may be; stands in ``Annotated``, in place of pydantic's own reading of the type."""

    allowed: str
    """In words that go on from "it must be"."""
    read: Callable[[Any], Any]
    """Gives the value in its plain form; raises ValueError or TypeError if it may not be."""
    hint: Callable[[Any], str | None] = lambda given: None
    """What may have been meant."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, given: Any) -> Any:
        try:
            return self.read(given)
        except (ValueError, TypeError):
            raise not_allowed(self.allowed, self.hint(given)) from None


def demand(fits: bool) -> None:
    """Raise ValueError if it does not."""
    if not fits:
        raise ValueError


def as_integer(given: Any) -> int:
    """The integer that it is, also if it is written as 1e3.

    Raises:
        ValueError: it is none.
    """
    demand(type(given) is int or (type(given) is float and given.is_integer() and abs(given) < 2**53))
    return int(given)


def as_number(given: Any) -> float | int:
    """The number that it is.

    Raises:
        ValueError: it is none.
    """
    demand(isinstance(given, int | float) and not isinstance(given, bool))
    number: float | int = given
    return number


def integer(least: int | None = None, most: int | None = None, what: str = "an integer") -> Rule:
    """An integer within bounds."""

    def read(given: Any) -> int:
        value = as_integer(given)
        demand((least is None or value >= least) and (most is None or value <= most))
        return value

    if least is not None and most is not None:
        return Rule(f"{what} from {least} to {most}", read)
    return Rule(what if least is None else f"{what} of at least {least}", read)


def number(above: float | None = None, least: float | None = None, most: float | None = None) -> Rule:
    """A number within bounds."""

    def read(given: Any) -> float | int:
        value = as_number(given)
        demand((above is None or value > above) and (least is None or value >= least))
        demand(most is None or value <= most)
        return value

    bound = f" above {above:g}" if above is not None else f" of at least {least:g}" if least is not None else ""
    return Rule(f"a number{bound}" + ("" if most is None else f" and at most {most:g}"), read)


def one_of(*names: str, instead: Mapping[str, str] | None = None) -> Rule:
    """One of some words.

    Args:
        names: the words.
        instead: hints for words of former times.
    """

    def read(given: Any) -> str:
        demand(isinstance(given, str) and given in names)
        return str(given)

    def hint(given: Any) -> str | None:
        return (instead or {}).get(str(given)) or nearest(given, names)

    return Rule(f"one of {', '.join(names)}", read, hint)


def text(what: str = "a text", pattern: str = r"(?s).*") -> Rule:
    """A text that matches."""

    def read(given: Any) -> str:
        demand(isinstance(given, str) and re.fullmatch(pattern, given) is not None)
        return str(given)

    return Rule(what, read)


def _flag(given: Any) -> bool:
    found = _SWITCH.get(given.lower()) if isinstance(given, str) else given
    demand(isinstance(found, bool))
    return bool(found)


def _object(given: Any) -> dict[str, Any]:
    demand(isinstance(given, Mapping))
    return dict(given)


def _list(given: Any) -> list[Any]:
    demand(isinstance(given, list))
    return list(given)


def _command(given: Any) -> str | list[str]:
    if isinstance(given, str):
        demand(bool(given.strip()))
        return given
    demand(isinstance(given, list) and bool(given) and all(isinstance(word, str) for word in given))
    demand(bool(given[0]))
    return list(given)


def _length(least: int) -> Callable[[Any], Any]:
    def read(given: Any) -> Any:
        if not isinstance(given, Mapping):
            value = as_integer(given)
            demand(value >= least)
            return value
        ((unit, count),) = given.items()
        demand(unit in LENGTH_UNITS and as_integer(count) >= 1)
        return {unit: as_integer(count)}

    return read


def _period(given: Any) -> dict[str, int]:
    demand(isinstance(given, Mapping))
    ((unit, count),) = given.items()
    demand(unit in LENGTH_UNITS and as_integer(count) >= 0)
    return {unit: as_integer(count)}


def _prefix(given: Any) -> str:
    demand(isinstance(given, str) and ".." not in given.split("/"))
    return "/".join(part for part in given.split("/") if part not in ("", "."))


def _absolute(given: Any) -> str:
    demand(isinstance(given, str) and posixpath.isabs(given))
    return str(given)


def length(least: int) -> Rule:
    """How long to train."""
    return Rule(
        f"an integer of at least {least}, or one of {{batches: N}}, {{records: N}} and {{epochs: N}}, N at least 1",
        _length(least),
    )


Flag = Annotated[bool, Rule("true or false", _flag)]
Text = Annotated[str, text()]
Name = Annotated[str, text("a text that is not empty", r"(?s).*\S.*")]
Integer = Annotated[int, integer()]
Count = Annotated[int, integer(0)]
Positive = Annotated[int, integer(1)]
Number = Annotated[float, number()]
AnyObject = Annotated[dict[str, Any], Rule("an object", _object)]
AnyList = Annotated[list[Any], Rule("a list", _list)]
Anything = Annotated[Any, Rule("anything", lambda given: given)]
Command = Annotated[Any, Rule("a command: a text for sh, or a list of texts", _command)]
Length = Annotated[Any, length(0)]
LengthOfOne = Annotated[Any, length(1)]
Period = Annotated[Any, Rule("one of {batches: N}, {records: N} and {epochs: N}, N at least 0", _period)]
Variable = Annotated[str, text("a text of the form NAME=VALUE", r"(?s)[^=]+=.*")]
Prefix = Annotated[str, Rule("a text without '..' between its slashes", _prefix)]
AbsolutePath = Annotated[str, Rule("an absolute path", _absolute)]
Web = Annotated[str, text("a URL that begins with http:// or https://", r"https?://\S+")]
