"""Which graph serves a pass: shapes are rounded up to a few, as a graph has one shape for ever.

vLLM and nano-vllm capture one graph per batch size; a verification pass has nodes per row and a
span of keys besides, so that a bucket is (rows, nodes, window, span) and graphs are captured when
their bucket first occurs.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.runtime.attention import KEY_BLOCK

__all__ = ["Bucket", "Buckets"]


@dataclass(frozen=True)
class Bucket:
    """The shape of one graph.

    Args:
        rows: B, rows of the slab from the first one on.
        nodes: N, nodes computed in each row.
        window: W, places behind a row's committed tokens that its nodes may see: nodes of earlier
            passes that were not committed, and those of this one.
        span: S, key positions attended to.
    """

    rows: int
    nodes: int
    window: int
    span: int

    @property
    def places(self) -> int:
        """B N."""
        return self.rows * self.nodes


@dataclass(frozen=True)
class Buckets:
    """The sizes there are.

    Args:
        rows: ascending.
        nodes: ascending; windows take the same sizes.
        most_places: largest B N. What is larger keeps a GPU busy for longer than its kernels take
            to launch, and memory for its logits is reserved.
    """

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    nodes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    most_places: int = 512

    def fit(self, needed: Bucket, most: Bucket) -> Bucket | None:
        """The smallest bucket for a pass; None where it is run as it is.

        Args:
            needed: what the pass takes.
            most: its `rows` and `span` are what the slab has.
        """
        rows = self.fit_rows(needed.rows, most.rows)
        nodes = _at_least(needed.nodes, self.nodes)
        window = _at_least(max(needed.window, nodes or 0), self.nodes)
        if rows is None or nodes is None or window is None:
            return None
        span = min(doubled(needed.span), most.span)
        bucket = Bucket(rows, nodes, window, span)
        return bucket if bucket.places <= self.most_places else None

    def fit_rows(self, needed: int, most: int) -> int | None:
        """B for a pass over so many rows of the `most` there are."""
        rows = _at_least(needed, self.rows)
        return None if rows is None else min(rows, most)


def _at_least(size: int, sizes: tuple[int, ...]) -> int | None:
    return next((known for known in sizes if known >= size), None)


def doubled(positions: int) -> int:
    """The smallest of one key block, two, four, ... that has room for so many positions."""
    span = KEY_BLOCK
    while span < positions:
        span *= 2
    return span
