"""Capture and replay: the only file of this package that needs a CUDA device.

The other files only use the protocol `Capture`. In tests on a CPU, a strict stand-in implements it:
it records operations with their addresses and numbers, and replays exactly these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Capture", "CudaGraphs", "Staging", "Uncaptured"]

WARM_UPS = 2
"""Calls before a capture. In these, libraries create their handles and choose their kernels."""


class Capture(Protocol):
    """Records a function once, so that it can be replayed cheaply.

    The function has no arguments; it reads and writes fixed buffers.
    """

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a function; return its replay.

        A replay computes with what the buffers contain when it is called. The function itself is
        called a few times during the capture. So the buffers should then have contents for which it
        does no harm.
        """
        ...


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool.

    They can share it because no two run at once, and because each copies its output elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Warm-ups and captures use the same stream, because libraries keep a handle per stream and
        # cannot create one during a capture.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
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
                torch.cuda.set_stream(caller)  # a failed capture leaves its own stream set
        replay: Callable[[], None] = graph.replay
        return replay


class Uncaptured:
    """Calls the function itself instead of a replay. Graphs are compared with it."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function


class Staging:
    """A tensor on the host, and one on the device that it is copied to without waiting."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.long, pin_memory=on_gpu)
        self.device = torch.zeros(size, dtype=torch.long, device=device)
        self._copied: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def send(self) -> None:
        """Start copying to the device."""
        self.device.copy_(self.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))

    def wait(self) -> None:
        """Wait until the last copy is done. Until then, the host's tensor must not be changed."""
        if self._copied is not None:
            self._copied.synchronize()
