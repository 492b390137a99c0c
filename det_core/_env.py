"""Environment variables that det_core reads, in one frozen object.

``Environment.read()`` takes a snapshot, and is how the package sees ``os.environ``; only what is handed on whole to a
child process does not pass through it. Variables that launchers and schedulers set for ranks (``RANK``,
``SLURM_PROCID``, …) form one mapping, ``launch``, which :mod:`det_core._environments` reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

_Default = TypeVar("_Default", int, None)

LIMIT_BATCHES = "PT_ACC_LIMIT_BATCHES"
"""Also set by det_core: ``det_core.accelerated.utils.LimitBatches``."""
_MIN_SECRET_CHARS = 16
"""Characters: what ranks of several machines send each other can run code."""
LAUNCH_PREFIXES = ("HOROVOD_", "MPI_LOCAL", "OMPI_COMM_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "PET_")
LAUNCH_NAMES = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TF_CONFIG",
        "USE_TORCH_DISTRIBUTED",
        "USE_DEEPSPEED",
        "USE_HOROVOD",
        "DET_MANUAL_INIT_DISTRIBUTED",
    ]
)


@dataclass(frozen=True)
class Environment:
    """Snapshot of the variables that configure det_core; ``None``: not set."""

    home: Path
    """``DET_CORE_HOME``, else the platform's user data folder: where runs are kept."""
    resume: str | None = None
    """``DET_CORE_RESUME``: ``latest`` or a run id, the default of ``core.init(resume=)``."""
    secret: str | None = None
    """``DET_CORE_SECRET``, else the content of the file ``DET_CORE_SECRET_FILE`` names, else ``DET_SESSION_TOKEN``."""
    timeout: float | None = None
    """``DET_CORE_TIMEOUT``: seconds after which a collective raises; without it, it waits while every rank lives."""
    info_dir: Path | None = None
    """``DET_CORE_INFO_DIR``: the folder of cluster.json and its siblings, instead of the contract's fixed path."""
    chief_ip: str | None = None
    """``DET_CHIEF_IP``: the address of the chief when there is more than one machine."""
    port: int | None = None
    """``INTER_TRAIN_PROCESS_COMM_PORT_1``: the port that links machines."""
    command: str | None = None
    """``DET_CORE_COMMAND``: the command line that started this job, which the launcher hands to its ranks."""
    cuda_visible_devices: str | None = None
    """``CUDA_VISIBLE_DEVICES``: which GPUs the profiler reports and the launcher counts."""
    grace: float | None = None
    """``DET_CORE_GRACE``: seconds that a launcher gives scripts to save and exit after a signal."""
    master: str | None = None
    """``DET_MASTER``: the address of the master that ``det-core`` and ``det_core.client`` talk to. None: the embedded
    one of ``home``."""
    user_token: str | None = None
    """``DET_USER_TOKEN``: the token that a master at another address demands of its user."""
    master_cert: str | None = None
    """``DET_MASTER_CERT_FILE``: certificates to trust when the master's address begins with https, or ``noverify``."""
    master_cert_name: str | None = None
    """``DET_MASTER_CERT_NAME``: the name that the master's certificate is issued for, where it is not its host's."""
    session_token: str | None = None
    """``DET_SESSION_TOKEN``: the credential of the allocation that this process belongs to."""
    run_dir: Path | None = None
    """``DET_CORE_RUN_DIR``: directory for the journal of a run under a master, whose engine ships the rest."""
    master_timeout: float = 600.0
    """``DET_CORE_MASTER_TIMEOUT``: seconds for which a request to a master that does not answer is retried."""
    ship_timeout: float = 120.0
    """``DET_CORE_SHIP_TIMEOUT``: seconds that the end of a run may take to bring the last reports to the master."""
    allow_pickle: bool = False
    """``DET_CORE_ALLOW_PICKLE``: 1 lets checkpoints of trials hold pickles that run code when they are read."""
    limit_batches: int | None = None
    """``PT_ACC_LIMIT_BATCHES``: trainers of ``det_core.accelerated`` train and evaluate on so many batches of a loader;
    ``none``: on all."""
    probe: str | None = None
    """``DET_CORE_PROBE``: a module whose ``attach(context)`` ``core.init()`` calls before it returns, and under which
    checkpoints go into the run's own folder. ``det-core check-resume`` sets it, with ``DET_CORE_PROBE_DIR``."""
    probe_dir: Path | None = None
    """``DET_CORE_PROBE_DIR``: the folder that the probe reads its plan from, and writes to."""
    launch: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Variables of a framework's launcher or a job scheduler for this process."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Return a snapshot of ``environ``, which defaults to this process's.

        Raises:
            ValueError: If a variable's value is invalid; the message names the variable.
        """
        e: Mapping[str, str] = os.environ
        if environ is not None:
            e = environ
        return cls(
            home=_folder(e, "DET_CORE_HOME") or _default_home(),
            resume=e.get("DET_CORE_RESUME") or None,
            secret=_secret(e),
            timeout=_number(e, "DET_CORE_TIMEOUT"),
            info_dir=_path(e, "DET_CORE_INFO_DIR"),
            chief_ip=e.get("DET_CHIEF_IP") or None,
            port=_port(e, "INTER_TRAIN_PROCESS_COMM_PORT_1"),
            command=e.get("DET_CORE_COMMAND") or None,
            cuda_visible_devices=e.get("CUDA_VISIBLE_DEVICES"),
            grace=_number(e, "DET_CORE_GRACE"),
            master=e.get("DET_MASTER") or None,
            user_token=e.get("DET_USER_TOKEN") or None,
            master_cert=e.get("DET_MASTER_CERT_FILE") or None,
            master_cert_name=e.get("DET_MASTER_CERT_NAME") or None,
            session_token=e.get("DET_SESSION_TOKEN") or None,
            run_dir=Path(e["DET_CORE_RUN_DIR"]).absolute() if e.get("DET_CORE_RUN_DIR") else None,
            master_timeout=_number(e, "DET_CORE_MASTER_TIMEOUT") or cls.master_timeout,
            ship_timeout=_number(e, "DET_CORE_SHIP_TIMEOUT") or cls.ship_timeout,
            allow_pickle=e.get("DET_CORE_ALLOW_PICKLE") == "1",
            limit_batches=None if e.get(LIMIT_BATCHES) == "none" else _count(e, LIMIT_BATCHES, None, "batches"),
            probe=e.get("DET_CORE_PROBE") or None,
            probe_dir=_path(e, "DET_CORE_PROBE_DIR"),
            launch=MappingProxyType({k: v for k, v in e.items() if k in LAUNCH_NAMES or k.startswith(LAUNCH_PREFIXES)}),
        )


def completion_request() -> str | None:
    """Return what a shell's completion script asks of ``det-core``: ``_DET_CORE_COMPLETE``, such as bash_complete."""
    return os.environ.get("_DET_CORE_COMPLETE") or None


def swap_variable(name: str, value: str | None) -> str | None:
    """Set a variable of this process and its children, or remove it with None; return the earlier value."""
    earlier = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    return earlier


def child_environment() -> dict[str, str]:
    """Return this process's variables for a process of another job: without those of det_core and of ranks."""
    return {
        k: v for k, v in os.environ.items() if not k.startswith(("DET_", *LAUNCH_PREFIXES)) and k not in LAUNCH_NAMES
    }


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's variables for a child, with changes; None leaves a variable out."""
    return {k: v for k, v in {**os.environ, **changes}.items() if v is not None}


def set_local_rank(local_rank: int) -> None:
    """Set LOCAL_RANK where the launcher has not: DeepSpeed's engines read nothing else."""
    os.environ.setdefault("LOCAL_RANK", str(local_rank))


def _path(e: Mapping[str, str], name: str) -> Path | None:
    if not (text := e.get(name)):
        return None
    return Path(text)


def _folder(e: Mapping[str, str], name: str) -> Path | None:
    if not (text := e.get(name)):
        return None
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:  # as expanduser() puts it
        raise ValueError(f"{name}={text}: {text.partition('/')[0]} has no home directory") from None


def _default_home() -> Path:
    from platformdirs import user_data_path

    return user_data_path("det_core")


def _secret(e: Mapping[str, str]) -> str | None:
    secret = e.get("DET_CORE_SECRET")
    source = "DET_CORE_SECRET"
    if not secret and (path := e.get("DET_CORE_SECRET_FILE")):
        source = f"DET_CORE_SECRET_FILE={path}"
        try:
            secret = Path(path).read_text().strip()
        except OSError as error:
            raise ValueError(f"{source}: {error.strerror}") from error
    if secret and len(secret) < _MIN_SECRET_CHARS:
        raise ValueError(
            f"{source}: a secret of {len(secret)} characters can be guessed; expected at least {_MIN_SECRET_CHARS}. "
            "Make one: openssl rand -hex 32"
        )
    return secret or e.get("DET_SESSION_TOKEN") or None


def _number(e: Mapping[str, str], name: str) -> float | None:
    text = e.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={text!r}: expected a number of seconds above 0")
    return value


def _count(e: Mapping[str, str], name: str, default: _Default, unit: str) -> int | _Default:
    text = e.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name}={text!r}: expected a number of {unit}, 0 or more")
    return int(text)


def _port(e: Mapping[str, str], name: str) -> int | None:
    text = e.get(name)
    if not text:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"{name}={text!r}: expected a port number from 1 to 65535")
    return int(text)
