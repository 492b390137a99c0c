"""Fine-tune the classifier to tell odd digits from even ones: first its new last layer, then all of it."""

import torch
from digits import build_model, datasets
from torchmetrics.classification import MulticlassAccuracy

from det_core import core
from det_core.accelerated import Trainer, set_seed
from det_core.accelerated.callbacks import ModelEmaCallback, get_default_callbacks
from det_core.accelerated.finetuning import ModelFreezer
from det_core.accelerated.schedulers import CosineLrScheduler

if __name__ == "__main__":
    with core.init(name="odd-or-even", resume="latest", distributed=core.DistributedContext.detect()) as ctx:
        set_seed(1)
        model = build_model(width=16, dropout=0.2)
        model.load_state_dict(torch.load("digits.pt", weights_only=True)["model_state_dict"])
        model[-1] = torch.nn.Linear(model[-1].in_features, 2)
        freezer = ModelFreezer(model)
        freezer.freeze()  # all but the last layer
        average = ModelEmaCallback(0.99, save_path="odd_or_even.pt", update_every="step", warmup=True)
        trainer = Trainer(
            model,
            torch.nn.functional.cross_entropy,
            torch.optim.AdamW(freezer.get_trainable_parameters(), lr=2e-3),
            callbacks=[average, *get_default_callbacks()],
            metrics={"accuracy": MulticlassAccuracy(num_classes=2, average="micro")},
        )
        train_set, valid_set = datasets(classes=2)
        settings = {
            "num_epochs": 3,
            "eval_dataset": valid_set,
            "per_device_batch_size": 32 // ctx.distributed.size,
            "create_scheduler_fn": CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1),
            "train_dataloader_kwargs": {"num_workers": 0},
        }
        trainer.train(train_set, **settings)
        # A smaller rate than the new layer's, whose large gradients at first would spoil the trained ones.
        for group in freezer.unfreeze().values():
            trainer.optimizer.add_param_group({**group, "lr": 5e-4})
        trainer.train(train_set, **settings, reset_run_history=False)
