"""Context managers that explain a missing ``with``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def with_only(usage: str) -> Callable[[Callable[_P, Iterator[_T]]], Callable[_P, AbstractContextManager[_T]]]:
    """Return ``contextmanager``, whose errors say ``with USAGE:`` for a use without ``with``."""

    def decorate(method: Callable[_P, Iterator[_T]]) -> Callable[_P, AbstractContextManager[_T]]:
        manager = contextmanager(method)
        return wraps(method)(lambda *args, **kwargs: _Block(manager(*args, **kwargs), usage))

    return decorate


class _Block(AbstractContextManager[_T]):
    def __init__(self, inner: AbstractContextManager[_T], usage: str) -> None:
        self._inner = inner
        self._usage = usage

    def __enter__(self) -> _T:
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.__exit__(*error)

    def _raise_conflicts(self, *_: object) -> NoReturn:
        raise TypeError(f"use it in a with statement: with {self._usage}:")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no {name} here; use it in a with statement: with {self._usage}:")

    __iter__ = __fspath__ = __truediv__ = _raise_conflicts
