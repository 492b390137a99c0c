"""``core.resumable()``: the batches of the DataLoader alone, also after a resume at any of them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, DistributedSampler

from det_core import core
from support.resumable import DRAWING, FORMS, Plain, Stream, check, resume, seed, train, without_augmentation


@pytest.mark.parametrize("form", FORMS)
def test_resumable_without_workers_gives_the_batches_of_the_loader(form: str) -> None:
    check(form, every=2)


@pytest.mark.parametrize("form", DRAWING)
def test_resumable_with_forked_workers_gives_the_batches_of_the_loader(form: str) -> None:
    check(form, every=8, epochs=2, num_workers=2, multiprocessing_context="fork")


@pytest.mark.parametrize("form", ["shuffled", "own generator", "counting sampler", "odd batches", "shuffled stream"])
def test_resumable_with_persistent_workers_gives_the_batches_of_the_loader(form: str) -> None:
    check(form, every=9, num_workers=2, multiprocessing_context="fork", persistent_workers=True)


@pytest.mark.parametrize("form", ["shuffled", "own generator", "counting sampler", "odd batches", "single records"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumable_that_skips_loading_gives_the_batches_of_the_loader(form: str, workers: int) -> None:
    every = 11 if workers else 5
    check(form, every=every, skip_loading=True, dataset=Plain(), num_workers=workers, persistent_workers=workers > 0)


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumable_of_a_loader_prepared_by_accelerate_keeps_its_order(workers: int, seedable: bool) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")

    def make() -> Any:
        loader = FORMS["shuffled"](num_workers=workers)
        return data_loader.prepare_data_loader(loader, put_on_device=False, use_seedable_sampler=seedable)

    def comparable(rows: list[Any]) -> list[Any]:
        """Without workers, accelerate draws the augmentation of a batch ahead."""
        return rows if workers else [row[:2] for row in without_augmentation(rows)]

    seed(1)
    expected = train(make(), 2)
    states: list[bytes] = []
    seed(1)
    assert train(core.resumable(make()), 2, states=states) == expected
    for saved in states[::4]:
        seed(2)
        done, rest = resume(core.resumable(make()), saved, 2)
        assert comparable(rest) == comparable(expected[done:])


def test_skip_loading_loads_no_done_batch() -> None:
    seed(1)
    loader = core.resumable(DataLoader(Plain(), 4))
    for _, _ in zip(range(3), loader, strict=False):
        state = loader.state_dict()
    data = Plain()
    loader = core.resumable(DataLoader(data, 4), skip_loading=True)
    loader.load_state_dict(state)
    assert next(iter(loader)).tolist() == [12, 13, 14, 15]
    assert data.read == [12, 13, 14, 15]


def test_pass_that_was_saved_at_its_last_batch_is_not_loaded_again() -> None:
    loader = core.resumable(DataLoader(Plain(), 11))
    states = [loader.state_dict() for _ in loader]
    data = Plain()
    loader = core.resumable(DataLoader(data, 11))
    loader.load_state_dict(states[-1])
    assert (loader.epoch, list(loader), data.read) == (0, [], [])
    assert (loader.epoch, len(list(loader))) == (1, 2)


def test_state_that_was_loaded_is_saved_as_it_was() -> None:
    seed(1)
    states: list[bytes] = []
    expected = train(core.resumable(FORMS["shuffled"]()), 2, states=states)
    rows, position, generators = torch.load(io.BytesIO(states[3]), weights_only=True)
    loader = core.resumable(FORMS["shuffled"]())
    loader.load_state_dict(position)
    again = io.BytesIO()
    torch.save((rows, loader.state_dict(), generators), again)
    rows, rest = resume(core.resumable(FORMS["shuffled"]()), again.getvalue(), 2)
    assert rest == expected[rows:]


def test_state_loaded_beside_persistent_workers_resumes_in_new_ones() -> None:
    seed(1)
    loader = core.resumable(FORMS["shuffled"](num_workers=1, persistent_workers=True))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest


def test_pass_that_was_left_by_break_goes_on() -> None:
    seed(1)
    expected = [batch.tolist() for batch in FORMS["shuffled"]()]
    seed(1)
    loader = core.resumable(FORMS["shuffled"]())
    for _ in loader:
        break
    state = loader.state_dict()
    loader = core.resumable(FORMS["shuffled"]())
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == expected[1:]


def test_resumable_has_the_attributes_of_the_loader() -> None:
    made = DataLoader(Plain(), 4, drop_last=True)
    loader = core.resumable(made)
    assert (len(loader), loader.batch_size, loader.dataset, loader.sampler) == (5, 4, made.dataset, made.sampler)
    assert pickle.loads(pickle.dumps(loader)).batch_size == 4
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        loader.unknown  # noqa: B018


def test_state_of_another_loader_is_refused() -> None:
    state = core.resumable(DataLoader(Plain(), 4, sampler=DistributedSampler(Plain(), 2, 1))).state_dict()

    def refused(loader: Any) -> str:
        with pytest.raises(ValueError, match="cannot resume the DataLoader: its state is of one with") as e:
            core.resumable(loader).load_state_dict(state)
        return str(e.value)

    assert "batch_size=4, here 2" in refused(DataLoader(Plain(), 2, sampler=DistributedSampler(Plain(), 2, 1)))
    assert "rank=1, here 0" in refused(DataLoader(Plain(), 4, sampler=DistributedSampler(Plain(), 2, 0)))
    assert "length=3, here 6" in refused(DataLoader(Plain(), 4, sampler=DistributedSampler(Plain(), 1, 0)))
    assert "here ['RandomSampler', 'BatchSampler'" in refused(DataLoader(Plain(), 4, shuffle=True))
    workers = refused(DataLoader(Plain(), 4, sampler=DistributedSampler(Plain(), 2, 1), num_workers=1))
    assert "num_workers=0, here 1" in workers and "Make it as it was" in workers


def test_set_epoch_of_another_epoch_is_refused() -> None:
    def make() -> Any:
        return core.resumable(DataLoader(Plain(), 4, sampler=DistributedSampler(Plain(), 2, 1)))

    loader = make()
    loader.sampler.set_epoch(3)
    next(iter(loader))
    state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    loader.sampler.set_epoch(0)
    with pytest.raises(ValueError, match=r"set_epoch\(0\): expected 3"):
        iter(loader)
    loader.sampler.set_epoch(3)
    assert len(list(loader)) == 2


def test_other_data_is_refused_where_it_ends_earlier() -> None:
    loader = core.resumable(DataLoader(Stream(), 4))
    states = [loader.state_dict() for _ in loader]
    loader = core.resumable(DataLoader(Stream(4), 4))
    loader.load_state_dict(states[1])
    with pytest.raises(RuntimeError, match="it gave 1 batches, and 2 before"):
        iter(loader)


def test_iteration_within_an_iteration_is_refused() -> None:
    loader = core.resumable(DataLoader(Plain(), 4))
    outer = iter(loader)
    next(outer)
    assert len(list(loader)) == 6
    with pytest.raises(RuntimeError, match="iterated again within an iteration"):
        next(outer)


def test_options_that_cannot_be_resumed_are_refused() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    with pytest.raises(ValueError, match="skip_loading=True: expected a map-style dataset"):
        core.resumable(DataLoader(Stream(), 4), skip_loading=True)
    with pytest.raises(ValueError, match="expected a loader that inherits __iter__"):
        core.resumable(Own(Plain(), 4), skip_loading=True)
    with pytest.raises(ValueError, match="persistent_workers=True: expected a loader that inherits __iter__"):
        core.resumable(Own(Plain(), 4, num_workers=1, persistent_workers=True))
    with pytest.raises(ValueError, match="in_order=False: expected True"):
        core.resumable(DataLoader(Plain(), 4, num_workers=2, in_order=False))


def test_long_loading_of_done_batches_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("det_core.core._resumable.NOTICE_DELAY", 0.0)
    loader = core.resumable(DataLoader(Plain(), 4))
    states = [loader.state_dict() for _ in loader]
    loader = core.resumable(DataLoader(Plain(), 4))
    loader.load_state_dict(states[2])
    assert len(list(loader)) == 3
    assert capsys.readouterr().err.count("loading 3 batches again") == 1
