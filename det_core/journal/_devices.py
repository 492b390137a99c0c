"""Values in flight from a device to the host.

The tensors of one report that share a device and a dtype become one copy into pinned memory, on the stream that is
current at the call. The report does not wait for it, and a later change in place does not affect it.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from det_core import _clock

logger = logging.getLogger("det_core")

BUFFER_ELEMENTS = 256
"""Elements of a reusable buffer; a larger copy allocates its own memory."""
MAX_FREE_BUFFERS = 256
"""Free buffers kept for each device and dtype."""


class PendingValue(ABC):
    """A value that is fixed when it is reported and arrives on the host later."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether :meth:`result` returns without waiting."""

    @abstractmethod
    def result(self) -> Any:
        """Wait for the value and return it as a Python number or nested list.

        Raises:
            Exception: If the copy failed; the value is lost.
        """


class CudaBuffer:
    """Pinned memory for one copy at a time, and the event that fires when the copy has arrived.

    Args:
        device, dtype: of the tensors.
        size: elements.

    Attributes:
        host: the memory, a tensor of one dimension.
    """

    def __init__(self, device: Any, dtype: Any, size: int) -> None:
        torch = sys.modules["torch"]
        # Reused, as pinning memory takes longer than the copy.
        self.host = torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
        self._device = device
        self._event = torch.cuda.Event()
        self._current_stream = torch.cuda.current_stream

    def copy(self, source: Any) -> None:
        """Begin to copy a number or a tensor of one dimension."""
        self.host[: source.numel()].copy_(source, non_blocking=True)
        self._event.record(self._current_stream(self._device))

    def ready(self) -> bool:
        """Return whether the copy has arrived."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait until the copy has arrived."""
        self._event.synchronize()


BUFFER_TYPES = {"cuda": CudaBuffer}
"""Buffer class by type of device; tensors on other devices are read during the report."""


class HostBuffers:
    """Pool of buffers for copies. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, Any], list[Any]] = {}

    def take(self, device: Any, dtype: Any, size: int) -> Any:
        """Return a buffer for ``size`` elements."""
        if size <= BUFFER_ELEMENTS:
            try:
                return self._free[device, dtype].pop()
            except LookupError:
                size = BUFFER_ELEMENTS
        return BUFFER_TYPES[device.type](device, dtype, size)

    def give_back(self, device: Any, dtype: Any, buffer: Any) -> None:
        """Return a buffer whose copy has been read to the pool."""
        free = self._free.setdefault((device, dtype), [])
        if buffer.host.numel() == BUFFER_ELEMENTS and len(free) < MAX_FREE_BUFFERS:
            free.append(buffer)


class DeviceCopy(PendingValue):
    """One copy of tensors of a device and dtype; its result is the list of their values.

    Work queued later on the current stream of the device runs after the copy; the caller orders work on *other*
    streams, as for every read of such a tensor.

    Args:
        buffers: pool that provides the memory.
        device, dtype: of the tensors.

    Attributes:
        tensors: the tensors to copy, appended before :meth:`start`.
    """

    def __init__(self, buffers: HostBuffers, device: Any, dtype: Any) -> None:
        self.tensors: list[Any] = []
        self._buffers = buffers
        self._key = device, dtype
        self._buffer: Any = None
        self._size = 0
        self._has_arrays = False
        self._has_arrived = False
        self._error: Exception | None = None

    def start(self) -> None:
        """Begin to copy. An error is raised by :meth:`result`, never here."""
        torch = sys.modules["torch"]
        tensors = self.tensors
        self._has_arrays = any([tensor.ndim for tensor in tensors])
        try:
            # Not no_grad(): a buffer made by a report in inference mode could not be written outside of it later.
            with torch.inference_mode():
                if self._has_arrays:
                    source = torch.cat([tensor.reshape(-1) for tensor in tensors])
                elif len(tensors) == 1:
                    source = tensors[0]
                else:
                    source = torch.stack(tensors)
                self._size = source.numel()
                self._buffer = self._buffers.take(*self._key, self._size)
                self._buffer.copy(source)
        except Exception as e:  # the device is dead: a report does not raise, its row names the lost values
            self._error = e
        # self.tensors keeps them alive until the copy has arrived: memory of another stream would be reused there as
        # soon as the caller drops the tensor.

    def ready(self) -> bool:
        """Return whether the copy has arrived or has failed."""
        self._has_arrived = self._has_arrived or self._error is not None or self._buffer.ready()
        return self._has_arrived

    def result(self) -> list[Any]:
        """Return the values of the tensors at the time of the report, in the order in which they were appended."""
        if self._error is not None:
            raise self._error
        if not self._has_arrived:
            self._buffer.wait()
        host = self._buffer.host[: self._size]
        values: list[Any]
        if self._has_arrays:
            parts = host.split([tensor.numel() for tensor in self.tensors])
            values = [part.view(tensor.shape).tolist() for part, tensor in zip(parts, self.tensors, strict=True)]
        else:
            values = host.tolist()
        self._buffers.give_back(*self._key, self._buffer)
        self.tensors = []
        self._buffer = None
        return values


def is_ready(value: PendingValue) -> bool:
    """Return whether there is nothing to wait for: the value has arrived, or its device fails."""
    try:
        return value.ready()
    except Exception as e:
        logger.debug("cannot query whether a device value has arrived: %s", e)
        return True


def wait_for(values: Iterable[PendingValue], timeout: float) -> None:
    """Wait until all values have arrived.

    Args:
        values: the values.
        timeout: maximum wait in seconds.
    """
    deadline = _clock.monotonic() + timeout
    # Polled: an event can only be waited for without a deadline, and one behind a collective whose peer has died never
    # fires.
    pause = 0.0001
    for value in values:
        while not is_ready(value) and _clock.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
