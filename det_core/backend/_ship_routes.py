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
        session: talks to the master.
        trial_id: the trial.
        trial_run_id: which run of it.
        patience: seconds for which a batch is sent again.
    """

    def __init__(self, session: MasterSession, trial_id: int, trial_run_id: int, *, patience: float = FOREVER) -> None:
        self._session, self._patience = session, patience
        self._trial_id, self._run_id = trial_id, trial_run_id

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: Arrived) -> list[Refusal]:
        """Post a batch; a refused one in halves, until it is known which record it is."""
        head = {"trialId": self._trial_id, "trialRunId": self._run_id, "rank": rank, "restart": restart}
        body = dump(head)[:-1] + b',"records":[' + b",".join(line.text for line in lines) + b"]}"
        try:
            self._session.call("POST", "/api/v1/journal", body, timeout=self._patience, retry_server_errors=True)
        except MasterError as e:
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
    """Posts report by report, by the routes of the wire contract §5. What is no report is passed over.

    Args:
        session: talks to the master.
        trial_id: the trial.
        trial_run_id: which run of it.
        master: which master it is.
        patience: seconds for which a report is sent again.
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
        self._session, self._patience = session, patience
        self._begun: set[tuple[int, int]] = set()
        self._doubt = False
        self._trial_id, self._run_id, self._master = trial_id, trial_run_id, master

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: Arrived) -> list[Refusal]:
        """Post one after the other."""
        refused = []
        passed: list[Line] = []
        for line in lines:
            send = self._ways().get(line.record["kind"])
            if send is None:
                passed.append(line)
                continue
            self._doubt = (restart, rank) not in self._begun  # an earlier process may have sent it, and died
            self._begun.add((restart, rank))
            try:
                send(line.record)
            except MasterError as e:
                if self._over(e):
                    raise
                refused.append(Refusal(line, e))
                continue
            arrived([*passed, line])
            passed = []
        if passed:
            arrived(passed)
        return refused

    def _ways(self) -> dict[str, Callable[[dict[str, Any]], None]]:
        return {"metrics": self._metrics, "progress": self._progress, "status": self._status}

    def _metrics(self, record: dict[str, Any]) -> None:
        route, body = self._route("metrics"), bodies.metrics(self._trial_id, self._run_id, record)
        try:
            self._call(route, body)
        except MasterError as e:
            # Rows with batch metrics cannot be sent twice; without them they can.
            is_repeat = e.status and (e.maybe_applied or self._doubt)
            if not is_repeat or "batchMetrics" not in body["metrics"]["metrics"] or not self._has_batches(record):
                raise

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

    def _has_batches(self, record: dict[str, Any]) -> bool:
        """Whether a row with batch metrics has arrived, which cannot be sent twice; without them it can."""
        row = {**record, "batch_metrics": None}
        try:
            self._call(self._route("metrics"), bodies.metrics(self._trial_id, self._run_id, row))
        except MasterUnreachable:
            raise
        except MasterError:
            return False
        return True

    def _route(self, name: str) -> str:
        return f"/api/v1/trials/{self._trial_id}/{name}"

    @staticmethod
    def _over(error: MasterError) -> bool:
        """Whether the master takes nothing from here any more: no answer, no right, no trial, or another run of it."""
        if isinstance(error, (MasterUnreachable, MasterDenied, UnknownToMaster)):
            return True
        return error.status >= 500 and "run id" in str(error).lower()
