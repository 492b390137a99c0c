"""Handwritten digits, and a model that reads them."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def datasets(classes=10):
    """1,437 images to train on and 360 to validate on, 8 by 8 pixels, with their digits; modulo ``classes``."""
    images, digits = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    digits = torch.tensor(digits) % classes
    # By a generator of its own: the same split on every rank, and after a resume.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train = order[360:]
    valid = order[:360]
    return TensorDataset(images[train], digits[train]), TensorDataset(images[valid], digits[valid])


def build_model(width, dropout):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * width, 10),
    )  # fmt: skip
