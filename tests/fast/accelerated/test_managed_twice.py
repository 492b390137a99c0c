"""A script that trains twice in one context, and is preempted in its first training."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from det_core import core  # noqa: E402
from det_core.accelerated import Trainer  # noqa: E402
from det_core.accelerated.callbacks import TrainerCallback  # noqa: E402


class Leave(TrainerCallback):
    def on_train_step_end(self, trainer, batch, batch_output, step, **kwargs):  # type: ignore[no-untyped-def]
        if trainer.updates_completed == 1:
            core.current_context().preempt._ask_for("signal")


def script(*callbacks: object, resume: str | None = None) -> list[int]:
    """Train for two epochs of two updates, twice; the updates made when either training returned."""
    done = []
    model = torch.nn.Linear(1, 1)
    with core.init(name="twice", resume=resume) as ctx:
        trainer = Trainer(model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), callbacks)
        dataset = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
        for _ in range(2):
            trainer.train(dataset, 2, per_device_batch_size=2, train_dataloader_kwargs={"num_workers": 0})
            done.append(trainer.steps_completed)
            assert trainer.preempted == bool(callbacks)
        assert ctx.managed is False
    return done


def test_a_training_after_a_preemption_waits_for_the_resume() -> None:
    assert script(Leave())[0] == 2
    assert script(resume="latest") == [4, 8]
