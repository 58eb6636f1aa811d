"""Models whose packed weights are files in the cache, mapped into memory.

A quantized model is packed once, layer by layer, so it is never in memory as a whole. While it is
packed, a few tokens pass through its modules. Their logits are kept with the packed weights: they
show whether quantization spoils the model (see `probing.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from foretoken.core.memory import return_freed
from foretoken.errors import ModelError
from foretoken.models import store
from foretoken.models.disk import CacheError
from foretoken.models.folder import read_config
from foretoken.models.progress import progress
from foretoken.models.skeleton import empty, fill, skeleton
from foretoken.models.weights import FolderWeights, WeightSource
from foretoken.runtime.llama import ARCHITECTURES, LinearWeights, LlamaWeights
from foretoken.runtime.native.pack import PackedWeights, joined
from foretoken.runtime.native.packed import QUANTIZED, Packing
from foretoken.runtime.native.packed_files import (
    LAYOUT_VERSION,
    MappedDecoder,
    MappedFile,
    rest_file,
    write,
    write_layer,
)
from foretoken.runtime.native.support import FORMATS, why_no_library, why_not_native
from foretoken.runtime.probing import probe_tokens

__all__ = ["PackedModel", "open_packed"]

_log = logging.getLogger(__name__)

_HEAD_ROWS = 8192
"""Rows of the output layer that are packed at once; a multiple of `PANEL`."""

_SHOWN_BYTES = 200_000_000
"""Models whose weights take less are packed within a second, without a word."""


@dataclass(frozen=True)
class PackedModel:
    """A model whose linear layers are packed and mapped.

    Args:
        module: its modules, with the weights of the embedding and of the final norm only.
        weights: the packed weights.
        logits: [3, V] of the unpacked model's modules for three of the tokens of `probe_tokens`.
    """

    module: PreTrainedModel
    weights: MappedDecoder
    logits: Tensor


def open_packed(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str | None,
    runtime: str,
) -> PackedModel | None:
    """A model with mapped weights, which are packed now if they are not in the cache.

    Args:
        folder: a Hugging Face folder.
        dtype: of the embedding and the KV, and of the weights before they are quantized.
        device: where the model is to run.
        quantization: as `LLM` takes it.
        runtime: as `LLM` takes it.

    Returns:
        None if the native runtime does not run this model with these options, or if something is
        wrong with it: loading it as a whole then says what.

    Raises:
        ModelError: the model changes while it is read.
    """
    wanted = quantization in QUANTIZED and runtime in ("auto", "native")
    if not wanted or device.type != "cpu" or dtype not in FORMATS:
        return None
    if not set(read_config(folder).get("architectures") or [""]) <= ARCHITECTURES:
        return None
    try:
        module, source = skeleton(folder, dtype), FolderWeights(folder)
    except ModelError:
        return None
    if not _fits(module, source) or why_not_native(module) or why_no_library():
        return None
    assert quantization is not None
    try:
        files = _packed(source, module, quantization)
    except _NotFiniteError:
        return None
    if files is None:
        return None
    rest = MappedFile(rest_file(files))
    _fill_ends(module, rest.tensors["embedding"], rest.tensors["norm"])
    weights = MappedDecoder(files, rest, LlamaWeights(module))
    return PackedModel(module, weights, rest.tensors["logits"])


def _fits(module: PreTrainedModel, source: WeightSource) -> bool:
    """Whether the source has every weight of the modules, in the right shape."""
    expected = {name: tuple(each.shape) for name, each in module.named_parameters()}
    if module.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    shapes = source.shapes
    return all(shapes.get(name) == shape for name, shape in expected.items())


def _packed(source: WeightSource, module: PreTrainedModel, quantization: str) -> Path | None:
    """The folder of the packed files; None if the cache cannot hold them."""
    before = source.identity()
    dtype = str(module.dtype).removeprefix("torch.")
    name = f"{source.title}.{quantization}-{dtype}-{store.key_of(str(source.folder.resolve()))}"
    kind = store.Kind("packed", LAYOUT_VERSION, before)
    if (found := store.find(name, kind)) is not None:
        return found

    def build(_scratch: Path, product: Path) -> dict[str, str]:
        _Packer(source, skeleton(source.folder, module.dtype), quantization, product).run()
        if source.identity() != before:
            raise ModelError(f"{source.folder} has changed while it was read; load it again")
        return {"quantization": quantization, "dtype": dtype}

    try:
        return store.build(name, str(source.folder), _num_bytes(module, quantization), build, kind)
    except CacheError as error:
        _log.warning("The weights are packed in memory, at every start again: %s.", error)
        return None


def _num_bytes(module: PreTrainedModel, quantization: str) -> int:
    """About how large the packed files are, rounded up."""
    embedding = module.config.vocab_size * module.config.hidden_size
    layers = sum(each.numel() for name, each in module.named_parameters() if "layers." in name)
    per_weight = {"int8": 34 / 32, "int4": 20 / 32}[quantization]
    ends = embedding * (34 / 32 + module.dtype.itemsize)
    return int(1.01 * (layers * per_weight + ends)) + 1_000_000


def _fill_ends(module: Any, embedding: Tensor, norm: Tensor) -> None:
    """Give the modules the weights that something besides the network reads."""
    fill(module.model.embed_tokens, {"weight": embedding})
    fill(module.model.norm, {"weight": norm})
    if module.config.tie_word_embeddings:
        module.lm_head.weight = module.model.embed_tokens.weight


class _NotFiniteError(ModelError):
    """A weight is damaged, or the dtype too small."""


class _Packer:
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
        doing = f"Packing {source.title} in {self._quantization}"
        large = source.num_bytes > _SHOWN_BYTES
        shown = progress(doing, "10 s per GB", source.num_bytes) if large else nullcontext(_ignored)
        with shown as self._report:
            embedding = self._read("model.embed_tokens.weight")
            norm = self._read("model.norm.weight")
            _fill_ends(self._module, embedding, norm)
            self._packing = Packing(LlamaWeights(self._module), self._quantization)
            for index, layer in enumerate(body.layers):
                layer.register_forward_pre_hook(partial(self._fill, index))
                layer.register_forward_hook(partial(self._finish, index))
            tokens = torch.tensor([probe_tokens(self._module.config.vocab_size)])
            logits, head = self._head(body(input_ids=tokens).last_hidden_state[0, 1:])
            if not logits.isfinite().all():
                raise _NotFiniteError
            tensors = {"embedding": embedding, "norm": norm, "logits": logits.contiguous()}
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
        for start in range(0, size, _HEAD_ROWS):
            if tied:
                piece = self._module.model.embed_tokens.weight[start : start + _HEAD_ROWS]
            else:
                piece = self._read("lm_head.weight", (start, min(start + _HEAD_ROWS, size)))
            logits.append(F.linear(states, piece))
            packed.append(self._packing.pack_head(LinearWeights(piece, None)))
        return torch.cat(logits, dim=-1), joined(packed)

    def _read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        tensor = self._source.read(name, self._module.dtype, rows)
        self._done += tensor.numel() / self._elements * self._source.num_bytes
        self._report(int(self._done))
        return tensor


def _ignored(_done: int) -> None:
    """Progress that nobody sees."""
