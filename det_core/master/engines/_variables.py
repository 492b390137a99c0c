"""What a trial is told of itself: its variables and its information files (wire contract, §3)."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from det_core._env import inherited
from det_core.master.engines._protocol import LaunchSpec
from det_core.master.engines._slots import Slots

PORTS = {
    "DTRAIN_SSH_PORT": 12350,
    "INTER_TRAIN_PROCESS_COMM_PORT_1": 12360,
    "INTER_TRAIN_PROCESS_COMM_PORT_2": 12365,
    "C10D_PORT": 29400,
}
"""The ports of the first allocation; each further one has its own, ``STRIDE`` higher."""
STRIDE, _PLACES = 16, 1000
_LONGEST = 100_000
"""Characters of a variable; the kernel takes no program's with 128 KiB. What is longer is in the information files."""
LARGEST = 100_000
"""Characters of a variable: Linux starts nothing with one above 128 KiB. What is larger is in trial.json alone."""


def variables(spec: LaunchSpec, folder: Path, home: Path, slots: Slots, place: int) -> dict[str, str]:
    """The environment of an allocation's script.

    Args:
        spec: the allocation.
        folder: its folder.
        home: the home folder of the master.
        slots: the machine's slots.
        place: which ports it gets; see :func:`free_place`.
    """
    base = inherited()
    told = {**_of_the_cluster(spec), **_of_the_trial(spec)}
    return {
        **base,
        "PATH": os.pathsep.join([_programs(spec.interpreter or sys.executable, folder), base.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        **slots.variables(spec.slot_ids),
        **{name: value for name, value in told.items() if len(value) < _LONGEST},
        **{name: str(port + STRIDE * place) for name, port in PORTS.items()},
        "DET_WORKDIR": str(folder / "work"),
        **_of_the_user(spec, slots),
        "DET_CORE_HOME": str(home),
        "DET_CORE_INFO_DIR": str(folder / "info"),
        "DET_CORE_RUN_DIR": str(folder / "journal"),
        "DET_CORE_GRACE": str(max(spec.preemption_timeout, 1.0)),
    }


def write_info(spec: LaunchSpec, folder: Path, slots: Slots) -> None:
    """Write the four information files.

    Raises:
        OSError: they cannot be written.
    """
    files: dict[str, Mapping[str, Any]] = {
        "cluster.json": {
            "master_url": spec.master_url,
            "cluster_id": spec.cluster_id,
            "agent_id": spec.agent_id,
            "slot_ids": list(spec.slot_ids),
            "task_id": spec.task_id,
            "allocation_id": spec.allocation_id,
            "session_token": spec.session_token,
            "task_type": "TRIAL",
            "latest_checkpoint": spec.latest_checkpoint,
        },
        "trial.json": {
            "trial_id": spec.trial_id,
            "experiment_id": spec.experiment_id,
            "trial_seed": spec.trial_seed,
            "hparams": dict(spec.hparams),
            "config": dict(spec.config),
            "steps_completed": spec.steps_completed,
            "trial_run_id": spec.trial_run_id,
            "debug": bool(spec.config.get("debug", False)),
            "inter_node_network_interface": None,
        },
        "rendezvous.json": {
            "container_addrs": ["127.0.0.1"],
            "container_rank": 0,
            "container_slot_counts": [len(spec.slot_ids)],
        },
        "resources.json": {"gpu_uuids": slots.gpu_uuids(spec.slot_ids)},
    }
    for name, content in files.items():
        (folder / "info" / name).write_text(json.dumps(content))


def _programs(interpreter: str, folder: Path) -> str:
    """The folder in which ``python`` is the interpreter: made here where it goes by ``python3`` alone."""
    programs = os.path.dirname(interpreter)
    if not os.path.exists(os.path.join(programs, "python")):
        (folder / "bin").mkdir()
        for name in ("python", "python3"):
            (folder / "bin" / name).symlink_to(interpreter)
        return str(folder / "bin")
    return programs


def free_place(taken: set[int]) -> int:
    """The first place that no allocation has and whose ports no other program listens on."""
    for place in range(_PLACES):
        if place not in taken and all(_is_free(port + STRIDE * place) for port in PORTS.values()):
            return place
    return next(place for place in range(len(taken) + 1) if place not in taken)


def _is_free(port: int) -> bool:
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


def _of_the_cluster(spec: LaunchSpec) -> dict[str, str]:
    address = urlsplit(spec.master_url)
    container = f"{spec.allocation_id}.0"
    return {
        "DET_MASTER": spec.master_url,
        "DET_MASTER_HOST": address.hostname or "",
        "DET_MASTER_ADDR": address.hostname or "",
        "DET_MASTER_PORT": str(address.port or (443 if address.scheme == "https" else 80)),
        "DET_MASTER_ID": spec.cluster_id,
        "DET_CLUSTER_ID": spec.cluster_id,
        "DET_AGENT_ID": spec.agent_id,
        "DET_USE_TLS": "true" if address.scheme == "https" else "false",
        "DET_RESOURCES_ID": container,
        "DET_CONTAINER_ID": container,
        "DET_RESOURCES_TYPE": "docker-container",
        "DET_RUN_DIR": "/run/determined",
        "DET_INTER_NODE_NETWORK_INTERFACE": "",
        "DET_USER": "det_core",
        "DET_USER_TOKEN": spec.session_token,
        "DET_SESSION_TOKEN": spec.session_token,
    }


def _of_the_user(spec: LaunchSpec, slots: Slots) -> Mapping[str, str]:
    on_gpu = bool(slots.devices and spec.slot_ids)
    return spec.gpu_environment if on_gpu and spec.gpu_environment is not None else spec.environment


def _of_the_trial(spec: LaunchSpec) -> dict[str, str]:
    large = {"DET_HPARAMS": json.dumps(dict(spec.hparams)), "DET_EXPERIMENT_CONFIG": json.dumps(dict(spec.config))}
    names = {"allocation_id": spec.allocation_id, "task_id": spec.task_id}
    return {
        "DET_TASK_ID": spec.task_id,
        "DET_TASK_TYPE": "TRIAL",
        "DET_ALLOCATION_ID": spec.allocation_id,
        "DET_TASK_LOGGING_METADATA": json.dumps(names),
        "DET_SLOT_IDS": json.dumps(list(spec.slot_ids)),
        "DET_EXPERIMENT_ID": str(spec.experiment_id),
        "DET_TRIAL_ID": str(spec.trial_id),
        "DET_TRIAL_RUN_ID": str(spec.trial_run_id),
        "DET_TRIAL_SEED": str(spec.trial_seed),
        "DET_STEPS_COMPLETED": str(spec.steps_completed),
        "DET_LATEST_CHECKPOINT": spec.latest_checkpoint or "",
        **{name: value for name, value in large.items() if len(value) < LARGEST},
    }
