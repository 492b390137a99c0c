"""Live state: experiments that have not ended, their trials, and the allocations that hold slots.

Each holds its row, in the state in which it is stored, or will be when the transaction of the present decision is
committed: :meth:`~det_core.master.service._actor.Transaction.change` changes both. All of it can be made anew from the
store at any moment. Columns that reports set by statements of their own are not kept up to date here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from det_core.master.scheduler import Losses, Phase, State
from det_core.master.service._measured import Measured
from det_core.master.store import models

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
        row: its row.
        trial: the trial that runs in it.
        launch: how it is started.
        is_preempted: whether its preemption is recorded, so that its processes may learn it.
        idle: whether it has got the answer that nothing is left to do.
    """

    row: models.Allocation
    trial: LiveTrial
    launch: Launch = field(default_factory=Launch)
    is_preempted: bool = False
    idle: bool = False

    @property
    def id(self) -> str:
        """Its ID, ``"{task_id}.{run_id}"``."""
        return self.row.id

    @property
    def ready(self) -> bool:
        """Whether all nodes have claimed it, so that it can be asked to stop; before, it can only be killed."""
        return self.row.acked or len(self.launch.claims) >= self.launch.nodes

    @property
    def phase(self) -> Phase:
        """Phase of its start, or RUNNING."""
        if self.ready:
            return Phase.RUNNING
        return self.launch.phase

    @property
    def ending(self) -> bool:
        """Whether it was asked to end."""
        return self.row.preempt_time is not None or self.row.kill_time is not None

    @property
    def stop_by(self) -> float | None:
        """Time at which it is killed, or was; None if it was not asked to end."""
        if self.row.kill_time is not None or self.row.preempt_time is None:
            return self.row.kill_time
        return self.row.preempt_time + self.trial.experiment.spec.preemption_timeout


@dataclass(eq=False)
class LiveTrial:
    """A trial of an experiment that has not ended.

    Attributes:
        row: its row.
        experiment: its experiment.
        operations: those that it was given; the last one is the current one.
        stopped: whether the search wants it to end whatever it is doing.
        losses: how often it was lost in a row.
        allocation: the one that it runs in, or None.
        queued: its next allocation, which waits for slots; None: it does not wait.
    """

    row: models.Trial
    experiment: LiveExperiment
    operations: list[models.Operation] = field(default_factory=list)
    stopped: bool = False
    losses: Losses = field(default_factory=Losses)
    allocation: LiveAllocation | None = None
    queued: PendingAllocation | None = None

    @property
    def id(self) -> int:
        """Its ID."""
        return self.row.id

    @property
    def state(self) -> State:
        """Its state."""
        return State(self.row.state)

    @property
    def length(self) -> int | None:
        """Length of the current operation; None if there is none."""
        if not self.operations:
            return None
        return self.operations[-1].length

    @property
    def completed(self) -> bool:
        """Whether the current operation is done."""
        return bool(self.operations) and self.operations[-1].completed

    @property
    def pending(self) -> bool:
        """Whether it has something to train: an operation that is not done, or none to go by, until it ends."""
        return not self.stopped and not self.completed

    @property
    def spent(self) -> bool:
        """Whether there is nothing left for it to do, ever."""
        return self.stopped or (self.row.closed and not self.pending)


@dataclass(eq=False)
class LiveExperiment:
    """An experiment that has not ended.

    Attributes:
        row: its row.
        spec: its configuration.
        search: its search; None if it cannot be made again.
        trials: those that have not ended, by request id.
        known: the request ids of all trials, also ended ones.
        pending: events that are not recorded yet.
        unanswered: events that are recorded, and that its worker has not decided on.
        broken: why its search cannot be made again from what is kept.
        warm_start: the checkpoint its trials start from.
        measured: what its trials report.
    """

    row: models.Experiment
    spec: Experiment
    search: Search | SearchWorker | None = None
    trials: dict[str, LiveTrial] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    pending: deque[Event] = field(default_factory=deque)
    unanswered: deque[Event] = field(default_factory=deque)
    broken: str | None = None
    warm_start: str | None = None
    measured: Measured = field(init=False)

    def __post_init__(self) -> None:
        self.measured = Measured(self.spec.metric)

    @property
    def id(self) -> int:
        """Its ID."""
        return self.row.id

    @property
    def state(self) -> State:
        """Its state."""
        return State(self.row.state)

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
