"""What to train: the searcher's operations, or the one of the configured length, as the master's generation has it.

Masters before 0.38, and ours, give operations (wire contract, §5.5). Later ones give none: there the trial trains to
``searcher.max_length``, and its validations steer the search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from det_core._length import split_length
from det_core.backend._rest_master import Master
from det_core.errors import MasterError

Call = Callable[..., "dict[str, Any]"]


class Operations:
    """The operations of one trial.

    Args:
        call: asks the master.
        master: which master it is; if it does not say what it has, it is asked for an operation, to see.
        trial_id: the trial.
        searcher: the section ``searcher`` of the experiment's configuration.
        max_length: the length if the configuration says none.
    """

    def __init__(
        self, call: Call, master: Master, trial_id: int, searcher: Mapping[str, Any], max_length: Any = None
    ) -> None:
        self._call = call
        self._given = master.has_operations
        self._route = f"/api/v1/trials/{trial_id}/searcher"
        self._length = searcher.get("max_length")
        self._default = 1 if max_length is None and master.ours else max_length  # as in a bare run
        self._reached = 0
        self._begun = False

    @property
    def given_by_searcher(self) -> bool:
        """Whether the master has been found to give operations."""
        return bool(self._given)

    def next(self) -> int | None:
        """The length to train to next; None: nothing (more) to do.

        Raises:
            ValueError: the configuration must say the length, and does not.
            MasterError: there is no answer.
        """
        if self._given is not False:
            try:
                found = self._current()
            except MasterError as e:
                if e.status not in (404, 501) or self._begun or (self._given and self._length is not None):
                    raise
                self._given = False  # a master without operations; or a search without, as it has no max_length
            else:
                self._given = self._begun = True
                return None if found[1] else found[0]
        length = self._configured()
        return length if self._reached < length else None

    def complete(self, length: int, searcher_metric: Any) -> None:
        """The operation of ``length`` is done.

        Raises:
            MasterError: it is not the current one, or there is no answer.
        """
        self._reached = max(length, self._reached)
        if self._given is False:
            return
        body = {"op": {"length": length}, "searcherMetric": searcher_metric}
        try:
            self._call("POST", f"{self._route}/completed_operation", body)
        except MasterError as e:
            # A repeat is refused: what counts is whether the first attempt, whose answer was lost, was carried out.
            if not (e.status and e.maybe_applied) or not self._is_done(length):
                raise

    def _is_done(self, length: int) -> bool:
        """Whether the master has counted it, though it refuses to do so twice."""
        current, completed = self._current()
        return current > length or (current == length and completed)

    def _current(self) -> tuple[int, bool]:
        found = self._call("GET", f"{self._route}/operation")
        length = ((found.get("op") or {}).get("validateAfter") or {}).get("length")
        if length is None:
            raise MasterError(f"the master's answer to GET {self._route}/operation holds no operation: {found}")
        return int(length), bool(found.get("completed"))

    def _configured(self) -> int:
        length, _ = split_length(self._default if self._length is None else self._length)
        if isinstance(length, bool) or not isinstance(length, int):
            raise ValueError(
                "searcher.max_length is not in the experiment's configuration, and this master gives no operations: "
                "pass core.init(max_length=…), or set searcher.max_length"
            )
        return length
