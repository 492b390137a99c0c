"""Train a small image classifier on handwritten digits with DeepSpeed: ZeRO 1, the optimizer split over the ranks."""

import argparse
import math
import os

import deepspeed
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from det_core import core, get_cluster_info


def load_data():
    """Return images and labels to train on and to validate on: 1,437 and 360 of them, 8 by 8 pixels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    # By a generator of its own: the same split on every rank, and after a resume.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train = order[360:]
    valid = order[:360]
    return images[train], labels[train], images[valid], labels[valid]


def build_model(width):
    def block(inputs, outputs):
        # Not BatchNorm, whose running statistics differ between ranks.
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU())

    return nn.Sequential(
        block(1, width), block(width, width), nn.MaxPool2d(2),
        block(width, 2 * width), block(2 * width, 2 * width), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(2 * width * 4, 10),
    )  # fmt: skip


class Trainer:
    """The model, its optimizer, and how far they are."""

    def __init__(self, args, ctx):
        self.ctx = ctx
        self.args = args
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        if not dist.is_initialized():
            alone = None if self.size > 1 else dist.HashStore()  # one process has nobody to meet
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=alone, rank=self.rank, world_size=self.size)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed wants it, also of one process
        torch.manual_seed(args.seed)
        self.model = build_model(args.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        config = {"train_micro_batch_size_per_gpu": args.batch_size // self.size, "zero_optimization": {"stage": 1}}
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=config)
        data = (part.to(self.engine.device) for part in load_data())
        self.images, self.labels, self.valid_images, self.valid_labels = data
        self.epoch = self.step = 0
        if args.load:
            self.load(args.load)

    def fit(self, epochs):
        """Train until so many epochs are done in all, and return the accuracy on the validation set."""
        while self.epoch < epochs:
            self.optimizer.param_groups[0]["lr"] = self.args.lr * math.cos(math.pi / 2 * self.epoch / epochs)
            for images, labels in self.batches():
                loss = cross_entropy(self.engine(images), labels)
                self.engine.backward(loss)
                self.engine.step()
                self.step += 1
                if self.rank == 0:
                    self.ctx.train.report_training_metrics(self.step, {"loss": loss.item()})
            self.epoch += 1
            if self.rank == 0:
                accuracy = self.validate()
                print(f"epoch {self.epoch}/{epochs}: step {self.step}, accuracy {accuracy:.4f}", flush=True)
                self.ctx.train.report_validation_metrics(self.step, {"accuracy": accuracy})
                self.ctx.train.report_progress(self.epoch / epochs)
            with self.ctx.checkpoint.store_path({"steps_completed": self.step}, shard=True) as (path, _):
                self.save(path)
            if self.ctx.preempt.should_preempt():  # on every rank, as they agree on the call at which to stop
                raise SystemExit
        if self.args.save:
            self.save(self.args.save)
        return self.validate()

    def batches(self):
        """Yield this rank's share of the images in the epoch's own order, each shifted by up to one pixel."""
        random = torch.Generator().manual_seed(1000 * self.args.seed + self.epoch)
        torch.manual_seed(1000 * self.args.seed + self.epoch * self.size + self.rank)  # for shifts and dropout
        count = len(self.images) // self.size * self.size  # a rank with a batch more would wait for the others
        order = torch.randperm(len(self.images), generator=random)[:count]
        for share in order[self.rank :: self.size].split(self.args.batch_size // self.size):
            yield self.images[share].roll(torch.randint(-1, 2, (2,)).tolist(), (2, 3)), self.labels[share]

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        right = self.model(self.valid_images).argmax(1) == self.valid_labels
        self.model.train()
        return right.float().mean().item()

    def save(self, path):
        self.engine.save_checkpoint(path, "state", client_state={"epoch": self.epoch, "step": self.step})

    def load(self, path):
        _, state = self.engine.load_checkpoint(path, "state")
        self.epoch = state["epoch"]
        self.step = state["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolutions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", metavar="FOLDER", help="start from what FOLDER holds")
    parser.add_argument("--save", metavar="FOLDER", help="keep the trained model in FOLDER")
    args = parser.parse_args()
    vars(args).update(info.trial.hparams if (info := get_cluster_info()) else {})  # what a search has chosen
    with core.init(distributed=core.DistributedContext.detect(), max_length={"epochs": args.epochs}) as ctx:
        trainer = Trainer(args, ctx)
        if ctx.latest_checkpoint:
            with ctx.checkpoint.restore_path(ctx.latest_checkpoint) as path:
                trainer.load(path)
        for op in ctx.searcher.operations():
            accuracy = trainer.fit(op.length)
            if trainer.rank == 0:
                op.report_completed(accuracy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
