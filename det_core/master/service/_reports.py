"""Reports of trials: journals, metrics, status, log lines. Those that decide something go to ``_facts``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_core import _clock
from det_core._metadata import validate_metadata
from det_core.errors import StoreConflict
from det_core.master._errors import Conflict, Fenced, Invalid, is_content_error
from det_core.master.engines import LogLine
from det_core.master.service import _logs, _unmanaged
from det_core.master.service._access import check_run, experiment_row, know_trial, live_trial, trial_row
from det_core.master.service._facts import steer
from det_core.master.service._measured import VALIDATION, is_search
from det_core.master.store import change, ingest, models, trials

if TYPE_CHECKING:
    from det_core.master.service._live import LiveAllocation
    from det_core.master.service._state import ServiceState

LOG = logging.getLogger("det_core")


async def fence(service: ServiceState, trial_id: int, trial_run_id: int) -> None:
    """Make sure that a report comes from the attempt of a trial that runs.

    Raises:
        NotFound: If the trial does not exist.
        Fenced: the attempt is over.
        Invalid: there never was such an attempt.
    """
    trial = service.live.trials.get(trial_id)
    if trial is not None:
        check_run(trial, trial_run_id)
        return
    row = await trial_row(service, trial_id)
    if not row.unmanaged:
        raise Fenced(f"trial {trial_id} has ended")
    if row.run_id != trial_run_id:
        raise Fenced(f"trial {trial_id}: run {trial_run_id} is not the one that runs, which is {row.run_id}")


async def journal(
    service: ServiceState,
    trial_id: int,
    trial_run_id: int,
    rank: int,
    records: Sequence[Mapping[str, Any]],
    restart: int = 0,
    *,
    last_will: bool = False,
    storage_id: int | None = None,
) -> int:
    """Record what a process has written to its journal, each record once.

    Args:
        service: State of the service.
        trial_id: Trial.
        trial_run_id: Run that wrote the records.
        rank: Rank that wrote them.
        records: Records as they stand in the journal, in order.
        restart: Restart in the name of the journal.
        last_will: Whether the process is dead and left these: they count also where it would have asked.
        storage_id: Number of the storage of checkpoints that an unmanaged trial records.

    Returns:
        The sequence number to send next.

    Raises:
        Fenced: If the run is over.
        Invalid: If a record's content cannot be taken.
    """
    if not last_will:
        await fence(service, trial_id, trial_run_id)
    try:
        next_seq = await service.store.write(
            lambda session: ingest.insert_journal(session, trial_id, trial_run_id, rank, records, restart=restart)
        )
    except ValueError as e:
        raise Invalid(f"trial {trial_id}, journal of rank {rank}: {e}") from None
    # Repeats wake readers for nothing, which costs less than to find out.
    if any(record["kind"] == "metrics" for record in records):
        service.subscriptions.publish(("metrics", trial_id))
    if trial_id in service.live.trials:
        await _warn(service, trial_id, records)
        await steer(service, trial_id, f"run {trial_run_id}", records, last_will=last_will)
    else:
        await _unmanaged.apply_records(service, trial_id, records, storage_id)
    return next_seq


async def left_behind(
    service: ServiceState, allocation: LiveAllocation, rank: int, records: Sequence[Mapping[str, Any]], restart: int
) -> None:
    """Take records that a dead process left in its journal, and pass over those whose content cannot be taken.

    What is passed over is written to the trial's log, whole: its process is dead, and gets no answer.

    Raises:
        Exception: If our database, disk or network failed. The same records may be given again.
    """
    try:
        await journal(service, allocation.trial.id, allocation.row.run_id, rank, records, restart, last_will=True)
    except Exception as e:
        if not is_content_error(e):
            raise
        if len(records) > 1:
            # One bad record must not take the others with it; halving finds it in few transactions.
            half = len(records) // 2
            await left_behind(service, allocation, rank, records[:half], restart)
            await left_behind(service, allocation, rank, records[half:], restart)
            return
        reason = str(e)
        if "damaged" in records[0]:
            reason = "line is not a record"
        LOG.warning("allocation %s: ignoring a record of rank %d: %s", allocation.id, rank, reason)
        text = f"ignoring a record of rank {rank}, restart {restart}: {reason}: {json.dumps(records[0])}"
        await _write_log(service, allocation.trial.row.task_id, text)


async def report_metrics(
    service: ServiceState,
    trial_id: int,
    trial_run_id: int,
    group: str,
    steps_completed: int | None,
    avg_metrics: Mapping[str, Any],
    batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    report_time: float | None = None,
) -> None:
    """Record one report (§5.2).

    Raises:
        Fenced: If the run is over.
        Invalid: If the group, the step or a metric is unusable.
        Conflict: If a metric has another value already.
    """
    await fence(service, trial_id, trial_run_id)
    try:
        await service.store.write(
            lambda session: ingest.report(
                session, trial_id, trial_run_id, group, steps_completed, avg_metrics, batch_metrics, time=report_time
            )
        )
    except StoreConflict as e:
        raise Conflict(str(e)) from None
    except ValueError as e:
        raise Invalid(f"trial {trial_id}: {e}") from None
    service.subscriptions.publish(("metrics", trial_id))
    if group == VALIDATION and trial_id in service.live.trials:
        record = {"kind": "metrics", "group": group, "metrics": avg_metrics, "steps_completed": steps_completed}
        await _warn(service, trial_id, [record])
        await steer(service, trial_id, f"run {trial_run_id}", [record], last_will=False)


async def _warn(service: ServiceState, trial_id: int, records: Sequence[Mapping[str, Any]]) -> None:
    """Say in a trial's log, once for all of its search, that it does not report what the search goes by."""
    trial = service.live.trials.get(trial_id)
    if trial is None or not is_search(trial.experiment.spec):
        return
    warning = trial.experiment.measured.take_in(trial_id, records)
    if warning is None:
        return
    await _write_log(service, trial.row.task_id, warning)


async def _write_log(service: ServiceState, task_id: str, text: str) -> None:
    """Write a warning of the master to a trial's log."""
    line = LogLine(_clock.now(), "stderr", None, "WARNING", text + "\n", source="master")
    await _logs.append_own(service, task_id, line)


async def set_status(service: ServiceState, trial_id: int, status: str, *, allocation_id: str | None = None) -> None:
    """Replace the status line of a trial.

    Raises:
        NotFound: If the trial does not exist.
        Fenced: If the allocation whose token was shown has ended.
    """
    await _check_reporter(service, trial_id, allocation_id)
    await service.store.write(lambda session: change(session, models.Trial, trial_id, status=status))
    service.subscriptions.publish(("trial", trial_id))


async def set_metadata(
    service: ServiceState, trial_id: int, metadata: Mapping[str, Any], *, allocation_id: str | None = None
) -> dict[str, Any]:
    """Replace the metadata of a trial's run and return them (§5.4).

    Raises:
        NotFound: If the trial does not exist.
        Fenced: If the allocation whose token was shown has ended.
        Invalid: If the metadata exceed the limits.
    """
    try:
        checked = validate_metadata(metadata)
    except (TypeError, ValueError) as e:
        raise Invalid(str(e)) from None
    await _check_reporter(service, trial_id, allocation_id)
    await service.store.write(lambda session: trials.set_metadata(session, trial_id, checked))
    return checked


async def get_metadata(service: ServiceState, trial_id: int) -> dict[str, Any]:
    """Return the metadata of a trial's run; {} if none were set."""
    await know_trial(service, trial_id)
    return await service.store.read(lambda session: trials.metadata(session, trial_id))


async def _check_reporter(service: ServiceState, trial_id: int, allocation_id: str | None) -> None:
    """Check that a trial exists, and that the allocation that reports for it has not ended."""
    await know_trial(service, trial_id)
    if allocation_id is not None:
        live_trial(service, trial_id, allocation_id)


async def alert(
    service: ServiceState, experiment_id: int, trial_id: int | None, title: str, description: str, level: str
) -> None:
    """Write an alert to the log of its trial; to the master's own, where it names none."""
    await experiment_row(service, experiment_id)
    text = f"alert: {title}"
    if description:
        text += f": {description}"
    if trial_id is None:
        LOG.info("experiment %d: %s", experiment_id, text)
        return
    task_id = (await trial_row(service, trial_id)).task_id
    line = LogLine(_clock.now(), "stdout", None, level, text + "\n", source="alert")
    await _logs.append_own(service, task_id, line)
