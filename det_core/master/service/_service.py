"""The service: every call of the API, each handed to the part that knows its idea."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_core.master._settings import MasterSettings

if TYPE_CHECKING:
    from det_core.master.engines import Engine
    from det_core.master.service._views import (
        CheckpointView,
        CreatedView,
        EventView,
        ExperimentView,
        LogPage,
        MasterView,
        MetricView,
        OperationView,
        RendezvousView,
        SearchView,
        StartView,
        TokenView,
        TrialView,
    )
    from det_core.master.store import Store


class Service:
    """Turns requests and events into decisions, records each in the store, then acts on it.

    Every method may be called at any time on the loop that :meth:`start` ran on. What a method answers is in the
    store already. Each raises a MasterError that says what is wrong; a repeat of a request that was carried out
    changes nothing and gets the same answer.

    Args:
        store: an open store; the service does not close it.
        engine: what runs allocations.
        settings: where the master is, and what it is called.
    """

    def __init__(self, store: Store, engine: Engine, settings: MasterSettings) -> None:
        raise NotImplementedError

    # lifecycle

    async def start(self) -> None:
        """Read what is in the store, adopt the allocations that still run, and go on."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Decide nothing more. Allocations go on; the next :meth:`start` finds them."""
        raise NotImplementedError

    async def master(self) -> MasterView:
        """What clients are told of the master."""
        raise NotImplementedError

    async def identify(self, token: str) -> TokenView | None:
        """Whom an allocation's token belongs to; None if it is none, or its allocation has ended."""
        raise NotImplementedError

    # experiments

    async def create_experiment(
        self,
        config: str | Mapping[str, Any],
        context: bytes | None = None,
        *,
        activate: bool = True,
        validate_only: bool = False,
        unmanaged: bool = False,
        parent_id: int | None = None,
        external_id: str | None = None,
        overrides: Sequence[str] = (),
    ) -> CreatedView:
        """Create an experiment.

        Args:
            config: the configuration, as text (YAML or JSON) or read already.
            context: the packed context directory (tar, gzipped).
            activate: whether it starts at once; else it is PAUSED.
            validate_only: only look whether it could be created.
            unmanaged: its trials are run by others (§9).
            parent_id: the experiment that it was derived from.
            external_id: a name of the caller's; another experiment of this name is a Conflict.
            overrides: changes of the configuration, as ``a.b=v``.

        Raises:
            Invalid: mistakes in the configuration, all of them in ``errors``; or an unusable archive.
            NotFound: a warm start from a trial or checkpoint that there is not.
        """
        raise NotImplementedError

    async def put_experiment(self, external_id: str, config: str | Mapping[str, Any], *, unmanaged: bool = True) -> CreatedView:
        """The experiment of that external id, created if there is none."""
        raise NotImplementedError

    async def experiments(
        self,
        *,
        states: Sequence[str] = (),
        labels: Sequence[str] = (),
        name: str | None = None,
        archived: bool | None = None,
        newest_first: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ExperimentView]:
        """Experiments by their ids, without deleted ones; each filter that is given must match."""
        raise NotImplementedError

    async def experiment(self, experiment_id: int) -> ExperimentView:
        """One experiment."""
        raise NotImplementedError

    async def trials(self, experiment_id: int, *, states: Sequence[str] = ()) -> list[TrialView]:
        """The trials of an experiment, by their ids."""
        raise NotImplementedError

    async def trial(self, trial_id: int) -> TrialView:
        """One trial."""
        raise NotImplementedError

    async def activate(self, experiment_id: int) -> None:
        """Let a paused experiment go on. An active one stays so; an ended one is a WrongState."""
        raise NotImplementedError

    async def pause(self, experiment_id: int) -> None:
        """Have all trials save and stop, to go on at :meth:`activate`."""
        raise NotImplementedError

    async def cancel(self, experiment_id: int) -> None:
        """Have all trials save and stop, for good. An ended experiment stays as it is."""
        raise NotImplementedError

    async def kill(self, experiment_id: int) -> None:
        """Kill all trials, for good. An ended experiment stays as it is."""
        raise NotImplementedError

    async def kill_trial(self, trial_id: int) -> None:
        """Kill one trial, for good; the search is told that it was canceled."""
        raise NotImplementedError

    async def archive(self, experiment_id: int) -> None:
        """Put an ended experiment aside."""
        raise NotImplementedError

    async def unarchive(self, experiment_id: int) -> None:
        """Undo :meth:`archive`."""
        raise NotImplementedError

    async def delete_experiment(self, experiment_id: int) -> None:
        """Delete an ended experiment with its checkpoints, metrics and logs. They go in the background: see its state."""
        raise NotImplementedError

    async def continue_experiment(self, experiment_id: int, override: str | None = None) -> ExperimentView:
        """Go on with an ended experiment (§10): incomplete trials resume from their latest checkpoints.

        Args:
            experiment_id: the experiment, which must have ended.
            override: configuration text laid over its own; the search itself cannot be changed, but for longer training
                of a single trial.

        Raises:
            WrongState: it has not ended, or its search of several trials is complete.
        """
        raise NotImplementedError

    async def patch_experiment(
        self,
        experiment_id: int,
        *,
        name: str | None = None,
        description: str | None = None,
        labels: Sequence[str] | None = None,
        priority: int | None = None,
        checkpoint_storage: Mapping[str, Any] | None = None,
    ) -> ExperimentView:
        """Change what is given. ``checkpoint_storage`` takes the save_… counts alone, which are applied at once if it has ended."""
        raise NotImplementedError

    async def set_priority(self, experiment_id: int, priority: int) -> None:
        """Change the priority, 1 (first) to 99."""
        raise NotImplementedError

    async def wait_experiment(self, experiment_id: int, timeout: float) -> ExperimentView:
        """The experiment once it has ended, or as it is after ``timeout`` seconds."""
        raise NotImplementedError

    async def best_trial(self, experiment_id: int) -> TrialView | None:
        """The trial with the best searched metric."""
        raise NotImplementedError

    async def best_checkpoint(self, experiment_id: int) -> CheckpointView | None:
        """Of the checkpoints still there, that with the best searched metric at its step."""
        raise NotImplementedError

    async def best_validation(self, experiment_id: int) -> float:
        """The best value of the searched metric. Without validations: NotFound."""
        raise NotImplementedError

    async def search_state(self, experiment_id: int) -> SearchView:
        """Where the search stands."""
        raise NotImplementedError

    async def context_archive(self, experiment_id: int) -> bytes:
        """The context directory as it was packed; empty if there was none."""
        raise NotImplementedError

    async def task_context(self, task_id: str) -> bytes:
        """The context directory of a task's experiment, as it was packed."""
        raise NotImplementedError

    async def searcher_events(self, experiment_id: int, timeout: float) -> list[EventView]:
        """For a searcher that runs elsewhere (§12.8): events not yet answered; waits for one up to ``timeout`` seconds."""
        raise NotImplementedError

    async def searcher_operations(self, experiment_id: int, triggered_by: int | None, operations: Sequence[Mapping[str, Any]]) -> None:
        """Take the decisions of a searcher that runs elsewhere (§12.8).

        Args:
            experiment_id: its experiment, whose searcher is ``custom``.
            triggered_by: the id of the event that they answer; it and those before it are done with.
            operations: as on the wire, in camelCase: ``createTrial``, ``trialOperation``, ….
        """
        raise NotImplementedError

    # what was recorded

    async def metrics(
        self, trial_ids: Sequence[int], group: str | None = None, *, after: int = 0, limit: int | None = None,
        archived: bool = False
    ) -> list[MetricView]:
        """Rows of the group (None: of all groups), by id from ``after`` on; ``archived``: superseded ones too."""
        raise NotImplementedError

    async def checkpoints(self, experiment_id: int) -> list[CheckpointView]:
        """All checkpoints of an experiment, newest first."""
        raise NotImplementedError

    async def trial_checkpoints(self, trial_id: int) -> list[CheckpointView]:
        """All checkpoints of a trial, newest first."""
        raise NotImplementedError

    async def checkpoint(self, uuid: str) -> CheckpointView:
        """One checkpoint."""
        raise NotImplementedError

    async def set_checkpoint_metadata(self, uuid: str, metadata: Mapping[str, Any]) -> CheckpointView:
        """Replace what the master answers as a checkpoint's metadata."""
        raise NotImplementedError

    async def delete_checkpoints(self, uuids: Sequence[str], globs: Sequence[str] = ("**/*",)) -> None:
        """Delete checkpoints, or the files in them that match, from their storage. Returns when that is recorded; deletion goes on."""
        raise NotImplementedError

    async def logs(self, trial_id: int, *, after: int = 0, limit: int = 1000, wait: float = 0.0) -> LogPage:
        """Lines of a trial's log with ids above ``after``; waits up to ``wait`` seconds for the first one, unless the trial has ended."""
        raise NotImplementedError

    async def logs_of_task(self, task_id: str, *, after: int = 0, limit: int = 1000, wait: float = 0.0) -> LogPage:
        """As :meth:`logs`, by task id."""
        raise NotImplementedError

    # trials

    async def run_prepare(self, trial_id: int, storage: Mapping[str, Any] | None) -> int | None:
        """The id of a checkpoint storage (§5.1); equal ones have the same id. None without one."""
        raise NotImplementedError

    async def journal(
        self, trial_id: int, trial_run_id: int, rank: int, records: Sequence[Mapping[str, Any]], restart: int = 0
    ) -> int:
        """Take records of a process's journal, each counted once.

        Args:
            trial_id: the trial.
            trial_run_id: the attempt that wrote them.
            rank: the rank that wrote them.
            records: as they stand in the journal, in order.
            restart: the restart that the journal's name says.

        Returns:
            The sequence number to send next.

        Raises:
            Fenced: the attempt is over.
            Invalid: a record that is none, with its number.
        """
        raise NotImplementedError

    async def report_metrics(
        self,
        trial_id: int,
        trial_run_id: int,
        group: str,
        steps_completed: int | None,
        avg_metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
        report_time: float | None = None,
    ) -> None:
        """Take one report (§5.2).

        Raises:
            Fenced: the attempt is over.
            Invalid: no usable group, step or metric.
            Conflict: a key that has another value already.
        """
        raise NotImplementedError

    async def progress(self, trial_id: int, value: float, *, is_raw: bool = False, allocation_id: str | None = None) -> None:
        """Note progress: units trained by the trial, or with ``is_raw`` a fraction. ``allocation_id``: whose token was shown."""
        raise NotImplementedError

    async def set_status(self, trial_id: int, status: str, *, allocation_id: str | None = None) -> None:
        """Replace what is shown as the trial's doing."""
        raise NotImplementedError

    async def set_metadata(self, trial_id: int, metadata: Mapping[str, Any], *, allocation_id: str | None = None) -> dict[str, Any]:
        """Replace the run's metadata (§5.4) and return it. Beyond the limits: Invalid."""
        raise NotImplementedError

    async def get_metadata(self, trial_id: int) -> dict[str, Any]:
        """The run's metadata; {} if nothing was set."""
        raise NotImplementedError

    async def early_exit(self, trial_id: int, reason: str, *, allocation_id: str | None = None) -> None:
        """Note that the trial gives up: INVALID_HP, INIT_INVALID_HP or USER_REQUESTED_STOP, with or without EXITED_REASON_."""
        raise NotImplementedError

    async def operation(self, trial_id: int, *, allocation_id: str | None = None) -> OperationView:
        """The trial's current operation. None at all yet, or an experiment without them: NotFound."""
        raise NotImplementedError

    async def complete_operation(self, trial_id: int, length: int, searcher_metric: Any, *, allocation_id: str | None = None) -> None:
        """The operation of ``length`` is done. Another operation than the current one, or another metric: Conflict."""
        raise NotImplementedError

    async def register_checkpoint(
        self,
        uuid: str,
        task_id: str,
        *,
        allocation_id: str | None = None,
        storage_id: int | None = None,
        metadata: Mapping[str, Any],
        resources: Mapping[str, int],
        state: str = "COMPLETED",
        report_time: float | None = None,
    ) -> None:
        """Note a checkpoint that is complete in its storage (§5.7).

        Raises:
            Invalid: no steps_completed in the metadata, or another state than COMPLETED.
            NotFound: the task is no trial.
            Fenced: the allocation is over.
            Conflict: another checkpoint has that uuid.
        """
        raise NotImplementedError

    async def patch_checkpoints(self, checkpoints: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        """Note what remains of checkpoints, as pairs of uuid and resources: nothing is DELETED, less PARTIALLY_DELETED."""
        raise NotImplementedError

    async def alert(self, experiment_id: int, trial_id: int | None, title: str, description: str, level: str) -> None:
        """Bring something to people's attention: it is written to the trial's log."""
        raise NotImplementedError

    async def trial_source_info(self, trial_id: int, checkpoint_uuid: str, kind: str) -> None:
        """Note that a trial uses a checkpoint."""
        raise NotImplementedError

    async def task_logs(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take log lines, in the shape of LogView without ``id``."""
        raise NotImplementedError

    # allocations

    async def preemption(self, allocation_id: str, timeout: float) -> bool:
        """Whether the allocation is to stop; waits up to ``timeout`` seconds for that. One that has ended: False at once."""
        raise NotImplementedError

    async def ack_preemption(self, allocation_id: str) -> None:
        """The process has noticed, and is about to exit."""
        raise NotImplementedError

    async def pending_preemption(self, allocation_id: str) -> None:
        """Whoever lent the machine wants it back: have the trial save and stop; it runs again elsewhere."""
        raise NotImplementedError

    async def rendezvous(self, allocation_id: str, resources_id: str) -> RendezvousView:
        """The addresses of all peers, once all have started."""
        raise NotImplementedError

    async def all_gather(self, allocation_id: str, request_uuid: str, num_peers: int, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each of ``num_peers`` has sent, once all have."""
        raise NotImplementedError

    async def notify_container_running(self, allocation_id: str, request_uuid: str, num_peers: int, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Note that a container runs."""
        raise NotImplementedError

    async def accelerator_data(self, allocation_id: str, data: Mapping[str, Any]) -> None:
        """Note what accelerators an allocation has."""
        raise NotImplementedError

    async def proxy_address(self, allocation_id: str, address: str) -> None:
        """Note where an allocation is reached."""
        raise NotImplementedError

    async def daemon(self, allocation_id: str, resources_id: str) -> None:
        """Note that this container may be killed once the others are done."""
        raise NotImplementedError

    async def ready(self, allocation_id: str) -> None:
        """The allocation is ready."""
        raise NotImplementedError

    async def waiting(self, allocation_id: str) -> None:
        """The allocation waits."""
        raise NotImplementedError

    # unmanaged trials (§9)

    async def create_trial(self, experiment_id: int, hparams: Mapping[str, Any], *, external_id: str | None = None) -> TrialView:
        """A new trial of an unmanaged experiment."""
        raise NotImplementedError

    async def put_trial(self, experiment_id: int, external_id: str, hparams: Mapping[str, Any]) -> TrialView:
        """The trial of that external id, created if there is none."""
        raise NotImplementedError

    async def start_trial(self, trial_id: int, *, resume: bool) -> StartView:
        """Begin another attempt of an unmanaged trial. A started one without ``resume``: WrongState."""
        raise NotImplementedError

    async def patch_trial(self, trial_id: int, *, state: str | None = None) -> TrialView:
        """A sign of life of an unmanaged trial, and perhaps its new state."""
        raise NotImplementedError
