"""Routes about the master itself, and who the caller is (§2.3, rows 29 to 31 and 37 of §4)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response

import det_core
from det_core.master._errors import Unauthenticated
from det_core.master.api._auth import is_same_secret
from det_core.master.api._routing import Routes, TheAuthenticator, TheCaller, TheService
from det_core.master.api._shapes import USER
from det_core.master.api._types import Body, answer
from det_core.master.service import _queries

if TYPE_CHECKING:
    from det_core.master.service._queries import MasterView

routes = Routes("master")
plain_routes = Routes("master", prefix="")
_SALT = "GubPEmmotfiK9TMD6Zdw"
"""Salt that clients put before a password before they hash it (§2.3)."""


class LoginRequest(Body):
    """A user name, whichever, and the user's token as the password; hashed as §2.3 says, or as it is."""

    username: str = USER
    password: str = ""
    is_hashed: bool = False


@routes.open.get("/master")
async def master(service: TheService) -> Response:
    """Answer the identity of the master."""
    return answer(_master_reply(_queries.master(service)))


@routes.open.get("/master/telemetry")
async def telemetry() -> Response:
    """Answer that no telemetry is sent."""
    return answer({"enabled": False})


@plain_routes.open.get("/info")
async def info(service: TheService) -> Response:
    """Answer the identity of the master in an older form."""
    view = _queries.master(service)
    return answer(
        {
            "version": view["version"],
            "master_id": view["cluster_id"],
            "cluster_id": view["cluster_id"],
            "cluster_name": view["cluster_name"],
            "telemetry": {"enabled": False},
            "sso_providers": [],
        }
    )


@routes.trial.get("/me")
async def me(caller: TheCaller) -> Response:
    """Answer the user of a valid token; any other token gets 401."""
    return answer({"user": _user(USER)})


@routes.open.post("/auth/login")
async def login(body: LoginRequest, authenticator: TheAuthenticator) -> Response:
    """Answer the token for a password, which is the token (``<home>/master/token``), and for any user name."""
    token = authenticator.user_token
    wanted = hashlib.sha512((_SALT + token).encode()).hexdigest() if body.is_hashed else token
    if not is_same_secret(body.password, wanted):
        raise Unauthenticated(
            "invalid credentials: the password is the content of the file master/token in the master's home"
        )
    return answer({"token": token, "user": _user(body.username)})


def _master_reply(view: MasterView) -> dict[str, Any]:
    return {
        "clusterId": view["cluster_id"],
        "clusterName": view["cluster_name"],
        "masterId": view["cluster_id"],
        "version": view["version"],
        # Tells our clients that the master takes journals. A "product" is one of a few to the contract's clients, which
        # break at another.
        "software": "det_core",
        "productVersion": det_core.__version__,
        "slots": len(view["slots"]),
        "slotsInUse": len(view["slots_in_use"]),
        "hasCustomLogo": False,
        "strictJobQueueControl": False,
        "telemetryEnabled": False,
    }


def _user(name: str) -> dict[str, Any]:
    return {"id": 1, "username": name, "displayName": USER, "active": True, "admin": True}
