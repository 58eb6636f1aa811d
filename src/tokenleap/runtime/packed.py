"""Models whose packed weights are files in the cache, mapped into memory.

A quantized model is packed once. `packing.py` rounds the weights of a folder or a GGUF file to int8
or int4, and `packing_gguf.py` packs a GGUF file in its own numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tokenleap import models
from tokenleap.errors import ModelError
from tokenleap.models import aside, store
from tokenleap.models.disk import CacheError
from tokenleap.models.gguf_file import GgufFile, gguf_parts
from tokenleap.models.gguf_weights import GgufWeights
from tokenleap.models.identity import identity_of
from tokenleap.models.load import checked_config
from tokenleap.models.packed_names import packed_beginning
from tokenleap.models.resolver import cache_title, gguf_file, gguf_title
from tokenleap.models.skeleton import skeleton
from tokenleap.models.weights import FolderWeights, WeightSource
from tokenleap.runtime.choices import AUTO, DRAFTING, OWN
from tokenleap.runtime.families import FAMILIES
from tokenleap.runtime.llama import LlamaWeights
from tokenleap.runtime.native.packed import QUANTIZED
from tokenleap.runtime.native.packed_files import (
    LAYOUT_VERSION,
    MappedDecoder,
    MappedFile,
    rest_file,
)
from tokenleap.runtime.native.support import FORMATS, why_no_library, why_not_native
from tokenleap.runtime.packing import NotFiniteError, RoundingPacker, fill_ends
from tokenleap.runtime.packing_gguf import GgufPacker

__all__ = ["PackedModel", "open_packed"]

_log = logging.getLogger(__name__)

_Fill: TypeAlias = Callable[[Path, Path], dict[str, str]]


@dataclass(frozen=True)
class PackedModel:
    """A model whose linear layers are packed and mapped.

    Args:
        folder: a folder with its configuration and its tokenizer.
        module: its modules, with the weights of the embedding and of the final norm only.
        weights: the packed weights.
        quantization: "int8", "int4", or `OWN`.
        logits: [3, V] of the unpacked model's modules for the last three of `probe_tokens`; None if
            nothing was rounded that could spoil it.
    """

    folder: Path
    module: PreTrainedModel
    weights: MappedDecoder
    quantization: str
    logits: Tensor | None


class _Build(Protocol):
    """`store.build`, or what takes its arguments."""

    def __call__(
        self,
        name: str,
        source: str,
        needed_bytes: int,
        fill: _Fill,
        kind: store.Kind,
        replaces: str | None,
    ) -> Path:
        """See `store.build`."""
        ...


@dataclass(frozen=True)
class _Recipe:
    """How a model is packed.

    Args:
        origin: the model.
        title: a short name of it.
        identity: text that differs when the model's files have changed.
        dtype: see `open_packed`.
        form: how it is packed.
        needed: bytes that packing needs.
        fill: packs it (see `store.build`).
    """

    origin: Path
    title: str
    identity: Callable[[], str]
    dtype: torch.dtype
    form: str
    needed: int
    fill: _Fill


class _NotNativeError(ModelError):
    """The native runtime does not run this model; loading it as a whole says what else is wrong."""


def open_packed(
    name: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: str | None,
    runtime: str,
) -> PackedModel | None:
    """A model with mapped weights, which are packed now if they are not in the cache.

    Args:
        name: as `LLM` takes it.
        dtype: of the embedding and the KV, and of the weights before they are rounded.
        device: where the model is to run.
        quantization: as `LLM` takes it, or `DRAFTING`.
        runtime: as `LLM` takes it.

    Returns:
        None if the native runtime does not run this model with these options, or if something is
        wrong with it: loading it as a whole then says what.

    Raises:
        ModelError: there is no such model, it changes while it is read, or it is a GGUF file that
            cannot be read or for which the cache has no room.
    """
    if runtime not in ("auto", "native") or device.type != "cpu" or dtype not in FORMATS:
        return None
    if quantization != AUTO and quantization not in QUANTIZED:
        return None
    gguf = gguf_file(name)
    if gguf is None and quantization == AUTO:
        return None
    if why_no_library() is not None:
        return None
    try:
        form = OWN if quantization == AUTO else str(quantization)
        if gguf is not None:
            return _opened(partial(_packed_gguf, gguf, dtype, form), dtype, form)
        folder = models.resolve(name)
        return _opened(partial(_packed_folder, folder, dtype, form), dtype, form)
    except (_NotNativeError, NotFiniteError):
        return None
    except CacheError as error:
        if gguf is not None:  # there is nothing else to load it from
            raise
        _log.warning("The weights are packed in memory, at every start again: %s.", error)
        return None


def _opened(
    pack: Callable[[], tuple[Path, Path]], dtype: torch.dtype, form: str, *, again: bool = True
) -> PackedModel:
    """A packed model.

    Args:
        pack: makes its packed files if needed. It returns the folder of its configuration and
            tokenizer, and that of its packed files.
        dtype: see `open_packed`.
        form: how it is packed.
        again: whether to pack once more if the files are deleted before they are mapped.
    """
    folder, files = pack()
    try:
        module, rest = skeleton(folder, dtype), MappedFile(rest_file(files))
        body, vocabulary = module.model, module.config.vocab_size
        embedding = rest.tensor("embedding", body.embed_tokens.weight)
        if embedding.dtype != dtype:
            raise rest.damaged("embedding")
        norm = rest.tensor("norm", body.norm.weight)
        fill_ends(module, embedding, norm.to(dtype))
        sizes = LlamaWeights(module)
        sizes.norm = sizes.family.norm(norm)  # as precise as it is stored
        weights = MappedDecoder(files, rest, sizes)
        like = None if form == OWN else torch.empty(3, vocabulary, device="meta")
        logits = rest.optional("logits", like)
    except ModelError:
        if files.is_dir() or not again:
            raise
        return _opened(pack, dtype, form, again=False)
    return PackedModel(folder, module, weights, form, logits)


def _packed_folder(folder: Path, dtype: torch.dtype, form: str) -> tuple[Path, Path]:
    """A Hugging Face folder, and its packed files."""
    try:
        config = checked_config(folder)
        if not set(config.get("architectures") or [""]) <= set(FAMILIES):
            raise _NotNativeError
        source, module = FolderWeights(folder), skeleton(folder, dtype)
    except ModelError as error:
        raise _NotNativeError from error
    if not _fits(module, source) or why_not_native(module):
        raise _NotNativeError

    def fill(_scratch: Path, product: Path) -> dict[str, str]:
        RoundingPacker(source, module, form, product).run()
        return {"runs": f"rounded to {form}"}

    recipe = _Recipe(
        origin=folder,
        title=cache_title(source.title),
        identity=source.identity,
        dtype=dtype,
        form=form,
        needed=_num_bytes(module, form),
        fill=fill,
    )
    return folder, _kept(recipe, store.build)


def _packed_gguf(path: Path, dtype: torch.dtype, form: str) -> tuple[Path, Path]:
    """The packed files of a GGUF file, which have its configuration and tokenizer beside them."""
    parts = gguf_parts(path)
    read = GgufFile.read(parts[0])
    if not read.about.native:
        raise _NotNativeError
    if form == OWN and all(tensor.is_float for tensor in read.tensors):
        raise _NotNativeError  # there is nothing to keep in its own numbers

    def fill(_scratch: Path, product: Path) -> dict[str, str]:
        from tokenleap.models.convert import convert_settings

        file = GgufFile.open(parts[0])
        convert_settings(file, product)
        module = skeleton(product, dtype)
        source = GgufWeights(file, module)
        if why_not_native(module) is not None:
            raise _NotNativeError
        if form != OWN:
            RoundingPacker(source, module, form, product).run()
            return {"runs": f"rounded to {form}"}
        return {"runs": GgufPacker(source, module, product).run()}

    recipe = _Recipe(
        origin=parts[0],
        title=gguf_title(parts[0]),
        identity=lambda: identity_of(parts),
        dtype=dtype,
        form=form,
        # A number of the file takes at most twice its room, and the embedding 16 or 32 bits.
        needed=3 * sum(part.stat().st_size for part in parts),
        fill=fill,
    )
    files = _kept(recipe, aside.build)
    return files, files


def _kept(recipe: _Recipe, build: _Build) -> Path:
    """A folder of packed files in the cache, made now if it is not there.

    Its name tells the files that it was made from. So nobody maps some layers of an older version
    and some of a newer one.

    Args:
        recipe: how it is made.
        build: makes it in the cache, or elsewhere if the cache cannot be written.

    Raises:
        ModelError: the model changes meanwhile, or `fill` raises it.
        CacheError: it cannot be written.
    """
    origin, before = recipe.origin, recipe.identity()
    dtype_name = str(recipe.dtype).removeprefix("torch.")
    stem = packed_beginning(recipe.title, recipe.form, dtype_name, origin)
    name = f"{stem}-{store.key_of(f'{before} {LAYOUT_VERSION}')}"
    kind = store.Kind("packed", LAYOUT_VERSION, before)

    def checked(scratch: Path, product: Path) -> dict[str, str]:
        notes = recipe.fill(scratch, product)
        if recipe.identity() != before:
            raise ModelError(f"{origin} has changed while it was read; load it again")
        return notes

    return store.find(name, kind) or build(name, str(origin), recipe.needed, checked, kind, stem)


def _fits(module: PreTrainedModel, source: WeightSource) -> bool:
    """Whether the source has every weight of the modules, in the right shape."""
    expected = {name: tuple(each.shape) for name, each in module.named_parameters()}
    if module.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    shapes = source.shapes
    return all(shapes.get(name) == shape for name, shape in expected.items())


def _num_bytes(module: PreTrainedModel, form: str) -> int:
    """About how large the packed files of a rounded model are, rounded up."""
    embedding = module.config.vocab_size * module.config.hidden_size
    layers = sum(each.numel() for name, each in module.named_parameters() if "layers." in name)
    per_weight = {"int8": 34 / 32, "int4": 20 / 32, DRAFTING: 20 / 32}[form]
    ends = embedding * (34 / 32 + module.dtype.itemsize)
    return int(1.01 * (layers * per_weight + ends)) + 1_000_000
