"""A classifier of handwritten digits, trained by a plain loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def datasets():
    """1,437 images to train on and 360 to validate on, 8 by 8 pixels, with their digits."""
    images, digits = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    digits = torch.tensor(digits)
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


def main(epochs=10, batch_size=32, lr=2e-3, width=16, dropout=0.2):
    torch.manual_seed(1)
    train, valid = datasets()
    model = build_model(width, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for epoch in range(epochs):
        model.train()
        for images, digits in DataLoader(train, batch_size, shuffle=True):
            loss = cross_entropy(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = torch.cat([model(images).argmax(1) == digits for images, digits in DataLoader(valid, 120)])
        print(f"epoch {epoch + 1}/{epochs}: accuracy {right.float().mean():.4f}", flush=True)


if __name__ == "__main__":
    main()
