"""Machines and their slots: in a hostfile, or on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .._words._options import UsageError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")
_SLOTS = re.compile(r"slots=(\d+)")


@dataclass(frozen=True)
class Host:
    """A machine of a job."""

    name: str
    """Its name or address, as the other machines reach it."""
    slots: int
    """How many ranks it gets."""


def read_hostfile(path: str, slots: int | None = None) -> tuple[Host, ...]:
    """The machines in a file with lines of ``NAME slots=N``; ``#`` begins a comment.

    Args:
        path: the file.
        slots: how many each gets, whatever the file says; without it a line that has no ``slots=`` means 1.

    Raises:
        UsageError: the file cannot be read or holds a mistake; the message names file and line.
    """
    try:
        text = Path(path).read_text()
    except OSError as e:
        raise UsageError(f"hostfile {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"hostfile {path} is not text: {e}") from e
    lines = ((f"{path}:{number}", line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), 1))
    hosts = tuple(_host(where, words, slots) for where, words in lines if words)
    if not hosts:
        raise UsageError(f"hostfile {path} names no host: expected lines like `node1 slots=4`")
    return _distinct(path, hosts)


def read_hosts(text: str, slots: int | None = None) -> tuple[Host, ...]:
    """The machines in ``NAME:N,NAME:N``.

    Raises:
        UsageError: there is a mistake in it.
    """
    hosts = []
    for part in text.split(","):
        name, colon, count = part.rpartition(":") if part.count(":") == 1 else (part, "", "")
        where = f"--hosts {text}"
        hosts.append(_host(where, [name, *([f"slots={count}"] if colon else [])], slots))
    return _distinct(f"--hosts {text}", tuple(hosts))


def _host(where: str, words: list[str], slots: int | None) -> Host:
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!r} is no name of a host: expected NAME slots=N")
    if len(rest) > 1 or (rest and not _SLOTS.fullmatch(rest[0])):
        raise UsageError(f"{where}: expected {name} slots=N, found {' '.join(words)!r}")
    count = int(rest[0].partition("=")[2]) if rest else 1
    if not count:
        raise UsageError(f"{where}: {name} has slots=0: expected 1 or more, or no such line")
    return Host(name, count if slots is None else slots)


def _distinct(where: str, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
    for number, host in enumerate(hosts):
        if host.name in {h.name for h in hosts[:number]}:
            raise UsageError(f"{where}: {host.name} stands there twice: give it one line with all its slots")
    return hosts


def write_hostfile(path: str, hosts: Iterable[Host]) -> str:
    """Write a file that :func:`read_hostfile`, deepspeed and mpirun can read, and return its path."""
    Path(path).write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
    return path
