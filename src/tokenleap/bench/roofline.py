"""The time to stream the weights once: no step of plain decoding can be shorter.

Decoding is bound by memory bandwidth (Leviathan et al., 2023, section 4.1): a step reads every
weight and little else. Bytes over bandwidth is therefore the lower bound of its time.
"""

from __future__ import annotations

import time

import torch

__all__ = ["stream_seconds"]

LARGEST = 1 << 30
"""Bytes that are read at most: far more than any cache, and less than a second large model."""

REPEATS = 5


def stream_seconds(size: int, device: str = "cpu") -> float:
    """Seconds to read this many bytes once with torch's threads: the best of several runs.

    Args:
        size: in bytes. Above 1 GiB only 1 GiB is read, and its time is scaled up.
        device: whose memory.
    """
    read = min(size, LARGEST)
    values = torch.ones(max(1, read // 4), dtype=torch.float32, device=device)
    best = min(_sum(values, device) for _ in range(REPEATS))
    return best * size / (values.numel() * 4)


def _sum(values: torch.Tensor, device: str) -> float:
    began = time.perf_counter()
    values.sum()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
