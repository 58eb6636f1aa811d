"""The time to stream the weights once: no step of plain decoding can be shorter.

A step reads every weight and little else (Leviathan et al., 2023, section 4.1: decoding is bound by
memory bandwidth), so that bytes over bandwidth is its roofline.
"""

from __future__ import annotations

import time

import torch

__all__ = ["stream_seconds"]

LARGEST = 1 << 30
"""Bytes that are really read: far more than any cache, and no second model in memory."""

REPEATS = 5


def stream_seconds(size: int, device: str = "cpu") -> float:
    """Seconds to read this many bytes once with the threads torch has: the best of several sums.

    Args:
        size: in bytes; of more than 1 GiB that much is read and the time is in proportion.
        device: where.
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
