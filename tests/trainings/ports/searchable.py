"""Train as long as a search asks, by a schedule that ends with its length, and report only every third step."""

import torch

from det_core import core

torch.manual_seed(10)
x = torch.randn(64, 4)
y = x.max(1, keepdim=True).values
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

with core.init(name="searchable", max_length=30, searcher_metric="error", hparams={"dropped": 0.1}) as ctx:
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            core.set_random_state(saved["random"])
    step = ctx.steps_completed
    for op in ctx.searcher.operations():
        while step < op.length:
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / op.length)
            kept = torch.rand(len(x)) > ctx.hparams["dropped"]
            loss = torch.nn.functional.mse_loss(model(x[kept]), y[kept])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 3 == 0:
                ctx.train.report_training_metrics(step, {"loss": loss.item()})
                op.report_progress(step)
            stop = ctx.preempt.should_preempt()
            if stop or step % 10 == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "random": core.random_state(),
                }
                ctx.checkpoint.save(state, {"steps_completed": step})
            if stop:
                raise SystemExit
        with torch.no_grad():
            error = torch.nn.functional.mse_loss(model(x), y).item()
        ctx.train.report_validation_metrics(step, {"error": error})
        op.report_completed(error)
