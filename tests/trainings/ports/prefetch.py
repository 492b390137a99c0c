"""Train on batches of which the next one is fetched while the current one is trained on, without a `with` block."""

import torch

from det_core import core

LENGTH = 24
torch.manual_seed(3)
weights = torch.randn(6, 1)


def fetch():
    """Return a batch that nobody has seen before."""
    x = torch.randn(16, 6)
    return x, x @ weights


model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
ctx = core.init(name="prefetch", resume="latest")
try:
    upcoming = None
    with ctx.checkpoint.resume() as path:
        if path is not None:
            saved = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            upcoming = saved["upcoming"]
            core.set_random_state(saved["random"])
    if upcoming is None:
        upcoming = fetch()
    for step in range(ctx.steps_completed + 1, LENGTH + 1):
        x, y = upcoming
        upcoming = fetch()
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.train.report_training_metrics(step, {"loss": loss.item()})
        stop = ctx.preempt.should_preempt()
        if stop or step % 5 == 0 or step == LENGTH:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "upcoming": upcoming,
                "random": core.random_state(),
            }
            ctx.checkpoint.save(state, {"steps_completed": step}, blocking=False)
        if stop:
            break
finally:
    ctx.close()
