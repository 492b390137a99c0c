"""Routes about the master itself, and who the caller is (§2.3, rows 29 to 31 and 37 of §4)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response
from pydantic import ConfigDict

import det_core
from det_core.master._errors import Unauthenticated
from det_core.master.api._auth import is_same_secret
from det_core.master.api._routing import Routes, TheAuthenticator, TheCaller, TheService
from det_core.master.api._show_experiment import USER
from det_core.master.api._types import Body, Reply, answer

if TYPE_CHECKING:
    from det_core.master.service._views import MasterView

routes = Routes("master")
plain_routes = Routes("master", prefix="")
_SALT = "GubPEmmotfiK9TMD6Zdw"
"""What the contract's clients put before a password before they hash it (§2.3)."""


class MasterReply(Reply):
    """What the master says of itself.

    ``software`` tells our clients that it takes journals. (A ``product`` is one of a few to the contract's clients,
    which break at another.)
    """

    cluster_id: str
    cluster_name: str
    master_id: str
    version: str
    software: str = "det_core"
    product_version: str
    slots: int
    slots_in_use: int
    has_custom_logo: bool = False
    strict_job_queue_control: bool = False
    telemetry_enabled: bool = False

    @classmethod
    def of(cls, view: MasterView) -> MasterReply:
        """As the service tells it."""
        return cls(
            cluster_id=view["cluster_id"],
            cluster_name=view["cluster_name"],
            master_id=view["cluster_id"],
            version=view["version"],
            product_version=det_core.__version__,
            slots=len(view["slots"]),
            slots_in_use=len(view["slots_in_use"]),
        )


class TelemetryReply(Reply):
    """Nothing is ever sent anywhere."""

    enabled: bool = False


class InfoReply(Reply):
    """The same for the contract's oldest clients, whose names are in snake_case."""

    model_config = ConfigDict(alias_generator=None)

    version: str
    master_id: str
    cluster_id: str
    cluster_name: str
    telemetry: dict[str, Any]
    sso_providers: list[str]


class User(Reply):
    """The user. There is one."""

    id: int = 1
    username: str = USER
    display_name: str = USER
    active: bool = True
    admin: bool = True


class MeReply(Reply):
    """Who the caller is."""

    user: User


class LoginRequest(Body):
    """A user name, whichever, and the user's token as the password; hashed as §2.3 says, or as it is."""

    username: str = USER
    password: str = ""
    is_hashed: bool = False


class LoginReply(Reply):
    """The token to show from now on."""

    token: str
    user: User


@routes.open.get("/master", response_model=MasterReply)
async def master(service: TheService) -> Response:
    """What the master says of itself."""
    return answer(MasterReply.of(await service.master()))


@routes.open.get("/master/telemetry", response_model=TelemetryReply)
async def telemetry() -> Response:
    """Whether anything is sent to anybody. It is not."""
    return answer(TelemetryReply())


@plain_routes.open.get("/info", response_model=InfoReply)
async def info(service: TheService) -> Response:
    """What the master says of itself, in an older form."""
    view = await service.master()
    reply = InfoReply(
        version=view["version"],
        master_id=view["cluster_id"],
        cluster_id=view["cluster_id"],
        cluster_name=view["cluster_name"],
        telemetry={"enabled": False},
        sso_providers=[],
    )
    return answer(reply)


@routes.trial.get("/me", response_model=MeReply)
async def me(caller: TheCaller) -> Response:
    """Who the caller is; a token that is not valid gets 401."""
    return answer(MeReply(user=User()))


@routes.open.post("/auth/login", response_model=LoginReply)
async def login(body: LoginRequest, authenticator: TheAuthenticator) -> Response:
    """The token for a password, which is the token itself (in ``<home>/master/token``); any user name will do."""
    token = authenticator.user_token
    wanted = hashlib.sha512((_SALT + token).encode()).hexdigest() if body.is_hashed else token
    if not is_same_secret(body.password, wanted):
        raise Unauthenticated(
            "invalid credentials: the password is the content of the file master/token in the master's home"
        )
    return answer(LoginReply(token=token, user=User(username=body.username)))
