"""``det-core sync``: send a run that has ended to a master.

A bare run becomes an unmanaged experiment with one trial (wire contract, §9), by which both have the run's ID as their
external ID, and each of its restarts a run of that trial. A run under a master that could not send all of its reports
is continued where it stopped. The position is kept beside the journal, so that a second call sends nothing twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from det_core import _clock
from det_core._info import canonical_url
from det_core._standalone.files import write_atomic
from det_core.backend._master import MasterInfo, get_master_info, storage_settings
from det_core.backend._rest import Task
from det_core.backend._shipper import BatchSender, Refusal, send_journal
from det_core.errors import MasterError, RunError, RunNotFound
from det_core.journal import Cursor, Line, RunSummary, open_cursors, read_run
from det_core.protocol import MasterSession

TASK = "task.json"
"""File in the directory of a run under a master: its work there."""
POSITIONS = "synced.json"
"""File in the directory of a bare run: its restarts at a master."""
SEARCHER = {"name": "single", "metric": "unmanaged", "max_length": 100_000_000}
STATES = {"completed": "STATE_COMPLETED", "invalid_hp": "STATE_COMPLETED"}
"""State of a run to that of its trial at the master; all others are errors there."""
MAX_DESCRIPTION = 1000


@dataclass(frozen=True)
class Synced:
    """Result of :func:`sync_run`.

    Attributes:
        experiment_id: ID of the experiment at the master.
        trial_id: ID of its trial.
        records: Number of records sent by this call.
        refused: Errors of those that the master has refused.
        state: State of the trial; empty where the master knows better.
    """

    experiment_id: int
    trial_id: int
    records: int
    refused: tuple[str, ...]
    state: str


def sync_run(
    folder: Path,
    url: str,
    token: str | None = None,
    *,
    cert_file: str | None = None,
    cert_name: str | None = None,
    timeout: float = 60.0,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Synced:
    """Send a run that has ended to a master. A second call sends the rest, or what was added by a resume.

    Args:
        folder: Directory of the run.
        url: Address of the master.
        token: Token of the user there.
        cert_file: Certificates to trust, or ``noverify``.
        cert_name: Name in the master's certificate.
        timeout: Time during which a request that is not answered is sent again, in seconds.
        on_bytes: Called with the number of bytes of the journal that have arrived since the last call.

    Raises:
        RunNotFound: If the directory holds no run.
        RunError: If a process is writing the run.
        MasterError: If the master is not of det_core, does not answer, or takes nothing from here.
    """
    if not open_cursors(folder):
        raise RunNotFound(f"no reports of a run in {folder}")
    if RunSummary(folder).live:
        raise RunError(f"cannot sync {folder.name}: it is running; sync it after its end")
    session = MasterSession(
        canonical_url(url), user_token=token, cert_file=cert_file, cert_name=cert_name, timeout=timeout
    )
    try:
        master = get_master_info(session)
        if not master.is_det_core:
            raise MasterError(f"cannot sync to {session.url}: not a det_core master: runs stay on disk for one")
        sync = _Sync(folder, session, master, on_bytes)
        if (folder / TASK).exists():
            return sync.send_rest()
        return sync.send_bare_run()
    finally:
        session.close()


def write_task(folder: Path, url: str, cluster_id: str, task: Task) -> None:
    """Record in the directory of a run its work for a master.

    Args:
        folder: Directory of the run.
        url: Address of the master.
        cluster_id: ID by which it is known again at another address.
        task: Work of the run there.

    Raises:
        OSError: If the file cannot be written.
    """
    record = {"master_url": url, "cluster_id": cluster_id, **asdict(task)}
    write_atomic(folder / TASK, json.dumps(record).encode())


class _Sync:
    """One run, on its way to one master."""

    def __init__(
        self, folder: Path, session: MasterSession, master: MasterInfo, on_bytes: Callable[[int], None]
    ) -> None:
        self._folder = folder
        self._session = session
        self._master = master
        self._on_bytes = on_bytes
        self._records = 0
        self._refusals: list[Refusal] = []

    def send_rest(self) -> Synced:
        """Send what a run under a master has left."""
        record = json.loads((self._folder / TASK).read_bytes())
        url = record.pop("master_url")
        cluster = record.pop("cluster_id")
        task = Task(**{field.name: record[field.name] for field in fields(Task)})
        cursors = open_cursors(self._folder, to=f"{url} {task.allocation_id}", run_id=task.allocation_id)
        if not any(cursor.count_remaining() for cursor in cursors):
            return self._result(task.experiment_id, task.trial_id, "")
        if cluster != self._master.cluster_id:
            raise MasterError(
                f"the reports in {self._folder} belong to trial {task.trial_id} of the master at {url}, cluster "
                f"{cluster}: {self._session.url} is cluster {self._master.cluster_id}"
            )
        self._send(cursors, task.trial_id, task.trial_run_id, None)
        return self._result(task.experiment_id, task.trial_id, "")

    def send_bare_run(self) -> Synced:
        """Send a bare run as an unmanaged trial."""
        run = RunSummary(self._folder)
        experiment_id, trial_id = self._register(run)
        to = f"{self._master.cluster_id or self._session.url} {trial_id}"
        cursors = open_cursors(self._folder, name="synced", to=to)
        numbers = _read_positions(self._folder / POSITIONS, to)
        for restart in sorted({cursor.restart for cursor in cursors}):
            if str(restart) not in numbers:
                start = {"trialId": trial_id, "resume": True}
                answer = self._session.call("POST", f"/api/v1/trials/{trial_id}/start", start)
                numbers[str(restart)] = int(answer["trialRunId"])
                # Kept at once: to start it again would make another run of the trial.
                write_atomic(self._folder / POSITIONS, json.dumps({"to": to, "runs": numbers}).encode())
            own = [cursor for cursor in cursors if cursor.restart == restart]
            if any(cursor.count_remaining() for cursor in own):
                self._send(own, trial_id, numbers[str(restart)], self._storage(trial_id, restart))
        state = STATES.get(run.state, "STATE_ERROR")
        body = {"trialId": trial_id, "state": state}
        if run.ended is not None:
            body["endTime"] = _clock.iso(run.ended)
        self._session.call("PATCH", f"/api/v1/trials/{trial_id}", body)
        return self._result(experiment_id, trial_id, state)

    def _send(self, own: Sequence[Cursor], trial_id: int, run_id: int, storage_id: int | None) -> None:
        timeout = self._session.timeout
        sender = BatchSender(self._session, trial_id, run_id, timeout=timeout, storage_id=storage_id)
        for cursor in own:
            self._refusals += send_journal(cursor, sender, partial(self._on_acked, cursor))

    def _on_acked(self, cursor: Cursor, lines: Sequence[Line]) -> None:
        before = cursor.offset
        cursor.advance(lines)
        cursor.save()
        self._records += len(lines)
        self._on_bytes(cursor.offset - before)

    def _register(self, run: RunSummary) -> tuple[int, int]:
        """Return the IDs of the experiment and the trial of a bare run, which exist from the first call on."""
        start = {}
        if run.created:
            start["startTime"] = _clock.iso(run.created)
        config: dict[str, Any] = {"name": run.name or run.run_id, "searcher": SEARCHER}
        if argv := run.argv:
            config["description"] = " ".join(argv)[:MAX_DESCRIPTION]
        body: dict[str, Any] = {"config": json.dumps(config), "unmanaged": True, **start}
        route = f"/api/v1/experiments/by-external-id/{quote(run.run_id, safe='')}"
        experiment_id = int(self._session.call("PUT", route, body)["experiment"]["id"])
        request = {"experimentId": experiment_id, "hparams": {}, "unmanaged": True}
        body = {"createTrialRequest": request, "externalTrialId": run.run_id, **start}
        return experiment_id, int(self._session.call("PUT", "/api/v1/trials", body)["trial"]["id"])

    def _storage(self, trial_id: int, restart: int) -> int | None:
        """Return the master's number of the storage in which this restart has its checkpoints."""
        starts = (r for r in read_run(self._folder).records("run_start") if r.restart == restart)
        default = str(self._folder.absolute() / "checkpoints")
        chosen = next((r["storage"] for r in starts if r.get("storage") is not None), default)
        body = {"runId": trial_id, "checkpointStorage": storage_settings(chosen, is_determined=False)}
        number = self._session.call("POST", "/api/v1/runs/start", body).get("storageId")
        return None if number is None else int(number)

    def _result(self, experiment_id: int, trial_id: int, state: str) -> Synced:
        errors = tuple(str(refusal.error) for refusal in self._refusals)
        return Synced(experiment_id, trial_id, self._records, errors, state)


def _read_positions(path: Path, to: str) -> dict[str, int]:
    """Return the number of the trial's run for each restart that was sent to this trial."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}  # none yet, or damaged: then the restarts are sent as further runs
    if record["to"] != to:
        return {}
    return dict(record["runs"])
