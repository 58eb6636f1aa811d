"""Attention windows: layers that see only the positions near a node.

Windows count positions, not slots. In a token tree, a node's slot says nothing about its position,
so masks are made by the ranks of what a node sees (`PassInputs.mask_within`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedConfig

__all__ = ["FULL", "Window", "layer_windows", "resize_windows", "resized", "windows_by_kind"]

FULL = "full_attention"
_CHUNKED = "chunked_attention"
_SIZES = {"sliding_attention": "sliding_window", _CHUNKED: "attention_chunk_size"}
"""Kinds of layers with windows, and the fields of configurations with their sizes."""


@dataclass(frozen=True)
class Window:
    """What a layer sees of the positions up to a node's own.

    Args:
        size: number of tokens.
        chunked: whether the text is cut into chunks of `size` tokens, and a node sees its own chunk
            only. Otherwise it sees itself and the `size` - 1 tokens before it.
    """

    size: int
    chunked: bool = False

    def first(self, positions: Tensor) -> Tensor:
        """The first position that a node at each of these positions sees; it may be negative."""
        if self.chunked:
            return positions // self.size * self.size
        return positions + (1 - self.size)


def windows_by_kind(config: PreTrainedConfig) -> Mapping[str, Window]:
    """The windows of a decoder-only model by the kinds of its layers (`layer_types`).

    A model without `layer_types` has the same window in all layers, or none.
    """
    kinds = getattr(config, "layer_types", None)
    sizes = {kind: getattr(config, field, None) for kind, field in _SIZES.items()}
    return {
        kind: Window(size, kind == _CHUNKED)
        for kind, size in sizes.items()
        if size and (kinds is None or kind in kinds)
    }


def layer_windows(config: PreTrainedConfig) -> tuple[Window | None, ...]:
    """The window of each layer of a decoder-only model; None if it sees the whole text."""
    windows = windows_by_kind(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return tuple(windows.get(kind) for kind in kinds)
    return (next(iter(windows.values()), None),) * int(config.num_hidden_layers)


def resized(window: Window | None, size: int) -> Window | None:
    """A window of the same kind with this size; None stays None."""
    return None if window is None else replace(window, size=size)


def resize_windows(config: PreTrainedConfig, size: int) -> None:
    """Give all windows of a configuration this size."""
    for kind in windows_by_kind(config):
        setattr(config, _SIZES[kind], size)
