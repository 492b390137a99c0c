"""torch's process group of the ranks that a launcher started, and the device of each."""

from __future__ import annotations

import atexit
import time

import torch

RELEASE_SECONDS = 0.05
"""How long gloo's threads may take to release the tensors of the last collective, on a busy machine."""


def make_group() -> bool:
    """Make torch's default process group of the ranks in the environment; False: there is one already.

    It lives as long as the process, so that a script may train again: ranks that end a group and make another at the
    same address may meet the store of the one before.

    Raises:
        ValueError: the environment does not say who the ranks are.
    """
    if torch.distributed.is_initialized():
        return False
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(destroy_group)
    return True


def destroy_group() -> None:
    """End the default process group, if there is one.

    gloo's threads release the tensors of a collective a moment after it has returned, for which they need the
    interpreter; up to Python 3.13, one that comes while the interpreter ends aborts the process. Destroying the group
    does not wait for its threads as long as a DistributedDataParallel model holds it; hence the pause.
    """
    if torch.distributed.is_initialized():
        gloo = torch.distributed.get_backend() == "gloo"
        torch.distributed.destroy_process_group()
        if gloo:
            time.sleep(RELEASE_SECONDS)


def local_device(local_rank: int) -> torch.device:
    """The device of one of this machine's ranks, made the current one: a GPU where there are any, else the CPU.

    Raises:
        ValueError: there are fewer GPUs than ranks; NCCL refuses two ranks on one, late and in riddles.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"local rank {local_rank} has no GPU: {count} can be seen, and each rank needs one of its own. Start "
            f"{count} on this machine (--nproc-per-node {count}), or train on CPUs with CUDA_VISIBLE_DEVICES=''"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
