"""Live state: experiments that have not ended, their trials, and the allocations that hold slots.

All of it can be made anew from the store at any moment (see ``_recovery``). An experiment that has ended leaves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from det_core.master.scheduler import Losses, Phase, State
from det_core.master.service._measured import Measured

if TYPE_CHECKING:
    from det_core.config import Experiment
    from det_core.master.scheduler import PendingAllocation
    from det_core.master.service._search_workers import SearchWorker
    from det_core.search import Event, Search


@dataclass(eq=False)
class Launch:
    """Launch of an allocation, as it is stored with it.

    Attributes:
        code: digest of the claim code.
        nodes: number of nodes it runs on.
        ref: the engine's name for it; None: it has none.
        phase: how far the cluster got with it before its nodes claimed it.
        claims: runner, and digest of its token, by node.
    """

    code: str = ""
    nodes: int = 1
    ref: str | None = None
    phase: Phase = Phase.STARTING
    claims: dict[int, tuple[str, str]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return it as JSON."""
        claims = {str(node): list(claim) for node, claim in self.claims.items()}
        return {"code": self.code, "nodes": self.nodes, "ref": self.ref, "phase": self.phase.value, "claims": claims}

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Launch:
        """Return what JSON of :meth:`facts` says."""
        claims = {int(node): (runner, digest) for node, (runner, digest) in facts.get("claims", {}).items()}
        phase = Phase(facts.get("phase", Phase.STARTING))
        return cls(facts.get("code", ""), facts.get("nodes", 1), facts.get("ref"), phase, claims)


@dataclass(eq=False)
class LiveAllocation:
    """An allocation that has not ended.

    Attributes:
        id: ``"{task_id}.{run_id}"``.
        trial: the trial that runs in it.
        run_id: which run of the trial it is.
        slots: the number of slots it holds.
        slot_ids: their IDs, where the pool has them.
        launch: how it is started.
        preempt_time: when it was asked to stop; None: it was not.
        is_preempted: whether that is recorded, so that its processes may learn it.
        acked: whether it said that it is about to exit.
        idle: whether it was told that there is nothing left to do.
        kill_time: when it was killed; None: it was not.
        steps_completed: the step of ``latest_checkpoint``.
        latest_checkpoint: the checkpoint that it starts from.
    """

    id: str
    trial: LiveTrial
    run_id: int
    slots: int
    slot_ids: tuple[int, ...]
    launch: Launch = field(default_factory=Launch)
    preempt_time: float | None = None
    is_preempted: bool = False
    acked: bool = False
    idle: bool = False
    kill_time: float | None = None
    steps_completed: int = 0
    latest_checkpoint: str | None = None

    @property
    def ready(self) -> bool:
        """Whether all nodes have claimed it, so that it can be asked to stop; before, it can only be killed."""
        return self.acked or len(self.launch.claims) >= self.launch.nodes

    @property
    def phase(self) -> Phase:
        """How far it got."""
        return Phase.RUNNING if self.ready else self.launch.phase

    @property
    def ending(self) -> bool:
        """Whether it was asked to end."""
        return self.preempt_time is not None or self.kill_time is not None

    @property
    def stop_by(self) -> float | None:
        """Time at which it is killed, or was; None if it was not asked to end."""
        if self.kill_time is not None or self.preempt_time is None:
            return self.kill_time
        return self.preempt_time + self.trial.experiment.spec.preemption_timeout


@dataclass(eq=False)
class LiveTrial:
    """A trial of an experiment that has not ended.

    Attributes:
        operations: how many operations it was given; the last one is the current one.
        length: of the current operation; None: it has none.
        completed: whether that is done.
        done: operations that are done, by length, with what was reported.
        closed: whether the search will give it no more operations.
        stopped: whether the search wants it to end whatever it is doing.
        reopened: whether it goes on by itself, after its search has seen its end (``continue``).
        validated: the largest step of which the search has seen a validation; -1: none.
        early_exit: the reason it gave for giving up.
        losses: how often it was lost in a row.
        warm_start: the checkpoint it starts from as long as it has none of its own.
        queued: its next allocation, which waits for slots; None: it does not wait.
    """

    id: int
    experiment: LiveExperiment
    request_id: str
    task_id: str
    seed: int
    hparams: dict[str, Any]
    state: State = State.ACTIVE
    run_id: int = 0
    restarts: int = 0
    operations: int = 0
    length: int | None = None
    completed: bool = False
    done: dict[int, Any] = field(default_factory=dict)
    closed: bool = False
    stopped: bool = False
    reopened: bool = False
    validated: int = -1
    early_exit: str | None = None
    losses: Losses = field(default_factory=Losses)
    warm_start: str | None = None
    allocation: LiveAllocation | None = None
    queued: PendingAllocation | None = None

    @property
    def pending(self) -> bool:
        """Whether it has something to train: an operation that is not done, or none to go by, until it ends."""
        if self.stopped:
            return False
        return self.length is None or not self.completed

    @property
    def spent(self) -> bool:
        """Whether there is nothing left for it to do, ever."""
        return self.stopped or (self.closed and not self.pending)


@dataclass(eq=False)
class LiveExperiment:
    """An experiment that has not ended.

    Attributes:
        spec: its configuration.
        trials: those that have not ended, by request id.
        known: the request ids of all trials, also ended ones, with their ids.
        search: its search; None for an unmanaged one.
        events: how many events of the search were recorded.
        pending: events that are not recorded yet.
        unanswered: events that are recorded, and that its worker has not decided on.
        broken: why its search cannot be made again from what is kept.
        context: the digest of its context directory.
        warm_start: the checkpoint its trials start from.
        error: why it ends, where it is an error.
        measured: what its trials report.
    """

    id: int
    spec: Experiment
    state: State
    priority: int
    search: Search | SearchWorker | None
    trials: dict[str, LiveTrial] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    events: int = 0
    pending: deque[Event] = field(default_factory=deque)
    unanswered: deque[Event] = field(default_factory=deque)
    broken: str | None = None
    context: str | None = None
    warm_start: str | None = None
    error: str | None = None
    measured: Measured = field(init=False)

    def __post_init__(self) -> None:
        self.measured = Measured(self.spec.metric)

    @property
    def alive(self) -> bool:
        """Whether its search goes on."""
        return self.state in (State.ACTIVE, State.PAUSED)


@dataclass
class Live:
    """Everything that goes on, and the ids to give out next."""

    experiments: dict[int, LiveExperiment] = field(default_factory=dict)
    trials: dict[int, LiveTrial] = field(default_factory=dict)
    allocations: dict[str, LiveAllocation] = field(default_factory=dict)
    queue: dict[int, LiveTrial] = field(default_factory=dict)
    touched: dict[int, LiveExperiment] = field(default_factory=dict)
    next_experiment: int = 1
    next_trial: int = 1

    def touch(self, experiment: LiveExperiment) -> None:
        """Note that an experiment changed, from which more may follow."""
        self.touched[experiment.id] = experiment

    def new_experiment_id(self) -> int:
        """Return an ID that no experiment has had."""
        number = self.next_experiment
        self.next_experiment += 1
        return number

    def new_trial_id(self) -> int:
        """Return an ID that no trial has had."""
        number = self.next_trial
        self.next_trial += 1
        return number
