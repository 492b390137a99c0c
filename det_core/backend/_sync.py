"""Bringing a run that lies on disk to a master: ``det-core sync``.

A bare run becomes an unmanaged experiment with one trial (wire contract, §9), by which both have the run's id as their
external id, and each of its restarts a run of that trial. A run under a master that could not bring all of its reports
there is carried on where it stopped. What has arrived is kept beside the journal, so that doing it again does nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from det_core import _clock
from det_core._info import canonical_url
from det_core._standalone.files import write_atomic
from det_core.backend import _rest_bodies as bodies
from det_core.backend._rest import Task
from det_core.backend._rest_master import Master, about
from det_core.backend._ship_routes import JournalCarrier, Refusal
from det_core.errors import MasterError, RunNotFound
from det_core.journal import Cursor, Line, RunSummary, open_cursors
from det_core.protocol import Credential, MasterSession

TASK = "task.json"
"""In the folder of a run under a master: what it did there."""
SEARCHER = {"name": "single", "metric": "unmanaged", "max_length": 100_000_000}
STATES = {"completed": "STATE_COMPLETED", "invalid_hp": "STATE_COMPLETED", "running": "STATE_RUNNING"}
"""What a run's state is called at the master; all others are errors there."""


@dataclass(frozen=True)
class Synced:
    """What was brought where.

    Attributes:
        experiment_id: the experiment at the master.
        trial_id: its trial.
        records: how many records arrived just now.
        refused: those that the master did not take, a line each.
        state: the state that the trial has now; empty where the master knows better.
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
    patience: float = 60.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Synced:
    """Bring a run to a master. Doing it again brings only what is new; an interrupted one is carried on.

    Args:
        folder: the run's folder.
        url: the master's address.
        token: the user's token there.
        cert_file: certificates to trust, or ``noverify``.
        cert_name: the name in the master's certificate.
        patience: seconds for which a master that does not answer is asked again.
        progress: called with the bytes of the journal that have arrived, and that there are.

    Raises:
        RunNotFound: there is no run in the folder.
        MasterError: If the master is not of det_core, does not answer, or takes nothing from here.
    """
    if not open_cursors(Path(folder)):
        raise RunNotFound(f"no reports of a run in {folder}")
    shown = [Credential("Authorization", token)] if token else []
    session = MasterSession(canonical_url(url), shown, cert_file=cert_file, cert_name=cert_name, timeout=patience)
    try:
        master = about(session)
        if not master.ours:
            raise MasterError(f"cannot sync to {session.url}: not a det_core master: runs stay on disk for one")
        sync = _Sync(Path(folder), session, master, progress)
        return sync.carry_on() if (Path(folder) / TASK).exists() else sync.bare()
    finally:
        session.close()


def write_task(folder: Path, url: str, cluster_id: str, task: Task) -> None:
    """Note in the folder of a run what it does for which master.

    Args:
        folder: the run's folder.
        url: the master's address.
        cluster_id: the name by which it is known again at another address.
        task: what the run does there.

    Raises:
        OSError: the disk refused.
    """
    facts = {"master_url": url, "cluster_id": cluster_id, **asdict(task)}
    write_atomic(folder / TASK, json.dumps(facts).encode())


class _Sync:
    """One run, on its way to one master."""

    def __init__(
        self, folder: Path, session: MasterSession, master: Master, progress: Callable[[int, int], None]
    ) -> None:
        self._folder = folder
        self._session = session
        self._master = master
        self._progress = progress
        self._cursors: list[Cursor] = []
        self._records = 0
        self._refused: list[Refusal] = []

    def carry_on(self) -> Synced:
        """What a run under a master has left."""
        found = json.loads((self._folder / TASK).read_bytes())
        url, cluster = found.pop("master_url"), found.pop("cluster_id")
        task = Task(**found)
        self._cursors = open_cursors(self._folder, to=f"{url} {task.allocation_id}", run_id=task.allocation_id)
        if not any(cursor.count_remaining() for cursor in self._cursors):
            return self._result(task.experiment_id, task.trial_id, "")
        if cluster != self._master.cluster_id:
            raise MasterError(
                f"the reports in {self._folder} belong to trial {task.trial_id} of the master at {url}, cluster "
                f"{cluster}: {self._session.url} is cluster {self._master.cluster_id}"
            )
        self._bring(self._cursors, task.trial_id, task.trial_run_id, None)
        return self._result(task.experiment_id, task.trial_id, "")

    def bare(self) -> Synced:
        """A bare run, as an unmanaged trial."""
        run = RunSummary(self._folder)
        experiment_id = self._experiment(run)
        trial_id = self._trial(run, experiment_id)
        to = f"{self._master.cluster_id or self._session.url} {trial_id}"
        self._cursors = open_cursors(self._folder, name="synced", to=to)
        known = _Runs(self._folder / "synced.json", to)
        for restart in sorted({cursor.restart for cursor in self._cursors}):
            number = known.get(restart)
            if number is None:
                # Kept at once: to start it again would make another run of the trial.
                number = known.put(restart, self._start(trial_id))
            own = [cursor for cursor in self._cursors if cursor.restart == restart]
            if any(cursor.count_remaining() for cursor in own):
                self._bring(own, trial_id, number, self._storage(trial_id, restart))
        state = STATES.get(run.state, "STATE_ERROR")
        body = {"trialId": trial_id, "state": state, **self._ended(run)}
        self._session.call("PATCH", f"/api/v1/trials/{trial_id}", body)
        return self._result(experiment_id, trial_id, state)

    def _bring(self, own: Sequence[Cursor], trial_id: int, run_id: int, storage_id: int | None) -> None:
        timeout = self._session.timeout
        carrier = JournalCarrier(self._session, trial_id, run_id, patience=timeout, storage_id=storage_id)
        for cursor in own:
            arrived = partial(self._arrived, cursor)
            while lines := cursor.read():
                refused = carrier.carry(cursor.restart, cursor.rank, lines, arrived)
                self._refused += refused
                # The master would refuse them again.
                cursor.advance(refusal.line for refusal in refused)
            cursor.save()
        self._tell()

    def _arrived(self, cursor: Cursor, lines: Sequence[Line]) -> None:
        cursor.advance(lines)
        cursor.save()
        self._records += len(lines)
        self._tell()

    def _tell(self) -> None:
        total = sum(os.path.getsize(path) for path in self._folder.glob("journal-*.jsonl"))
        self._progress(min(sum(cursor.offset for cursor in self._cursors), total), total)

    def _experiment(self, run: RunSummary) -> int:
        config: dict[str, Any] = {"name": run.name or run.run_id, "searcher": SEARCHER, "labels": ["det-core sync"]}
        if argv := run.argv:
            config["description"] = " ".join(argv)[:1000]
        body = {"config": json.dumps(config), "unmanaged": True, **self._began(run)}
        route = f"/api/v1/experiments/by-external-id/{quote(run.run_id, safe='')}"
        return int(self._session.call("PUT", route, body)["experiment"]["id"])

    def _trial(self, run: RunSummary, experiment_id: int) -> int:
        request = {"experimentId": experiment_id, "hparams": {}, "unmanaged": True}
        body = {"createTrialRequest": request, "externalTrialId": run.run_id, **self._began(run)}
        return int(self._session.call("PUT", "/api/v1/trials", body)["trial"]["id"])

    def _began(self, run: RunSummary) -> dict[str, str]:
        """Return when the run began."""
        return {"startTime": _clock.iso(run.created)} if run.created else {}

    def _ended(self, run: RunSummary) -> dict[str, str]:
        """Return when the run ended."""
        return {} if run.ended is None else {"endTime": _clock.iso(run.ended)}

    def _start(self, trial_id: int) -> int:
        body = {"trialId": trial_id, "resume": True}
        return int(self._session.call("POST", f"/api/v1/trials/{trial_id}/start", body)["trialRunId"])

    def _storage(self, trial_id: int, restart: int) -> int | None:
        """The master's number of where this restart has put its checkpoints."""
        from det_core.journal import read_run

        said = [r.get("storage") for r in read_run(self._folder).records("run_start") if r.restart == restart]
        chosen = next((s for s in said if s is not None), str(self._folder.absolute() / "checkpoints"))
        body = {"runId": trial_id, "checkpointStorage": bodies.storage_settings(chosen, foreign=False)}
        found = self._session.call("POST", "/api/v1/runs/start", body).get("storageId")
        return None if found is None else int(found)

    def _result(self, experiment_id: int, trial_id: int, state: str) -> Synced:
        refused = tuple(str(refusal.error) for refusal in self._refused)
        return Synced(experiment_id, trial_id, self._records, refused, state)


class _Runs:
    """Which run of the trial a restart became at the master."""

    def __init__(self, path: Path, to: str) -> None:
        self._path, self._to = path, to
        self._runs: dict[str, int] = {}
        try:
            found = json.loads(path.read_bytes())
            if found["to"] == to:
                self._runs = {str(restart): int(number) for restart, number in found["runs"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass

    def get(self, restart: int) -> int | None:
        """Its number; None: it was not begun."""
        return self._runs.get(str(restart))

    def put(self, restart: int, number: int) -> int:
        """Keep it."""
        self._runs[str(restart)] = number
        write_atomic(self._path, json.dumps({"to": self._to, "runs": self._runs}).encode())
        return number
