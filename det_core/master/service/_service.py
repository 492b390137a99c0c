"""The service: its start and its stop, and calls of the API that are not yet functions of their topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from det_core._metadata import validate_metadata
from det_core.master._errors import Conflict, Invalid, NotFound
from det_core.master._settings import MasterSettings
from det_core.master.service import (
    _checkpoints,
    _create,
    _logs,
    _operations,
    _queries,
    _reports,
    _searches,
    _show_checkpoints,
    _show_experiments,
    _storages,
    _unmanaged,
)
from det_core.master.service._access import experiment_row, know_trial, trial_row
from det_core.master.service._actor import Actor, Transaction
from det_core.master.service._exits import log_mark
from det_core.master.service._hub import Hub
from det_core.master.service._listener import Ear
from det_core.master.service._recovery import reload, resume
from det_core.master.service._runner import Runner
from det_core.master.service._schedule import schedule
from det_core.master.service._search import settle
from det_core.master.service._views import CreatedView, MasterView
from det_core.master.store import experiments, key_values, trials
from det_core.master.store.allocations import alive

if TYPE_CHECKING:
    from det_core.master.engines import Engine
    from det_core.master.service._queries import MetricsReader
    from det_core.master.service._views import LogPage, OperationView, SearchView, StartView
    from det_core.master.store import Store
    from det_core.protocol.records import CheckpointView, ExperimentView, TrialView


class Service(Hub):
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
        super().__init__(store, engine, settings)
        self.runner = Runner(self)

    def _settle(self, tx: Transaction) -> None:
        settle(self, tx)

    def _conclude(self, tx: Transaction) -> None:
        schedule(self, tx)

    # lifecycle

    async def start(self) -> None:
        """Read what is in the store, adopt the allocations that still run, and go on."""
        self.actor = Actor(self.store, self._settle, self._conclude, partial(reload, self), self.subscriptions.publish)
        await reload(self)
        marks = await self.store.read(lambda conn: {a.id: key_values.get(conn, log_mark(a.id)) for a in alive(conn)})
        self.actor.start()
        await self.engine.recover(marks, Ear(self))
        self.runner.watch()
        await resume(self)

    async def stop(self) -> None:
        """Decide nothing more. Allocations go on; the next :meth:`start` finds them."""
        await self.actor.stop()
        self.subscriptions.close()
        await self.runner.stop()

    async def master(self) -> MasterView:
        """What clients are told of the master."""
        used = {slot for allocation in self.live.allocations.values() for slot in allocation.slot_ids}
        return MasterView(
            cluster_id=self.settings.cluster_id,
            cluster_name=self.settings.cluster_name,
            version=self.settings.version,
            slots=list(self.engine.pool.slot_ids),
            slots_in_use=sorted(used),
        )

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
        drafted = await _create.draft(self, config, context, overrides, unmanaged=unmanaged, keep=not validate_only)
        if validate_only:
            return CreatedView(experiment=_show_experiments.drafted(drafted.spec), warnings=list(drafted.spec.warnings))
        number = await _create.create(self, drafted, activate=activate, parent_id=parent_id, external_id=external_id)
        return CreatedView(experiment=await self.experiment(number), warnings=list(drafted.spec.warnings))

    async def put_experiment(
        self,
        external_id: str,
        config: str | Mapping[str, Any],
        *,
        unmanaged: bool = True,
        start_time: float | None = None,
    ) -> CreatedView:
        """The experiment of that external id, created if there is none. ``start_time``: when it began."""
        made = await self._put_experiment(external_id, config, unmanaged)
        if start_time is None or not made["experiment"].unmanaged:
            return made
        number = made["experiment"].id
        await self.store.write(lambda conn: experiments.change(conn, number, start_time=start_time))
        return CreatedView(experiment=await self.experiment(number), warnings=made["warnings"])

    async def _put_experiment(self, external_id: str, config: str | Mapping[str, Any], unmanaged: bool) -> CreatedView:
        row = await self.store.read(lambda conn: experiments.by_external_id(conn, external_id))
        if row is None:
            try:
                return await self.create_experiment(config, unmanaged=unmanaged, external_id=external_id)
            except Conflict:  # somebody else has just created it
                row = await self.store.read(lambda conn: experiments.by_external_id(conn, external_id))
        if row is None or row.state == "DELETED":
            raise Conflict(f"the experiment of the external id {external_id!r} was deleted; choose another one")
        return CreatedView(experiment=await self.experiment(row.id), warnings=list(row.warnings))

    async def experiments(
        self,
        *,
        states: Sequence[str] = (),
        labels: Sequence[str] = (),
        name: str | None = None,
        archived: bool | None = None,
        newest_first: bool = False,
        by_start: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ExperimentView]:
        """Experiments by their ids, or by when they started, without deleted ones; each filter must match."""
        views, _ = await _queries.find_experiments(
            self,
            states=states,
            labels=labels,
            name=name,
            archived=archived,
            newest_first=newest_first,
            by_start=by_start,
            limit=limit,
            offset=offset,
        )
        return views

    async def experiment(self, experiment_id: int) -> ExperimentView:
        """One experiment."""
        return await _queries.experiment(self, experiment_id)

    async def trials(self, experiment_id: int, *, states: Sequence[str] = ()) -> list[TrialView]:
        """Return the trials of an experiment by their IDs."""
        views, _ = await _queries.find_trials(self, experiment_id, states)
        return views

    async def page_of_trials(
        self, experiment_id: int, *, states: Sequence[str], best_first: bool, limit: int | None, offset: int
    ) -> tuple[list[TrialView], int]:
        """Return some trials of an experiment, and how many match."""
        return await _queries.find_trials(
            self, experiment_id, states, best_first=best_first, limit=limit, offset=offset
        )

    async def trial(self, trial_id: int, *, summarize: bool = False) -> TrialView:
        """Return one trial; ``summarize``: with the summary of its metrics."""
        return await _queries.trial(self, trial_id, summarize=summarize)

    async def wait_experiment(self, experiment_id: int, timeout: float) -> ExperimentView:
        """The experiment once it has ended, or as it is after ``timeout`` seconds."""
        return await _queries.wait(self, experiment_id, timeout)

    async def best_trial(self, experiment_id: int) -> TrialView | None:
        """The trial with the best searched metric."""
        return await _queries.best_trial(self, experiment_id)

    async def best_checkpoint(self, experiment_id: int) -> CheckpointView | None:
        """Of the checkpoints still there, that with the best searched metric at its step."""
        await experiment_row(self, experiment_id)
        return await self.store.read(lambda conn: _show_checkpoints.best(conn, experiment_id))

    async def best_validation(self, experiment_id: int) -> float:
        """The best value of the searched metric. Without validations: NotFound."""
        return await _queries.best_validation(self, experiment_id)

    async def search_state(self, experiment_id: int) -> SearchView:
        """Where the search stands."""
        return await _searches.state(self, experiment_id)

    async def context_archive(self, experiment_id: int) -> bytes:
        """The context directory as it was packed; empty if there was none."""
        return await _searches.context(self, experiment_id)

    async def task_context(self, task_id: str) -> bytes:
        """The context directory of a task's experiment, as it was packed."""
        row = await self.store.read(lambda conn: trials.by_task_id(conn, task_id))
        if row is None:
            raise NotFound(f"there is no task {task_id}")
        return await _searches.context(self, row.experiment_id)

    # what was recorded

    def metrics(
        self, trial_ids: Sequence[int], group: str | None = None, *, after: int = 0, archived: bool = False
    ) -> MetricsReader:
        """Return a reader of the rows of a group, or of all, after an ID; ``archived``: superseded ones too."""
        return _queries.MetricsReader(self.store, trial_ids, group, after=after, archived=archived)

    async def checkpoints(self, experiment_id: int) -> list[CheckpointView]:
        """All checkpoints of an experiment, newest first."""
        await experiment_row(self, experiment_id)
        views, _ = await _show_checkpoints.page(self, 2**31 - 1, 0, experiment_id=experiment_id)
        return views

    async def checkpoint(self, uuid: str) -> CheckpointView:
        """One checkpoint."""
        return await self.store.read(lambda conn: _show_checkpoints.one(conn, uuid))

    async def set_checkpoint_metadata(self, uuid: str, metadata: Mapping[str, Any]) -> CheckpointView:
        """Replace what the master answers as a checkpoint's metadata."""
        await _checkpoints.set_metadata(self, uuid, metadata)
        return await self.checkpoint(uuid)

    async def logs(self, trial_id: int, *, after: int = 0, limit: int = 1000, wait: float = 0.0) -> LogPage:
        """Lines of a trial's log with ids above ``after``; waits ``wait`` seconds for one, unless it has ended."""
        row = await trial_row(self, trial_id)
        return await _logs.page(self, row.task_id, after, limit, wait)

    async def logs_of_task(self, task_id: str, *, after: int = 0, limit: int = 1000, wait: float = 0.0) -> LogPage:
        """As :meth:`logs`, by task id."""
        return await _logs.page(self, task_id, after, limit, wait)

    # trials

    async def run_prepare(self, trial_id: int, storage: Mapping[str, Any] | None) -> int | None:
        """The id of a checkpoint storage (§5.1); equal ones have the same id. None without one."""
        await know_trial(self, trial_id)
        return None if storage is None else await _storages.choose(self, trial_id, storage)

    async def journal(
        self,
        trial_id: int,
        trial_run_id: int,
        rank: int,
        records: Sequence[Mapping[str, Any]],
        restart: int = 0,
        storage_id: int | None = None,
    ) -> int:
        """Take records of a process's journal, each counted once.

        Args:
            trial_id: the trial.
            trial_run_id: the attempt that wrote them.
            rank: the rank that wrote them.
            records: as they stand in the journal, in order.
            restart: the restart that the journal's name says.
            storage_id: Number of the storage of checkpoints that an unmanaged trial records.

        Returns:
            The sequence number to send next.

        Raises:
            Fenced: the attempt is over.
            Invalid: a record that is none, with its number.
        """
        return await _reports.journal(self, trial_id, trial_run_id, rank, records, restart, storage_id=storage_id)

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
        await _reports.report(
            self, trial_id, trial_run_id, group, steps_completed, avg_metrics, batch_metrics, report_time
        )

    async def progress(
        self, trial_id: int, value: float, *, is_raw: bool = False, allocation_id: str | None = None
    ) -> None:
        """Note progress: units trained by the trial, or with ``is_raw`` a fraction.

        ``allocation_id`` here and below: whose token was shown; one that has ended is Fenced.
        """
        await _operations.progress(self, trial_id, value, is_raw, allocation_id)

    async def set_status(self, trial_id: int, status: str, *, allocation_id: str | None = None) -> None:
        """Replace what is shown as the trial's doing."""
        await _reports.set_status(self, trial_id, status, allocation_id)

    async def set_metadata(
        self, trial_id: int, metadata: Mapping[str, Any], *, allocation_id: str | None = None
    ) -> dict[str, Any]:
        """Replace the run's metadata (§5.4) and return it. Beyond the limits: Invalid."""
        try:
            checked = validate_metadata(metadata)
        except (TypeError, ValueError) as e:
            raise Invalid(str(e)) from None
        await _reports.may_report(self, trial_id, allocation_id)
        await self.store.write(lambda conn: trials.set_metadata(conn, trial_id, checked))
        return checked

    async def get_metadata(self, trial_id: int) -> dict[str, Any]:
        """The run's metadata; {} if nothing was set."""
        await know_trial(self, trial_id)
        return await self.store.read(lambda conn: trials.metadata(conn, trial_id))

    async def early_exit(self, trial_id: int, reason: str, *, allocation_id: str | None = None) -> None:
        """Note that the trial gives up: EXITED_REASON_INVALID_HP, …_INIT_INVALID_HP or …_USER_REQUESTED_STOP."""
        await _operations.give_up(self, trial_id, reason, allocation_id)

    async def operation(self, trial_id: int, *, allocation_id: str | None = None) -> OperationView:
        """The trial's current operation. None at all yet, or an experiment without them: NotFound."""
        return await _operations.current(self, trial_id, allocation_id)

    async def complete_operation(
        self, trial_id: int, length: int, searcher_metric: Any, *, allocation_id: str | None = None
    ) -> None:
        """The operation of ``length`` is done. Another operation than the current one, or another metric: Conflict."""
        await _operations.complete(self, trial_id, length, searcher_metric, allocation_id)

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
            NotFound: If the task is not a trial.
            Fenced: the allocation is over.
            Conflict: another checkpoint has that uuid.
        """
        await _checkpoints.register(
            self,
            uuid,
            task_id,
            allocation_id=allocation_id,
            storage_id=storage_id,
            metadata=metadata,
            resources=resources,
            state=state,
            report_time=report_time,
        )

    async def patch_checkpoints(self, checkpoints: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        """Note what remains of checkpoints, in pairs of uuid and resources; without any it is DELETED."""
        await _checkpoints.patch(self, checkpoints)

    async def alert(self, experiment_id: int, trial_id: int | None, title: str, description: str, level: str) -> None:
        """Bring something to people's attention: it is written to the trial's log."""
        await _reports.alert(self, experiment_id, trial_id, title, description, level)

    async def trial_source_info(self, trial_id: int, checkpoint_uuid: str) -> None:
        """Accept that a trial uses a checkpoint."""
        await _checkpoints.use(self, trial_id, checkpoint_uuid)

    async def task_logs(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take log lines, in the shape of LogView without ``id``."""
        await _reports.task_logs(self, lines)

    # allocations

    # unmanaged trials (§9)

    async def create_trial(
        self, experiment_id: int, hparams: Mapping[str, Any], *, external_id: str | None = None
    ) -> TrialView:
        """A new trial of an unmanaged experiment."""
        return await self.trial(await _unmanaged.create(self, experiment_id, hparams, external_id))

    async def put_trial(
        self, experiment_id: int, external_id: str, hparams: Mapping[str, Any], *, start_time: float | None = None
    ) -> TrialView:
        """The trial of that external id, created if there is none. ``start_time``: when it began."""
        number = await _unmanaged.create(self, experiment_id, hparams, external_id)
        if start_time is not None:
            await self.store.write(lambda conn: trials.change(conn, number, start_time=start_time))
        return await self.trial(number)

    async def start_trial(self, trial_id: int, *, resume: bool) -> StartView:
        """Begin another attempt of an unmanaged trial. A started one without ``resume``: WrongState."""
        return await _unmanaged.start(self, trial_id, resume=resume)

    async def patch_trial(self, trial_id: int, *, state: str | None = None, end_time: float | None = None) -> TrialView:
        """A sign of life of an unmanaged trial, and perhaps its new state. ``end_time``: when it ended; None: now."""
        await _unmanaged.patch(self, trial_id, state, end_time)
        return await self.trial(trial_id)
