"""The agreement on a stop, simulated: any number of ranks, any order of events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from det_core.core._agreement import SIGNAL, ChiefState, RankState, Stop


@dataclass
class World:
    """Ranks that make up to ``total`` calls each, with message queues that keep order per direction."""

    size: int
    total: int
    goes_on: bool = False
    """True if ranks continue after a stop that only the script requested."""
    sides: list[RankState] = field(init=False)
    chief: ChiefState = field(init=False)
    to_rank: list[list[tuple[str, object]]] = field(init=False)
    to_chief: list[list[tuple[str, object]]] = field(init=False)
    results: list[list[Stop | None]] = field(init=False)
    waiting: list[bool] = field(init=False)
    left: list[bool] = field(init=False)
    requests: list[tuple[int, int, str]] = field(init=False)
    """Of each request: the rank, how many of its calls had ended, the reason."""

    def __post_init__(self) -> None:
        self.sides = [RankState() for _ in range(self.size)]
        for side in self.sides:
            side.needs_slow_path = False
        self.chief = ChiefState(range(self.size))
        self.to_rank = [[] for _ in range(self.size)]
        self.to_chief = [[] for _ in range(self.size)]
        self.results = [[] for _ in range(self.size)]
        self.waiting = [False] * self.size
        self.left = [False] * self.size
        self.requests = []

    def step(self, rank: int) -> None:
        """Advance the training thread of ``rank``: begin a call, end a waiting one, or leave."""
        side, results = self.sides[rank], self.results[rank]
        if self.left[rank]:
            return
        if self.waiting[rank]:
            if not side.waiting:
                self.waiting[rank] = False
                self.end_call(rank)
            return
        last = results[-1] if results else None
        if len(results) == self.total or (last is not None and (last.is_preemption or not self.goes_on)):
            self.leave(rank)
            return
        self.begin_call(rank)

    def begin_call(self, rank: int) -> None:
        side = self.sides[rank]
        side.calls += 1
        if side.needs_slow_path and side.waiting:
            self.waiting[rank] = True
        elif side.needs_slow_path:
            self.end_call(rank)
        else:
            self.results[rank].append(None)

    def end_call(self, rank: int) -> None:
        side = self.sides[rank]
        self.results[rank].append(side.pending_stop())
        side.needs_slow_path = bool(side.waiting or side.stops)

    def leave(self, rank: int) -> None:
        if self.sides[rank].waiting:
            return  # close() finishes an open agreement first
        self.left[rank] = True
        if rank == 0:
            for queue in self.to_rank[1:]:
                queue.append(("left", self.sides[0].calls))
            self.decided(self.chief.on_leave(0, self.sides[0].calls))
        else:
            self.to_chief[rank].append(("left", self.sides[rank].calls))

    def signal(self, rank: int) -> None:
        self.ask_for(rank, SIGNAL)

    def request(self, rank: int) -> None:
        self.ask_for(rank, f"asked by rank {rank}")

    def ask_for(self, rank: int, reason: str) -> None:
        if self.left[rank]:
            return
        self.requests.append((rank, len(self.results[rank]), reason))
        side = self.sides[rank]
        side.request()
        if rank == 0:
            self.request_at_chief(reason, side.round)
        else:
            self.to_chief[rank].append(("request", (reason, side.round)))

    def request_at_chief(self, reason: str, round_: int) -> None:
        if self.left[0]:
            return
        for rank in sorted(self.chief.on_request(reason, round_)):
            if rank:
                self.to_rank[rank].append(("ask", 0))
            else:
                self.decided(self.chief.on_answer(0, self.sides[0].on_ask()))

    def decided(self, stop: Stop | None) -> None:
        if stop is not None:
            self.sides[0].on_stop(stop)
            for queue in self.to_rank[1:] if not self.left[0] else ():
                queue.append(("stop", stop))

    def deliver(self, rank: int) -> None:
        """One message each way between the chief and ``rank``."""
        if self.to_rank[rank]:
            word, what = self.to_rank[rank].pop(0)
            if word == "ask":
                self.to_chief[rank].append(("count", self.sides[rank].on_ask()))
            elif isinstance(what, Stop):
                self.sides[rank].on_stop(what)
            else:
                self.sides[rank].chief_left = True
        if self.to_chief[rank]:
            word, what = self.to_chief[rank].pop(0)
            if isinstance(what, tuple):
                self.request_at_chief(*what)
            else:
                assert isinstance(what, int)
                answer = self.chief.on_leave if word == "left" else self.chief.on_answer
                self.decided(answer(rank, what))

    def settle(self) -> None:
        """Let everything come to its end, fairly."""
        for _ in range(6 * self.total + 60):
            for rank in range(self.size):
                self.deliver(rank)
                self.step(rank)
        assert all(self.left), "a rank waits for ever"


KINDS = ["step", "step", "step", "deliver", "deliver", "signal", "request"]


def worlds(data: st.DataObject, size: int, total: int, *, goes_on: bool, kinds: list[str] = KINDS) -> World:
    world = World(size, total, goes_on)
    events = st.tuples(st.sampled_from(kinds), st.integers(0, size - 1))
    for kind, rank in data.draw(st.lists(events, max_size=150)):
        getattr(world, kind)(rank)
    world.settle()
    return world


def true_calls(world: World, rank: int) -> list[tuple[int, str]]:
    return [(call, stop.reason) for call, stop in enumerate(world.results[rank], 1) if stop is not None]


@settings(max_examples=120)
@given(data=st.data(), size=st.integers(2, 5), total=st.integers(1, 12), goes_on=st.booleans())
def test_agreement_any_order_of_events_stops_all_ranks_at_the_same_calls(
    data: st.DataObject, size: int, total: int, goes_on: bool
) -> None:
    world = worlds(data, size, total, goes_on=goes_on)
    told = [true_calls(world, rank) for rank in range(size)]
    assert all(each == told[0] for each in told), told
    assert len({len(results) for results in world.results}) == 1


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(2, 5))
def test_agreement_request_stops_a_later_call_of_its_rank(data: st.DataObject, size: int) -> None:
    world = worlds(data, size, 1000, goes_on=True)
    for rank, results in enumerate(world.results):
        if results and (last := results[-1]) is not None and last.is_preemption:
            # Asked for once more after that call, it is answered by the same verdict, should there be another call.
            world.begin_call(rank)
            assert not world.waiting[rank] and results[-1] == last
    for rank, ended, reason in world.requests:
        later = [stop.reason for stop in world.results[rank][ended:] if stop is not None]
        assert later if reason != SIGNAL else SIGNAL in later, (world.requests, world.results[rank])


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), size=st.integers(2, 5))
def test_agreement_ranks_in_step_stop_at_most_two_calls_later(seed: int, size: int) -> None:
    """In step: a call begins on no rank before the one before has begun on all, as with a collective a step."""
    rng = random.Random(seed)
    world, asked = World(size, 40), 0
    while not asked or not all(world.left):
        rank = rng.randrange(size)
        world.deliver(rank)
        if world.left[rank] or world.waiting[rank] or len(world.results[rank]) <= min(s.calls for s in world.sides):
            world.step(rank)
        if not asked and world.sides[rank].calls == 5 and not world.waiting[rank]:
            asked = 5
            world.request(rank)
    calls = {call for rank in range(size) for call, _ in true_calls(world, rank)}
    assert len(calls) == 1 and calls.pop() <= asked + 2


def test_agreement_single_rank_stops_at_its_next_call() -> None:
    chief, side = ChiefState([0]), RankState()
    chief.on_request("mine", side.round)
    assert chief.on_request(SIGNAL, side.round) == frozenset()
    side.calls += 1
    stop = chief.decide(side.calls)
    assert stop == Stop(1, SIGNAL), "a preemption outweighs the script's request"
    side.on_stop(stop)
    assert side.pending_stop() == side.pending_stop() == stop


def test_chief_state_late_request_belongs_to_the_decided_stop() -> None:
    chief = ChiefState([0, 1])
    assert chief.on_request("first", 0) == {0, 1}
    assert chief.on_answer(0, 4) is None
    assert chief.on_answer(1, 5) == Stop(6, "first")
    assert chief.on_request("second", 0) == frozenset() and not chief.open
    assert chief.on_request("third", 1) == {0, 1}
    assert chief.on_answer(0, 4) is None
    assert chief.on_answer(1, 5) == Stop(7, "third"), "no two stops at one call"


def test_agreement_script_that_continues_after_its_stop_stops_again() -> None:
    side = RankState()
    side.on_stop(Stop(2, "mine"))
    side.on_stop(Stop(3, SIGNAL))
    found = []
    for _ in range(4):
        side.calls += 1
        stop = side.pending_stop()
        found.append(None if stop is None else stop.reason)
    assert found == [None, "mine", SIGNAL, SIGNAL]
