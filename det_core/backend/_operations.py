"""Generations of masters, and the operations of a trial that each gives (wire contract, §1.2 and §5.5).

Masters before 0.38, and those of det_core, give operations. Later ones give none: there a trial trains to
``searcher.max_length``, and its validations steer the search.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from det_core._length import split_length
from det_core.errors import MasterError
from det_core.protocol import MasterSession

SOFTWARE = "det_core"
LAST_WITH_OPERATIONS = (0, 37)
"""Last release of Determined whose searches give operations."""
Call = Callable[..., "dict[str, Any]"]


@dataclass(frozen=True)
class Master:
    """Identity of a master, by its own answer.

    Attributes:
        version: Version of its software.
        software: ``det_core`` for one of this project.
        cluster_id: Lasting ID.
    """

    version: str = ""
    software: str = ""
    cluster_id: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is of det_core, and takes the journal as it is."""
        return self.software == SOFTWARE

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor version of a Determined master, None if unknown."""
        match = re.match(r"v?(\d+)\.(\d+)", self.version)
        if match is None or self.ours:
            return None
        return int(match[1]), int(match[2])

    @property
    def has_operations(self) -> bool | None:
        """Whether its searches give operations; None if only a request can tell."""
        if self.ours:
            return True
        if self.release is None:
            return None
        return self.release <= LAST_WITH_OPERATIONS


def about(session: MasterSession) -> Master:
    """Ask a master for its identity.

    Raises:
        MasterError: If it does not answer, or is not a master.
    """
    answer: Any = session.call("GET", "/api/v1/master")
    if not isinstance(answer, dict):
        answer = {}
    return Master(
        version=str(answer.get("version") or ""),
        software=str(answer.get("software") or ""),
        cluster_id=str(answer.get("clusterId") or ""),
    )


class Operations:
    """The operations of one trial.

    Args:
        call: Sends a request to the master.
        master: Identity of the master; without a known release, a first request shows whether it gives operations.
        trial_id: ID of the trial.
        searcher: Section ``searcher`` of the experiment's configuration.
        max_length: Length if the configuration has none.
    """

    def __init__(
        self, call: Call, master: Master, trial_id: int, searcher: Mapping[str, Any], max_length: Any = None
    ) -> None:
        self._call = call
        self._are_given = master.has_operations
        self._route = f"/api/v1/trials/{trial_id}/searcher"
        self._length = searcher.get("max_length")
        self._default = max_length
        if max_length is None and master.ours:
            self._default = 1  # as in a bare run
        self._reached = 0
        self._has_begun = False

    @property
    def given_by_searcher(self) -> bool:
        """Whether the master is known to give operations."""
        return bool(self._are_given)

    def next(self) -> int | None:
        """Return the length to train to next, or None if there is nothing (more) to do.

        Raises:
            ValueError: If the configuration must have a length, and has none.
            MasterError: If the master does not answer.
        """
        if self._are_given is not False:
            try:
                length, is_completed = self._current()
            except MasterError as e:
                # Without operations: an old search without max_length, or a master that has none at all.
                has_none = not self._has_begun and not (self._are_given and self._length is not None)
                if e.status not in (404, 501) or not has_none:
                    raise
                self._are_given = False
            else:
                self._are_given = True
                self._has_begun = True
                return None if is_completed else length
        length = self._configured()
        if self._reached >= length:
            return None
        return length

    def complete(self, length: int, searcher_metric: Any) -> None:
        """Complete the operation of ``length``.

        Raises:
            MasterError: If it is not the current one, or the master does not answer.
        """
        self._reached = max(length, self._reached)
        if self._are_given is False:
            return
        body = {"op": {"length": length}, "searcherMetric": searcher_metric}
        try:
            self._call("POST", f"{self._route}/completed_operation", body)
        except MasterError as e:
            # A repeat is refused: what counts is whether the first attempt, whose answer was lost, was carried out.
            if not (e.status and e.maybe_applied) or not self._is_done(length):
                raise

    def _is_done(self, length: int) -> bool:
        """Return whether the master has completed it, though it refuses to do so twice."""
        current, is_completed = self._current()
        return current > length or (current == length and is_completed)

    def _current(self) -> tuple[int, bool]:
        answer = self._call("GET", f"{self._route}/operation")
        length = ((answer.get("op") or {}).get("validateAfter") or {}).get("length")
        if length is None:
            raise MasterError(f"the master's answer to GET {self._route}/operation holds no operation: {answer}")
        return int(length), bool(answer.get("completed"))

    def _configured(self) -> int:
        length, _ = split_length(self._default if self._length is None else self._length)
        if isinstance(length, bool) or not isinstance(length, int):  # True is an int
            raise ValueError(
                "searcher.max_length is not in the experiment's configuration, and this master gives no operations: "
                "pass core.init(max_length=…), or set searcher.max_length"
            )
        return length
