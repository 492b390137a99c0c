"""Refusals and failures of the master, each with the HTTP status and code of the wire contract (§2.2)."""

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
    """The request cannot be carried out as it stands; the message has a line for each mistake."""

    status = 400
    code = 3


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
