"""Errors that det_core raises, as one tree.

::

    DetCoreError
    ├── InvalidHP                 raised by the user: these hyperparameters cannot be trained
    ├── ReportsLost            reports that could not be written anywhere (also an OSError)
    ├── CloseError                parts of a Context that could not be closed
    ├── InfoError                 a file that describes the task cannot be used (also a ValueError)
    ├── TensorboardError          event files that could not be written or copied (also an OSError)
    ├── RunError                  a run folder that cannot be used
    │   ├── RunNotFound           no run of that id (also a LookupError)
    │   └── RunLocked             another process writes this run
    ├── CheckpointError
    │   ├── CheckpointNotFound    no checkpoint of that storage_id (also a LookupError)
    │   ├── CheckpointCorrupt     a file differs from the manifest
    │   ├── CheckpointConflict    ranks disagree on a file or on metadata (also a RuntimeError)
    │   ├── CheckpointBusy        another checkpoint is being saved, and the caller would not wait
    │   └── StorageError          the store itself refused (also an OSError)
    ├── DistributedError
    │   ├── PeerLost              a rank died or left its context
    │   ├── CollectiveMismatch    ranks called different collectives (also a RuntimeError)
    │   ├── CollectiveTimeout     a deadline that was set has passed (also a TimeoutError)
    │   ├── RendezvousError       the ranks could not find or trust each other
    │   ├── LauncherNotFound      no launcher has set this process's rank (also a ValueError, KeyError)
    │   └── ContextClosed         a call on a closed context
    ├── MasterError               a master refused a request, or failed at it; ``status`` is that of HTTP
    │   ├── MasterUnreachable     no master answers there (also a ConnectionError)
    │   ├── MasterDenied          no token, a wrong one, or one that may not do this (also a PermissionError)
    │   ├── ReportsNotShipped     reports that are in the journal, and that the master did not get
    │   ├── UnknownToMaster       the master has no such experiment, trial or checkpoint (also a LookupError)
    │   └── ExperimentInvalid     mistakes in an experiment's configuration (also a ValueError)
    ├── ConfigError               mistakes in an experiment file, all of them (also a ValueError)
    ├── SearchError               a search cannot continue: an event, or its method, is at fault
    ├── StoreError                a master's database cannot be used; the message says why, and what to do
    │   ├── StoreLocked           another master uses it
    │   └── StoreConflict         what was reported contradicts what is recorded (also a ValueError)
    ├── InvalidExperimentException  a mistake in a trial class, or in how it is used (a ValueError, RuntimeError)
    ├── InternalException         a value of training was requested before it (also a RuntimeError)
    └── MissingExtra              an optional dependency is not installed (also an ImportError)

User mistakes in arguments raise ValueError or TypeError; calls in the wrong order or on the wrong rank raise
RuntimeError. A message says what happened, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DetCoreError(Exception):
    """Base of every error that det_core defines."""


class InvalidHP(DetCoreError):
    """Raise inside ``with core.init() as ctx`` when the hyperparameters cannot be trained.

    The context reports the early exit, closes, and ends every rank with status 0.
    """


class ReportsLost(DetCoreError, OSError):
    """Reports that reached no journal file. Raised by ``close()``, never by a report."""


class CloseError(DetCoreError):
    """One or more parts of a Context could not finish closing; ``failures`` maps part to exception."""

    def __init__(self, failures: dict[str, BaseException]) -> None:
        self.failures = failures
        parts = "; ".join(f"{part}: {type(e).__name__}: {e}" for part, e in failures.items())
        super().__init__(f"closing the context, {len(failures)} part(s) could not finish: {parts}")


class InfoError(DetCoreError, ValueError):
    """A file by which the cluster describes the task cannot be used; the message names file and key."""


class TensorboardError(DetCoreError, OSError):
    """TensorBoard's event files could not be written or copied; the message names path and loss."""


class RunError(DetCoreError):
    """A run folder that cannot be used."""


class RunNotFound(RunError, LookupError):
    """No run of that id in the home folder."""


class RunLocked(RunError):
    """Another process is writing this run."""


class CheckpointError(DetCoreError):
    """Base of errors of checkpoints."""


class CheckpointNotFound(CheckpointError, LookupError):
    """No checkpoint of that storage_id in the store."""


class CheckpointCorrupt(CheckpointError):
    """A file of a checkpoint differs from its manifest; the message names the file."""


class CheckpointConflict(CheckpointError, RuntimeError):
    """Ranks disagree on a file or a metadata key of a sharded checkpoint."""


class CheckpointBusy(CheckpointError):
    """Another checkpoint is being saved in the background, and the caller asked not to wait for it."""


class StorageError(CheckpointError, OSError):
    """The store refused an operation; the message names store, path and operation."""


class DistributedError(DetCoreError):
    """Base of errors between ranks."""


class PeerLost(DistributedError):
    """A rank died or left its context; the message gives rank, host, pid and its last call."""


class CollectiveMismatch(DistributedError, RuntimeError):
    """Ranks called different collectives; the message says which rank called what."""


class CollectiveTimeout(DistributedError, TimeoutError):
    """A collective did not end within the deadline that was set."""


class RendezvousError(DistributedError):
    """The ranks could not find, or could not trust, each other."""


class LauncherNotFound(DistributedError, ValueError, KeyError):
    """No launcher has set this process's rank; the message names the variables that are missing.

    A KeyError too, as in Determined: scripts catch that to run as one process.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError's own would be its repr()


class ContextClosed(DistributedError, RuntimeError):
    """A call on a context that is closed, or in a process forked from the one that opened it."""


class MasterError(DetCoreError):
    """A master refused a request, or failed at it.

    Attributes:
        status: HTTP status of its answer; 0 without one.
        detail: The master's reason alone, or the cause of a missing answer.
        maybe_applied: Whether an attempt was made whose answer is lost: the master may have carried it out.
    """

    def __init__(self, message: str, status: int = 0, *, detail: str = "", maybe_applied: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail or message
        self.maybe_applied = maybe_applied


class MasterUnreachable(MasterError, ConnectionError):
    """No master answers at that address; the message gives the address and the reason."""


class MasterDenied(MasterError, PermissionError):
    """The master got no token, a wrong one, or one that may not do this."""


class ReportsNotShipped(MasterError):
    """Reports that the master did not get. They are in the journal; the message says where, how many, and why."""


class UnknownToMaster(MasterError, LookupError):
    """The master has no such experiment, trial or checkpoint."""


class ExperimentInvalid(MasterError, ValueError):
    """An experiment that the master does not accept; ``problems`` are its mistakes, one line each."""

    def __init__(self, problems: list[str], status: int = 400) -> None:
        super().__init__("; ".join(problems), status)
        self.problems = problems


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in an experiment file; ``str()`` gives a line of text.

    Attributes:
        path: Path of the value, such as ``searcher.max_trials`` or ``labels[1]``; empty for the file itself.
        message: Expectation, such as "should be greater than or equal to 1".
        found: The value as a short text; None if it is not a single one, or may be a secret.
    """

    path: str
    message: str
    found: str | None = None

    @classmethod
    def at(cls, path: Sequence[str | int], message: str, found: str | None = None) -> ConfigProblem:
        """Return a problem at a path of keys and indices."""
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        return cls("".join(parts).removeprefix("."), message, found)

    def __str__(self) -> str:
        line = self.path or "the experiment file"
        if self.found is not None:
            line += f" is {self.found}"
        line += f": {self.message}"
        # A key of the file may be any text, and may end a line or control a terminal.
        return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)


class ConfigError(DetCoreError, ValueError):
    """The mistakes in an experiment file: ``errors``, all of them; the message has a line for each."""

    def __init__(self, errors: Sequence[ConfigProblem]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(map(str, self.errors)))


class SearchError(DetCoreError):
    """A search cannot go on; the message names the trial or the method that is at fault."""


class StoreError(DetCoreError):
    """A master's database cannot be used; the message names it, and says why and what to do."""


class StoreLocked(StoreError):
    """Another master uses that database; the message names its process where that is known."""


class StoreConflict(StoreError, ValueError):
    """A report contradicts the record; the message has the recorded value."""


class InvalidExperimentException(DetCoreError, ValueError, RuntimeError):
    """A mistake in a trial class, or in how it is used; the message names the method."""


class InternalException(DetCoreError, RuntimeError):
    """A value of training was requested before training; the message names the method."""


class MissingExtra(DetCoreError, ImportError):
    """An optional dependency is not installed; the message is the command that installs it."""
