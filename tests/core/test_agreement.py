"""The preemption agreement, simulated: any number of ranks, any order of events."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from det_core.core._preempt._agreement import ChiefSide, RankSide


@dataclass
class World:
    """Ranks that make ``total`` calls each, with message queues that keep order per direction."""

    size: int
    total: int
    sides: list[RankSide] = field(init=False)
    chief: ChiefSide = field(init=False)
    to_rank: list[list[tuple[str, int]]] = field(init=False)
    to_chief: list[list[tuple[str, int]]] = field(init=False)
    results: list[list[bool]] = field(init=False)
    waiting: list[bool] = field(init=False)
    left: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.sides = [RankSide() for _ in range(self.size)]
        for side in self.sides:
            side.attention = False
        self.chief = ChiefSide(range(self.size))
        self.to_rank = [[] for _ in range(self.size)]
        self.to_chief = [[] for _ in range(self.size)]
        self.results = [[] for _ in range(self.size)]
        self.waiting = [False] * self.size
        self.left = [False] * self.size

    def step(self, rank: int) -> None:
        """The training thread of ``rank`` goes on: begins a call, ends a waiting one, or leaves."""
        side = self.sides[rank]
        if self.left[rank]:
            return
        if self.waiting[rank]:
            if not side.waiting_for_decision:
                self.waiting[rank] = False
                self.results[rank].append(side.verdict())
            return
        if len(self.results[rank]) == self.total or (self.results[rank] and self.results[rank][-1]):
            self.leave(rank)
            return
        side.calls += 1
        if side.attention and side.waiting_for_decision:
            self.waiting[rank] = True
        else:
            self.results[rank].append(side.attention and side.verdict())

    def leave(self, rank: int) -> None:
        if self.sides[rank].waiting_for_decision:
            return  # close() finishes an open agreement first
        self.left[rank] = True
        if rank == 0:
            for queue in self.to_rank[1:]:
                queue.append(("left", self.sides[0].calls))
            self.decided(self.chief.answered(0, self.sides[0].calls))
        else:
            self.to_chief[rank].append(("left", self.sides[rank].calls))

    def signal(self, rank: int) -> None:
        if rank == 0:
            self.request_at_chief()
        elif not self.sides[rank].request():
            self.to_chief[rank].append(("request", 0))

    def request_at_chief(self) -> None:
        if self.left[0]:
            return
        for rank in self.chief.requested():
            if rank:
                self.to_rank[rank].append(("ask", 0))
            else:
                self.decided(self.chief.answered(0, self.sides[0].asked()))

    def decided(self, stop_at: int | None) -> None:
        if stop_at is not None:
            self.sides[0].announced(stop_at)
            for queue in self.to_rank[1:]:
                queue.append(("stop", stop_at))

    def deliver(self, rank: int) -> None:
        """One message each way between the chief and ``rank``."""
        if self.to_rank[rank]:
            word, number = self.to_rank[rank].pop(0)
            if word == "ask":
                self.to_chief[rank].append(("count", self.sides[rank].asked()))
            elif word == "stop":
                self.sides[rank].announced(number)
            else:
                self.sides[rank].chief_left(number)
        if self.to_chief[rank]:
            word, number = self.to_chief[rank].pop(0)
            if word == "request":
                self.request_at_chief()
            else:
                self.decided(self.chief.answered(rank, number))


@settings(max_examples=500, deadline=None)
@given(data=st.data(), size=st.integers(2, 5), total=st.integers(1, 12))
def test_every_rank_returns_true_at_the_same_call(data: st.DataObject, size: int, total: int) -> None:
    world = World(size, total)
    events = st.tuples(
        st.sampled_from(["step", "step", "step", "deliver", "deliver", "signal"]), st.integers(0, size - 1)
    )
    for kind, rank in data.draw(st.lists(events, max_size=120)):
        getattr(world, kind)(rank)
    for _ in range(4 * total + 40):  # let everything come to its end, fairly
        for rank in range(size):
            world.deliver(rank)
            world.step(rank)
    assert all(world.left), "a rank waits for ever"
    first_true = [results.index(True) if True in results else None for results in world.results]
    assert len(set(first_true)) == 1, world.results
    assert len({len(results) for results in world.results}) == 1


@given(size=st.integers(2, 8), calls=st.lists(st.integers(0, 100), min_size=8, max_size=8))
def test_nobody_has_passed_the_agreed_call(size: int, calls: list[int]) -> None:
    chief = ChiefSide(range(size))
    assert chief.requested() == frozenset(range(size))
    decisions = [chief.answered(rank, calls[rank]) for rank in range(size)]
    assert decisions[:-1] == [None] * (size - 1)
    assert decisions[-1] == max(calls[:size]) + 1
    assert chief.requested() == frozenset(), "asked twice"


def test_a_request_before_anyone_called_stops_at_the_first_call() -> None:
    chief, side = ChiefSide([0]), RankSide()
    chief.requested()
    stop_at = chief.answered(0, side.asked())
    assert stop_at == 1
    side.announced(stop_at)
    side.calls += 1
    assert side.verdict()
