"""Trials of our own master: what its engine would give to their processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from det_core import core
from support.scripted_engine import Launched

CONFIG = """
name: test
entrypoint: "true"
searcher: {{name: single, metric: loss, max_length: {length}}}
max_restarts: 0
checkpoint_storage: {{type: directory, container_path: {store}}}
"""


def config(folder: Path, length: int = 10) -> str:
    """Return the configuration of one trial with its checkpoints in ``folder``."""
    return CONFIG.format(length=length, store=folder / "store")


def variables(spec: Launched, folder: Path) -> dict[str, str]:
    """Write the information files of an allocation; the variables of its processes."""
    info = folder / f"info-{spec.trial_run_id}"
    info.mkdir(parents=True, exist_ok=True)
    cluster = {
        "master_url": spec.master_url, "cluster_id": spec.cluster_id, "agent_id": spec.agent_id,
        "slot_ids": list(spec.slot_ids), "task_id": spec.task_id, "allocation_id": spec.allocation_id,
        "session_token": spec.session_token, "task_type": "TRIAL", "latest_checkpoint": spec.latest_checkpoint,
    }  # fmt: skip
    trial = {
        "trial_id": spec.trial_id, "experiment_id": spec.experiment_id, "trial_seed": spec.trial_seed,
        "hparams": dict(spec.hparams), "config": dict(spec.config), "steps_completed": spec.steps_completed,
        "trial_run_id": spec.trial_run_id, "debug": False, "inter_node_network_interface": None,
    }  # fmt: skip
    (info / "cluster.json").write_text(json.dumps(cluster))
    (info / "trial.json").write_text(json.dumps(trial))
    journal = folder / f"journal-{spec.trial_run_id}"
    return {
        "DET_CORE_INFO_DIR": str(info), "DET_CORE_RUN_DIR": str(journal), "DET_SESSION_TOKEN": spec.session_token,
        "DET_CORE_MASTER_TIMEOUT": "30", "DET_CORE_SHIP_TIMEOUT": "30",
    }  # fmt: skip


@contextmanager
def opened(
    spec: Launched, folder: Path, patch: pytest.MonkeyPatch, env: Mapping[str, str] | None = None
) -> Iterator[core.Context]:
    """Open a context of one rank in this process, as the allocation's script would have it."""
    given = variables(spec, folder) | dict(env or {})
    for name, value in given.items():
        patch.setenv(name, value)
    try:
        with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as ctx:
            yield ctx
    finally:
        for name in given:
            patch.delenv(name)
