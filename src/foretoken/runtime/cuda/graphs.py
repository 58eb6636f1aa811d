"""Capture and replay: the only lines of this package that need a CUDA device.

Everything else is written against `Capture`, of which the tests have a strict stand-in: it records
operations with their addresses and numbers, and replays just those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Capture", "CudaGraphs", "Staging", "Uncaptured"]

WARM_UPS = 2
"""Runs before a capture: libraries make their handles and choose their kernels in them."""


class Capture(Protocol):
    """Makes a function of no arguments, which reads and writes fixed buffers, cheap to call."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """A replay of the function, on the contents its buffers have when the replay is called.

        The function is called a few times first, so that its buffers should have contents for
        which it leaves nothing behind.
        """
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory: no two run at once, and none keeps its own output.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for warm-ups and captures: libraries keep a handle per stream, and making one
        # during a capture fails.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """See `Capture.capture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            caller = torch.cuda.current_stream()
            self._stream.wait_stream(caller)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    function()
            caller.wait_stream(self._stream)
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    function()
            finally:
                torch.cuda.set_stream(caller)  # a capture that fails leaves its own in place
        replay: Callable[[], None] = graph.replay
        return replay


class Uncaptured:
    """Runs the function at every call: what graphs are measured against."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """See `Capture.capture`."""
        return function


class Staging:
    """A tensor on the host and its twin on the device, and copies between them without waiting.

    Args:
        size: elements, int64.
        device: where the twin is.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.long, pin_memory=on_gpu)
        self.device = torch.zeros(size, dtype=torch.long, device=device)
        self._copied: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def send(self) -> None:
        """Start copying to the device."""
        self._copy(self.device, self.host)

    def fetch(self) -> Tensor:
        """Copy to the host; the host's tensor, once it is there."""
        self._copy(self.host, self.device)
        self.wait()
        return self.host

    def wait(self) -> None:
        """Until the last copy is done: before that the host's tensor is not to be touched."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, to: Tensor, of: Tensor) -> None:
        to.copy_(of, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))
