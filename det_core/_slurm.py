"""The two short forms in which Slurm writes lists."""

from __future__ import annotations

import re

_PART = re.compile(r"([^,\[\]]+)(?:\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]([^,\[\]]*))?(?:,|$)")


def expand_counts(text: str, name: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Slurm's counts per node as a list: ``"2(x3),1"`` is ``[2, 2, 2, 1]``.

    Raises:
        ValueError: that is none; the message names the variable ``name``.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{name}={text!r}: expected counts like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodes(text: str, name: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Slurm's list of nodes as their names: ``"gpu[03-05,9],cpu1"`` is ``gpu03 gpu04 gpu05 gpu9 cpu1``.

    Raises:
        ValueError: that is none; the message names the variable ``name``.
    """
    nodes: list[str] = []
    place = 0
    while place < len(text):
        match = _PART.match(text, place)
        if match is None:
            raise ValueError(f"{name}={text!r}: expected nodes like gpu[03-05,9],cpu1")
        before, ranges, after = match.groups()
        numbers = [""] if ranges is None else [n for part in ranges.split(",") for n in _numbers(part)]
        nodes += [f"{before}{number}{after or ''}" for number in numbers]
        place = match.end()
    return nodes


def _numbers(part: str) -> list[str]:
    first, dash, last = part.partition("-")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] if dash else [part]
