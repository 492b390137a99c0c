"""Refusals of the master, each with the HTTP status and code of the wire contract (§2.2).

::

    MasterError                   500, code 13: something in the master went wrong
    ├── Invalid                   400, code 3: the request cannot be carried out as it stands
    │   └── WrongState            400, code 9: … because of the state that its object is in
    ├── Unauthenticated           401, code 16: no token, or one that is not (or no longer) valid
    ├── Forbidden                 403, code 7: the token does not reach that far
    ├── NotFound                  404, code 5: the object does not exist
    ├── Conflict                  409, code 6: it contradicts what is recorded already
    │   └── Fenced                409, code 6: it comes from an attempt that is over (a zombie)
    ├── TooMuch                   413, code 8: more than the master takes
    ├── Misdirected               421, code 7: it is addressed to a name that is not the master's, without a token
    └── Stopping                  503, code 14: the master is about to stop; try again later
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from det_core.errors import DetCoreError, StoreConflict


class MasterError(DetCoreError):
    """A refusal or a failure of the master. The message is one clear line for a person.

    Attributes:
        status: the HTTP status.
        code: the code of the contract's error body.
    """

    status: ClassVar[int] = 500
    code: ClassVar[int] = 13


class Invalid(MasterError):
    """The request cannot be carried out as it stands.

    Args:
        message: what is wrong; several lines where there are several mistakes.
        errors: each mistake, for callers that show them one by one.
    """

    status = 400
    code = 3

    def __init__(self, message: str, errors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.errors = errors or (message,)


class WrongState(Invalid):
    """The object is in a state in which this cannot be done; the message names state and object."""

    code = 9


class Unauthenticated(MasterError):
    """The request has no valid token."""

    status = 401
    code = 16


class Forbidden(MasterError):
    """The token does not reach as far as the object."""

    status = 403
    code = 7


class NotFound(MasterError):
    """The object does not exist."""

    status = 404
    code = 5


class Conflict(MasterError):
    """The request contradicts what is recorded already."""

    status = 409
    code = 6


class Fenced(Conflict):
    """The request comes from an attempt of a trial that is over."""


class TooMuch(MasterError):
    """The request is larger than what the master takes."""

    status = 413
    code = 8


class Misdirected(MasterError):
    """The request has no valid token, and names a host that is not this master."""

    status = 421
    code = 7


class Stopping(MasterError):
    """The master is about to stop, and takes no more requests."""

    status = 503
    code = 14


def is_content_error(error: BaseException) -> bool:
    """Return whether an error comes from what was sent, so that the same fails again however often it is tried.

    Errors of our database, disk or network are not of that kind. Any other error that is not ours is: the code that
    handles a record has a bug that this record triggers, and a master that tried again would never get past it.
    """
    if type(error) is MasterError and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, MasterError):
        return error.status < 500
    if isinstance(error, StoreConflict):
        return True
    return not isinstance(error, (DetCoreError, OSError, MemoryError, asyncio.TimeoutError, asyncio.CancelledError))
