"""Common parts of the five trainings, in any package: data, models, and a record."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

RANK = int(os.environ.get("RANK", "0"))
PADDING = 0
WORDS = 30
own = torch.Generator().manual_seed(1000 + RANK)
"""Generator of a step's draws, apart from those that each package seeds in its own way."""


class Account:
    """Record of the steps of each optimizer, and of the values of each metric."""

    def __init__(self) -> None:
        self.updates: Counter[str] = Counter()
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def watch(self, name: str, optimizer: Any) -> Any:
        """Count the steps of an optimizer; return it."""

        def stepped(*_: Any) -> None:
            self.updates[name] += 1

        # A hook of torch's, as each package wraps an optimizer and its step() in another way.
        optimizer.register_step_post_hook(stepped)
        return optimizer

    def note(self, metrics: dict[str, Any]) -> None:
        """Add one value to each metric."""
        for name, value in metrics.items():
            self.metrics[name].append(float(value))

    def tell(self, model: nn.Module) -> None:
        """Answer with it, once, and with the length of the weights."""
        weights = sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters())
        if RANK == 0:
            with open(os.environ["BENCH_ANSWER"], "w") as file:
                json.dump({"updates": self.updates, "metrics": self.metrics, "weights": weights**0.5}, file)


def images(rows: int, seed: int) -> Dataset[Any]:
    """Images of four kinds, each brighter in a quarter of its own."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 4, (rows,), generator=draw)
    pictures = torch.randn(rows, 1, 8, 8, generator=draw)
    for kind in range(4):
        pictures[kinds == kind, :, 4 * (kind // 2) : 4 * (kind // 2) + 4, 4 * (kind % 2) : 4 * (kind % 2) + 4] += 1
    return TensorDataset(pictures, kinds)


def convolutions() -> nn.Module:
    """Return a small model of images, with a batch norm."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 4)
    )


def mixed(pictures: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each image with another one of its batch laid over it, as mixup does; the labels as shares."""
    share = 0.5 + 0.5 * float(torch.rand((), generator=own))
    labels = nn.functional.one_hot(kinds, 4).float()
    return share * pictures + (1 - share) * pictures.flip(0), share * labels + (1 - share) * labels.flip(0)


def points(rows: int) -> Dataset[Any]:
    """Points of the plane, on a circle."""
    angle = torch.rand(rows, 1, generator=torch.Generator().manual_seed(4)) * 6.2832
    return TensorDataset(torch.cat([angle.cos(), angle.sin()], 1))


class Gan(nn.Module):  # type: ignore[misc]
    """A generator and a discriminator of points, called by name of the part that learns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    # DDP averages gradients only after a call of its own forward(), so both parts are reached by it.
    def forward(self, part: str, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Return the loss of one part."""
        made = self.generator(noise)
        if part == "generator":
            return nn.functional.softplus(-self.discriminator(made)).mean()
        told = self.discriminator(real), self.discriminator(made.detach())
        return nn.functional.softplus(-told[0]).mean() + nn.functional.softplus(told[1]).mean()


def noise(rows: int) -> torch.Tensor:
    """Return the input of a generator."""
    return torch.randn(rows, 3, generator=own)


def sentences(rows: int, seed: int) -> Dataset[Any]:
    """Sentences of 4 to 12 words, each word the last one plus one, padded."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(1, WORDS, (rows, 1), generator=draw)
    length = torch.randint(4, 13, (rows, 1), generator=draw)
    words = (first + torch.arange(13) - 1) % (WORDS - 1) + 1
    return TensorDataset(torch.where(torch.arange(13) < length, words, PADDING))


def words_model() -> nn.Module:
    """Return a model that predicts the next word of each."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(WORDS, 16, padding_idx=PADDING), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, WORDS)
    )


def next_word(model: nn.Module, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a batch, and for each sentence its number of correct words and of words."""
    told = model(words[:, :-1])
    right = words[:, 1:]
    loss = nn.functional.cross_entropy(told.flatten(0, 1), right.flatten(), ignore_index=PADDING)
    there = right != PADDING
    return loss, torch.stack([((told.argmax(-1) == right) & there).sum(1), there.sum(1)], 1)


def curve(rows: int, seed: int) -> Dataset[Any]:
    """Noisy values of a sine."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, generator=draw) * 6 - 3
    return TensorDataset(x, x.sin() + 0.1 * torch.randn(rows, 1, generator=draw))


def regression() -> nn.Module:
    """Return a model of a curve."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
