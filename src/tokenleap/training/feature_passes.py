"""Computing features: one pass of the target over each conversation, chunk by chunk.

`features.py` says what is kept, and reads it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenleap.core.files import write_whole
from tokenleap.core.source import Source
from tokenleap.core.tree import chain
from tokenleap.errors import DataError
from tokenleap.runtime.network import Need, PassOutput
from tokenleap.runtime.rows import INTERNAL_KEY
from tokenleap.runtime.target import Target
from tokenleap.training.conversations import Conversation
from tokenleap.training.features import ENCODED, INDEX, TOP_K, FeatureCache, array_shapes, quantize

__all__ = ["compute_features", "passes"]

_CHUNK = 256
"""Tokens of a pass."""


def compute_features(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    folder: Path,
    *,
    encoder: bool = False,
) -> Iterator[int]:
    """Fill a cache; a complete one for these conversations and layers stays as it is.

    Args:
        target: the target.
        conversations: what it is run over.
        layers: ids of the layers whose hidden states are kept.
        folder: of the cache.
        encoder: whether what the encoder makes of the sources is kept.

    Yields:
        Numbers of tokens that have been computed.

    Raises:
        DataError: the disk is full. What was there before is gone.
    """
    index: dict[str, Any] = {
        "layers": list(layers),
        "hidden_size": target.hidden_size,
        "lengths": [len(each.tokens) for each in conversations],
        "answers": [each.answers for each in conversations],
    }
    if any(each.source for each in conversations):
        index["sources"] = [each.source for each in conversations]
    if encoder:
        index[ENCODED] = True
    text = json.dumps(index)
    if _is_complete(folder, text):
        return
    arrays = _new_arrays(folder, array_shapes(index))
    at = read = 0
    for each in conversations:
        stop = at + len(each.tokens)
        arrays["tokens"][at:stop] = each.tokens
        if encoder:
            found = _encoded(target, each)
            arrays[ENCODED][read : read + len(found)] = found.half().cpu().numpy()
            read += len(found)
        for name, tensor in _features(target, each, layers).items():
            arrays[name][at:stop] = tensor.numpy()
        at = stop
        yield at
    for array in arrays.values():
        array.flush()
    write_whole(folder / INDEX, lambda path: path.write_text(text))


def _is_complete(folder: Path, index: str) -> bool:
    """Whether a cache has this index, and all that the index says."""
    try:
        FeatureCache(folder)
    except DataError:
        return False
    return (folder / INDEX).read_text() == index


def _new_arrays(
    folder: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, np.memmap[Any, Any]]:
    """Empty arrays in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        return {name: _allocated(folder / name, *each) for name, each in shapes.items()}
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        size = sum(prod(shape) * np.dtype(kind).itemsize for kind, shape in shapes.values())
        raise DataError(
            f"{folder}: the features take {size / 1e9:.2f} GB: {error.strerror}: learn fewer "
            "tokens, or choose another disk."
        ) from None


def _allocated(path: Path, kind: str, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new array on disk whose space is there: writing beyond a full disk would be a signal."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, prod(shape) * np.dtype(kind).itemsize))
    return np.memmap(path, dtype=kind, mode="r+", shape=shape)


def _features(
    target: Target, conversation: Conversation, layers: Sequence[int]
) -> dict[str, Tensor]:
    """File name -> what is kept of the n tokens of a conversation."""
    need = Need(hidden=tuple(sorted(layers)))
    outputs = passes(target, conversation.tokens, need, conversation.source)
    parts = [_kept(output, layers) for output in outputs]
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


@torch.inference_mode()
def _encoded(target: Target, conversation: Conversation) -> Tensor:
    """[s, E] what the target's encoder makes of a source."""
    assert target.source_network is not None, "the method is for encoder-decoders"
    return target.source_network.encoded(Source(tuple(conversation.source)))


def passes(
    target: Target, tokens: Sequence[int], need: Need, source: Sequence[int] = ()
) -> Iterator[PassOutput]:
    """The outputs of a target's passes over a text, chunk by chunk.

    Args:
        target: the target.
        tokens: of the text; of an encoder-decoder, the decoder's.
        need: what the outputs are to have.
        source: what an encoder-decoder reads; without it, a short source of its own.
    """
    target.add(INTERNAL_KEY)
    try:
        if source:
            target.encode(INTERNAL_KEY, Source(tuple(source)))
        for start in range(0, len(tokens), _CHUNK):
            chunk = chain(tokens[start : start + _CHUNK])
            (output,) = target.verify([INTERNAL_KEY], [chunk], need=need)
            yield output
            target.commit(INTERNAL_KEY, range(len(chunk)))
    finally:
        target.remove(INTERNAL_KEY)


@torch.inference_mode()
def _kept(output: PassOutput, layers: Sequence[int]) -> dict[str, Tensor]:
    logits = output.scores.float()
    values, tokens = logits.topk(min(TOP_K, logits.shape[-1]))
    missing = TOP_K - values.shape[-1]  # of a vocabulary smaller than that
    logprobs = F.pad(values - logits.logsumexp(-1, keepdim=True), (0, missing), value=-1e4)
    kept = {"top_tokens": F.pad(tokens.int(), (0, missing)), "top_logprobs": logprobs.half()}
    if layers:
        hidden = torch.stack([output.hidden[layer] for layer in layers], dim=1)
        kept["hidden"], kept["scales"] = quantize(hidden)
    return kept
