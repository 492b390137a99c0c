"""Who asks, and how far that reaches.

There are two kinds of callers. The user (token in ``<home>/master/token``) may do everything. An allocation, whose
token the master handed to the trial's processes, reaches its own trial, the allocation itself, and reads its own
experiment.

Each route has exactly one of the dependencies below, ``for_...``; a test holds them to it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NoReturn

from fastapi import Depends, Request

from det_core.master._errors import Forbidden, Unauthenticated

if TYPE_CHECKING:
    from det_core.master.service import Service
    from det_core.master.service._views import TokenView

OPEN = frozenset(
    [
        ("GET", "/api/v1/master"),
        ("GET", "/api/v1/master/telemetry"),
        ("POST", "/api/v1/auth/login"),
        ("GET", "/info"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
    ]
)
"""What needs no token: the contract's routes (§2.2), and the description of the API."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever made the request. ``token``: the allocation; None: the user."""

    token: TokenView | None = None

    @property
    def allocation_id(self) -> str | None:
        """The allocation that asks, None for the user."""
        return self.token["allocation_id"] if self.token else None

    def check_user(self) -> None:
        """Raises: Forbidden, unless it is the user."""
        if self.token is not None:
            self._refuse("what only the user may do")

    def check_trial(self, trial_id: int) -> None:
        """Raises: Forbidden, for the trial of another."""
        if self.token is not None and self.token["trial_id"] != trial_id:
            self._refuse(f"trial {trial_id}")

    def check_experiment(self, experiment_id: int) -> None:
        """Raises: Forbidden, for the experiment of another."""
        if self.token is not None and self.token["experiment_id"] != experiment_id:
            self._refuse(f"experiment {experiment_id}")

    def check_allocation(self, allocation_id: str) -> None:
        """Raises: Forbidden, for another allocation."""
        if self.token is not None and self.token["allocation_id"] != allocation_id:
            self._refuse(f"allocation {allocation_id}")

    def check_task(self, task_id: str) -> None:
        """Raises: Forbidden, for the task of another."""
        if self.token is not None and self.token["task_id"] != task_id:
            self._refuse(f"task {task_id}")

    def _refuse(self, what: str) -> NoReturn:
        assert self.token is not None
        raise Forbidden(f"the token of trial {self.token['trial_id']} does not reach {what}")


class Gate:
    """Tells callers by their tokens.

    Args:
        service: knows the tokens of allocations.
        user_token: that of the user.
    """

    def __init__(self, service: Service, user_token: str) -> None:
        self._service = service
        self.user_token = user_token

    async def admit(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> Caller:
        """The caller of a request.

        Raises:
            Unauthenticated: there is no token, or one that is not or no longer valid.
        """
        shown = [
            headers.get("grpc-metadata-x-allocation-token", ""),
            headers.get("authorization", ""),
            cookies.get("auth", ""),
        ]
        tokens = [token for text in shown if (token := text.removeprefix("Bearer ").strip())]
        if not tokens:
            raise Unauthenticated("token missing")
        for token in tokens:
            if self.is_user(token):
                return Caller()
            if (allocation := await self._service.identify(token)) is not None:
                return Caller(allocation)
        raise Unauthenticated("invalid credentials")

    def is_user(self, token: str) -> bool:
        """Whether this is the user's token."""
        return self.same(token, self.user_token)

    @staticmethod
    def same(shown: str, wanted: str) -> bool:
        """Whether two secrets are equal, told in a time that says nothing about them."""
        return hmac.compare_digest(shown.encode(errors="replace"), wanted.encode())


async def for_all(request: Request) -> Caller:
    """Anybody with a token; what the body names is checked by the route itself."""
    caller = request.scope["caller"]
    assert isinstance(caller, Caller)
    return caller


async def for_anybody() -> None:
    """No token needed; see OPEN."""


async def for_user(request: Request) -> Caller:
    """The user alone."""
    caller = await for_all(request)
    caller.check_user()
    return caller


async def for_trial(request: Request) -> Caller:
    """The trial in the path, and the user."""
    caller = await for_all(request)
    caller.check_trial(_number(request, "trial_id"))
    return caller


async def for_experiment(request: Request) -> Caller:
    """The trials of the experiment in the path, and the user."""
    caller = await for_all(request)
    caller.check_experiment(_number(request, "experiment_id"))
    return caller


async def for_allocation(request: Request) -> Caller:
    """The allocation in the path, and the user."""
    caller = await for_all(request)
    caller.check_allocation(request.path_params["allocation_id"])
    return caller


async def for_task(request: Request) -> Caller:
    """The trial of the task in the path, and the user."""
    caller = await for_all(request)
    caller.check_task(request.path_params["task_id"])
    return caller


def _number(request: Request, name: str) -> int:
    """A number in the path; -1, which is nobody's, if it is written in any way but plainly."""
    text: str = request.path_params[name]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


ByAll = Annotated[Caller, Depends(for_all)]
ByAnybody = Annotated[None, Depends(for_anybody)]
ByUser = Annotated[Caller, Depends(for_user)]
ByTrial = Annotated[Caller, Depends(for_trial)]
ByExperiment = Annotated[Caller, Depends(for_experiment)]
ByAllocation = Annotated[Caller, Depends(for_allocation)]
ByTask = Annotated[Caller, Depends(for_task)]
