"""torch's process group of launched ranks, and the device of each rank."""

from __future__ import annotations

import atexit
import time

import torch

RELEASE_SECONDS = 0.05
"""Seconds gloo's threads may take to release the tensors of the last collective, on a busy machine."""


def make_group() -> bool:
    """Make torch's default process group from the environment; return False if it exists.

    Raises:
        ValueError: If the environment does not describe the ranks.
    """
    if torch.distributed.is_initialized():
        return False
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
    torch.distributed.init_process_group(backend)
    # Kept until the end: ranks that make a second group at the same address may meet the store of the first.
    atexit.register(destroy_group)
    return True


def destroy_group() -> None:
    """Destroy the default process group, if it exists."""
    if torch.distributed.is_initialized():
        gloo = torch.distributed.get_backend() == "gloo"
        torch.distributed.destroy_process_group()
        if gloo:
            # gloo's threads release tensors a moment after a collective, and need the interpreter for it: up to Python
            # 3.13, doing so while the interpreter ends aborts the process. destroy_process_group() does not wait for
            # them while a DistributedDataParallel model holds the group.
            time.sleep(RELEASE_SECONDS)


def local_device(local_rank: int) -> torch.device:
    """Return the device of a local rank, and make it the current one: a GPU, or the CPU if there are none.

    Raises:
        ValueError: If there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):  # NCCL's own error comes late and names neither
        raise ValueError(
            f"local rank {local_rank} has no GPU: {count} visible, and each rank needs one. Start {count} ranks on "
            f"this machine (--nproc-per-node {count}), or train on CPUs with CUDA_VISIBLE_DEVICES=''"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
