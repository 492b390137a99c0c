"""Reading a CUDA tensor without stopping its stream.

The tensor is copied, on the stream that is current for its device, into pinned host memory, and an event is
recorded behind the copy. Work queued later on that stream, an in-place update for example, comes after the
copy; work on *other* streams is the caller's to order, as for every read of a CUDA tensor.
"""

from __future__ import annotations

import sys
from typing import Any

from det_core.journal._pending import PendingValue


class CudaCopy(PendingValue):
    """A copy of a CUDA tensor that is under way."""

    def __init__(self, tensor: Any) -> None:
        torch = sys.modules["torch"]
        cuda = torch.cuda
        # Kept until the copy has arrived: the caller may let go of a tensor that belongs to another stream.
        self._source = source = tensor.detach()
        with cuda.device(source.device):
            self._host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            # A blocking event lets the waiting thread sleep instead of spinning on a core.
            self._event = cuda.Event(blocking=True)
            self._event.record(cuda.current_stream(source.device))

    def ready(self) -> bool:
        """Whether the copy has arrived."""
        return bool(self._event.query())

    def result(self) -> Any:
        """The tensor's value at the time of the report, as a number or nested list."""
        self._event.synchronize()
        self._source = None
        return self._host.tolist()
