"""Callers: who sent a request, by its credential, and which objects that credential reaches.

The user, whose token is in ``<home>/master/token``, reaches everything. An allocation, whose token the master gives to
the trial's processes, reaches its own trial, allocation and task, and reads its own experiment.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from det_core.master._errors import Forbidden, Unauthenticated
from det_core.master.service import _access

if TYPE_CHECKING:
    from det_core.master.service import ServiceState
    from det_core.master.service._access import TokenView

OBJECT_IDS = frozenset(["trial_id", "experiment_id", "allocation_id", "task_id"])
"""IDs that a token is compared with, by their names in paths and in the token."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated sender of a request.

    Attributes:
        token: token of the allocation; None for the user.
        credential: kind of the credential. A header is never sent by a browser on its own, unlike a session's cookie.
    """

    token: TokenView | None = None
    credential: Literal["header"] = "header"

    @property
    def allocation_id(self) -> str | None:
        """Allocation that sent the request, None for the user."""
        return self.token["allocation_id"] if self.token else None

    def check(self, **ids: object) -> None:
        """Compare objects with the token, by the names in OBJECT_IDS.

        Raises:
            Forbidden: If one of them is another trial's.
        """
        if self.token is None:
            return
        token: Mapping[str, object] = self.token
        for name, value in ids.items():
            # As text: another spelling of a number in a path, such as 07 or %207, is another object.
            if str(token[name]) != str(value):
                self._refuse(f"{name.removesuffix('_id')} {value}")

    def check_user(self) -> None:
        """Return for the user.

        Raises:
            Forbidden: If a trial sent the request.
        """
        if self.token is not None:
            self._refuse("what only the user may do")

    def _refuse(self, target: str) -> None:
        assert self.token is not None
        raise Forbidden(f"the token of trial {self.token['trial_id']} does not reach {target}")


class Authenticator:
    """The one place that turns a credential into a caller.

    Args:
        service: service that knows the tokens of allocations.
        user_token: token of the user.
    """

    def __init__(self, service: ServiceState, user_token: str) -> None:
        self._service = service
        self.user_token = user_token

    async def identify(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller that the headers of a request name.

        Raises:
            Unauthenticated: Without a valid token.
        """
        # Stock clients of a trial send the allocation's token in a header of its own.
        sent = [headers.get("grpc-metadata-x-allocation-token", ""), headers.get("authorization", "")]
        tokens = [token for text in sent if (token := text.removeprefix("Bearer ").strip())]
        if not tokens:
            raise Unauthenticated("token missing")
        # The first that is valid counts: a script may have both, its own and its user's.
        for token in tokens:
            if is_same_secret(token, self.user_token):
                return Caller()
            if (allocation := await _access.identify(self._service, token)) is not None:
                return Caller(allocation)
        raise Unauthenticated("invalid credentials")


class OwnHosts:
    """Names under which a request may address this master.

    A page of a foreign site can let its own name point to this machine (DNS rebinding). A browser then sends the page's
    requests to the master and regards the answers as the page's own; the Host header still has the foreign name.

    Args:
        names: names beside localhost and that of the machine, such as the one that a proxy is reached by.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        # Without a Host header no browser can have sent it, hence the empty one.
        self._names = {"", "localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def __contains__(self, host: str) -> bool:
        """Return whether a Host header names this master: IP addresses always do, since no site can own one."""
        name = _without_port(host).lower().rstrip(".")
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def is_same_secret(sent: str, expected: str) -> bool:
    """Return whether two secrets are equal, in a time that does not depend on where they differ."""
    # compare_digest() takes texts only if they are ASCII.
    return hmac.compare_digest(sent.encode(errors="replace"), expected.encode())
