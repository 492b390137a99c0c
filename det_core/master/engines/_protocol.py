"""What the master asks of an engine: to run allocations, to end them, and to say how each ended.

An allocation is one run of a trial's script. Whatever happens, an engine says of every allocation that it was given
that it ended, and says so once in each life of the master, until :meth:`Engine.forget`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class LaunchSpec:
    """All that an engine needs to run one allocation.

    Attributes:
        allocation_id: ``"{task_id}.{trial_run_id}"``, unique for ever.
        task_id: ``"{experiment_id}.{request id}"``.
        experiment_id: the experiment.
        trial_id: the trial.
        trial_run_id: which run of the trial this is, from 1.
        trial_seed: the trial's seed.
        hparams: the trial's hyperparameters.
        config: the complete configuration of the experiment.
        slot_ids: the slots it may use, out of :attr:`Engine.slots`.
        session_token: the allocation's credential.
        master_url: where its processes reach the master.
        command: what to run, as words.
        cluster_id: the master's lasting name.
        agent_id: the machine's name.
        steps_completed: the step of ``latest_checkpoint``; 0 at a warm start.
        latest_checkpoint: the storage_id to start from.
        environment: variables of the user's, which win over the engine's (save for those named DET_CORE_…).
        gpu_environment: those instead, if it gets a GPU; None: the same.
        context: the packed context directory; None: an empty one.
        preemption_timeout: seconds that the script has to save after it was asked to stop.
        interpreter: the Python that ``python`` means; None: the master's own.
    """

    allocation_id: str
    task_id: str
    experiment_id: int
    trial_id: int
    trial_run_id: int
    trial_seed: int
    hparams: Mapping[str, Any]
    config: Mapping[str, Any]
    slot_ids: Sequence[int]
    session_token: str
    master_url: str
    command: Sequence[str]
    cluster_id: str = "det_core"
    agent_id: str = "local"
    steps_completed: int = 0
    latest_checkpoint: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu_environment: Mapping[str, str] | None = None
    context: Path | None = None
    preemption_timeout: float = 3600.0
    interpreter: str | None = None


@dataclass(frozen=True)
class ExitReport:
    """How an allocation ended, in plain facts.

    Attributes:
        status: the script's exit status; None if a signal ended it, or if it is not known.
        signal: the number of the signal that ended it; None otherwise.
        killed: whether the engine ended it, because :meth:`Engine.kill` or :meth:`Engine.terminate` was called.
        started: whether the script began to run. If not, and nobody killed it, ``detail`` says what was in the way.
        lost: whether it ended by a fault of the machine's (its supervisor was killed, or the machine started anew),
            so that nobody knows how the script would have ended.
        detail: one line for a person.
        last_lines: the last lines of its output, without their line ends.
        time: when it ended, in seconds since the epoch.
    """

    status: int | None
    signal: int | None
    killed: bool
    started: bool
    lost: bool
    detail: str
    last_lines: tuple[str, ...] = ()
    time: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether the script ran and exited with 0."""
        return self.started and not self.lost and self.status == 0


@dataclass(frozen=True)
class Ended:
    """An allocation has ended, and no process of it is left. Its logs and its journal were handed over before."""

    allocation_id: str
    exit: ExitReport


class LogLine(NamedTuple):
    """One line of an allocation's output.

    Attributes:
        time: when it came, in seconds since the epoch.
        stream: ``stdout`` or ``stderr``.
        rank: from a leading ``[rank=N] ``; None without one.
        level: from a leading ``LEVEL: `` (DEBUG, INFO, WARNING, ERROR, CRITICAL); None without one.
        text: the rest, without its line end. A very long line comes in several.
    """

    time: float
    stream: str
    rank: int | None
    level: str | None
    text: str


class Listener(Protocol):
    """Who takes what an allocation says. A call that raises is made again, with the same, a little later."""

    async def logs(self, allocation_id: str, lines: Sequence[LogLine], mark: str) -> None:
        """Take the next lines of an allocation, in order.

        Whoever keeps them keeps ``mark`` with them, in one transaction, and gives the last one kept to
        :meth:`Engine.recover`: then no line is lost or taken twice, whenever the master dies.
        """

    async def journal(self, allocation_id: str, rank: int, records: Sequence[Mapping[str, Any]], restart: int) -> None:
        """Take records that a process of the allocation left in its journal, as they stand in the file.

        Called once its processes are dead, before Ended is told; also with records that the process has shipped
        itself. They are told apart by ``seq``, within allocation, restart and rank.
        """


class Engine(Protocol):
    """Runs allocations on slots. Every method is called on one event loop."""

    @property
    def slots(self) -> list[int]:
        """The ids of all slots there are, used or not."""

    async def recover(self, known: Mapping[str, str | None], listener: Listener) -> None:
        """Begin: adopt what runs. To be called once, before everything else.

        Args:
            known: the allocations that the master has not yet forgotten, each with the last mark of its logs that was
                kept. Of those that have ended, or were never launched, Ended is told. What runs and is not known
                is killed.
            listener: takes logs and journals from now on.
        """

    async def launch(self, spec: LaunchSpec) -> None:
        """Start an allocation; returns when its supervisor runs.

        What is in the way of starting it is told as Ended, not raised.

        Raises:
            ValueError: an allocation of this id was launched before, or the spec names a slot that there is not.
        """

    async def kill(self, allocation_id: str) -> None:
        """End an allocation now, with every process it started; returns at once. Unknown or ended: does nothing."""

    async def terminate(self, allocation_id: str, grace: float) -> None:
        """Kill an allocation in ``grace`` seconds, unless it has ended by then; also if the master dies meanwhile."""

    def events(self) -> AsyncIterator[Ended]:
        """What has ended, as it happens. To be iterated by one task."""

    async def forget(self, allocation_id: str) -> None:
        """Delete what is kept of an allocation that has ended. Unknown: does nothing."""

    async def close(self) -> None:
        """Stop watching. Allocations go on; a later engine's :meth:`recover` finds them."""
