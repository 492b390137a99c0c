"""Fit a function in steps, with Adam, a schedule of learning rates, a gradient scaler and dropout."""

import torch

from det_core import core

LENGTH = 24
torch.manual_seed(1)
inputs = torch.randn(256, 8)
targets = inputs.sum(1, keepdim=True).sin()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LENGTH)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

with core.init(name="steps", resume="latest") as ctx:
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            scaler.load_state_dict(saved["scaler"])
            core.set_random_state(saved["random"])
    for step in range(ctx.steps_completed, LENGTH):
        rows = torch.randint(len(inputs), (32,))
        loss = torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        metrics = {"loss": loss.item(), "scale": scaler.get_scale()}
        ctx.train.report_training_metrics(step + 1, metrics)
        stop = ctx.preempt.should_preempt()
        if stop or (step + 1) % 5 == 0 or step + 1 == LENGTH:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "random": core.random_state(),
            }
            ctx.checkpoint.save(state, {"steps_completed": step + 1})
        if stop:
            break
