"""Train with gradients accumulated over four batches; a stop waits for the update that they belong to."""

import torch

from det_core import core

LENGTH = 30  # batches
ACCUMULATE = 4
torch.manual_seed(6)
data = torch.randn(30 * 8, 5)
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)

with core.init(name="accumulation", resume="latest") as ctx:
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
    for step in range(ctx.steps_completed + 1, LENGTH + 1):
        x = data[8 * (step - 1) : 8 * step]
        loss = torch.nn.functional.mse_loss(model(x), x)
        (loss / ACCUMULATE).backward()
        updated = step % ACCUMULATE == 0 or step == LENGTH
        if updated:
            optimizer.step()
            optimizer.zero_grad()
        ctx.train.report_training_metrics(step, {"loss": loss.item()})
        stop = ctx.preempt.should_preempt() and updated
        if stop or step % 12 == 0 or step == LENGTH:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            ctx.checkpoint.save(state, {"steps_completed": step})
        if stop:
            break
