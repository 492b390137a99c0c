"""The acceptance cases of trials, by number, in one process: loaders, batches and their devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from det_core import core, pytorch  # noqa: E402
from det_core.errors import InvalidExperimentException  # noqa: E402
from det_core.pytorch import Batch, Epoch, LRScheduler  # noqa: E402
from det_core.pytorch._context import _batch_sizes  # noqa: E402
from support.trials import Numbers, Tiny, built, fit, resumed  # noqa: E402

STEP = LRScheduler.StepMode


def test_case_32_loaders_that_cannot_be() -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="IterableDataset cannot be sharded"):
        pytorch.DataLoader(Stream())
    for arguments in ({"batch_size": None}, {"persistent_workers": True}, {"prefetch_factor": 4},
                      {"batch_sampler": [[0]], "shuffle": True}, {"sampler": [0], "shuffle": True}):  # fmt: skip
        with pytest.raises(ValueError):
            pytorch.DataLoader(Numbers(), **arguments)  # type: ignore[arg-type]


class Foreign(Tiny):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(Numbers(8), batch_size=2)


def test_case_33_loaders_that_are_not_ours() -> None:
    class Unannounced(Foreign):
        def __init__(self, context: Any) -> None:
            Tiny.__init__(self, context)

    with pytest.raises(RuntimeError, match=r"build_training_data_loader\(\) returned a DataLoader"):
        fit(Unannounced, 2)
    found = fit(Foreign, 6)
    assert len(found.trial.seen) == 6 and found.trial.seen[4] == [0.0, 1.0]

    class Empty(Foreign):
        def build_training_data_loader(self) -> Any:
            return torch.utils.data.DataLoader(Numbers(0), batch_size=2)

    with pytest.raises(RuntimeError, match="has no batch"):
        fit(Empty, 2)

    class Small(Tiny):
        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(2), batch_size=4, drop_last=True)

    for length in (Batch(1), Epoch(1)):
        with pytest.raises(RuntimeError, match="has no batch"):
            fit(Small, length)


def test_loaders_that_do_not_know_their_length() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3], [4]])

    class Trial(Tiny):
        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(), batch_sampler=Endless())

    before, after = resumed(4, 6, Trial)
    assert before.trial.seen + after.trial.seen == [[0.0, 1.0], [2.0, 3.0], [4.0]] * 2


def test_a_worker_init_fn_finds_the_dataset() -> None:
    class Telling(Numbers):
        label = -1.0

        def __getitem__(self, i: int) -> Any:
            return torch.tensor([self.label]), torch.tensor([0.0])

    class Trial(Tiny):
        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Telling(), batch_size=2, num_workers=1, worker_init_fn=label)

    assert fit(Trial, 1).trial.seen == [[99.0, 99.0]]


def label(_worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.label = 99.0


def test_case_55_to_the_device(caplog: pytest.LogCaptureFixture) -> None:
    with built() as trial:
        moved = trial.context.to_device(
            {"a": [np.ones(2), np.arange(2)], "b": ("text", np.array(["x"])), "c": torch.ones(1), "d": None}
        )
        assert [type(x) for x in moved["a"]] == [torch.Tensor] * 2 and moved["a"][0].dtype is torch.float64
        assert moved["b"][0] == "text" and isinstance(moved["b"], tuple)
        trial.context.to_device("more text")
    assert caplog.text.count("leaving values of type str in a batch on their device") == 1

    class AsCollated(Tiny):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.experimental.disable_auto_to_device()

        def build_training_data_loader(self) -> Any:
            return pytorch.DataLoader(Numbers(), batch_size=2, collate_fn=lambda items: {"items": items})

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            assert list(batch) == ["items"]
            self.context.backward(self.model(batch["items"][0][0]).sum())
            self.context.step_optimizer(self.optimizer)
            return {}

    fit(AsCollated, 1)


def test_batch_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with pytorch.init(hparams={"global_batch_size": 8}) as context:
        assert (context.get_global_batch_size(), context.get_per_slot_batch_size()) == (8, 8)
        assert context.get_hparam("global_batch_size") == 8
    assert "use context.get_per_slot_batch_size()" in caplog.text
    assert _batch_sizes({"global_batch_size": 9}, 2) == (8, 4)
    assert "global_batch_size 9 is not divisible by 2 ranks: using 8" in caplog.text
    with pytest.raises(InvalidExperimentException, match="at least one record for each of 2 ranks"):
        _batch_sizes({"global_batch_size": 1}, 2)
    with pytorch.init(hparams={"lr": 1}) as context:
        with pytest.raises(ValueError, match="have no global_batch_size"):
            context.get_global_batch_size()
        with pytest.raises(ValueError, match="unknown hyperparameter 'x'; known: lr"):
            context.get_hparam("x")
    with pytest.raises(InvalidExperimentException, match="global_batch_size='many': expected an integer"):
        with pytorch.init(hparams={"global_batch_size": "many"}):
            pass


@pytest.mark.parametrize(
    ("stop", "workers", "skip_loading"), [(2, 0, False), (4, 0, False), (5, 2, False), (5, 0, True)]
)
def test_torch_loader_after_a_resume_goes_on_where_it_was(
    caplog: pytest.LogCaptureFixture, stop: int, workers: int, skip_loading: bool
) -> None:
    class Shuffled(Foreign):
        def build_training_data_loader(self) -> Any:
            data = Numbers(8) if skip_loading else NoisyNumbers(8)
            loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
            return core.resumable(loader, skip_loading=True) if skip_loading else loader

        def metrics(self, loss: torch.Tensor, batch_idx: int) -> Any:
            return {"loss": loss, "drawn": torch.rand(())}

    before, after = resumed(stop, 9, Shuffled)
    straight = fit(Shuffled, 9)
    assert before.trial.seen + after.trial.seen == straight.trial.seen
    assert after.batches() == straight.batches()
    assert after.trial.weights == straight.trial.weights
    assert "not exact" not in caplog.text


def test_loader_without_a_position_after_a_resume_starts_from_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    class Batches(Foreign):
        def build_training_data_loader(self) -> Any:
            return list(torch.utils.data.DataLoader(Numbers(8), batch_size=2))

    _, after = resumed(2, 4, Batches)
    assert after.trial.seen == [[0.0, 1.0], [2.0, 3.0]]
    assert caplog.text.count("starts from its beginning, so this resume is not exact") == 1


def test_resume_with_a_list_in_place_of_a_torch_loader_warns(caplog: pytest.LogCaptureFixture) -> None:
    class Batches(Foreign):
        def build_training_data_loader(self) -> Any:
            return list(torch.utils.data.DataLoader(Numbers(8), batch_size=2))

    fit(Foreign, 2, init={"name": "r"})
    fit(Batches, 3, init={"name": "r", "resume": "latest"})
    assert caplog.text.count("starts from its beginning, so this resume is not exact") == 1


def test_torch_loader_made_in_another_way_after_a_resume_starts_from_its_beginning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Larger(Foreign):
        def build_training_data_loader(self) -> Any:
            return torch.utils.data.DataLoader(Numbers(8), batch_size=4)

    fit(Foreign, 2, init={"name": "r"})
    after = fit(Larger, 3, init={"name": "r", "resume": "latest"})
    assert after.trial.seen == [[0.0, 1.0, 2.0, 3.0]]
    assert caplog.text.count("this resume is not exact: cannot resume the DataLoader: its state is of one with") == 1


class NoisyNumbers(Numbers):
    """Other noise each time a record is drawn."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(i)
        return x + torch.rand(1), y


@pytest.mark.parametrize("workers", [0, 1])
def test_passes_by_hand_draw_other_random_numbers(workers: int) -> None:
    loader = pytorch.DataLoader(NoisyNumbers(), batch_size=8, num_workers=workers)
    torch.manual_seed(1)
    (one,), (other,) = (list(loader) for _ in range(2))
    assert not torch.equal(one[0], other[0])
    torch.manual_seed(1)
    assert torch.equal(next(iter(loader))[0], one[0])
