"""Samplers, alone and put together as the loader does; cases 30 and 31 of the contract."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from det_core import pytorch  # noqa: E402
from det_core.pytorch import samplers  # noqa: E402
from support.trials import Numbers  # noqa: E402


def batches(size: int, batch: int = 1) -> Any:
    return torch.utils.data.BatchSampler(range(size), batch, False)


def test_case_30_batches_are_dealt_out_of_the_repeated_stream() -> None:
    first = pytorch.adapt_batch_sampler(batches(7), repeat=True, num_replicas=2, rank=0)
    second = pytorch.adapt_batch_sampler(batches(7), repeat=True, num_replicas=2, rank=1)
    assert [b[0] for b in itertools.islice(first, 8)] == [0, 2, 4, 6, 1, 3, 5, 0]
    assert [b[0] for b in itertools.islice(second, 8)] == [1, 3, 5, 0, 2, 4, 6, 1]
    assert (len(first), len(second)) == (4, 3)


def test_case_31_each_rank_skips_its_own() -> None:
    for rank, expected in ((0, [4, 6, 1, 3]), (1, [5, 0, 2, 4])):
        sampler = pytorch.adapt_batch_sampler(batches(7), repeat=True, skip=2, num_replicas=2, rank=rank)
        assert [b[0] for b in itertools.islice(sampler, 4)] == expected
        assert len(sampler) == 4 - rank


def test_the_loader_adapts_in_this_order() -> None:
    loader = pytorch.DataLoader(Numbers(7), batch_size=1)
    made = loader.get_data_loader(repeat=True, skip=1, num_replicas=2, rank=1)
    assert [int(x) for x, _ in itertools.islice(made, 4)] == [3, 5, 0, 2]
    assert [int(x) for x, _ in loader] == list(range(7)) and len(loader) == 7


def test_the_training_loader_is_that_stream_too() -> None:
    loader = pytorch.DataLoader(Numbers(7), batch_size=1)
    made = loader.training(1, rank=1, size=2, skip=1)
    assert [int(x) for x, _ in itertools.islice(made, 4)] == [3, 5, 0, 2]


def test_single_samplers() -> None:
    assert list(itertools.islice(samplers.RepeatSampler(range(2)), 5)) == [0, 1, 0, 1, 0]
    assert list(samplers.DistributedSampler(range(5), 2, 1)) == [1, 3]
    assert list(samplers.SkipSampler(range(4), 3)) == [3] and len(samplers.SkipSampler(range(4), 3)) == 4
    assert list(samplers.SkipSampler(range(2), 5)) == []
    shuffled = samplers.ReproducibleShuffleSampler(range(9), 7)
    first, second = list(shuffled), list(shuffled)
    assert sorted(first) == sorted(second) == list(range(9)) and first != second
    again = samplers.ReproducibleShuffleSampler(range(9), 7)
    assert [list(again), list(again)] == [first, second]
    assert sorted(map(tuple, samplers.ReproducibleShuffleBatchSampler(batches(4, 2), 1))) == [(0, 1), (2, 3)]
    for arguments in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match="expected"):
            samplers.DistributedBatchSampler(batches(3), *arguments)
    with pytest.raises(RuntimeError, match="has no batch"):
        next(iter(samplers.RepeatBatchSampler([])))


def test_the_length_of_a_batch() -> None:
    assert pytorch.data_length(torch.ones(3, 2)) == 3
    assert pytorch.data_length({"a": torch.ones(4), "b": 1}) == pytorch.data_length([torch.ones(4)]) == 4
    for wrong, kind in (([], ValueError), ({}, ValueError), (3, TypeError), ("abc", TypeError)):
        with pytest.raises(kind):
            pytorch.data_length(wrong)
