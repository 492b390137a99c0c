"""Train a classifier of handwritten digits: alone, behind the launcher, or as a trial of a search."""

import torch
from digits import build_model, datasets
from torchmetrics.classification import MulticlassAccuracy

from det_core import core
from det_core.accelerated import Trainer, set_seed

if __name__ == "__main__":
    with core.init(name="digits", resume="latest", distributed=core.DistributedContext.detect()) as ctx:
        hparams = {"lr": 2e-3, "width": 16, "dropout": 0.2, **ctx.hparams}
        set_seed(1)
        model = build_model(hparams["width"], hparams["dropout"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=hparams["lr"])
        accuracy = {"accuracy": MulticlassAccuracy(num_classes=10, average="micro")}
        trainer = Trainer(model, torch.nn.functional.cross_entropy, optimizer, metrics=accuracy)
        train_set, valid_set = datasets()
        # The batch of all ranks stays 32; the images are in memory, where workers would take longer to start.
        trainer.train(train_set, 10, valid_set, 32 // ctx.distributed.size, train_dataloader_kwargs={"num_workers": 0})
        if not trainer.preempted:  # the model of a part of the training is in the checkpoint
            trainer.save_checkpoint("digits.pt")
