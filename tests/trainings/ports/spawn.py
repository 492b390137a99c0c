"""Train on two ranks that torch.multiprocessing.spawn starts, with DistributedDataParallel."""

import socket

import torch
from torch.nn.parallel import DistributedDataParallel

from det_core import core

LENGTH = 18
RANKS = 2


def train(rank, port):
    """Train as one of the ranks."""
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    distributed = core.DistributedContext(
        rank=rank, size=RANKS, local_rank=rank, local_size=RANKS, cross_rank=0, cross_size=1, pub_port=port
    )
    torch.manual_seed(9)
    model = torch.nn.Linear(3, 1)
    network = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    with core.init(distributed=distributed, name="spawn", resume="latest") as ctx:
        with ctx.checkpoint.resume() as path:
            if path is not None:
                saved = torch.load(path / "state.pt", weights_only=True)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                core.set_random_state(saved["random"][rank])
        for step in range(ctx.steps_completed + 1, LENGTH + 1):
            x = torch.randn(8, 3)
            loss = torch.nn.functional.mse_loss(network(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                ctx.train.report_training_metrics(step, {"loss": loss.item()})
            stop = ctx.preempt.should_preempt()
            if stop or step % 4 == 0 or step == LENGTH:
                random = ctx.distributed.gather(core.random_state())
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random}
                    ctx.checkpoint.save(state, {"steps_completed": step})
            if stop:
                break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=RANKS)
