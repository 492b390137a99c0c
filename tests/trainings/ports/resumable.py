"""Train in epochs over a loader with two workers, whose position `core.resumable()` keeps."""

import torch
from torch.utils.data import DataLoader, Dataset

from det_core import core

EPOCHS = 3


class Noisy(Dataset):
    """Points of a line, another noise on each at every look."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.tensor([index / 40])
        return x + 0.01 * torch.randn(1), 3 * x


if __name__ == "__main__":
    torch.manual_seed(12)
    loader = core.resumable(DataLoader(Noisy(), batch_size=5, shuffle=True, num_workers=2))
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with core.init(name="resumable", resume="latest") as ctx:
        with ctx.checkpoint.resume() as path:
            if path is not None:
                saved = ctx.checkpoint.load(path)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                loader.load_state_dict(saved["loader"])
                core.set_random_state(saved["random"])
        step = ctx.steps_completed
        for _epoch in range(loader.epoch, EPOCHS):
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                ctx.train.report_training_metrics(step, {"loss": loss.item()})
                stop = ctx.preempt.should_preempt()
                if stop or step % 5 == 0 or step == EPOCHS * len(loader):
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    own = {"loader": loader.state_dict(), "random": core.random_state()}
                    ctx.checkpoint.save(state, {"steps_completed": step}, per_rank=own)
                if stop:
                    raise SystemExit
