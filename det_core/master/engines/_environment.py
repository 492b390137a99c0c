"""The environment of a run: its variables and information files (wire contract, §3), and that of a startup hook.

The context's ``startup-hook.sh`` runs in the script's shell, at each start. What it exports, the script has; what it
installs goes to a virtual environment of the run's own, which is layered on the Python of the trial and deleted with
the allocation.
"""

from __future__ import annotations

import json
import os
import posixpath
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from det_core._env import child_environment
from det_core.master.engines._protocol import Claim, Ticket
from det_core.master.engines._slots import Slots

HOOK = "startup-hook.sh"
_PORTS = {
    "DTRAIN_SSH_PORT": 12350,
    "INTER_TRAIN_PROCESS_COMM_PORT_1": 12360,
    "INTER_TRAIN_PROCESS_COMM_PORT_2": 12365,
    "C10D_PORT": 29400,
}
"""Lowest ports; those of another trial are a multiple of :data:`_PORT_STRIDE` higher."""
_PORT_STRIDE = 16
_PORT_SETS = 1000
_MAX_VARIABLE_CHARS = 100_000
"""Characters of a variable: Linux starts nothing with one above 128 KiB. What is larger is in trial.json alone."""
_VENV_TIMEOUT = 120.0
_HOOK_SHELL = f"""
trap 'echo "{HOOK} exited with status $?" >&2' EXIT
source ./{HOOK} || exit
trap - EXIT
exec "$@"
"""
# A virtual environment sees the packages of the Python that it is made of, but where that is one itself, only those of
# the Python below both: the .pth file adds the ones between.
_CREATE_VENV = """
import importlib.util, os, site, sys, venv
place = sys.argv[1]
venv.create(place, system_site_packages=True, symlinks=True, with_pip=False)
inside = os.path.join(place, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
if sys.prefix != sys.base_prefix:
    with open(os.path.join(inside, "_layered.pth"), "w") as file:
        file.writelines("import site; site.addsitedir(%r)\\n" % path for path in site.getsitepackages())
if importlib.util.find_spec("pip") is not None:
    for name in ("pip", "pip3"):
        program = os.path.join(place, "bin", name)
        with open(program, "w") as file:
            file.write('#!/bin/sh\\nexec "%s/bin/python" -m pip "$@"\\n' % place)
        os.chmod(program, 0o755)
"""


def run_variables(ticket: Ticket, claim: Claim, folder: Path, home: Path, slots: Slots) -> dict[str, str]:
    """Return the environment of an allocation's script.

    Args:
        ticket: The allocation.
        claim: Its credentials.
        folder: Its folder.
        home: Home folder of the master.
        slots: Slots of the machine.
    """
    base = child_environment()
    config = seen_config(ticket.config)
    large = {"DET_HPARAMS": json.dumps(dict(ticket.hparams)), "DET_EXPERIMENT_CONFIG": json.dumps(config)}
    names = {"allocation_id": ticket.allocation_id, "task_id": ticket.task_id}
    environment = ticket.environment
    # The configuration may name variables for GPUs alone.
    if slots.devices and ticket.slots and ticket.gpu_environment is not None:
        environment = ticket.gpu_environment
    return {
        **base,
        "PATH": os.pathsep.join([_bin_directory(folder), base.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        **slots.variables(ticket.slot_ids),
        **_cluster_variables(ticket, claim),
        # The SDK of scripts reads the files; the variables are for scripts that do not use it.
        **{name: value for name, value in large.items() if len(value) < _MAX_VARIABLE_CHARS},
        "DET_TASK_ID": ticket.task_id,
        "DET_TASK_TYPE": "TRIAL",
        "DET_ALLOCATION_ID": ticket.allocation_id,
        "DET_TASK_LOGGING_METADATA": json.dumps(names),
        "DET_SLOT_IDS": json.dumps(ticket.slot_ids),
        "DET_EXPERIMENT_ID": str(ticket.experiment_id),
        "DET_TRIAL_ID": str(ticket.trial_id),
        "DET_TRIAL_RUN_ID": str(ticket.trial_run_id),
        "DET_TRIAL_SEED": str(ticket.trial_seed),
        "DET_STEPS_COMPLETED": str(ticket.steps_completed),
        "DET_LATEST_CHECKPOINT": ticket.latest_checkpoint or "",
        **_free_ports(ticket.trial_id),
        "DET_WORKDIR": str(folder / "work"),
        "DET_CORE_MASTER_TIMEOUT": str(ticket.patience),
        **environment,
        # After the user's variables, which must not lead a trial away from its own journal.
        "DET_CORE_HOME": str(home),
        "DET_CORE_INFO_DIR": str(folder / "info"),
        "DET_CORE_RUN_DIR": str(folder / "journal"),
        "DET_CORE_GRACE": str(max(ticket.preemption_timeout, 1.0)),
    }


def write_info(ticket: Ticket, claim: Claim, folder: Path, slots: Slots) -> None:
    """Write the four information files.

    Raises:
        OSError: If they cannot be written.
    """
    files: dict[str, Mapping[str, Any]] = {
        "cluster.json": {
            "master_url": ticket.master_url,
            "cluster_id": ticket.cluster_id,
            "agent_id": ticket.agent_id,
            "slot_ids": ticket.slot_ids,
            "task_id": ticket.task_id,
            "allocation_id": ticket.allocation_id,
            "session_token": claim.session_token,
            "task_type": "TRIAL",
            "latest_checkpoint": ticket.latest_checkpoint,
        },
        "trial.json": {
            "trial_id": ticket.trial_id,
            "experiment_id": ticket.experiment_id,
            "trial_seed": ticket.trial_seed,
            "hparams": dict(ticket.hparams),
            "config": seen_config(ticket.config),
            "steps_completed": ticket.steps_completed,
            "trial_run_id": ticket.trial_run_id,
            "debug": bool(ticket.config.get("debug", False)),
            "inter_node_network_interface": None,
        },
        "rendezvous.json": {
            # One node: this machine.
            "container_addrs": ["127.0.0.1"],
            "container_rank": 0,
            "container_slot_counts": [ticket.slots],
        },
        "resources.json": {"gpu_uuids": slots.gpu_uuids(ticket.slot_ids)},
    }
    for name, content in files.items():
        (folder / "info" / name).write_text(json.dumps(content))


def hook_command(command: Sequence[str]) -> list[str]:
    """Return a command that runs the hook in the work directory, and then, unless it fails, this command."""
    return ["bash", "-c", _HOOK_SHELL, HOOK, *command]


def create_venv(place: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Create the virtual environment of a run; return its variables with that first in PATH.

    Raises:
        OSError: If Python cannot be run.
        subprocess.SubprocessError: If it cannot create a virtual environment.
    """
    subprocess.run(
        [sys.executable, "-c", _CREATE_VENV, str(place)],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=_VENV_TIMEOUT,
    )
    path = os.pathsep.join([str(place / "bin"), environment.get("PATH", os.defpath)])
    return {**environment, "VIRTUAL_ENV": str(place), "PATH": path}


def seen_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with a storage of type ``shared_fs`` as the directory that it is on this machine.

    In a container it would be at a path of its own, whatever its ``host_path`` (wire contract, §3.2), and there the
    contract's clients write. Trials of this engine run in none: given a ``directory``, every client uses that itself.
    """
    storage = config.get("checkpoint_storage")
    if not isinstance(storage, Mapping) or storage.get("type") != "shared_fs":
        return dict(config)
    path = posixpath.normpath(posixpath.join(storage["host_path"], storage.get("storage_path") or ""))
    kept = {key: value for key, value in storage.items() if key.startswith("save_")}
    return {**config, "checkpoint_storage": {"type": "directory", "container_path": path, **kept}}


def _cluster_variables(ticket: Ticket, claim: Claim) -> dict[str, str]:
    address = urlsplit(ticket.master_url)
    container = f"{ticket.allocation_id}.0"
    return {
        "DET_MASTER": ticket.master_url,
        "DET_MASTER_HOST": address.hostname or "",
        "DET_MASTER_ADDR": address.hostname or "",
        "DET_MASTER_PORT": str(address.port or (443 if address.scheme == "https" else 80)),
        "DET_MASTER_ID": ticket.cluster_id,
        "DET_CLUSTER_ID": ticket.cluster_id,
        "DET_AGENT_ID": ticket.agent_id,
        "DET_USE_TLS": "true" if address.scheme == "https" else "false",
        "DET_RESOURCES_ID": container,
        "DET_CONTAINER_ID": container,
        "DET_RESOURCES_TYPE": "docker-container",
        "DET_RUN_DIR": "/run/determined",
        "DET_INTER_NODE_NETWORK_INTERFACE": "",
        "DET_USER": "det_core",
        "DET_USER_TOKEN": claim.session_token,
        "DET_SESSION_TOKEN": claim.session_token,
    }


def _bin_directory(folder: Path) -> str:
    """Return the directory in which ``python`` is this one; made here where that goes by ``python3`` alone."""
    found = os.path.dirname(sys.executable)
    if os.path.exists(os.path.join(found, "python")):
        return found
    (folder / "bin").mkdir()
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(sys.executable)
    return str(folder / "bin")


def _free_ports(trial_id: int) -> dict[str, str]:
    """Return the variables of a trial's ports, which other trials do not get and on which nothing listens."""
    for number in range(trial_id, trial_id + _PORT_SETS):
        ports = {name: base + number % _PORT_SETS * _PORT_STRIDE for name, base in _PORTS.items()}
        if all(_is_free(port) for port in ports.values()):
            break
    return {name: str(port) for name, port in ports.items()}


def _is_free(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True
