"""Which models the C++ code can run on this machine."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PreTrainedModel

from tokenleap.runtime.llama import DecoderWeights, LlamaWeights, family_of
from tokenleap.runtime.native.build import NativeLibraryError, library
from tokenleap.runtime.native.pack import GROUP, Format

__all__ = [
    "FORMATS",
    "MOST_HIDDEN_SIZE",
    "why_no_library",
    "why_not_native",
    "wrong_place",
    "wrong_shape",
    "wrong_sizes",
]

_PLACES = ("cpu", "meta")
_WIDTHS = (32, 64, 96, 128, 256)
MOST_HIDDEN_SIZE = 16384
"""`MOST_HIDDEN_SIZE` in rows.h: functions of `Run` have room for this many numbers."""

FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


def why_not_native(model: PreTrainedModel) -> str | None:
    """Why the C++ code cannot run the model, on any machine; None if it can.

    The weights may be on the meta device: those of a `skeleton` are packed files.
    """
    if family_of(model) is None:
        return f"it does not support {type(model).__name__}, or not with this configuration"
    if (reason := wrong_place(model, _PLACES)) is not None:
        return reason
    weights = LlamaWeights(model)
    if (reason := wrong_sizes(weights)) is not None:
        return reason
    if any(parameter.device.type not in _PLACES for parameter in model.parameters()):
        return "some of the model's weights are not in CPU memory"
    embeddings, outputs = len(weights.embedding), len(weights.head.weight)
    if embeddings < outputs:
        return f"the model has {outputs} output tokens and only {embeddings} embeddings"
    return None


def wrong_place(model: PreTrainedModel, places: Collection[str]) -> str | None:
    """Why the C++ code has no kernels for a model's dtype, or where it is; None if it has."""
    if model.device.type in places and model.dtype in FORMATS:
        return None
    return (
        f"it supports only float32 and bfloat16 on CPUs, not {model.dtype} on {model.device.type}"
    )


def why_no_library() -> str | None:
    """Why the C++ code is not available on this machine; None if it is. Compiles it if needed."""
    try:
        library()
    except NativeLibraryError as error:
        return str(error)
    return None


def wrong_sizes(weights: DecoderWeights) -> str | None:
    """Which of the sizes the kernels do not support; None if they support all."""
    return wrong_shape(weights.width, weights.hidden_size, weights.inner_size)


def wrong_shape(width: int, hidden_size: int, inner_size: int) -> str | None:
    """The same of a head's width, of the residual stream, and of what an MLP computes within."""
    sizes = (hidden_size, inner_size)
    if width not in _WIDTHS:
        return f"head_dim must be one of {', '.join(map(str, _WIDTHS))}, and is {width}"
    if any(size % GROUP for size in sizes):
        return f"hidden_size and intermediate_size must be multiples of {GROUP}, and are {sizes}"
    if hidden_size > MOST_HIDDEN_SIZE:
        return f"hidden_size must be at most {MOST_HIDDEN_SIZE}, and is {hidden_size}"
    return None
