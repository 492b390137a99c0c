"""A run on one rank: its arguments, journal, backend and checkpoint store."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from det_core._env import Environment
from det_core._info import ClusterInfo
from det_core._json import equal_json
from det_core.backend import Backend
from det_core.core._searcher import Unit
from det_core.errors import DetCoreError
from det_core.journal import Journal
from det_core.storage import Store

logger = logging.getLogger("det_core.core")
_P = ParamSpec("_P")
_T = TypeVar("_T")

_UNPRINTABLE = frozenset(["Cc", "Cs", "Zl", "Zp"])
GIT_TIMEOUT = 2.0
"""Maximum time for git to describe the commit that is trained, in seconds."""


@dataclass(frozen=True)
class InitArguments:
    """Validated arguments of ``core.init()``, with the environment.

    Attributes:
        store: opened checkpoint store, or None if the script names none.
        checkpoint_storage: argument of the script.
        max_length: argument of the script: the length of a bare run's one operation.
        length: the same as a number with its unit; defaults to 1.
        name, resume, searcher_metric, smaller_is_better, hparams, check_storage: as ``core.init()`` takes them.
    """

    environment: Environment
    store: Store | None
    checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None
    max_length: int | Mapping[str, int] | None
    length: tuple[int, Unit | None]
    name: str | None
    resume: str | None
    searcher_metric: str | None
    smaller_is_better: bool
    hparams: dict[str, Any]
    check_storage: bool

    @property
    def command(self) -> str | None:
        """Command that starts this job again, or None without one: a notebook, stdin, ``python -c``."""
        if self.environment.command is not None:
            return self.environment.command
        if not is_script():
            return None
        return shlex.join(_command_line())

    def check_store(self, store: Store) -> None:
        """Check that a store is reachable, and, with ``check_storage``, that it is writable."""
        if self.check_storage:
            store.check_writable()
        else:
            store.check_reachable()


@dataclass(frozen=True)
class Run:
    """A bare run, or one run of a trial under a master. The Context closes its parts.

    Attributes:
        run_id: ID under which checkpoints are stored.
        restart: number of earlier starts; increases with each start.
        path: directory of its journal, as this rank sees it.
        journal: journal of this rank.
        journal_restart: number in the name of the journal.
        backend: answers requests.
        store: checkpoint store.
        storage: settings that open the store again, without secrets, for the record.
        latest_checkpoint: newest checkpoint of this run, or the one that the master passes on, or None.
        steps_completed: steps of that checkpoint; 0 without one.
        metric: validation metric of the search, or None.
        smaller_is_better: whether a smaller metric is better.
        units: unit of the searcher's lengths.
        hparams: hyperparameters.
        agent_id: name of the node in the profiler's metrics.
        remarks: lines to print before the start notice.
        start_notice: returns the line to print at the start, for the checkpoint to start from.
        end_notice: returns the line to print at the end, for outcome and detail.
        release: lets another process write the run.
        tensorboard_prefix: directory below the store's root for copies of event files, or None if they stay in the
            directory of the run.
        unlisted_checkpoints: checkpoints that this run has recorded after ``latest_checkpoint`` and its store does not
            list, newest first.
        suspect_checkpoints: checkpoints that an earlier start has found damaged when it restored them.
        other_stores: store by storage_id, for checkpoints in another store.
        info: the task in the cluster, or None.
        managed: whether a master preempts this run; otherwise signals do.
        earlier_config: last argument of ``set_config()`` in earlier starts, on the chief of a bare run.
    """

    run_id: str
    restart: int
    path: Path
    journal: Journal
    journal_restart: int
    backend: Backend
    store: Store
    storage: Any
    latest_checkpoint: str | None
    steps_completed: int
    metric: str | None
    smaller_is_better: bool
    units: Unit | None
    hparams: dict[str, Any]
    agent_id: str
    remarks: tuple[str, ...]
    start_notice: Callable[[str | None], str]
    end_notice: Callable[[str, str], str]
    release: Callable[[], None]
    tensorboard_prefix: str | None
    unlisted_checkpoints: tuple[str, ...] = ()
    suspect_checkpoints: frozenset[str] = frozenset()
    other_stores: Mapping[str, Store] = field(default_factory=dict)
    info: ClusterInfo | None = None
    managed: bool = False
    earlier_config: Mapping[str, Any] = field(default_factory=dict)


def hide_internal_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Hide internal frames in user errors of a function. The log has them at level DEBUG."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except (DetCoreError, ValueError, TypeError) as error:
            logger.debug("%s() fails", function.__name__, exc_info=True)
            # Python adds the frame of this line, and those of the user.
            raise error.with_traceback(None) from None

    return called


def close_quietly(component: Store | Backend) -> None:
    """Close a store or backend because of an error, which an error of this call must not hide."""
    try:
        component.close()
    except DetCoreError as e:
        logger.warning("%s", e)


def describe_outcome(outcome: str, detail: str) -> str:
    """Return the outcome of a run in words."""
    if outcome == "stopped":
        return f"stopped by the script: {detail}" if detail else "stopped by the script"
    text = outcome.replace("_", " ")
    return f"{text} ({detail})" if detail else text


def to_recordable(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as plain JSON for the record, with ``str()`` of values that JSON cannot hold."""
    if not isinstance(settings, Mapping):
        raise TypeError(f"{name} must be a mapping, not {type(settings).__name__}")
    # A path that is not UTF-8 is a string with surrogates, which the journal cannot encode.
    text = json.dumps(dict(settings), default=str, ensure_ascii=False)
    return json.loads(text.encode(errors="replace"))  # type: ignore[no-any-return]


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the settings that differ, as two texts such as ``lr=0.1`` and ``lr=0.01``, or None.

    Args:
        before, now: results of :func:`to_recordable`.
    """
    names = [name for name in {**before, **now} if name not in before or name not in now]
    names += [name for name in before if name in now and not equal_json(before[name], now[name])]
    if not names:
        return None
    return _values(names, before), _values(names, now)


def _values(names: Sequence[str], settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={json.dumps(settings[name], ensure_ascii=False)}" if name in settings else f"no {name}"
        for name in names
    )


def describe_start(command: str | None) -> dict[str, Any]:
    """Return a start for run.json: the command, the working directory and the commit of the script's repository."""
    return {"argv": shlex.split(command or ""), "cwd": os.getcwd(), "git": _commit(Path(script()))}


def how_to_resume(run_id: str, command: str | None) -> str:
    """Return the instruction to resume a run that was started by ``command``."""
    if command:
        return f"DET_CORE_RESUME={run_id} {command}"
    return f'DET_CORE_RESUME={run_id} in its environment, or core.init(resume="{run_id}")'


def is_printable(name: str) -> bool:
    """Return whether a name is one line that a terminal shows: without control characters and lone surrogates."""
    # str.isprintable() also rejects characters that are newer than Python's tables.
    return not any(unicodedata.category(character) in _UNPRINTABLE for character in name)


def is_script() -> bool:
    """Return whether a script or module started this process, not ``python -c``, stdin or a notebook."""
    if not sys.argv or sys.argv[0] in ("", "-", "-c"):
        return False
    # The sys.argv[0] of a notebook is ipykernel_launcher.py; its __main__ has no file.
    return getattr(sys.modules.get("__main__"), "__file__", None) is not None


def script() -> str:
    """Return the script's absolute path, or the working directory without a script."""
    if not is_script():
        return os.getcwd()
    return os.path.abspath(sys.argv[0])


def _command_line() -> list[str]:
    """Return the command line that started this process, without the path of the interpreter."""
    main = sys.modules["__main__"]
    file = str(main.__file__)
    named = next((word for word in sys.orig_argv[1:] if os.path.isfile(word)), "")
    is_wrapped = not os.path.isfile(sys.argv[0]) and "-c" not in sys.orig_argv
    # Python's own arguments count if they name the script, or sys.argv does not: a wrapper, or the script itself, may
    # have replaced sys.argv by words that start something else.
    if is_wrapped or (named and os.path.realpath(named) == os.path.realpath(file)):
        return ["python", *sys.orig_argv[1:]]
    # A debugger, or multiprocessing, runs the script by arguments that nobody has typed, with sys.argv as without it.
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:
        return ["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return ["python", *sys.argv]


@cache  # once: the imported code stays as it was, whatever becomes of the repository
def _commit(path: Path) -> dict[str, Any] | None:
    """Return the commit checked out around a file or directory, and whether tracked files differ from it."""
    directory = path if path.is_dir() else path.parent
    if not any((parent / ".git").exists() for parent in (directory, *directory.parents)):
        return None
    command = ["git", "--no-optional-locks", "-C", str(directory), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = output.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
