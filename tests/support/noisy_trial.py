"""A trial that draws random numbers wherever one can: dropout, shuffling, augmentation in this process or in workers.

Copied as a script, or as the code of an experiment, by the tests that disturb it; variables say how it is to be.
"""

import os
import random
import time

import torch
import torch.nn.functional as F

from det_core import pytorch

RECORDS, BATCH, WORKERS = (int(os.environ[name]) for name in ("RECORDS", "BATCH", "WORKERS"))


class Noisy(torch.utils.data.Dataset):
    """Another record each time one is drawn."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, i):
        noise = (torch.rand(4) + random.random()) * float(os.environ.get("NOISE", "0.1"))
        return torch.full((4,), i / RECORDS) + noise, torch.tensor([i / RECORDS])


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        torch.manual_seed(5)
        dropout = float(os.environ.get("DROPOUT", "0.3"))
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1))
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        context.wrap_lr_scheduler(schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def build_training_data_loader(self):
        ranks = self.context.distributed.size
        # Forked beside torch.distributed's threads a worker may hang; those of a forkserver outlive a kill -9 of
        # their parent, where no launcher exists to end them.
        how = {"multiprocessing_context": "forkserver"} if WORKERS and ranks > 1 else {}
        if "FOREIGN" in os.environ:
            self.context.experimental.disable_dataset_reproducibility_checks()
            share = torch.utils.data.Subset(Noisy(), range(self.context.distributed.rank, RECORDS, ranks))
            return torch.utils.data.DataLoader(share, BATCH // ranks, shuffle=True, num_workers=WORKERS, **how)
        return pytorch.DataLoader(Noisy(), batch_size=BATCH // ranks, shuffle=True, num_workers=WORKERS, **how)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(Noisy(), batch_size=32, shuffle=True)

    def train_batch(self, batch, epoch_idx, batch_idx):
        if "PROGRESS" in os.environ:
            time.sleep(float(os.environ["PACE"]))
            with open(os.environ["PROGRESS"], "a") as file:
                print(os.getpid(), batch_idx, file=file)
        inputs, labels = batch
        loss = F.mse_loss(self.model(inputs), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "drawn": inputs.sum(), "records": (labels * RECORDS).round().long().sum()}

    def evaluate_batch(self, batch):
        return {"error": F.mse_loss(self.model(batch[0]), batch[1])}


if __name__ == "__main__":
    random.seed(3)
    torch.manual_seed(3)
    with pytorch.init(name="resumed", resume="latest", searcher_metric="error") as context:
        pytorch.Trainer(Trial(context), context).fit(
            max_length=pytorch.Epoch(int(os.environ["EPOCHS"])), validation_period=pytorch.Epoch(1),
            checkpoint_period=pytorch.Batch(7), reporting_period=pytorch.Batch(3), checkpoint_policy="none",
        )  # fmt: skip
