"""The order of the data: any position of the stream, on any number of ranks, with and without workers."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from det_core._training.data_order import (  # noqa: E402
    NumberedBatches,
    Position,
    SeededDataset,
    SeededShuffle,
    mixed_seed,
    rebuilt,
)


def stream(
    size: int, batch: int, *, rank: int = 0, ranks: int = 1, skip: int = 0, seed: int = 7, drop: bool = False
) -> Any:
    batches = torch.utils.data.BatchSampler(SeededShuffle(size, seed), batch, drop)
    return NumberedBatches(batches, rank=rank, size=ranks, skip=skip, numbered=True)


@settings(max_examples=60)
@given(
    size=st.integers(1, 20),
    batch=st.integers(1, 7),
    ranks=st.integers(1, 4),
    skip=st.integers(0, 40),
    rank=st.integers(0, 3),
)
def test_what_is_skipped_is_what_would_have_come(size: int, batch: int, ranks: int, skip: int, rank: int) -> None:
    rank %= ranks
    straight = list(itertools.islice(stream(size, batch, rank=rank, ranks=ranks), skip + 10))
    assert list(itertools.islice(stream(size, batch, rank=rank, ranks=ranks, skip=skip), 10)) == straight[skip:]


@settings(max_examples=40)
@given(steps=st.integers(1, 12), ranks=st.sampled_from([2, 3, 4]), slot=st.integers(1, 3), per_pass=st.integers(1, 4))
def test_ranks_together_have_the_batches_of_one(steps: int, ranks: int, slot: int, per_pass: int) -> None:
    """Where the global batch divides the dataset."""
    size = ranks * slot * per_pass
    each = [list(itertools.islice(stream(size, slot, rank=r, ranks=ranks), steps)) for r in range(ranks)]
    together = [[i for _, indices in step for i in indices] for step in zip(*each, strict=True)]
    alone = [indices for _, indices in itertools.islice(stream(size, ranks * slot), steps)]
    assert together == alone


def test_every_pass_is_another_permutation_of_all() -> None:
    passes = list(itertools.islice(stream(6, 6), 4))
    assert all(sorted(indices) == list(range(6)) for _, indices in passes)
    assert len({tuple(indices) for _, indices in passes}) > 1
    assert list(itertools.islice(stream(6, 6, seed=8), 4)) != passes


def test_a_pass_without_a_batch_is_told_of() -> None:
    with pytest.raises(RuntimeError, match="has no batch"):
        next(iter(stream(2, 3, drop=True)))


@given(st.integers(0, 2**64), st.integers(0, 2**40))
def test_seeds_of_neighbours_are_far_apart(seed: int, number: int) -> None:
    one, two = mixed_seed(seed, number), mixed_seed(seed, number + 1)
    assert 0 <= one < 2**63 and one != two and bin(one ^ two).count("1") > 8


class Noisy(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> float:
        return i + float(torch.rand(1)) / 2 + random.random() / 4


def loaded(skip: int, workers: int, count: int) -> list[list[float]]:
    torch.manual_seed(random.randrange(100))  # the state of this process does not matter
    parts = torch.utils.data.DataLoader(Noisy(), num_workers=workers, collate_fn=list)
    batches = torch.utils.data.BatchSampler(SeededShuffle(12, 3), 5, False)
    order = NumberedBatches(batches, rank=0, size=1, skip=skip, numbered=True)
    iterator = iter(rebuilt(parts, order, SeededDataset(Noisy(), 3)))
    return [next(iterator) for _ in range(count)]


def test_workers_draw_the_same_random_numbers_for_a_batch_however_many_they_are() -> None:
    straight = loaded(0, 1, 8)
    assert loaded(0, 2, 8) == straight
    assert loaded(5, 2, 3) == straight[5:]


def test_making_an_iterator_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    parts = torch.utils.data.DataLoader(Noisy(), collate_fn=list)
    next(iter(rebuilt(parts, [[0]], [0.5])))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seeded_dataset_is_the_users_to_everybody_else() -> None:
    class Named(Noisy):
        classes = ("a", "b")

    seeded = SeededDataset(Named(), 1)
    assert seeded.classes == ("a", "b") and len(seeded) == 12
    seeded.seed = 5  # as a worker_init_fn does
    assert seeded.dataset.seed == 5 and seeded.order_seed == 1
    assert len(pickle.loads(pickle.dumps(SeededDataset(Noisy(), 1)))) == 12
    with pytest.raises(AttributeError):
        _ = seeded.nothing


def test_a_position_as_json() -> None:
    position = Position(3, 10, 1, 40, 16, 2)
    assert Position.from_dict(position.to_dict()) == position
    assert set(position.to_dict()) == {"seed", "batches", "pass", "records", "global_batch_size", "size"}
