"""Description of a task by its cluster: the files of the wire contract, section 3.1.

The files are in ``/run/determined/info``, or in ``DET_CORE_INFO_DIR``. Unknown keys are accepted, so that a newer
cluster can add some.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from det_core.errors import InfoError

INFO_DIR = Path("/run/determined/info")
"""Directory into which a Determined cluster writes the files."""

T = TypeVar("T")


@dataclass(eq=False)
class TrialInfo:
    """The trial that the current task runs.

    Attributes:
        trial_id: the ID of the trial.
        experiment_id: the ID of its experiment.
        trial_seed: the random seed for this trial.
        hparams: the hyperparameter values selected for this trial.
        config: the configuration of its experiment.
        steps_completed: steps of the checkpoint to start from; 0 without one.
        trial_run_id: number of this start of the trial, from 1.
        debug: whether the experiment asks for more logging.
        inter_node_network_interface: the network interface between machines, where the cluster names one.
    """

    trial_id: int
    experiment_id: int
    trial_seed: int = field(repr=False)
    hparams: dict[str, Any] = field(repr=False)
    config: dict[str, Any] = field(repr=False)
    steps_completed: int = field(repr=False)
    trial_run_id: int = field(repr=False)
    debug: bool = field(repr=False)
    inter_node_network_interface: str | None = field(repr=False)

    @property
    def _config(self) -> dict[str, Any]:
        """Another name of ``config``, which published trials read."""
        return self.config


@dataclass(eq=False)
class RendezvousInfo:
    """The containers of the current allocation.

    Attributes:
        container_addrs: one address per container; the first is the chief's.
        container_rank: the index of this container.
        container_slot_counts: number of slots of each container.
    """

    container_addrs: list[str]
    container_rank: int
    container_slot_counts: list[int]


@dataclass(eq=False)
class ResourcesInfo:
    """The accelerators of this container.

    Attributes:
        gpu_uuids: the UUIDs of its GPUs; empty without one.
    """

    gpu_uuids: list[str]


class ClusterInfo:
    """The cluster, the task and the allocation that this process runs in; see :func:`get_cluster_info`.

    Attributes:
        master_url: the master's address, with scheme and port and without a trailing slash.
        cluster_id: the ID of the cluster.
        agent_id: the ID of the agent that runs this container.
        slot_ids: the slots of this container.
        task_id: the ID of the task.
        allocation_id: the ID of the allocation: of this one run of the task.
        session_token: the credential of the allocation.
        task_type: ``TRIAL``, or ``NOTEBOOK``, ``SHELL``, ``COMMAND``, ``TENSORBOARD``, ``CHECKPOINT_GC``,
            ``GENERIC``.
        master_cert_name: the host name that the master's certificate is issued for, when it is another one.
        master_cert_file: a PEM file that signs the master's certificate, or ``noverify``.
    """

    def __init__(
        self,
        master_url: str,
        cluster_id: str,
        agent_id: str,
        slot_ids: list[int],
        task_id: str,
        allocation_id: str,
        session_token: str,
        task_type: str,
        master_cert_name: str | None = None,
        master_cert_file: str | None = None,
        latest_checkpoint: str | None = None,
        trial_info: TrialInfo | None = None,
        rendezvous_info: RendezvousInfo | None = None,
        resources_info: ResourcesInfo | None = None,
    ) -> None:
        """Initialize from values.

        Args:
            trial_info: the trial, where ``task_type`` is ``TRIAL``.
            rendezvous_info: the containers; an object read from the info directory reads them on first use.
            resources_info: the GPUs; read likewise.

        Raises:
            ValueError: If ``master_url`` is not an http or https address, or has a user, query or fragment.
        """
        self.master_url = canonical_url(master_url)
        self.cluster_id = cluster_id
        self.agent_id = agent_id
        self.slot_ids = slot_ids
        self.task_id = task_id
        self.allocation_id = allocation_id
        self.session_token = session_token
        self.task_type = task_type
        self.master_cert_name = master_cert_name
        self.master_cert_file = master_cert_file
        self._latest_checkpoint = latest_checkpoint
        self._trial_info = trial_info
        self._rendezvous_info = rendezvous_info
        self._resources_info = resources_info
        self._directory: Path | None = None

    def __repr__(self) -> str:
        return f"ClusterInfo(master_url={self.master_url!r}, task_id={self.task_id!r})"

    @classmethod
    def _read(cls, directory: Path) -> ClusterInfo:
        info = _read(cls, directory / "cluster.json")
        info._directory = directory
        if info.task_type == "TRIAL":
            info._trial_info = _read(TrialInfo, directory / "trial.json")
        return info

    @property
    def latest_checkpoint(self) -> str | None:
        """The storage_id of the checkpoint to start from; None without one and outside of a trial."""
        if self.task_type != "TRIAL":
            return None
        return self._latest_checkpoint

    def _start_from(self, storage_id: str, steps_completed: int) -> None:
        """Start from an older checkpoint, because the cluster's choice is damaged or deleted."""
        self._latest_checkpoint = storage_id
        self.trial.steps_completed = steps_completed

    @property
    def trial(self) -> TrialInfo:
        """The trial that this task runs.

        Raises:
            RuntimeError: If this task is not a trial.
        """
        if self.task_type != "TRIAL" or self._trial_info is None:
            raise RuntimeError(f"task {self.task_id} is of type {self.task_type}, not TRIAL")
        return self._trial_info

    @property
    def user_data(self) -> dict[str, Any]:
        """The ``data`` section of the experiment's config; empty without one or without a trial."""
        if self._trial_info is not None:
            data = self._trial_info.config.get("data")
            if isinstance(data, dict):
                return data
        return {}

    @property
    def container_addrs(self) -> list[str]:
        """One address per container of the allocation; the first is the chief's."""
        return self._rendezvous().container_addrs

    @property
    def container_rank(self) -> int:
        """The index of this container in the allocation."""
        return self._rendezvous().container_rank

    @property
    def container_slot_counts(self) -> list[int]:
        """Number of slots of each container of the allocation."""
        return self._rendezvous().container_slot_counts

    @property
    def gpu_uuids(self) -> list[str]:
        """The UUIDs of this container's GPUs."""
        if self._resources_info is None:
            self._resources_info = _read(ResourcesInfo, self._file("resources.json"))
        return self._resources_info.gpu_uuids

    def _rendezvous(self) -> RendezvousInfo:
        if self._rendezvous_info is None:
            if self.task_type == "TRIAL":
                self._rendezvous_info = _read(RendezvousInfo, self._file("rendezvous.json"))
            else:
                self._rendezvous_info = RendezvousInfo(["127.0.0.1"], 0, [len(self.slot_ids)])
        return self._rendezvous_info

    def _file(self, name: str) -> Path:
        if self._directory is None:
            raise RuntimeError(f"this ClusterInfo was not read from a directory, and has no {name}")
        return self._directory / name


def get_cluster_info() -> ClusterInfo | None:
    """Return the cluster's description of this task, or None outside of a cluster.

    Every call reads the files anew; they are small.

    Raises:
        InfoError: If a file is invalid; the message names file and key.
    """
    from det_core._env import Environment

    directory = Environment.read().info_dir or INFO_DIR
    if not (directory / "cluster.json").exists():
        return None
    return ClusterInfo._read(directory)


def canonical_url(url: str) -> str:
    """Return a master's address in the form of the wire contract, section 2.1.

    A missing scheme means http on port 8080, unless there is a port; http and https without a port get 80 and
    443. A path prefix stays, without a trailing slash.

    Raises:
        ValueError: If it is not an address, or has a user, a query or a fragment.
    """
    has_scheme = "://" in url
    text = url if has_scheme else f"http://{url}"
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = 0
    # urlsplit() takes nearly anything; a line feed in a host, say, would end up in a header.
    is_odd = any(letter.isspace() or not letter.isprintable() for letter in text)
    has_more = parts.username is not None or bool(parts.query or parts.fragment)
    if is_odd or has_more or parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise ValueError(
            f"invalid master address {url!r}: expected http or https, a host, and no user, query or fragment, as in "
            "http://host:port"
        )
    if port is None and has_scheme:
        port = _PORTS[parts.scheme]
    host = parts.hostname
    if ":" in host:
        host = f"[{host}]"  # urlsplit() takes the brackets off an IPv6 address
    return f"{parts.scheme}://{host}:{port or 8080}{parts.path.rstrip('/')}"


_PORTS = {"http": 80, "https": 443}
_OPTIONAL = ("master_cert_name", "master_cert_file", "latest_checkpoint", "inter_node_network_interface")
"""Keys that may be missing, null or empty, with the same meaning."""
_OF_OTHER_FILES = ("trial_info", "rendezvous_info", "resources_info")
"""Arguments of :class:`ClusterInfo` that have a file of their own."""


def _read(cls: type[T], path: Path) -> T:
    """Return an object of ``cls`` from a file whose keys include its arguments.

    Raises:
        InfoError: If the file cannot be read, or a key is missing or invalid.
    """
    try:
        content = json.loads(path.read_bytes())
        keys = [key for key in inspect.signature(cls).parameters if key not in _OF_OTHER_FILES]
        return cls(**{key: (content.get(key) or None) if key in _OPTIONAL else content[key] for key in keys})
    except OSError as e:
        raise InfoError(f"{path}: {e.strerror}") from e
    except KeyError as e:
        raise InfoError(f"{path}: the required key {e} is missing") from e
    except (ValueError, TypeError, AttributeError) as e:  # not JSON, not an object, or an invalid address
        raise InfoError(f"{path} cannot be used: {e}") from e
