"""The C structures that `decoder.cpp` is called with.

Each has the fields of the structure of its name, without the C, in the headers (`fields_of`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import (
    POINTER,
    Array,
    Structure,
    addressof,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
    sizeof,
)
from dataclasses import asdict
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tokenleap.core.distribution import Limits
from tokenleap.core.noise import Noise
from tokenleap.runtime.growth_plan import GrowthPlan
from tokenleap.runtime.inputs import PassInputs, Window
from tokenleap.runtime.llama import LAYER_NORMS, DecoderLayer, JointInput, Rotary
from tokenleap.runtime.native.pack import Format, PackedWeights
from tokenleap.runtime.native.packed import PackedDecoder, PackedLayer
from tokenleap.runtime.network import GrownTree, GrowthLimit, Need

_C_TYPES = {
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "float": c_float,
    "double": c_double,
    "Format": c_int32,
    "Activation": c_int32,
}
_DECLARATION = re.compile(r"(?:const )?(\w+)((?: const)?\*(?: const\*)?)? ?(.+)")
_NAME = re.compile(r"(\**)(\w+)(?:\[(\d+)\])?")


@cache
def _headers() -> str:
    """The C++ headers without comments, each run of white space as one space."""
    files = sorted(Path(__file__).parent.glob("*.h"))
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return " ".join(re.sub(r"//.*", "", code).split())


def fields_of(name: str, **nested: type[Structure]) -> list[tuple[str, Any]]:
    """The fields of a structure in the headers, as ctypes wants them."""
    found = re.search(rf"\bstruct {name} {{ ([^{{}}(]*;)", _headers())
    assert found, f"no header has struct {name}"
    fields: list[tuple[str, Any]] = []
    for statement in found[1].split(";")[:-1]:
        declared = _DECLARATION.fullmatch(statement.strip())
        assert declared, statement
        kind, pointer, names = declared.groups()
        for each in names.split(", "):
            named = _NAME.fullmatch(each)
            assert named, each
            assert not pointer or "," not in names, f"write a star for each name: {statement}"
            fields.append((named[2], _c_type(kind, bool(pointer or named[1]), named[3], nested)))
    return fields


def _c_type(
    kind: str, pointer: bool, size: str | None, nested: Mapping[str, type[Structure]]
) -> Any:
    if pointer:
        return POINTER(nested[kind]) if kind in nested else c_void_p
    one: Any = {**_C_TYPES, **nested}[kind]
    return one * int(size) if size else one


class CLinear(Structure):
    _fields_ = fields_of("Linear")


class CNorm(Structure):
    _fields_ = fields_of("Norm")


class CLayer(Structure):
    _fields_ = fields_of("Layer", Linear=CLinear, Norm=CNorm)


class CDecoder(Structure):
    _fields_ = fields_of("Decoder", Linear=CLinear, Norm=CNorm, Layer=CLayer)


class CSource(Structure):
    _fields_ = fields_of("Source")


class CPass(Structure):
    _fields_ = fields_of("Pass")


class CTree(Structure):
    _fields_ = fields_of("Tree")


class CDraw(Structure):
    _fields_ = fields_of("Draw")


class CTrees(Structure):
    _fields_ = fields_of("Trees", Tree=CTree)


class CBlockChain(Structure):
    _fields_ = fields_of("BlockChain")


class CFusion(Structure):
    _fields_ = fields_of("Fusion", Linear=CLinear)


def layer_of(
    index: int,
    qkv: Sequence[CLinear],
    output: CLinear,
    gate_up: Sequence[CLinear],
    down: CLinear,
    **more: Any,
) -> CLayer:
    return CLayer(
        qkv=(CLinear * 3)(*qkv),
        output=output,
        gate_up=(CLinear * 2)(*gate_up),
        down=down,
        index=index,
        attends=True,
        computes=True,
        **more,
    )


def structures(packed: PackedDecoder, kept: KeptWeights) -> tuple[CDecoder, list[CLayer]]:
    """The structures of a decoder, to which its layers are not joined yet."""
    made = _Structures(packed, kept)
    layers = [made.layer(index) for index in range(packed.sizes.num_layers)]
    return made.decoder(), layers


class _Structures:
    def __init__(self, packed: PackedDecoder, kept: KeptWeights) -> None:
        self._packed, self._sizes, self._kept = packed, packed.sizes, kept

    def decoder(self) -> CDecoder:
        sizes = self._sizes
        traits = asdict(sizes.traits)
        del traits["learnt_scale"]  # rows have it already (`Network.extend`)
        return CDecoder(
            head=self._kept.linear(self._packed.head()),
            norm=CNorm(self._kept.floats(sizes.norm)),
            embedding=self._kept.share(sizes.embedding.contiguous()).data_ptr(),
            vocabulary=len(sizes.embedding),
            hidden_size=sizes.hidden_size,
            heads=sizes.heads,
            key_heads=sizes.key_heads,
            width=sizes.width,
            intermediate=sizes.inner_size,
            is_bf16=sizes.embedding.dtype == torch.bfloat16,
            epsilon=sizes.epsilon,
            scaling=sizes.scaling,
            unplaced_token=-1,
            **traits,
            **self._joint(),
        )

    def _joint(self) -> dict[str, Any]:
        """The fields of `CDecoder` for a drafting head's input."""
        if (mix := self._packed.mix()) is not None:
            return {"mix": self._kept.linear(mix)}
        joint = self._sizes.joint
        if not isinstance(joint, JointInput):
            return {}
        return {
            "embedding_norm": CNorm(self._kept.floats(joint.embedding_norm)),
            "state_norm": self._kept.floats(joint.state_norm),
            "norm_before_residual": joint.norm_before_residual,
            "norm_output": joint.norm_output,
        }

    def layer(self, index: int) -> CLayer:
        weights = self._packed.layer(index)
        return layer_of(
            index,
            self._beside(weights.qkv),
            self._kept.linear(weights.output),
            self._beside(weights.gate_up),
            self._kept.linear(weights.down),
            **{name: self._norm(name, getattr(weights, name)) for name in LAYER_NORMS},
            **{name: _number(getattr(weights, name)) for name in _NUMBERS},
            angles=self._angles(weights),
        )

    def _norm(self, field: str, weight: Tensor | None) -> CNorm | int | None:
        address = self._kept.floats(weight)
        return CNorm(address) if getattr(CLayer, field).size == sizeof(CNorm) else address

    def _angles(self, weights: PackedLayer) -> int:
        """The layer's table of rotary angles, or -1."""
        if not weights.rotates:
            return -1
        return int(self._sizes.local_rotary is not None and weights.window is not None)

    def _beside(self, parts: Sequence[PackedWeights]) -> list[CLinear]:
        """Linear layers that read the same input rows, which have what all formats need."""
        rows = max(part.format for part in parts)
        assert len(parts) == 1 or min(part.format for part in parts) > Format.BFLOAT16
        made = [self._kept.linear(part) for part in parts]
        for layer in made:
            layer.rows = rows
        return made


_NUMBERS = [
    name
    for name, kind in CLayer._fields_
    if name in DecoderLayer.__dataclass_fields__ and kind in _C_TYPES.values()
]
"""The fields of a decoder layer and of `CLayer` that are numbers."""


def _number(value: Window | float | None) -> float:
    """A field of a decoder layer as C has it; 0 is none."""
    if isinstance(value, Window):
        assert not value.chunked, "no model of the Llama family has chunks"
        return value.size
    return value or 0


# The memory of a network's weights. What has the same bits in another network is in memory once.
#
# A draft model may have the embedding, the output layer or whole layers of its target: heads that
# draft with the target's output layer do, and so do draft models that were cut from their target,
# or trained with its embedding.


_Kind: TypeAlias = tuple[torch.dtype, torch.Size, bytes]
"""A key that tensors with the same bits share with few others: it has their first bytes."""

_FIRST_BYTES = 256


class KeptWeights:
    """The tensors that the kernels of a network read. They stay as long as this object.

    The same ones are looked for in the weights `beside`, which never change.
    """

    def __init__(self, beside: KeptWeights | None = None) -> None:
        self._tensors: list[Tensor] = []
        self._beside: dict[_Kind, list[Tensor]] = {}
        for tensor in () if beside is None else beside:
            self._beside.setdefault(_kind(tensor), []).append(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        self._tensors.append(tensor)
        return tensor

    def share(self, tensor: Tensor) -> Tensor:
        """Keep a contiguous tensor, or instead the one from `beside` that has the same bits."""
        alike = self._beside.get(_kind(tensor), ()) if self._beside else ()
        return self.keep(next((other for other in alike if _same_bits(tensor, other)), tensor))

    def linear(self, packed: PackedWeights) -> CLinear:
        weight, bias, form = self.share(packed.weight), packed.bias, packed.format
        address = None if bias is None else self.keep(bias).data_ptr()
        return CLinear(weight.data_ptr(), address, form, packed.inputs, packed.outputs, form)

    def floats(self, weight: Tensor | None) -> int | None:
        return None if weight is None else self.keep(weight.float().contiguous()).data_ptr()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def close(self) -> None:
        """Look through the other network's weights no more, and let go of them."""
        self._beside = {}


def _kind(tensor: Tensor) -> _Kind:
    first: bytes = _bits(tensor)[:_FIRST_BYTES].numpy().tobytes()
    return tensor.dtype, tensor.shape, first


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal; equal numbers are not enough, since 0 equals -0."""
    return one.data_ptr() == other.data_ptr() or torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


_MOST_CHILDREN = 64  # see `Ranking::MOST` in ranking.h
_NO_LIMIT = 2**31 - 1
_LOW = 2**64 - 1


class TreeArrays:
    """The trees to grow, and the memory for their nodes."""

    def __init__(
        self,
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None,
        nodes: int,
    ) -> None:
        assert max(plan.widths) <= _MOST_CHILDREN
        levels = max(limit.depth for limit in limits)
        self._widths, self._token_ids = array("i", plan.widths[:levels]), token_ids
        sizes = list(zip(plan.frontiers, self._widths, strict=False))
        count, most = len(limits), sum(frontier * width for frontier, width in sizes)
        self._trees = (CTree * count)(*map(_tree, limits))
        self._tokens, self._parents = (array(kind, bytes(8 * count * most)) for kind in "qi")
        self._probabilities = array("f", bytes(4 * count * most))
        frontiers = [frontier for frontier, _ in sizes]
        self._draws = _draws(limits)
        self._sources, self._shown = array("i"), array("f")
        self.keeps_logits = self._draws is not None and plan.beam is None
        if self._draws is not None:
            self._sources = array("i", bytes(4 * count * most))
            self._shown = array("f", bytes(4 * count * most))
        self.rows = count * (sum(frontiers) if self.keeps_logits else max(frontiers))
        self.arguments = CTrees(
            trees=self._trees,
            token_ids=None if token_ids is None else token_ids.data_ptr(),
            widths=self._widths.buffer_info()[0],
            levels=len(self._widths),
            beam=plan.beam or 0,
            most=most,
            widest=max(nodes, count * max(frontiers)),
            tokens=self._tokens.buffer_info()[0],
            parents=self._parents.buffer_info()[0],
            probabilities=self._probabilities.buffer_info()[0],
            draws=None if self._draws is None else addressof(self._draws),
            sources=self._sources.buffer_info()[0],
            shown=self._shown.buffer_info()[0],
        )

    def grown(self, logits: Tensor | None) -> list[GrownTree]:
        """The trees, when they have grown, with the logits [rows, V] of all passes if they keep."""
        return [self._tree(index, tree, logits) for index, tree in enumerate(self._trees)]

    def _tree(self, index: int, tree: CTree, logits: Tensor | None) -> GrownTree:
        if tree.undecided:
            return GrownTree((), (), (), undecided=True, levels=tree.levels)
        first = index * self.arguments.most
        at = slice(first, first + tree.drafted)
        found = self._tokens[at], self._parents[at], self._probabilities[at]
        if not self.keeps_logits:
            return GrownTree(*found, levels=tree.levels)
        drawn = logits, self._sources[at], self._shown[at]
        return GrownTree(*found, *drawn, levels=tree.levels)


def _draws(limits: Sequence[GrowthLimit]) -> Array[CDraw] | None:
    draws = [limit.draw for limit in limits if limit.draw is not None]
    assert len(draws) in (0, len(limits)), "all trees of a call draw, or none"
    found = [draw_of(d.noise, d.temperature, d.limits, coupled=d.coupled) for d in draws]
    return (CDraw * len(draws))(*found) if draws else None


def noise_of(noise: Noise, depth: int = 0, trial: int = 0, **more: Any) -> CDraw:
    """The noise of a draw, and what else is given of it."""
    _, number, position, stream = noise.counter(noise.token_stream, depth, trial)
    key = (c_uint64 * 2)(noise.seed & _LOW, noise.seed >> 64)
    return CDraw(key=key, trial=number, stream=stream, position=position, **more)


def draw_of(noise: Noise, temperature: float, limits: Limits, *, coupled: bool = True) -> CDraw:
    return noise_of(
        noise,
        temperature=temperature,
        min_p=limits.min_p,
        top_p=1.0 if limits.top_p == 1 else min(limits.top_p, _BELOW_1),
        top_k=min(limits.top_k, _NO_LIMIT),
        coupled=coupled,
    )


_BELOW_1 = 1 - 2.0**-24  # the next number of 32 bits


def _tree(limit: GrowthLimit) -> CTree:
    nodes = _NO_LIMIT if limit.nodes is None else limit.nodes
    return CTree(limit.min_token_prob, limit.min_path_prob, limit.depth, nodes)


class NodeArrays:
    """The nodes of all rows, as the arrays that `Pass` points to."""

    def __init__(self, inputs: PassInputs, need: Need) -> None:
        rows = [row for row in inputs.rows if row.tokens]
        self._tokens = array("q", _flat([row.tokens for row in rows]))
        self._ints = {
            "positions": array("i", _flat([row.positions for row in rows])),
            "prefixes": array("i", _flat([row.prefixes for row in rows])),
            "slots": array("i", _flat([range(row.start, row.start + len(row)) for row in rows])),
            "rows": array("i"),
            "tails": array("i"),
            "scored_nodes": array("i", inputs.last_nodes(need.last) if need.logits else ()),
        }
        starts = array("i", [0])
        for index, row in enumerate(inputs.rows, inputs.first):
            self._ints["rows"].extend(repeat(index, len(row)))
            if row.tails:
                for tail in row.tails:
                    self._ints["tails"].extend(tail)
                    starts.append(len(self._ints["tails"]))
            else:
                starts.extend(repeat(starts[-1], len(row)))
        self._ints["tail_starts"] = starts

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def scored(self) -> int:
        """L, the number of nodes whose logits are needed."""
        return len(self._ints["scored_nodes"])

    def addresses(self) -> dict[str, int]:
        """Field of `Pass` -> address of its array; valid as long as this object lives."""
        found = {name: numbers.buffer_info()[0] for name, numbers in self._ints.items()}
        return {"tokens": self._tokens.buffer_info()[0], **found}


def _flat(parts: Sequence[Iterable[int]]) -> Iterable[int]:
    return parts[0] if len(parts) == 1 else chain.from_iterable(parts)


_ANGLES = 256  # angles are computed for this many positions at once


class AngleTables:
    """Cosines and sines of one or more rotary embeddings, of half of a head each.

    Attributes:
        cos, sin: the addresses of tables [R, positions, D/2].
    """

    def __init__(self, rotaries: Sequence[Rotary], width: int) -> None:
        self._rotaries, self._half = rotaries, width // 2
        empty = torch.empty(len(rotaries), 0, self._half, dtype=torch.float32, device="cpu")
        self._tables = empty, empty
        self.positions = self.cos = self.sin = 0

    def reach(self, positions: int) -> None:
        """Extend the tables, if there are any, to at least this many positions.

        They grow by pieces of one size, because the bits of PyTorch's results may depend on the
        number of positions (invariant 7).
        """
        while self._rotaries and self.positions < positions:
            pairs = zip(self._tables, self._piece(self.positions), strict=True)
            cos, sin = (torch.cat(pair, dim=1) for pair in pairs)
            self._tables, self.positions = (cos, sin), self.positions + _ANGLES
            self.cos, self.sin = cos.data_ptr(), sin.data_ptr()

    def _piece(self, first: int) -> tuple[Tensor, Tensor]:
        """[R, positions, D/2] each, from a position on."""
        angles = [each.angles(first, _ANGLES, torch.float32) for each in self._rotaries]
        cos, sin = zip(*angles, strict=True)
        return torch.stack(cos)[..., : self._half], torch.stack(sin)[..., : self._half]
