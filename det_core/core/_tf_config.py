"""TensorFlow's description of a cluster, the variable ``TF_CONFIG``: which worker is this, and where are they all?"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from det_core._optional import is_installed
from det_core.errors import MissingExtra


@dataclass(frozen=True)
class Workers:
    """The workers of a job."""

    addresses: tuple[str, ...]
    """``HOST:PORT`` of each."""
    index: int
    """Which of them this process is."""

    @property
    def chief_ip(self) -> str:
        """The host of the first worker."""
        return self.addresses[0].rpartition(":")[0].strip("[]")


def read_tf_config(text: str) -> Workers:
    """Read the value of ``TF_CONFIG``.

    Raises:
        ValueError: it is not JSON of that form, or this process is no worker.
    """
    try:
        found = json.loads(text)
    except ValueError as e:
        raise ValueError(f"TF_CONFIG is not JSON: {e}") from e
    task = _object(_object(found, "TF_CONFIG").get("task"), "TF_CONFIG's task")
    addresses = _object(found.get("cluster"), "TF_CONFIG's cluster").get("worker")
    kind, index = task.get("type"), task.get("index")
    if kind != "worker":
        raise ValueError(f"TF_CONFIG: this process is of type {kind!r}; only a worker has a rank")
    if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
        raise ValueError(f"TF_CONFIG: cluster.worker is {addresses!r}, expected a list of HOST:PORT")
    if not isinstance(index, int) or not 0 <= index < len(addresses):
        raise ValueError(f"TF_CONFIG: task.index is {index!r}, and there are {len(addresses)} workers")
    return Workers(tuple(addresses), index)


def ranks_of(launch: Mapping[str, str]) -> dict[str, Any]:
    """The rank arguments of a DistributedContext: one process on each machine."""
    workers = read_tf_config(launch["TF_CONFIG"])
    place = (workers.index, len(workers.addresses))
    names = ("rank", "size", "cross_rank", "cross_size")
    return {**dict(zip(names, place * 2, strict=True)), "local_rank": 0, "local_size": 1, "chief_ip": workers.chief_ip}


def is_worker_of_several(launch: Mapping[str, str]) -> bool:
    """Whether ``TF_CONFIG`` says that this process is one of several workers."""
    try:
        return len(read_tf_config(launch.get("TF_CONFIG", "")).addresses) > 1
    except ValueError:
        return False


def make_strategy(*, several: bool, required: bool) -> Any:
    """TensorFlow's way of training on all devices of all workers, or of this machine.

    Args:
        several: whether there are several workers.
        required: raise rather than return None where TensorFlow is not installed.

    Raises:
        MissingExtra: it is not, and is required.
    """
    if not is_installed("tensorflow"):
        if required:
            raise MissingExtra(
                "a strategy needs tensorflow, which is not installed. Install it: pip install tensorflow"
            )
        return None
    distribute: Any = importlib.import_module("tensorflow").distribute
    return distribute.MultiWorkerMirroredStrategy() if several else distribute.MirroredStrategy()


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, expected an object")
    return value
