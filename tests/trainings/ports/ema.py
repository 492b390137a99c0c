"""Train a model and the moving average of its weights, which is what gets validated."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from det_core import core

LENGTH = 24
torch.manual_seed(7)
data = torch.randn(LENGTH, 16, 4)
targets = data.prod(2, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

with core.init(name="ema", resume="latest", searcher_metric="error") as ctx:
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            average.load_state_dict(saved["average"])
            optimizer.load_state_dict(saved["optimizer"])
    for step in range(ctx.steps_completed, LENGTH):
        loss = torch.nn.functional.mse_loss(model(data[step]), targets[step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        step += 1
        ctx.train.report_training_metrics(step, {"loss": loss.item()})
        if step % 4 == 0:
            with torch.no_grad():
                error = torch.nn.functional.mse_loss(average(data[0]), targets[0])
            ctx.train.report_validation_metrics(step, {"error": error.item()})
        stop = ctx.preempt.should_preempt()
        if stop or step % 5 == 0 or step == LENGTH:
            state = {
                "model": model.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            ctx.checkpoint.save(state, {"steps_completed": step})
        if stop:
            break
