"""Chooses the bucket, and so the CUDA graph, of a pass.

A graph has a fixed shape, so the shape of a pass is rounded up to one of a few buckets. vLLM and
nano-vllm capture a graph per batch size. The shape of a verification pass also has a number of
nodes per row and a span of keys. So a bucket is (rows, nodes, window, span). `network.py` captures
its graph when the bucket first occurs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenleap.runtime.attention import KEY_BLOCK

__all__ = ["Bucket", "Buckets"]


@dataclass(frozen=True)
class Bucket:
    """The shape of one graph.

    Args:
        rows: B, the number of rows, starting with the slab's first one.
        window: W, the number of slots after a row's committed tokens that its nodes may see. They
            hold the nodes of this pass, and uncommitted nodes of earlier ones.
    """

    rows: int
    nodes: int
    window: int
    span: int

    @property
    def places(self) -> int:
        """B N, all nodes computed, padding included."""
        return self.rows * self.nodes


@dataclass(frozen=True)
class Buckets:
    """The sizes of buckets.

    Args:
        most_places: largest B N. A larger pass keeps a GPU busy for longer than its kernels take to
            launch. Memory for the logits of this many nodes is reserved.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    nodes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    most_places: int = 512

    def fit(self, needed: Bucket, most: Bucket) -> Bucket | None:
        """The smallest bucket that holds a pass; None if the pass is to run without a graph."""
        rows = self.fit_rows(needed.rows, most.rows)
        nodes = _at_least(needed.nodes, self.nodes)
        window = _at_least(max(needed.window, nodes or 0), self.nodes)
        if rows is None or nodes is None or window is None:
            return None
        span = min(doubled(needed.span), most.span)
        bucket = Bucket(rows, nodes, window, span)
        return bucket if bucket.places <= self.most_places else None

    def fit_rows(self, needed: int, most: int) -> int | None:
        """B for a pass over `needed` rows of a slab that has `most`; None if there is no such B."""
        rows = _at_least(needed, self.rows)
        return None if rows is None else min(rows, most)


def _at_least(size: int, sizes: tuple[int, ...]) -> int | None:
    return next((known for known in sizes if known >= size), None)


def doubled(positions: int) -> int:
    """The smallest of 1, 2, 4, ... key blocks that holds this many positions; in positions."""
    span = KEY_BLOCK
    while span < positions:
        span *= 2
    return span
