"""The batch file of a chain's jobs, the environment they start with, and the submit."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from det_core._env import LAUNCH_NAMES, LAUNCH_PREFIXES, Environment, changed_environment
from det_core.slurm._chain import Chain, script_of
from det_core.slurm._commands import SlurmError, run_slurm

STOP_BEFORE = 180.0
"""Seconds before the time limit at which the script is asked to save."""
MAX_JOBS = 100
LAUNCHERS = ("torch_distributed", "deepspeed", "horovod", "none")
_OWN = ("array", "chdir", "dependency", "error", "export", "export-file", "hold", "job-name", "no-requeue", "nodes",
        "ntasks", "ntasks-per-node", "open-mode", "output", "requeue", "wrap")  # fmt: skip
"""Options of sbatch that the chain sets itself, or that have one of their own."""
_LEFT_OUT = LAUNCH_NAMES | {
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL",
    "DET_CORE_SECRET", "DET_CORE_SECRET_FILE", "DET_CORE_RESUME", "DET_CORE_COMMAND",
    "BASHOPTS", "SHELLOPTS", "UID", "EUID", "PPID", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "_",
}  # fmt: skip
"""Variables of the submit that are Slurm's, ours or the shell's to set in the job."""
_STARTS_RANKS = re.compile(
    r"(\S*/)?(torchrun|accelerate|deepspeed|horovodrun|mpirun|srun) "
    r"|\S*python\S*( -\S+)*? -m (det_core\.launch|torch\.distributed|accelerate|deepspeed)\b"
)
_BATCH_FILE = """\
#!/bin/bash
{directives}
#SBATCH --no-requeue
# One job of a chain: each queues the next one until the run is done (det-core slurm list).
# $1 is the chain's directory. The first job has none if you submit this file yourself, and makes it.
trap '' TERM  # until the program below listens: a preemption must not end the chain
[ -r "$1/env.sh" ] && . "$1/env.sh"  # the environment of the submit, by a file of yours alone
{setup}python={python}
[ -x "$python" ] || {{ echo "det-core slurm: node $(hostname) has no $python: install det_core in a directory that all \
nodes see" >&2; exit 127; }}
# Name; most jobs; seconds before the time limit at which the script is asked to save; the script.
exec "$python" -m det_core.slurm job "${{1:-$0}}" {name} {max_jobs} {stop_before:g} {command}
"""


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
        """Raise ValueError if an option is invalid, or contradicts another one."""
        for name in self.slurm:
            if name in _OWN:
                raise ValueError(f"--sbatch {name}: the chain sets it itself, or has an option of its own for it")
        longest = parse_limit(self.slurm.get("time", "")) / 3
        if self.stop_before is not None and not 0 < self.stop_before <= longest:
            raise ValueError(
                f"--stop-before {self.stop_before:g}: expected more than 0 and at most a third of --time, "
                f"{longest:g} s, as the rest is all that a job trains"
            )
        if self.max_jobs < 1:
            raise ValueError(f"--max-jobs {self.max_jobs}: expected at least 1")
        for line in self.setup:
            if re.fullmatch(r"\S+\.sh", line) and not Path(line).is_file():
                raise ValueError(f"--setup {line}: no such file")

    def check_command(self) -> None:
        """Raise ValueError if the command cannot run here; with a setup, which may bring it, anything goes."""
        if self.setup:
            return
        program, *arguments = self.command
        if shutil.which(program) is None and self.full_command[0] == program:
            advice = "if the nodes have it, say how by --setup"
            raise ValueError(f"cannot run {program!r}: not an executable here; {advice}")
        script = next((word for word in arguments if not word.startswith("-")), "")
        if Path(program).name.startswith("python") and script.endswith(".py") and not Path(script).exists():
            raise ValueError(f"cannot run {os.path.abspath(script)}: no such file")

    @property
    def chain_name(self) -> str:
        """Name of the chain, in characters that need no quotes anywhere."""
        return re.sub(r"[^A-Za-z0-9_-]+", "-", self.name or Path(script_of(self.command)).stem).strip("-") or "job"

    @property
    def full_command(self) -> list[str]:
        """The command with its launcher; one that starts ranks itself stays as it is, unless ``launcher`` is given."""
        gpus = self.slurm.get("gpus-per-node", "").rpartition(":")[2]
        is_parallel = self.nodes > 1 or self.ranks_per_node > 1 or gpus not in ("", "0", "1")
        launcher = self.launcher
        if not launcher and is_parallel and not _STARTS_RANKS.match(shlex.join(self.command)):
            launcher = "torch_distributed"
        if launcher in ("", "none"):
            return list(self.command)
        ranks = ["--nproc-per-node", str(self.ranks_per_node)] * bool(self.ranks_per_node)
        return [sys.executable, "-m", f"det_core.launch.{launcher}", *ranks, *self.command]


def submit(home: Path, options: JobOptions, variables: Sequence[str] = ()) -> Chain:
    """Make a chain and submit its first job, or the first ``options.chain`` at once.

    ``DET_CORE_RESUME`` in this process's environment names a run that the chain continues, instead of a new one.

    Args:
        home: where runs are kept; all nodes have to see it.
        options: what to run and where.
        variables: see :func:`environment_file`.

    Raises:
        ValueError: If the options are invalid, the command is not there, or a chain of the run has not ended.
        SlurmError: If sbatch refuses, in its words; nothing is left then of a new run.
        RunError: If the run's directory cannot be made, or the run to continue is not there.
    """
    options.check()
    options.check_command()
    environment = environment_file(changed_environment({}), variables)
    resume = Environment.read().resume or ""
    if resume == "latest":
        raise ValueError("DET_CORE_RESUME=latest: expected the ID of a run to continue; unset it for a new run")
    chain = Chain.create(home, options.chain_name, options.command, resume)
    try:
        chain.write("env.sh", environment)
        chain.write("job.sh", batch_file(options, os.getcwd()).encode())
        job = ""
        for _ in range(options.chain or 1):
            job = chain.submit(after=job)
    except BaseException:
        with suppress(SlurmError):  # such as a limit of jobs in the queue, which the first ones were within
            if chain.submitted:
                run_slurm("scancel", *chain.submitted)
        if resume:
            chain.save("not submitted")
        else:
            shutil.rmtree(chain.run_path)
        raise
    return chain


def batch_file(options: JobOptions, cwd: str) -> str:
    """Return the batch file of all jobs of a chain, also for people who submit it themselves."""
    directives = {"job-name": options.chain_name, "nodes": str(options.nodes), "ntasks-per-node": "1",
                  "chdir": cwd, **options.slurm, "open-mode": "append"}  # fmt: skip
    lines = [f"#SBATCH --{name}={shlex.quote(value)}".removesuffix("=''") for name, value in directives.items()]
    setup = ""
    for line in options.setup:
        if Path(line).is_file():
            line = f". {shlex.quote(os.path.abspath(line))}"
        setup += f"{line}\n"
    stop_before = min(options.stop_before or STOP_BEFORE, parse_limit(options.slurm.get("time", "")) / 3)
    return _BATCH_FILE.format(
        directives="\n".join(lines), setup=setup, python=shlex.quote(sys.executable), name=options.chain_name,
        max_jobs=options.chain or options.max_jobs, stop_before=stop_before, command=shlex.join(options.full_command),
    )  # fmt: skip


def environment_file(variables: Mapping[str, str], added: Sequence[str] = ()) -> bytes:
    """Return shell lines that set the variables of a submit, with added ones: ``NAME=VALUE``, or ``NAME`` of those.

    Raises:
        ValueError: If a variable to add is not set.
    """
    left_out = (*LAUNCH_PREFIXES, "SBATCH_")
    chosen = {k: v for k, v in variables.items() if k not in _LEFT_OUT and not k.startswith(left_out)}
    for word in ["SLURM_CONF"] * ("SLURM_CONF" in variables) + list(added):
        name, equals, value = word.partition("=")
        if not equals and name not in variables:
            raise ValueError(f"--env {name}: not set here")
        chosen[name] = value if equals else variables[name]
    lines = []
    for name, value in chosen.items():
        if name.isidentifier():
            lines.append(f"export {name}={shlex.quote(value)}\n")
        elif match := re.fullmatch(r"BASH_FUNC_([\w.-]+)%%", name):  # such as `module`, which a login shell exports
            lines.append(f"{match[1]} {value}\nexport -f {match[1]}\n")
    return os.fsencode("".join(lines))


def parse_limit(text: str) -> float:
    """Return a time limit in seconds: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; infinite if it is 0 or none of them."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    units = [3600, 60, 1] if dash or len(parts) == 3 else [60, 1]
    with suppress(ValueError):  # as of UNLIMITED
        limit = 86400.0 * int(days or 0) + sum(unit * int(part) for unit, part in zip(units, parts, strict=False))
        return limit or math.inf
    return math.inf
