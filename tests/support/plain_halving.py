"""Successive halving as the wire contract 12.5 and 12.6 put it, with lists and scans: slow, and easy to compare."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

WORST = 1.7976931348623157e308


@dataclass
class PlainRung:
    entries: list[list[Any]] = field(default_factory=list)  # [metric, trial], best first
    promoted: set[int] = field(default_factory=set)
    outstanding: int = 0


@dataclass
class Plain:
    """Decides as ("create", None), ("train", trial, rung) and ("close", trial); trials are numbers from 0."""

    lengths: list[int]
    divisor: float
    max_trials: int
    concurrent: int
    rungs: list[PlainRung] = field(default_factory=list)
    where: dict[int, int] = field(default_factory=dict)
    exited: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    invalid: int = 0

    def __post_init__(self) -> None:
        self.rungs = [PlainRung() for _ in self.lengths]

    def start(self) -> list[tuple[Any, ...]]:
        return [step for _ in range(min(self.concurrent, self.max_trials)) for step in self._create()]

    def _create(self) -> list[tuple[Any, ...]]:
        trial = len(self.where)
        self.where[trial] = 0
        self.rungs[0].outstanding += 1
        return [("create", trial), ("train", trial, self.lengths[0])]

    def _room(self) -> bool:
        return len(self.where) - self.invalid < self.max_trials

    def exit(self, trial: int) -> list[tuple[Any, ...]]:
        """Let a trial fail while it has something to do."""
        self.exited.add(trial)
        self.closed.add(trial)
        return self.report(trial, WORST)

    def withdraw(self, trial: int) -> list[tuple[Any, ...]]:
        """Withdraw a trial whose hyperparameters cannot be trained."""
        self.exited.add(trial)
        self.closed.add(trial)
        self.rungs[self.where[trial]].outstanding -= 1
        for rung in self.rungs:
            rung.entries = [entry for entry in rung.entries if entry[1] != trial]
        self.invalid += 1
        return self._create()


class PlainPromotion(Plain):
    def report(self, trial: int, x: float) -> list[tuple[Any, ...]]:
        self.rungs[self.where[trial]].outstanding -= 1
        out, promoted = self._insert(trial, x)
        if not promoted and self._room():
            out += self._create()
        if len(self.rungs[0].entries) == self.max_trials:
            for rung in self.rungs:
                if rung.outstanding:
                    break
                for _, t in rung.entries:
                    if t not in rung.promoted and t not in self.closed and t not in self.exited:
                        self.closed.add(t)
                        out.append(("close", t))
        return out

    def _insert(self, trial: int, x: float) -> tuple[list[tuple[Any, ...]], bool]:
        r = self.where[trial]
        rung = self.rungs[r]
        m = len(rung.entries)
        index = next((i for i, (other, _) in enumerate(rung.entries) if other > x), m)
        rung.entries.insert(index, [x, trial])
        if r == len(self.rungs) - 1:
            if trial in self.closed:  # so is one that has exited, and one that was among the last to be parked
                return [], False
            self.closed.add(trial)
            return [("close", trial)], False
        old, new = int(m / self.divisor), int((m + 1) / self.divisor)
        chosen = None
        if index < new:
            chosen = trial
        elif new != old and rung.entries[old][1] not in rung.promoted:
            chosen = rung.entries[old][1]
        if chosen is None:
            return [], False
        rung.promoted.add(chosen)
        self.where[chosen] = r + 1
        if chosen in self.exited or chosen in self.closed:
            return self._insert(chosen, WORST)
        self.rungs[r + 1].outstanding += 1
        return [("train", chosen, self.lengths[r + 1])], True


class PlainStopping(Plain):
    def report(self, trial: int, x: float) -> list[tuple[Any, ...]]:
        r = self.where[trial]
        rung = self.rungs[r]
        rung.outstanding -= 1
        index = bisect_left([entry[0] for entry in rung.entries], x)
        rung.entries.insert(index, [x, trial])
        k = max(int(len(rung.entries) / self.divisor), 1)
        if trial not in self.exited and r < len(self.rungs) - 1 and index < k:
            self.where[trial] = r + 1
            self.rungs[r + 1].outstanding += 1
            return [("train", trial, self.lengths[r + 1])]
        out: list[tuple[Any, ...]] = []
        if trial not in self.exited:
            self.closed.add(trial)
            out.append(("close", trial))
        if self._room():
            out += self._create()
        return out
