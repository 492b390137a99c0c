"""Routes about the master itself, and who the caller is (§2.3, rows 29 to 31 and 37 of §4)."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response

import det_core
from det_core.master._errors import Unauthenticated
from det_core.master.api._auth import is_same_secret
from det_core.master.api._routing import Routes, TheCaller, TheService
from det_core.master.api._types import IN_BODY, USER, answer
from det_core.master.service import _queries

routes = Routes("master")
plain_routes = Routes("master", prefix="")
_SALT = "GubPEmmotfiK9TMD6Zdw"
"""Prefix with which the contract's clients hash a password (§2.3)."""


@routes.open.get("/master")
async def master(service: TheService) -> Response:
    """Describe the master."""
    view = _queries.master(service)
    return answer(
        {
            "clusterId": view["cluster_id"],
            "clusterName": view["cluster_name"],
            "masterId": view["cluster_id"],
            "version": view["version"],
            # Our clients see by this that the master takes journals. The contract's clients know a few "products", and
            # break at another one.
            "software": "det_core",
            "productVersion": det_core.__version__,
            "slots": len(view["slots"]),
            "slotsInUse": len(view["slots_in_use"]),
            "hasCustomLogo": False,
            "strictJobQueueControl": False,
            "telemetryEnabled": False,
        }
    )


@routes.open.get("/master/telemetry")
async def telemetry() -> Response:
    """Answer that nothing is sent to anybody."""
    return answer({"enabled": False})


@plain_routes.open.get("/info")
async def info(service: TheService) -> Response:
    """Describe the master in an older form."""
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
    """Describe the caller; a token that is not valid gets 401."""
    return answer({"user": _user(USER)})


@routes.open.post("/auth/login")
async def login(
    request: Request,
    username: Annotated[str, IN_BODY] = USER,
    password: Annotated[str, IN_BODY] = "",
    is_hashed: Annotated[bool, IN_BODY] = False,
) -> Response:
    """Return the user's token for the password, which is the token itself, plain or hashed (§2.3); any name will do."""
    token: str = request.app.state.authenticator.user_token
    wanted = hashlib.sha512((_SALT + token).encode()).hexdigest() if is_hashed else token
    if not is_same_secret(password, wanted):
        raise Unauthenticated(
            "invalid credentials: the password is the content of the file master/token in the master's home"
        )
    return answer({"token": token, "user": _user(username)})


def _user(name: str) -> dict[str, Any]:
    return {"id": 1, "username": name, "displayName": USER, "active": True, "admin": True}
