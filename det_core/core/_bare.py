"""A bare run: its folder opened by the chief and known to every rank, its first and last line."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from det_core._env import Environment
from det_core.core._distributed import DistributedContext
from det_core.core._ranks import on_chief
from det_core.journal import RunFolder, RunRecord, read_run


@dataclass(frozen=True)
class BareRun:
    """Where this rank records, in which run and restart."""

    run_id: str
    restart: int
    resumed: bool
    path: Path
    """The run's folder as this rank sees it: the chief's where it is visible here, else one of the same name."""
    host: str
    """The chief's host."""
    command: str
    """The command line that started the job, for a person to type again."""
    remarks: tuple[str, ...]
    """What a person may not expect of the run that was opened."""
    folder: RunFolder | None
    """The chief's hold on the run; None on the workers."""

    def last_line(self, outcome: str, detail: str) -> str:
        """What is said when it ends."""
        return last_line(self, outcome, detail)

    def release(self) -> None:
        """Let another process write this run."""
        if self.folder is not None:
            self.folder.release()


def open_bare_run(
    distributed: DistributedContext, environment: Environment, *, name: str | None, resume: str | None
) -> BareRun:
    """Start a run, or take up the one that ``resume`` names, on all ranks together.

    Args:
        distributed: the ranks of the run.
        environment: says where runs are kept, and which to resume where ``resume`` is None.
        name: what ``latest`` goes by; None: the script's absolute path.
        resume: ``"latest"``, a run's id, or None for a new run.

    Raises:
        RunNotFound: there is no run of that id. ``latest`` without any run of that name starts a new one.
        RunLocked: another process writes that run.
    """
    held: list[RunFolder] = []
    remarks: list[str] = []
    command = environment.command or shlex.join(_typed())

    def open_on_chief() -> tuple[str, int, bool, str, str]:
        chosen = name or _script()
        folder, resumed = _chosen_folder(environment, chosen, resume or environment.resume, command)
        if resumed:
            remarks.extend(_differences(read_run(folder.path), chosen, distributed.size))
        elif resume or environment.resume:
            remarks.append(f"there is no earlier run named {chosen} in {environment.home}: starting a new one")
        restart = folder.begin_restart()
        held.append(folder)
        return folder.run_id, restart, resumed, str(folder.path), os.uname().nodename

    run_id, restart, resumed, path, host = on_chief(distributed, "init", open_on_chief)
    seen = Path(path)
    if not held and not seen.is_dir():
        seen = environment.home / "runs" / run_id
        seen.mkdir(parents=True, exist_ok=True)
    return BareRun(run_id, restart, resumed, seen, host, command, tuple(remarks), held[0] if held else None)


def _differences(run: RunRecord, name: str, size: int) -> list[str]:
    """How this start of a run differs from the ones before."""
    found = []
    if run.name != name:
        found.append(f"run {run.run_id} was started under the name {run.name}, and goes on under {name}")
    before = [r["size"] for r in run.records("run_start")]
    if before and before[-1] != size:
        found.append(f"run {run.run_id} had {before[-1]} rank(s) before, and has {size} now")
    if never_asked(run):
        found.append(f"run {run.run_id} ended without a word before: {NEVER_ASKED}")
    return found


NEVER_ASKED = "it had not called should_preempt() yet, and before that a signal ends a process at once"


def never_asked(run: RunRecord) -> bool:
    """Whether the last start of a run ended without a word, and before any rank had called should_preempt()."""
    last = run.restarts - 1
    starts = [r for r in run.records("run_start") if r.restart == last and r.get("notes_should_preempt")]
    ended = {r.rank for r in run.records("run_end") if r.restart == last}
    asked = any(r.restart == last for r in run.records("should_preempt"))
    return not asked and any(r.rank not in ended for r in starts)


def _chosen_folder(environment: Environment, name: str, resume: str | None, command: str) -> tuple[RunFolder, bool]:
    if resume == "latest":
        if (latest := RunFolder.latest(environment.home, name)) is not None:
            return latest, True
    elif resume is not None:
        return RunFolder.open(environment.home, resume), True
    return RunFolder.create(environment.home, name=name, argv=shlex.split(command)), False


def _typed() -> list[str]:
    """What was typed to start this process; of ``python -m package.module`` Python only keeps the module's file."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:
        return ["python", "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return ["python", *sys.argv]


def _script() -> str:
    """The script's absolute path; for an interactive session, the folder it runs in."""
    script = sys.argv[0] if sys.argv else ""
    return os.path.abspath(script) if script and script != "-c" else os.getcwd()


def say(text: str) -> None:
    """One line for the person at the terminal, apart from the script's own output."""
    print(f"det_core: {text}", file=sys.stderr, flush=True)


def first_line(run: BareRun, latest_checkpoint: str | None) -> str:
    """What a bare run says when it starts."""
    if not run.resumed:
        return f"run {run.run_id} in {run.path}"
    start = f"from checkpoint {latest_checkpoint}" if latest_checkpoint else "without a checkpoint to start from"
    return f"run {run.run_id} resumed (restart {run.restart}) {start}, in {run.path}"


def ending_of(outcome: str, detail: str) -> str:
    """An outcome of a run in words."""
    if outcome == "stopped":
        return f"stopped by the script: {detail}" if detail else "stopped by the script"
    return outcome.replace("_", " ") + (f" ({detail})" if detail else "")


def last_line(run: BareRun, outcome: str, detail: str) -> str:
    """What a bare run says when it ends."""
    ending = ending_of(outcome, detail)
    if outcome in ("completed", "invalid_hp"):
        return f"run {run.run_id} {ending}; to look at it: det-core runs show {run.run_id}"
    return f"run {run.run_id} {ending}; to resume it: DET_CORE_RESUME={run.run_id} {run.command}"
