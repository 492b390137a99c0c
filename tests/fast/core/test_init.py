from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from det_core import core


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"distributed": 3}, "distributed must be a core.DistributedContext, not int"),
        ({"preempt_mode": "ChiefOnly"}, "preempt_mode must be a core.PreemptMode"),
        ({"tensorboard_mode": "AUTO"}, "tensorboard_mode must be a core.TensorboardMode"),
        ({"name": " "}, "name="),
        ({"resume": ""}, "resume="),
        ({"searcher_metric": 3}, "searcher_metric="),
        ({"max_length": 0}, "max_length="),
        ({"hparams": 3}, "hparams must be a mapping, not int"),
        ({"checkpoint_storage": {"type": "floppy"}}, "floppy"),
        ({"checkpoint_storage": 7}, "checkpoint_storage"),
    ],
)
def test_arguments_are_checked_before_anything_is_made(home: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as e:
        core.init(**arguments)
    assert said in str(e.value)
    assert not (home / "runs").exists()


def test_more_ranks_need_a_distributed_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError,
        match=r"core\.init\(distributed=core\.DistributedContext\.from_torch_distributed\(\)\), or "
        r"core\.DistributedContext\.detect\(\) for any launcher",
    ):
        core.init()


def test_wrong_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DET_CORE_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="DET_CORE_TIMEOUT='soon'"):
        core.init()
