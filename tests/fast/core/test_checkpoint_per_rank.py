"""Values of which each rank has its own, in a state that the chief saves; states that are read without running code."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from det_core import core
from det_core.core._checkpoint import CheckpointContext
from det_core.errors import CheckpointError
from support.checkpoints import STEPS, Recorder, alone, listed, nothing_is_left_over
from support.threads import as_ranks
from support.torch_once import an_optimizer  # noqa: F401  a fixture of this module

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")


def on_ranks(size: int, store: Path, work: Any) -> list[Any]:
    """Return what ``work(context, rank)`` returns, or raises, on each rank."""

    def run(distributed: core.DistributedContext) -> Any:
        context = Recorder().context(distributed, store)
        try:
            return work(context, distributed.rank)
        except Exception as e:
            return e
        finally:
            context.close()

    return as_ranks(size, run)


def save(context: CheckpointContext, rank: int, blocking: bool = True) -> str:
    state = {"weights": torch.arange(3.0)} if rank == 0 else None
    metadata = STEPS if rank == 0 else None
    own = {"random": core.random_state(), "loader": {"rank": rank, "rows": torch.full((2,), rank)}}
    return context.save(state, metadata, per_rank=own, blocking=blocking)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("blocking", [True, False])
def test_each_rank_loads_its_own_values(tmp_path: Path, size: int, blocking: bool) -> None:
    ids = on_ranks(size, tmp_path, lambda context, rank: save(context, rank, blocking))
    assert listed(tmp_path) == [ids[0]] and len(set(ids)) == 1

    def load(context: CheckpointContext, rank: int) -> Any:
        with context.restore_path(ids[0]) as path:
            return context.load(path)

    for rank, state in enumerate(on_ranks(size, tmp_path, load)):
        assert state.keys() == {"weights", "random", "loader"}
        assert state["weights"].tolist() == [0, 1, 2] and state["random"].keys() >= {"python", "torch"}
        assert (state["loader"]["rank"], state["loader"]["rows"].tolist()) == (rank, [rank, rank])
    whole = torch.load(tmp_path / ids[0] / "state.pt", weights_only=True)
    assert [own["loader"]["rank"] for own in whole["per_rank"]] == list(range(size))


def test_another_number_of_ranks_is_an_error_that_says_the_way_out(tmp_path: Path) -> None:
    storage_id = on_ranks(2, tmp_path, save)[0]
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path)
        with context.restore_path(storage_id) as path:
            with pytest.raises(ValueError, match=r"saved by 2 rank\(s\), and 1 load it: of 'random', 'loader'") as e:
                context.load(path)
            assert "Start 2 rank(s), or leave them out by ctx.checkpoint.load(path, strict=False)" in str(e.value)
            assert context.load(path, strict=False).keys() == {"weights"}


OTHERS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    # state, per_rank by rank, other arguments, words of the error
    "key in both": ({"random": 1}, lambda rank: {"random": 2}, {}, "ValueError: .* the state must not have 'random'"),
    "our own key": ({"per_rank": 1}, lambda rank: {"random": 2}, {}, "ValueError: .* the state must not have 'per_r"),
    "other keys": ({}, lambda rank: {f"key {rank}": 1}, {}, "ValueError: .* rank 0 gave 'key 0', rank 1 'key 1'"),
    "state that is a list": ([1], lambda rank: {"a": 1}, {}, "TypeError: .* has to be a dictionary, not a list"),
    "no dictionary on one rank": ({}, lambda rank: [1] * rank, {}, "TypeError: .* expected a dictionary with str"),
    "numpy on one rank": (
        {},
        lambda rank: {"a": [1, numpy.float64(1) if rank else 1]},
        {},
        r"ValueError: .*save\(per_rank=…\)\['a'\]\[1\] is a numpy.float64",
    ),
    "shards": ({}, lambda rank: {"a": 1}, {"shard": True}, r"ValueError: save\(shard=True, per_rank=…\)"),
    "wrong metadata": ({}, lambda rank: {"a": 1}, {"metadata": {}}, "ValueError: .*no 'steps_completed'"),
    "wrong name": ({}, lambda rank: {"a": 1}, {"files": {"state.pt": b""}}, "ValueError: "),
}


@pytest.mark.parametrize("case", OTHERS)
def test_values_that_cannot_be_saved_are_an_error_on_every_rank(tmp_path: Path, case: str) -> None:
    state, per_rank, more, words = OTHERS[case]

    def work(context: CheckpointContext, rank: int) -> str:
        return context.save(state, **{"metadata": STEPS, "per_rank": per_rank(rank), **more})

    for error in on_ranks(2, tmp_path, work):
        text = f"{type(error).__name__}: {error}"
        assert re.match(words, text), text
    assert listed(tmp_path) == []
    nothing_is_left_over(tmp_path)


def test_ranks_that_call_different_saves_are_an_error(tmp_path: Path) -> None:
    def work(context: CheckpointContext, rank: int) -> str:
        return context.save({}, STEPS, per_rank={"a": 1}, blocking=rank == 0)

    for error in on_ranks(2, tmp_path, work):
        assert "the ranks called different things" in str(error)


class Average:
    """An object, as scripts have them."""


@pytest.mark.parametrize("blocking", [True, False])
def test_first_save_names_what_a_resume_will_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, blocking: bool
) -> None:
    state = {"best": numpy.float64(0.5), "ema": {"of": [1, Average()]}, numpy.int64(3): 1, "weights": torch.ones(2)}
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path)
        for _ in range(2):
            storage_id = context.save(state, STEPS, blocking=blocking)
        context.close()
        (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert "state['best'] (numpy.float64), state['ema']['of'][1] (" in warning
        assert "Average), state, key np.int64(3) (numpy.int64): save numbers, strings" in warning
        context = Recorder().context(distributed, tmp_path)
        with context.restore_path(storage_id) as path, pytest.raises(CheckpointError, match="could run code") as e:
            context.load(path)
        assert str(path / "state.pt") in str(e.value)


def test_first_save_of_a_state_that_holds_itself_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state: dict[str, Any] = {"weights": torch.ones(2)}
    state["whole"] = [state]
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path)
        with context.restore_path(context.save(state, STEPS)) as path:
            found = context.load(path)
        context.close()
    assert found["whole"][0]["weights"].tolist() == [1, 1]
    assert caplog.records == []


def test_first_save_of_what_a_resume_reads_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(), "random": core.random_state(), "shape": torch.ones(2).shape,
        "dtype": torch.float32, "device": torch.device("cpu"), "parameter": model.weight, "done": {1, 2}, 3: None,
    }  # fmt: skip
    with alone() as distributed:
        context = Recorder().context(distributed, tmp_path)
        storage_id = context.save(state, STEPS)
        assert caplog.records == []
        with context.restore_path(storage_id) as path:
            assert context.load(path).keys() == state.keys()
        context.close()
