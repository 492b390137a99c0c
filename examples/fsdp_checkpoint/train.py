"""Train a small transformer whose parameters are sharded over the ranks, and write its checkpoints meanwhile."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from det_core import core

CUDA = torch.cuda.is_available()
LENGTH = 16


class Model(nn.Module):
    """Predicts each next digit of a sequence."""

    def __init__(self, width):
        super().__init__()
        self.digits = nn.Embedding(10, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.digits(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(h)


class Trainer:
    """The model, its optimizer, and how far they are."""

    def __init__(self, args, ctx):
        self.args = args
        self.ctx = ctx
        self.device = torch.device("cuda" if CUDA else "cpu")
        torch.manual_seed(args.seed)
        self.model = Model(args.width).to(self.device)
        # Blocks first: what the call for the whole finds unsharded is gathered at once, and not block by block.
        for part in (*self.model.blocks, self.model):
            fully_shard(part)
        # After fully_shard(), which replaces the parameters by this rank's shards.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.step = 0
        self.writers = dist.new_group(backend="gloo")  # ranks write a checkpoint while they train: let them talk apart
        self.saving = None

    def fit(self, steps):
        """Train until so many steps are done in all, and return the last loss."""
        loss = None
        while self.step < steps:
            loss = self.train()
            self.step += 1
            if dist.get_rank() == 0:
                self.ctx.train.report_training_metrics(self.step, {"loss": loss})
                print(f"step {self.step}/{steps}: loss {loss:.4f}", flush=True)
            stop = self.ctx.preempt.should_preempt()
            if stop or self.step == steps or self.step % self.args.save_every == 0:
                self.save()
            if stop:
                break
        if self.saving:
            self.saving.wait()
        if self.step < steps:
            raise SystemExit  # with status 0, and without report_completed(): a resume goes on
        return loss

    def train(self):
        x = self.batch().to(self.device)
        loss = cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def batch(self):
        """Return this rank's share of the step's sequences: each digit is the sum of the two before, modulo 10."""
        x = torch.zeros(self.args.batch_size, LENGTH + 1, dtype=torch.long)
        x[:, :2] = torch.randint(10, (len(x), 2), generator=torch.Generator().manual_seed(self.step))
        for i in range(2, x.shape[1]):
            x[:, i] = (x[:, i - 2] + x[:, i - 1]) % 10
        return x[dist.get_rank() :: dist.get_world_size()]

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self):
        """Copy this rank's shards now. torch writes them and det_core commits them while the training goes on."""
        if self.saving:
            self.saving.wait()
        handle = self.ctx.checkpoint.begin({"steps_completed": self.step}, shard=True)
        written = dcp.async_save(self.state(), checkpoint_id=handle.path, process_group=self.writers)

        # Called in torch's thread, which must not wait for the other ranks.
        def end(written):
            if written.exception():
                handle.abort(written.exception(), blocking=False)
            else:
                handle.commit(blocking=False)

        written.add_done_callback(end)
        self.saving = handle

    def load(self, path, step):
        """Read what this rank has to hold, whatever number of ranks wrote it."""
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = step


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="sequences in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--storage", help="where checkpoints go: a folder or a URL (default: the run's own folder)")
    args = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    ranks = core.DistributedContext.from_torch_distributed()
    with core.init(distributed=ranks, checkpoint_storage=args.storage, max_length=args.steps) as ctx:
        trainer = Trainer(args, ctx)
        if ctx.latest_checkpoint:
            step = ctx.checkpoint.get_metadata(ctx.latest_checkpoint)["steps_completed"]
            with ctx.checkpoint.restore_path(ctx.latest_checkpoint) as path:
                trainer.load(path, step)
        for op in ctx.searcher.operations():
            loss = trainer.fit(op.length)
            if ranks.rank == 0:
                op.report_completed(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
