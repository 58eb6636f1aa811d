"""Packs the weights of a model on disk in int8 or int4, layer by layer.

A few tokens pass through the model's modules at the same time, each of which is given its weights
when the tokens reach it. Their logits are kept with the packed weights: they show whether
quantization spoils the model (see `probing.py`). `packed.py` keeps the files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenleap.core.memory import return_freed
from tokenleap.errors import ModelError
from tokenleap.models.progress import progress
from tokenleap.models.skeleton import empty, fill
from tokenleap.models.weights import WeightSource
from tokenleap.runtime.llama import LinearWeights, LlamaWeights
from tokenleap.runtime.native.pack import PackedWeights, joined
from tokenleap.runtime.native.packed import Packing
from tokenleap.runtime.native.packed_files import rest_file, write, write_layer
from tokenleap.runtime.probing import probe_tokens

__all__ = ["HEAD_ROWS", "NotFiniteError", "RoundingPacker", "fill_ends", "packing_progress"]

HEAD_ROWS = 8192
"""Rows of the output layer that are packed at once; a multiple of `PANEL`."""

_SHOWN_BYTES = 200_000_000
"""Models whose weights take less are packed within a second, without a word."""


def fill_ends(module: Any, embedding: Tensor, norm: Tensor) -> None:
    """Give the modules the weights that something besides the network reads."""
    fill(module.model.embed_tokens, {"weight": embedding})
    fill(module.model.norm, {"weight": norm})
    if module.config.tie_word_embeddings:
        module.lm_head.weight = module.model.embed_tokens.weight


class NotFiniteError(ModelError):
    """A weight is damaged, or the dtype too small."""


class RoundingPacker:
    """Writes the packed files of a model, while a few tokens pass through its modules.

    Args:
        source: the weights.
        module: its modules, which are of no use afterwards: each layer is given its weights when
            the tokens reach it.
        quantization: how to pack.
        folder: an empty folder to fill.
    """

    def __init__(
        self, source: WeightSource, module: PreTrainedModel, quantization: str, folder: Path
    ) -> None:
        self._source, self._quantization, self._folder = source, quantization, folder
        self._module: Any = module
        self._report: Callable[[int], None] = _ignored
        self._elements = sum(torch.Size(shape).numel() for shape in source.shapes.values())
        self._done = 0.0

    @torch.no_grad()
    def run(self) -> None:
        """Write the files.

        Raises:
            ModelError: a weight cannot be read, or logits are not finite.
            OSError: a file cannot be written.
        """
        source, body = self._source, self._module.model
        with packing_progress(source, self._quantization) as self._report:
            embedding = self._read("model.embed_tokens.weight")
            norm = self._read("model.norm.weight")
            fill_ends(self._module, embedding, norm)
            sizes = LlamaWeights(self._module)
            self._packing, self._traits = Packing(sizes, self._quantization), sizes.traits
            for index, layer in enumerate(body.layers):
                layer.register_forward_pre_hook(partial(self._fill, index))
                layer.register_forward_hook(partial(self._finish, index))
            tokens = torch.tensor([probe_tokens(self._module.config.vocab_size)])
            logits, head = self._head(body(input_ids=tokens).last_hidden_state[0, 1:])
            if not logits.isfinite().all():
                raise NotFiniteError
            tensors = {"embedding": embedding, "norm": norm, "logits": logits.float()}
            write(rest_file(self._folder), tensors, {"head": head})

    def _fill(self, index: int, layer: nn.Module, _inputs: object) -> None:
        """Read the weights of a layer before it runs."""
        names = [name for name, _ in layer.named_parameters()]
        fill(layer, {name: self._read(f"model.layers.{index}.{name}") for name in names})

    def _finish(self, index: int, layer: nn.Module, _inputs: object, _outputs: object) -> None:
        """Pack a layer when it has run."""
        write_layer(self._folder, index, self._packing.layer(index))
        empty(layer)
        return_freed()

    def _head(self, states: Tensor) -> tuple[Tensor, PackedWeights]:
        """The logits of states [n, E], and the packed output layer.

        The output layer, which can be as large as ten others, is read piece by piece.
        """
        tied, size = self._module.config.tie_word_embeddings, self._module.config.vocab_size
        logits, packed = [], []
        for start in range(0, size, HEAD_ROWS):
            if tied:
                piece = self._module.model.embed_tokens.weight[start : start + HEAD_ROWS]
            else:
                piece = self._read("lm_head.weight", (start, min(start + HEAD_ROWS, size)))
            logits.append(F.linear(states, piece))
            packed.append(self._packing.pack_head(LinearWeights(piece, None)))
        return self._traits.logits(torch.cat(logits, dim=-1)), joined(packed)

    def _read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        tensor = self._source.read(name, self._module.dtype, rows)
        self._done += tensor.numel() / self._elements * self._source.num_bytes
        self._report(int(self._done))
        return tensor


def packing_progress(
    source: WeightSource, form: str
) -> AbstractContextManager[Callable[[int], None]]:
    """Show the progress of packing a large model, in bytes of its weights on disk."""
    if source.num_bytes < _SHOWN_BYTES:
        return nullcontext(_ignored)
    return progress(f"Packing {source.title} in {form}", "10 s per GB", source.num_bytes)


def _ignored(_done: int) -> None:
    """Progress that nobody sees."""
