"""Train in epochs over a shuffled DataLoader with noise on its samples; the position in the epoch is kept by hand."""

import torch
from torch.utils.data import DataLoader, Dataset

from det_core import core

EPOCHS = 3


class Noisy(Dataset):
    """Points of a line, another noise on each at every look."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.tensor([index / 64])
        return x + 0.01 * torch.randn(1), 3 * x


torch.manual_seed(2)
loader = DataLoader(Noisy(), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with core.init(name="epochs", resume="latest") as ctx:
    saved = None
    first_epoch = done = 0
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            first_epoch, done = saved["epoch"], saved["done"]
    for epoch in range(first_epoch, EPOCHS):
        if saved is not None:
            core.set_random_state(saved["random_at_start"])  # the order of the epoch is drawn from here
        random_at_start = core.random_state()
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        if saved is not None:
            core.set_random_state(saved["random"])
        for batch, (x, y) in enumerate(batches, start=done):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = epoch * len(loader) + batch + 1
            ctx.train.report_training_metrics(step, {"loss": loss.item()})
            stop = ctx.preempt.should_preempt()
            if stop or step % 5 == 0 or step == EPOCHS * len(loader):
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch,
                    "done": batch + 1,
                    "random_at_start": random_at_start,
                    "random": core.random_state(),
                }
                ctx.checkpoint.save(state, {"steps_completed": step})
            if stop:
                raise SystemExit
        saved = None
        done = 0
