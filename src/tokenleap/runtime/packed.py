"""Models whose packed weights are files in the cache, mapped into memory.

A quantized model is packed once: the weights of a folder or a GGUF file are rounded to int8 or
int4, or a GGUF file keeps its own quantization.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap import models
from tokenleap.core.config import return_freed
from tokenleap.errors import ModelError
from tokenleap.models import resolver, store
from tokenleap.models.convert import GgufWeights
from tokenleap.models.generation import generation_config_in
from tokenleap.models.gguf import GgufFile, gguf_parts
from tokenleap.models.load import checked_config, load_config
from tokenleap.models.loaded import (
    FolderWeights,
    WeightSource,
    empty,
    fill,
    skeleton,
)
from tokenleap.models.resolver import cache_title, gguf_file, gguf_title, packed_beginning
from tokenleap.models.store import CacheError, identity_of, progress
from tokenleap.runtime.choices import AUTO, DRAFTING, OWN
from tokenleap.runtime.llama import FAMILIES, LinearWeights, LlamaSizes, LlamaWeights, rotaries_of
from tokenleap.runtime.native.build import FORMATS, why_no_library, why_not_native
from tokenleap.runtime.native.pack import (
    FORMAT_OF,
    PANEL,
    Format,
    PackedWeights,
    halves,
    joined,
    pack,
    pack_blocks,
    packed_in_turns,
)
from tokenleap.runtime.native.packed import (
    LAYOUT_VERSION,
    QUANTIZED,
    MappedDecoder,
    MappedFile,
    PackedLayer,
    Packing,
    rest_file,
    write,
    write_layer,
)
from tokenleap.runtime.probing import probe_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)

_Fill: TypeAlias = Callable[[Path, Path], dict[str, str]]
_Build: TypeAlias = Callable[[str, str, int, _Fill, store.Kind, str | None], Path]
"""`store.build`, or what takes its arguments."""


@dataclass(frozen=True)
class PackedModel:
    """A model whose linear layers are packed and mapped. Transformers' module is not made."""

    folder: Path
    name: str  # that of the module's class
    config: PreTrainedConfig
    weights: MappedDecoder
    quantization: str
    norm: Tensor
    # [3, V] of the unpacked modules for the last of `probe_tokens`; None if nothing was rounded
    logits: Tensor | None

    device: ClassVar[torch.device] = torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.sizes.embedding.dtype

    @property
    def generation_config(self) -> GenerationConfig:
        return generation_config_in(self.folder)

    @property
    def vocabulary_weights(self) -> tuple[Tensor, Tensor] | None:
        """Those of embedding and output layer, if they are one; else only a packed copy exists."""
        embedding = self.weights.sizes.embedding
        return (embedding, embedding) if self.config.tie_word_embeddings else None

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that are not packed, by the names of Transformers' module."""
        yield "model.embed_tokens.weight", self.weights.sizes.embedding
        yield "model.norm.weight", self.norm


@dataclass(frozen=True)
class _Recipe:
    """How a model is packed."""

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

    None if the native runtime does not run it with these options, or if something is wrong with it:
    loading it as a whole then says what.
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
    """A packed model; `pack` makes its packed files if needed.

    It returns the folder of its configuration and tokenizer, and that of its packed files.
    """
    folder, files = pack()
    try:
        config, rest = load_config(folder), MappedFile(rest_file(files))
        (name,), vocabulary = config.architectures or [""], config.vocab_size
        embedding = rest.tensor("embedding", (vocabulary, config.hidden_size))
        if embedding.dtype != dtype:
            raise rest.damaged("embedding")
        norm = rest.tensor("norm", (config.hidden_size,))
        sizes = LlamaSizes(name, config, embedding, norm, rotaries_of(config))
        weights = MappedDecoder(files, rest, sizes)
        logits = rest.optional("logits", None if form == OWN else (3, vocabulary))
    except ModelError:
        if files.is_dir() or not again:
            raise
        return _opened(pack, dtype, form, again=False)
    return PackedModel(folder, name, config, weights, form, norm, logits)


def _packed_folder(folder: Path, dtype: torch.dtype, form: str) -> tuple[Path, Path]:
    try:
        config = checked_config(folder)
        (name, *others) = config.get("architectures") or [""]
        if others or name not in FAMILIES:
            raise _NotNativeError
        source = FolderWeights(folder)
    except ModelError as error:
        raise _NotNativeError from error

    @cache
    def module() -> PreTrainedModel:
        try:
            made = skeleton(load_config(folder), dtype)
        except ModelError as error:
            raise _NotNativeError from error
        if type(made).__name__ != name or not _fits(made, source) or why_not_native(made):
            raise _NotNativeError
        return made

    def build(*given: Any) -> Path:
        module()
        return store.build(*given)

    def fill(_scratch: Path, product: Path) -> dict[str, str]:
        RoundingPacker(source, module(), form, product).run()
        return {"runs": f"rounded to {form}"}

    recipe = _Recipe(
        origin=folder,
        title=cache_title(source.title),
        identity=source.identity,
        dtype=dtype,
        form=form,
        needed=_num_bytes(source, dtype, form),
        fill=fill,
    )
    return folder, _kept(recipe, build)


def _packed_gguf(path: Path, dtype: torch.dtype, form: str) -> tuple[Path, Path]:
    """The packed files of a GGUF file, which have its configuration and tokenizer beside them."""
    parts = gguf_parts(path)

    def build(*given: Any) -> Path:
        file = GgufFile.read(parts[0])
        if not file.about.native:
            raise _NotNativeError
        if form == OWN and all(tensor.is_float for tensor in file.tensors):
            raise _NotNativeError  # there is no quantization to keep
        return resolver.build_aside(*given)

    def fill(_scratch: Path, product: Path) -> dict[str, str]:
        from tokenleap.models.convert import convert_settings

        file = GgufFile.open(parts[0])
        convert_settings(file, product)
        module = skeleton(load_config(product), dtype)
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
    files = _kept(recipe, build)
    return files, files


def _kept(recipe: _Recipe, build: _Build) -> Path:
    """A folder of packed files in the cache, made now if it is not there.

    Its name tells the files that it was made from. So no process maps layers of two versions.
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
    expected = {name: tuple(each.shape) for name, each in module.named_parameters()}
    if module.config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    shapes = source.shapes
    return all(shapes.get(name) == shape for name, shape in expected.items())


def _num_bytes(source: WeightSource, dtype: torch.dtype, form: str) -> int:
    """About how large the packed files of a rounded model are, rounded up."""
    embedding = math.prod(source.shapes.get("model.embed_tokens.weight", ()))
    layers = sum(math.prod(shape) for name, shape in source.shapes.items() if "layers." in name)
    per_weight = {"int8": 34 / 32, "int4": 20 / 32, DRAFTING: 20 / 32}[form]
    ends = embedding * (34 / 32 + dtype.itemsize)
    return int(1.01 * (layers * per_weight + ends)) + 1_000_000


# Packs the weights of a model on disk in int8 or int4, layer by layer.
#
# A few tokens pass through the model's modules at the same time, each of which is given its weights
# when the tokens reach it. Their logits are kept with the packed weights: they show whether
# quantization spoils the model (see `probing.py`).


HEAD_ROWS = 8192  # rows of the output layer that are packed at once; a multiple of `PANEL`

_SHOWN_BYTES = 200_000_000
"""Models whose weights take less are packed within a second, without a word."""


@torch.inference_mode(mode=False)  # heads may be trained after it
def norm_module(config: PreTrainedConfig, weight: Tensor) -> nn.Module:
    """The norm before the output layer, with this weight in the model's dtype."""
    module: Any = skeleton(config, weight.dtype)
    norm: nn.Module = module.model.norm
    fill(norm, {"weight": weight})
    return norm


class NotFiniteError(ModelError):
    """A weight is damaged, or the dtype too small."""


class RoundingPacker:
    """Writes the packed files of a model, while a few tokens pass through its modules.

    The modules, of no use afterwards, are given their weights when the tokens reach them.
    """

    def __init__(
        self, source: WeightSource, module: PreTrainedModel, quantization: str, folder: Path
    ) -> None:
        self._source, self._quantization, self._folder = source, quantization, folder
        self._module: Any = module

    @torch.no_grad()
    def run(self) -> None:
        source, body = self._source, self._module.model
        with packing_progress(source, self._quantization) as self._report:
            embedding = self._read("model.embed_tokens.weight")
            norm = self._read("model.norm.weight")
            fill(body.embed_tokens, {"weight": embedding})
            fill(body.norm, {"weight": norm})
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
        names = [name for name, _ in layer.named_parameters()]
        fill(layer, {name: self._read(f"model.layers.{index}.{name}") for name in names})

    def _finish(self, index: int, layer: nn.Module, _inputs: object, _outputs: object) -> None:
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
        self._report(tensor.numel())
        return tensor


@contextmanager
def packing_progress(source: WeightSource, form: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of packing a large model; yields what is told how many numbers are done."""
    if source.num_bytes < _SHOWN_BYTES:
        yield lambda _numbers: None
        return
    elements, done = sum(map(math.prod, source.shapes.values())), 0
    with progress(f"Packing {source.title} in {form}", "10 s per GB", source.num_bytes) as show:

        def report(numbers: int) -> None:
            nonlocal done
            done += numbers
            show(done * source.num_bytes // elements)

        yield report


# Packs a GGUF file with its own quantization (`native/pack.py`), layer by layer.
#
# A layer whose numbers no format has is dequantized and rounded to int8. Layers that are one in the
# native runtime (query, key and value; gate and up) are several if their kinds differ. Beside one
# in floats, they are all dequantized.


class GgufPacker:
    def __init__(self, source: GgufWeights, module: PreTrainedModel, folder: Path) -> None:
        self._source, self._module, self._folder = source, module, folder
        self._tied = bool(module.config.tie_word_embeddings)
        self._floats = FORMATS[module.dtype]
        self._family = FAMILIES[type(module).__name__]
        self._runs: dict[str, set[str]] = {}

    def run(self) -> str:
        shapes = self._source.shapes
        with packing_progress(self._source, "its quantization") as report:
            for index in range(self._module.config.num_hidden_layers):
                prefix = f"model.layers.{index}."
                write_layer(self._folder, index, self._layer(prefix))
                report(sum(math.prod(shapes[name]) for name in shapes if name.startswith(prefix)))
            self._write_rest()
        return "; ".join(f"{kind} {' and '.join(sorted(how))}" for kind, how in self._runs.items())

    def _layer(self, prefix: str) -> PackedLayer:
        merge = {"qkv": self._parts, "gate_up": self._gate_up}
        parts: dict[str, Any] = {
            field: merge.get(field, self._alone)(*(f"{prefix}{name}" for name in names))
            for field, names in self._family.linear_modules.items()
        }
        for field, name in self._family.norm_modules.items():
            weight = None if name is None else self._found(f"{prefix}{name}.weight")
            parts[field] = None if weight is None else self._family.norm(weight)
        return PackedLayer(**parts)

    def _write_rest(self) -> None:
        dtype = self._module.dtype
        embedding = "model.embed_tokens.weight"
        head = embedding if self._tied else "lm_head.weight"
        tensors = {
            "embedding": self._source.read(embedding, dtype),
            "norm": self._read("model.norm.weight"),
        }
        write(rest_file(self._folder), tensors, {"head": self._linear(head, self._form(head))})

    def _alone(self, name: str) -> PackedWeights:
        (packed,) = self._parts(name)
        return packed

    def _parts(self, *names: str) -> tuple[PackedWeights, ...]:
        """Linear layers with the same input; neighbours in one format are one matrix."""
        runs = groupby(zip(names, self._forms(*names), strict=True), key=itemgetter(1))
        return tuple(self._merged(form, *(name for name, _ in run)) for form, run in runs)

    def _gate_up(self, *names: str) -> tuple[PackedWeights, ...]:
        forms = self._forms(*names)
        parts = [self._linear(f"{n}.weight", form) for n, form in zip(names, forms, strict=True)]
        gate, up = halves(*parts) if len(parts) == 1 else parts
        return (packed_in_turns(gate, up),) if gate.format is up.format else (gate, up)

    def _merged(self, form: Format, *names: str) -> PackedWeights:
        """Linear layers with the same input, one below the other, with their biases."""
        parts = [self._linear(f"{name}.weight", form) for name in names]
        biases = [self._found(f"{name}.bias") for name in names]
        if all(bias is None for bias in biases):
            return joined(parts)
        sizes = [part.outputs for part in parts]
        both = zip(biases, sizes, strict=True)
        bias = torch.cat([torch.zeros(size) if each is None else each for each, size in both])
        whole = joined(parts)
        return replace(whole, bias=F.pad(bias, (0, -len(bias) % PANEL)))

    def _forms(self, *names: str) -> list[Format]:
        """The formats of layers with the same input, which is either of floats or of int8."""
        forms, floats = [self._form(f"{name}.weight") for name in names], self._floats
        return [floats] * len(forms) if floats in forms else forms

    def _form(self, name: str) -> Format:
        """The format that holds a weight best."""
        if self._source.is_float(name):
            return self._floats
        kind = self._source.kind(name)
        return FORMAT_OF.get(kind, Format.INT8)

    def _linear(self, name: str, form: Format) -> PackedWeights:
        kind = self._source.kind(name)
        packed = self._repacked(name) if FORMAT_OF.get(kind) is form else None
        exact = packed or form is Format.FLOAT32 or (kind.name, form) == ("BF16", Format.BFLOAT16)
        self._say(kind.name, form, "" if exact else ", rounded")
        return packed or self._rounded(name, form)

    def _repacked(self, name: str) -> PackedWeights | None:
        """A weight in its quantization, a piece at a time; None if one is not finite."""
        kind, rows = self._source.kind(name), torch.from_numpy(self._source.blocks(name))
        parts = []
        for piece in torch.split(rows, HEAD_ROWS):
            packed = pack_blocks(kind, piece, self._source.shapes[name][1])
            if packed is None:
                return None
            parts.append(packed)
        return joined(parts)

    def _rounded(self, name: str, form: Format) -> PackedWeights:
        """A weight that is dequantized, a piece at a time if that is possible, and packed."""
        if form not in (self._floats, Format.INT8, Format.INT4):
            raise ModelError(
                f"{self._source.title}: {name} has numbers that are not finite: the file is "
                "damaged; get it again."
            )
        outputs = self._source.shapes[name][0]
        whole = name.startswith("model.layers.")  # rows may be in another order in the file
        size = outputs if whole else HEAD_ROWS
        dtype = torch.float32 if form is Format.INT8 else self._module.dtype
        parts = []
        for start in range(0, outputs, size):
            rows = None if whole else (start, min(start + size, outputs))
            parts.append(pack(LinearWeights(self._source.read(name, dtype, rows), None), form))
        return joined(parts)

    def _say(self, kind: str, form: Format, how: str) -> None:
        self._runs.setdefault(kind, set()).add(f"as {form.name.lower()}{how}")

    def _read(self, name: str) -> Tensor:
        return self._source.read(name, torch.float32)

    def _found(self, name: str) -> Tensor | None:
        return self._read(name) if name in self._source.shapes else None
