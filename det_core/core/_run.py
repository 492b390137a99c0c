"""A run as one rank takes part in it: where it records, who answers its questions, where checkpoints lie."""

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
"""Seconds that git may take to say which commit is trained, and whether files differ from it."""


@dataclass(frozen=True)
class InitArguments:
    """What ``core.init()`` was asked for, checked, and the environment that it was asked in.

    Attributes:
        store: where checkpoints go, opened; None: the script does not say.
        checkpoint_storage: what the script said of it.
        max_length: the length of a bare run's one operation, as the script said it.
        length: the same as a number with its unit; 1 where the script does not say.
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
        """What to type to start this job again; None where no command starts it: a notebook, stdin, ``python -c``."""
        if self.environment.command is not None:
            return self.environment.command
        return shlex.join(_command_line()) if is_script() else None

    def check_store(self, store: Store) -> None:
        """See whether a store is there, and, if that is wanted, whether it can be written."""
        if self.check_storage:
            store.check_writable()
        else:
            store.check_reachable()


@dataclass(frozen=True)
class Run:
    """A bare run, or one run of a trial under a master. The Context closes what it is made of.

    Attributes:
        run_id: whose checkpoints these are.
        restart: how often it was started before: later ones have larger numbers.
        path: the folder of its journal, as this rank sees it.
        journal: this rank's.
        journal_restart: the number in the journal's name.
        backend: who answers questions.
        store: where checkpoints lie.
        storage: what opens that store again, without secrets, for the record.
        latest_checkpoint: the newest checkpoint of this run, or what the master hands over; None: from scratch.
        steps_completed: those of that checkpoint; 0 without one.
        metric: the validation metric that is searched over; None: nothing says.
        smaller_is_better: which end of it is best.
        units: what the searcher's lengths count.
        hparams: the hyperparameters.
        agent_id: names the machine in the profiler's metrics.
        remarks: lines for a person, before the first line.
        start_notice: the line for a person when it starts, by the checkpoint that it starts from.
        end_notice: what a person is told when it ends, by outcome and detail.
        release: lets another process write the run.
        tensorboard_prefix: the folder below the store's root that event files are copied to; None: they stay in
            the run's folder.
        unlisted_checkpoints: those that this run has recorded after ``latest_checkpoint`` and its store does not list,
            newest first.
        suspect_checkpoints: those that an earlier start has found damaged when it restored them.
        other_stores: by storage_id, the stores of checkpoints that lie in another one.
        info: what the cluster says of this task.
        managed: whether a master says when to stop; else signals do.
        earlier_config: what ``set_config()`` was given last in its earlier starts; the chief of a bare run knows.
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
    """The function, whose errors for its user show the user's line and what they say, not how we came to it.

    Python adds the one frame that raises. How we came to it is in the log, at level DEBUG.
    """

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except (DetCoreError, ValueError, TypeError) as error:
            logger.debug("%s() fails", function.__name__, exc_info=True)
            raise error.with_traceback(None) from None

    return called


def close_quietly(what: Store | Backend) -> None:
    """Close it because of an error that is under way, and must not be hidden by one more."""
    try:
        what.close()
    except DetCoreError as e:
        logger.warning("%s", e)


def describe_outcome(outcome: str, detail: str) -> str:
    """An outcome of a run in words."""
    if outcome == "stopped":
        return f"stopped by the script: {detail}" if detail else "stopped by the script"
    return outcome.replace("_", " ") + (f" ({detail})" if detail else "")


def to_recordable(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the journal takes them, with texts for what JSON cannot hold: they are recorded for people."""
    if not isinstance(settings, Mapping):
        raise TypeError(f"{name} must be a mapping, not {type(settings).__name__}")
    # A path that is not UTF-8 is a text with surrogates, which a journal cannot hold.
    text = json.dumps(dict(settings), default=str, ensure_ascii=False)
    return json.loads(text.encode(errors="replace"))  # type: ignore[no-any-return]


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the settings that differ, as two texts such as ``lr=0.1`` and ``lr=0.01``; None: none does.

    Args:
        before, now: as :func:`to_recordable` gives them.
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
    """What run.json says of a start: the command, the working directory, and the commit of the script's repository."""
    return {"argv": shlex.split(command or ""), "cwd": os.getcwd(), "git": _commit(Path(script()))}


def how_to_resume(run_id: str, command: str | None) -> str:
    """Return what to type to resume a run that was started by ``command``."""
    if command:
        return f"DET_CORE_RESUME={run_id} {command}"
    return f'DET_CORE_RESUME={run_id} in its environment, or core.init(resume="{run_id}")'


def is_printable(name: str) -> bool:
    """Return whether a name is one line of text that a terminal shows: without control characters or lone surrogates.

    ``str.isprintable()`` also refuses what is merely newer than Python's table of characters.
    """
    return not any(unicodedata.category(character) in _UNPRINTABLE for character in name)


def is_script() -> bool:
    """Return whether this process was started by a script or module, not by ``python -c``, stdin or a notebook.

    A notebook's ``sys.argv[0]`` is ``ipykernel_launcher.py``, the same for all.
    """
    started = sys.argv[0] if sys.argv else ""
    return started not in ("", "-", "-c") and getattr(sys.modules.get("__main__"), "__file__", None) is not None


def script() -> str:
    """The script's absolute path; where there is none, the folder this process runs in."""
    return os.path.abspath(sys.argv[0]) if is_script() else os.getcwd()


def _command_line() -> list[str]:
    """Return what was typed to start this process, without the path of the interpreter.

    That is what Python itself was given where it names the script that runs, or where ``sys.argv`` does not: a wrapper,
    or the script itself, may have put words there that start something else. A debugger runs the script with
    ``sys.argv`` as it would be without; so does multiprocessing, whose processes have words that nobody has typed.
    """
    main = sys.modules["__main__"]
    file = str(main.__file__)
    named = next((word for word in sys.orig_argv[1:] if os.path.isfile(word)), "")
    is_wrapped = not os.path.isfile(sys.argv[0]) and "-c" not in sys.orig_argv
    if is_wrapped or (named and os.path.realpath(named) == os.path.realpath(file)):
        return ["python", *sys.orig_argv[1:]]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:
        return ["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return ["python", *sys.argv]


@cache  # what was imported does not change with the repository
def _commit(place: Path) -> dict[str, Any] | None:
    """The commit that is checked out around a file or folder, and whether tracked files differ from it."""
    folder = place if place.is_dir() else place.parent
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None
    command = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = said.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in lines)}
