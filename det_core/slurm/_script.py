"""The batch file of a chain's jobs and the environment they start with. Pure but for reading the environment."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from det_core._env import LAUNCH_NAMES, LAUNCH_PREFIXES

STOP_BEFORE = 180.0
"""Seconds before the time limit at which the script is asked to save."""
MAX_JOBS = 100
LAUNCHERS = ("torch_distributed", "deepspeed", "horovod", "none")
_OWN = ("array", "chdir", "dependency", "error", "export", "export-file", "hold", "job-name", "no-requeue", "nodes",
        "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "time", "wrap")  # fmt: skip
"""Options of sbatch that the chain sets itself, or that have one of their own."""
_LEFT_OUT = LAUNCH_NAMES | {
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL",
    "DET_CORE_SECRET", "DET_CORE_SECRET_FILE", "DET_CORE_RESUME", "DET_CORE_COMMAND",
    "BASHOPTS", "SHELLOPTS", "UID", "EUID", "PPID", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "_",
}  # fmt: skip
"""Variables of the submit that are Slurm's, ours or the shell's to set in the job."""
_INTERPRETER = re.compile(r"python[\d.]*")
_FLAGS_WITH_VALUE = ("-W", "-X")
_LAUNCHER_MODULE = re.compile(r"(det_core\.launch|torch\.distributed|accelerate\.commands|deepspeed\.launcher)\b.*")


@dataclass(frozen=True)
class JobOptions:
    """Options of ``det-core slurm submit`` and ``script``.

    Attributes:
        command: the script's command, without a launcher.
        slurm: options of sbatch by their long names.
        name: of chain and jobs; empty: the script's.
        setup: shell lines, or files of them, to run before the script on the first node.
        launcher: one of :data:`LAUNCHERS`; empty: torch_distributed where there are several ranks.
    """

    command: Sequence[str]
    slurm: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    nodes: int = 1
    setup: Sequence[str] = ()
    launcher: str = ""
    ranks_per_node: int = 0
    stop_before: float | None = None
    max_jobs: int = MAX_JOBS
    chain: int = 0

    def check(self) -> None:
        """Raise ValueError if the options contradict each other."""
        if own := [name for name in self.slurm if name in _OWN and name != "time"]:
            raise ValueError(f"--sbatch {own[0]}: the chain sets it itself, or has an option of its own for it")
        limit = parse_limit(self.slurm.get("time", ""))
        if limit and self.stop_before and self.stop_before > limit / 3:
            raise ValueError(
                f"--stop-before {self.stop_before:g}: expected at most a third of --time, {limit / 3:g} s, "
                "as the rest is all that a job trains"
            )
        self.full_command()

    @property
    def chain_name(self) -> str:
        """Name of the chain, in characters that need no quotes anywhere."""
        return re.sub(r"[^A-Za-z0-9_-]+", "-", self.name or Path(script_of(self.command)).stem).strip("-") or "job"

    def full_command(self) -> list[str]:
        """Return the command with its launcher.

        Raises:
            ValueError: If a launcher is needed and the command is not a Python script.
        """
        gpus = self.slurm.get("gpus-per-node", "0").rpartition(":")[2]
        ranks = self.ranks_per_node or (int(gpus) if gpus.isdigit() else 0)
        launcher = self.launcher or ("torch_distributed" if self.nodes > 1 or ranks > 1 else "none")
        command = list(self.command)
        if launcher == "none":
            return command
        place = _script_place(command)
        if place is None:
            raise ValueError(
                f"{shlex.join(command)}: expected `python SCRIPT …`, to start one process a rank; to run this command "
                "once on each node: --launcher none"
            )
        if command[place] == "-m" and _LAUNCHER_MODULE.fullmatch(command[place + 1]):
            return command
        own = ["-m", f"det_core.launch.{launcher}"]
        own += ["--nproc-per-node", str(self.ranks_per_node)] if self.ranks_per_node else []
        return command[:place] + own + command[place:]


def script_of(command: Sequence[str]) -> str:
    """Return the script's file in a command, or the program."""
    return next((word for word in command if word.endswith((".py", ".sh"))), command[0])


def batch_file(options: JobOptions, cwd: str) -> str:
    """Return the batch file: of all jobs of a chain, and for people who submit it themselves.

    Args:
        options: what was asked for.
        cwd: directory of the script.
    """
    directives = {"job-name": options.chain_name, "nodes": str(options.nodes), "ntasks-per-node": "1",
                  "chdir": cwd, **options.slurm, "open-mode": "append"}  # fmt: skip
    lines = [f"#SBATCH --{name}={shlex.quote(value)}" if value else f"#SBATCH --{name}"
             for name, value in directives.items()]  # fmt: skip
    setup = [f". {shlex.quote(str(Path(line).absolute()))}" if Path(line).is_file() else line for line in options.setup]
    command = shlex.join(options.full_command())
    max_jobs = options.chain or options.max_jobs
    words = ["--name", options.chain_name, "--max-jobs", str(max_jobs)]
    limit = parse_limit(options.slurm.get("time", "")) or math.inf
    words += ["--stop-before", f"{min(options.stop_before or STOP_BEFORE, limit / 3):g}"]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --no-requeue",
            "# One job of a chain: each queues the next one until the run is done (det-core slurm list).",
            "# $1 is the chain's directory. The first job has none if you submit this file yourself, and makes it.",
            "trap '' TERM  # until the program below listens: a preemption must not end the chain",
            '[ -r "$1/env.sh" ] && . "$1/env.sh"  # the environment of the submit, by a file of yours alone',
            *setup,
            f"python={shlex.quote(sys.executable)}",
            '[ -x "$python" ] || { echo "det-core slurm: node $(hostname) has no $python: install det_core in a'
            ' directory that all nodes see" >&2; exit 127; }',
            f'exec "$python" -m det_core.slurm job {shlex.join(words)} "${{1:-$0}}" -- {command}',
            "",
        ]
    )


def environment_file(variables: Mapping[str, str], home: Path, added: Sequence[str] = ()) -> str:
    """Return shell lines that set the environment of a submit.

    Args:
        variables: those of the submit.
        home: where runs are kept.
        added: ``NAME`` for one that would be left out, or ``NAME=VALUE``.

    Raises:
        ValueError: If a variable to add is not set.
    """
    chosen = {
        k: v for k, v in variables.items() if k not in _LEFT_OUT and not k.startswith((*LAUNCH_PREFIXES, "SBATCH_"))
    }
    if "SLURM_CONF" in variables:
        chosen["SLURM_CONF"] = variables["SLURM_CONF"]
    for word in added:
        name, equals, value = word.partition("=")
        if not equals and name not in variables:
            raise ValueError(f"--env {name}: not set here")
        chosen[name] = value if equals else variables[name]
    chosen["DET_CORE_HOME"] = str(home)
    lines = ["unset SLURM_EXPORT_ENV  # NIL, which srun would take over: the script's steps get this environment"]
    for name, value in chosen.items():
        if name.isidentifier():
            lines.append(f"export {name}={shlex.quote(value)}")
        elif match := re.fullmatch(r"BASH_FUNC_([\w.-]+)%%", name):  # such as `module`
            lines.append(f"{match[1]} {value}\nexport -f {match[1]}")
    return "\n".join(lines) + "\n"


def parse_limit(text: str) -> float | None:
    """Return a time limit of Slurm's in seconds; None where it is none, or not written as Slurm takes it.

    Formats: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, *parts = (int(part) if part else None for part in match.groups())
    first, second, third = parts
    if days is not None or third is not None:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = 0, first, second
    return 86400.0 * (days or 0) + 3600 * (hours or 0) + 60 * (minutes or 0) + (seconds or 0)


def _script_place(command: Sequence[str]) -> int | None:
    """Return the index of the script, or of ``-m``, in a command of Python; None if it is not one."""
    if not _INTERPRETER.fullmatch(Path(command[0]).name):
        return None
    place = 1
    while place < len(command) and command[place].startswith("-") and command[place] not in ("-m", "-c", "-"):
        place += 2 if command[place] in _FLAGS_WITH_VALUE else 1
    is_script = place < len(command) and command[place] not in ("-c", "-")
    return place if is_script and (command[place] != "-m" or place + 1 < len(command)) else None
