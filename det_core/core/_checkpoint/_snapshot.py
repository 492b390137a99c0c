"""A state of torch: copied as it is now, and written while the training goes on."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from det_core._torch_states import unreadable
from det_core.storage import Disk, Progress

log = logging.getLogger("det_core.checkpoint")


class StateWriter:
    """Writes states by ``torch.save``, in the call or from a copy later, and warns once of each thing to know of them.

    Args:
        disk: the door to the file system.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._buffer = SnapshotBuffer()
        self._has_checked = False
        self._has_warned_of_copy = False

    def write(self, state: Any, path: Path, blocking: bool) -> Callable[[Progress], None]:
        """Write a state to a file, and return what is left to do: with ``blocking=False``, to write the copy of it.

        One that cannot be copied is written before this returns.
        """
        self._warn_if_unreadable(state)
        if not blocking:
            try:
                copied = self._buffer.copy_state(state)
                return lambda tick: write_state(self._disk, path, copied, tick)
            except Exception as e:  # of torch's, of a class of the user's, or of memory
                self._warn_of_copy(e)
        write_state(self._disk, path, state)
        return lambda _tick: None

    def _warn_of_copy(self, error: Exception) -> None:
        if not self._has_warned_of_copy:
            self._has_warned_of_copy = True
            log.warning(
                "save(blocking=False) writes the state in the call, as it cannot be copied: %s: %s",
                type(error).__name__, error,
            )  # fmt: skip

    def _warn_if_unreadable(self, state: Any) -> None:
        """Name what a resume could not read, at the first save: at the resume it is too late."""
        if self._has_checked:
            return
        self._has_checked = True
        try:
            found = [f"state{place} ({kind})" for place, kind in unreadable(state)]
        except Exception as e:  # it holds itself, or changes meanwhile: torch.save() has the say
            log.debug("whether the state can be read back is not known: %s: %s", type(e).__name__, e)
            return
        if found:
            log.warning(
                "save(): torch.load(weights_only=True) and ctx.checkpoint.load() will not read %s%s: save numbers, "
                "strings, tensors, lists and dictionaries, such as float(value) or its state_dict()",
                ", ".join(found[:5]), f" and {len(found) - 5} more" * (len(found) > 5),
            )  # fmt: skip


class SnapshotBuffer:
    """Copies one state after the other into CPU memory that is kept from one to the next.

    Memory that is new costs more than the copy, as the kernel clears each page of it. So a snapshot holds until the
    next is taken, and no longer.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._made: dict[Any, Any] = {}
        """The tensors on it, to be used again: making one takes longer than a small copy."""

    def copy_state(self, state: Any) -> Any:
        """Return a deep copy of a state, with its dense tensors on the CPU, that later changes do not reach.

        Tensors that share a storage share its copy: a ``state_dict()`` makes new tensors of tied weights, and their
        bytes would be saved twice. Other values are left to their own ``__deepcopy__``, on their device.

        Raises:
            Exception: what in the state cannot be copied.
        """
        import torch

        copies: dict[int, Any] = {}
        whole: list[Any] = []
        devices: set[Any] = set()
        made: dict[Any, Any] = {}
        shared: dict[int, Any] = {}
        memo: dict[Any, Any] = {"torch": shared}  # where deepcopy looks for what other objects have of a storage
        tensors = list(
            _tensors(state, torch.Tensor)
        )  # kept, as the memo goes by their ids: a mapping may make new ones
        for tensor in tensors:
            if tensor.is_cuda:
                devices.add(tensor.device)
            if not _is_dense(tensor, torch):
                if tensor.grad_fn is not None:  # deepcopy refuses what has a history
                    memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo).requires_grad_()
                continue
            storage = tensor.untyped_storage()
            kept = copies.get(storage._cdata)
            if kept is None:
                kept = copies[storage._cdata] = self._memory(len(copies), storage.nbytes(), torch)
                if tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
                    whole.append(tensor)
                else:
                    kept.copy_(storage, non_blocking=tensor.is_cuda)
                if tensor.is_cpu:
                    shared[storage._cdata] = kept
            shape = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
            key = (kept._cdata, *shape, type(tensor), tensor.requires_grad)
            found = self._made.pop(key, None)  # two tensors stay two
            made[key] = memo[id(tensor)] = _view(torch, kept, *key[1:]) if found is None else found
        with torch.inference_mode():  # minds neither tensors that were made in it, nor leaves that require a gradient
            for tensor in whole:  # takes half as long as to copy the storage
                memo[id(tensor)].copy_(tensor, non_blocking=tensor.is_cuda)
        del self._kept[len(copies) :]
        self._made = made
        result = copy.deepcopy(state, memo)
        for device in devices:
            torch.cuda.synchronize(device)  # the copies are on their way until then
        return result

    def _memory(self, number: int, size: int, torch: Any) -> Any:
        """Return memory for a storage: that of the previous one at its place, if it has the size."""
        if number == len(self._kept):
            self._kept.append(torch.UntypedStorage(size))
        elif self._kept[number].nbytes() != size:
            self._kept[number] = torch.UntypedStorage(size)
        return self._kept[number]


def _view(
    torch: Any, storage: Any, dtype: Any, offset: int, size: Any, stride: Any, kind: type, requires_grad: bool
) -> Any:
    """Return a tensor on a storage."""
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)
    return (
        torch.nn.Parameter(tensor, requires_grad)
        if kind is torch.nn.Parameter
        else tensor.requires_grad_(requires_grad)
    )


def _tensors(state: Any, kind: type) -> Iterator[Any]:
    """Yield the tensors in dictionaries, lists and tuples at any depth, each once."""
    kinds = (kind, Mapping, list, tuple)
    seen: dict[int, Any] = {}
    left = [state]
    while left:
        value = left.pop()
        if not isinstance(value, kinds) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, kind):
            yield value
        else:
            left.extend(value.values() if isinstance(value, Mapping) else value)  # type: ignore[arg-type]


def _is_dense(tensor: Any, torch: Any) -> bool:
    """Return whether this is a plain dense tensor."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        and not (tensor.__dict__ or tensor._backward_hooks)
    )


def write_state(disk: Disk, path: Path, state: Any, tick: Progress = lambda _: None) -> None:
    """Write a state by ``torch.save``; what the disk refuses is a StorageError, which torch would hide.

    Args:
        disk: the door to the file system.
        path: the file; its folder is made.
        state: what to save.
        tick: called with 0 before each write; what it raises ends the save.
    """
    import torch

    disk.make_folders(os.fspath(path.parent))
    with disk.open_fd(os.fspath(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        file = _File(disk, os.fspath(path), fd, tick)
        try:
            torch.save(state, file)
        except BaseException:
            if file.error is not None:
                raise file.error from None
            raise


class _File:
    """A file as ``torch.save`` wants one."""

    def __init__(self, disk: Disk, path: str, fd: int, tick: Progress) -> None:
        self._disk = disk
        self._path = path
        self._fd = fd
        self._tick = tick
        self._size = 0
        self.error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        try:
            self._tick(0)
            self._disk.write_all(self._fd, self._path, view, self._size)
        except BaseException as e:
            self.error = self.error or e
            raise
        self._size += len(view)
        return len(view)

    def flush(self) -> None:
        """All of it is the kernel's."""
