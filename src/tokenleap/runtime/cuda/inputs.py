"""The inputs of a captured pass: fixed buffers on the device, filled by one copy from the host.

A mask [B, 1, N, S] would be most of the bytes, although all but W of its columns follow from the
rows' lengths. So only those W columns are copied, and the mask is computed on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count
from math import prod

import torch
from torch import Tensor

from tokenleap.runtime.attention import padded_rows
from tokenleap.runtime.cuda.buckets import Bucket
from tokenleap.runtime.cuda.graphs import Staging
from tokenleap.runtime.inputs import PassInputs, RowNodes

__all__ = ["StaticInputs", "additive_mask", "device_pass"]


class StaticInputs:
    """The input buffers of one bucket's graph."""

    def __init__(
        self, bucket: Bucket, device: torch.device, scratch: int, dtype: torch.dtype
    ) -> None:
        rows, nodes = bucket.rows, bucket.nodes
        self._bucket, self._scratch, self._dtype = bucket, scratch, dtype
        shapes = {
            "lengths": (rows,),
            "tokens": (rows, nodes),
            "positions": (rows, nodes),
            "slots": (rows, nodes),
            "visible": (rows, padded_rows(nodes), bucket.window),
            "places": (bucket.places,),
        }
        self._staging = Staging(sum(prod(shape) for shape in shapes.values()), device)
        self._host = _views(self._staging.host, shapes)
        self._device = _views(self._staging.device, shapes)
        self.clear()

    @property
    def slots(self) -> Tensor:
        """[B, N] the slot that each node writes to."""
        return self._device["slots"]

    @property
    def places(self) -> Tensor:
        """[B N] whose first T numbers say which of the B N places are nodes of the last pass."""
        return self._device["places"]

    def clear(self) -> None:
        """Load a pass of nothing but padding: it reads rows' first slots and writes to scratch."""
        self._clear_host()
        self._staging.send()

    def _clear_host(self) -> None:
        self._staging.wait()
        self._staging.host.zero_()
        self._host["slots"].fill_(self._scratch)
        self._host["visible"][:, :, 0] = 1  # a softmax over no slots would be NaN

    def load(self, inputs: PassInputs, lengths: Sequence[int]) -> None:
        """Load a pass, from its numbers: the tensors of `inputs` are not made."""
        self._clear_host()
        places: list[int] = []
        for row, nodes, length in zip(count(inputs.first), inputs.rows, lengths, strict=False):
            self._host["lengths"][row] = length
            self._load_row(row, nodes, length)
            place = row * self._bucket.nodes
            places += range(place, place + len(nodes))
        self._host["places"][: len(places)] = torch.tensor(places)
        self._staging.send()

    def _load_row(self, row: int, nodes: RowNodes, length: int) -> None:
        size, host = len(nodes), self._host
        if not size:
            return
        assert min(nodes.prefixes) >= length, "all nodes see what is committed"
        host["tokens"][row, :size] = torch.tensor(nodes.tokens)
        host["positions"][row, :size] = torch.tensor(nodes.positions)
        host["slots"][row, :size] = torch.arange(nodes.start, nodes.start + size)
        prefixes = torch.tensor(nodes.prefixes)[:, None] - length  # [n, 1]
        visible = host["visible"][row, :size]  # [n, W]
        visible.copy_(torch.arange(self._bucket.window) < prefixes)
        for node, tail in enumerate(nodes.tails):
            visible[node, [slot - length for slot in tail]] = 1

    def as_pass(self) -> PassInputs:
        """The buffers as inputs of a network. Called in a capture, it captures the mask, too."""
        device = self._device
        mask = additive_mask(
            device["lengths"], device["visible"].bool(), self._bucket.span, self._dtype
        )
        return device_pass(device["tokens"], device["positions"], mask)


def device_pass(tokens: Tensor, positions: Tensor, mask: Tensor) -> PassInputs:
    """A pass over the first rows, given as tensors; the host does not know its numbers.

    Args:
        tokens: [B, N].
        positions: [B, N].
        mask: [B, 1, padded_rows(N), S], added to the attention scores.
    """
    rows, nodes = tokens.shape
    unknown = [RowNodes(0)] * rows
    inputs = PassInputs(unknown, 0, nodes, mask.shape[3], mask.dtype, tokens.device)
    # Set the cached properties, which would compute them from the numbers.
    vars(inputs).update(tokens=tokens, positions=positions, mask=mask, used=None)
    return inputs


def additive_mask(lengths: Tensor, visible: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, R, S]: 0 where a node sees a slot, -inf elsewhere.

    Args:
        lengths: [B] committed tokens, which all nodes of a row see.
        visible: [B, R, W] bool, which of the W slots after those each node sees.
    """
    rows, nodes, window = visible.shape
    behind = torch.arange(span, device=lengths.device) - lengths[:, None]  # [B, S]
    index = behind.clamp(0, window - 1)[:, None].expand(rows, nodes, span)
    uncommitted = visible.gather(2, index) & (behind < window)[:, None]  # [B, R, S]
    seen = (behind < 0)[:, None] | uncommitted
    mask = torch.zeros(seen.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill(~seen, -torch.inf)[:, None]


def _views(flat: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    ends = accumulate(prod(shape) for shape in shapes.values())
    return {
        name: flat[end - prod(shape) : end].view(shape)
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }
