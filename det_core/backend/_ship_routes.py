"""How records get to a master: whole batches to one of ours, report by report to a foreign one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from det_core import _clock
from det_core._json import dump
from det_core.backend import _rest_bodies as bodies
from det_core.backend._rest_master import Master
from det_core.errors import MasterDenied, MasterError, MasterUnreachable, UnknownToMaster
from det_core.journal import Line
from det_core.protocol import MasterSession

logger = logging.getLogger("det_core.master")
FOREVER = float("inf")
Arrived = Callable[[Sequence[Line]], None]


class Refusal(NamedTuple):
    """A record that the master does not take, and why."""

    line: Line
    error: MasterError


class Carrier(Protocol):
    """Brings records to a master, in order, and takes as long as that takes."""

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: Arrived) -> list[Refusal]:
        """Bring ``lines``.

        Args:
            restart: of the journal.
            rank: of the journal.
            lines: in order.
            arrived: called with those that have, as soon as they have.

        Returns:
            Those that the master refuses for what they say.

        Raises:
            MasterUnreachable: the session was ended.
            MasterError: the master takes nothing from this process any more.
        """


class JournalCarrier:
    """Posts batches to ``/api/v1/journal``, which counts each record once, however often it comes.

    Args:
        session: Session with the master.
        trial_id: ID of the trial.
        trial_run_id: Number of its run.
        patience: Time during which a batch is sent again, in seconds.
        storage_id: The master's number of the storage of the run's checkpoints, if no allocation has chosen it.
    """

    def __init__(
        self,
        session: MasterSession,
        trial_id: int,
        trial_run_id: int,
        *,
        patience: float = FOREVER,
        storage_id: int | None = None,
    ) -> None:
        self._session = session
        self._patience = patience
        self._head = {"trialId": trial_id, "trialRunId": trial_run_id}
        if storage_id is not None:
            self._head["storageId"] = storage_id

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: Arrived) -> list[Refusal]:
        """Post a batch; a refused one in halves, until it is known which record it is."""
        head = {**self._head, "rank": rank, "restart": restart}
        body = dump(head)[:-1] + b',"records":[' + b",".join(line.text for line in lines) + b"]}"
        try:
            self._session.call("POST", "/api/v1/journal", body, timeout=self._patience, retry_server_errors=True)
        except MasterError as e:
            # Any other status is about the run, as 409 of one that has ended, and not about a record.
            if e.status not in (400, 413, 422):
                raise
            if len(lines) == 1:
                return [Refusal(lines[0], e)]
            half = len(lines) // 2
            refused = self.carry(restart, rank, lines[:half], arrived)
            return refused + self.carry(restart, rank, lines[half:], arrived)
        arrived(lines)
        return []


class ReportCarrier:
    """Posts report by report to a Determined master, by the routes of the wire contract §5; skips other records.

    Such a master refuses a report with batch metrics that it has already, so a refusal of a report that may have
    arrived before counts as an arrival.

    Args:
        session: Session with the master.
        trial_id: ID of the trial.
        trial_run_id: Number of its run.
        master: What the master says of itself.
        patience: Time during which a report is sent again, in seconds.
    """

    def __init__(
        self,
        session: MasterSession,
        trial_id: int,
        trial_run_id: int,
        master: Master,
        *,
        patience: float = FOREVER,
    ) -> None:
        self._session = session
        self._patience = patience
        self._trial_id = trial_id
        self._run_id = trial_run_id
        self._master = master
        self._begun: set[tuple[int, int]] = set()
        """Restart and rank of the journals of which this process has sent a report."""

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: Arrived) -> list[Refusal]:
        """Post one report after the other."""
        refused = []
        skipped: list[Line] = []
        for line in lines:
            send = self._ways().get(line.record["kind"])
            if send is None:
                skipped.append(line)
                continue
            # An earlier process may have sent a journal's first report, and died before it was noted.
            may_be_repeat = (restart, rank) not in self._begun
            self._begun.add((restart, rank))
            try:
                send(line.record)
            except MasterError as e:
                if self._over(e):
                    raise
                if not (e.status in (409, 500) and (may_be_repeat or e.maybe_applied)):
                    refused.append(Refusal(line, e))
                    continue
            arrived([*skipped, line])
            skipped = []
        if skipped:
            arrived(skipped)
        return refused

    def _ways(self) -> dict[str, Callable[[dict[str, Any]], None]]:
        return {"metrics": self._metrics, "progress": self._progress, "status": self._status}

    def _metrics(self, record: dict[str, Any]) -> None:
        self._call(self._route("metrics"), bodies.metrics(self._trial_id, self._run_id, record))

    def _progress(self, record: dict[str, Any]) -> None:
        body = bodies.progress(record["body"], self._master)
        if body is not None:
            self._call(self._route("progress"), body)

    def _status(self, record: dict[str, Any]) -> None:
        self._call(self._route("runner/metadata"), {"state": record["body"]["status"]})

    def _call(self, route: str, body: Any) -> Any:
        """Post; a 500, by which a foreign master also refuses, is tried again until it is known to be a refusal."""
        while True:
            try:
                return self._session.call("POST", route, body, timeout=self._patience)
            except MasterError as e:
                if e.status != 500 or self._works():
                    raise

    def _works(self) -> bool:
        """Whether the master can say something of the trial, so that a 500 was about the report. Waits until it can."""
        before = _clock.monotonic()
        self._session.call("GET", f"/api/v1/trials/{self._trial_id}", timeout=self._patience, retry_server_errors=True)
        return _clock.monotonic() - before < 1.0

    def _route(self, name: str) -> str:
        return f"/api/v1/trials/{self._trial_id}/{name}"

    @staticmethod
    def _over(error: MasterError) -> bool:
        """Whether the master takes nothing from here any more: no answer, no right, no trial, or another run of it."""
        if isinstance(error, (MasterUnreachable, MasterDenied, UnknownToMaster)):
            return True
        # Determined refuses a run that is not the latest by a 500, which only its words tell from a fault.
        return error.status >= 500 and "run id" in str(error).lower()
