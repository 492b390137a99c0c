"""Train in whole epochs, counted in epochs everywhere: reports, checkpoints and stops; the order is of the epoch."""

import torch

from det_core import core

EPOCHS = 9
torch.manual_seed(11)
data = torch.randn(40, 6)
model = torch.nn.Linear(6, 6)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)

with core.init(name="whole-epochs") as ctx:
    ctx.set_config({"epochs": EPOCHS})
    with ctx.checkpoint.resume() as path:
        if path is not None:
            model.load_state_dict(torch.load(path / "model.pt", weights_only=True))
            optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
    for epoch in range(ctx.steps_completed + 1, EPOCHS + 1):
        torch.manual_seed(epoch)
        losses = []
        for rows in torch.randperm(len(data)).split(8):
            loss = torch.nn.functional.l1_loss(model(data[rows]), data[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ctx.train.report_training_metrics(epoch, {"loss": sum(losses) / len(losses)})
        ctx.train.report_validation_metrics(epoch, {"worst": max(losses)})
        stop = ctx.preempt.should_preempt()
        if stop or epoch % 2 == 0 or epoch == EPOCHS:
            with ctx.checkpoint.store_path({"steps_completed": epoch}) as (path, _):
                torch.save(model.state_dict(), path / "model.pt")
                torch.save(optimizer.state_dict(), path / "optimizer.pt")
        if stop:
            break
