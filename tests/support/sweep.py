"""Requests made from the description of the API, right ones and wrong ones. Loading schemathesis takes a second."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks

from support.running_master import Running

DOCUMENTED = (200, 400, 401, 403, 404, 405, 409, 413, 503)
"""Statuses of the wire contract, section 2.2, for any route."""
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
LIMITED = {"timeout_seconds": 0, "follow": False}
"""Values of the parameters that would make a request wait."""


class Sweep:
    """Sweep of all operations with requests, valid ones and invalid ones.

    Args:
        master: whom to ask.
        examples: requests per operation and kind.
        alternating: of the two kinds, only one for each operation, in turn.
    """

    def __init__(self, master: Running, examples: int, *, alternating: bool = False) -> None:
        self.made = 0
        self.statuses: set[int] = set()
        self._master, self._examples, self._alternating = master, examples, alternating
        self._schema = schemathesis.openapi.from_url(f"{master.url}/openapi.json")
        spec = master.a_trial()
        uuid = f"swept-{spec.trial_id}"
        kept = {"uuid": uuid, "taskId": spec.task_id, "metadata": {"steps_completed": 1}, "resources": {}}
        assert master.ask("POST", "checkpoints", kept, spec.session_token).status == 200
        self._known = {
            "trial_id": spec.trial_id,
            "experiment_id": spec.experiment_id,
            "allocation_id": spec.allocation_id,
            "task_id": spec.task_id,
            "uuid": uuid,
        }

    def run(self, token: str | None, check: Callable[[Any, Any], None]) -> None:
        """Make the requests, each with the token, and have each answer checked."""
        with requests.Session() as session:
            session.headers["Authorization"] = f"Bearer {token}"
            for number, found in enumerate(self._schema.get_all_operations()):
                for mode in [MODES[number % 2]] if self._alternating else MODES:
                    self._ask(found.ok(), mode, session, check)

    def _ask(self, operation: Any, mode: GenerationMode, session: requests.Session, check: Callable[..., None]) -> None:
        @settings(
            max_examples=self._examples,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            self._prepare(case)
            response = case.call(session=session)
            self.made += 1
            self.statuses.add(response.status_code)
            check(case, response)

        with suppress(Unsatisfiable):  # some take nothing that could be wrong
            ask()

    def _prepare(self, case: Any) -> None:
        """Prepare a request that does not wait; every second one is about an existing object."""
        if case.query:
            case.query.update({k: v for k, v in LIMITED.items() if k in case.query})
        if case.path.endswith(("/signals/preemption", "/wait")):
            case.query = {**(case.query or {}), "timeout_seconds": 0}
        names = case.path_parameters or {}
        if self.made % 2 or ("allocation_id" in names and self.made % 20):  # who asks for another is slowed down
            names.update({k: v for k, v in self._known.items() if k in names})


def as_described(case: Any, response: Any) -> None:
    """Check that the master did not fail, and that the answer is of a documented status and JSON."""
    case.validate_response(response, checks=[checks.not_a_server_error])
    assert response.status_code in DOCUMENTED, (case.method, case.path, response.status_code)
    for line in response.text.splitlines():
        assert isinstance(json.loads(line), dict), (case.method, case.path, line)
