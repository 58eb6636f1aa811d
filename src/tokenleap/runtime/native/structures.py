"""The C structures that `decoder.cpp` is called with.

Each has the fields of the structure in `pass.h` that has its name without the C in front.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
)
from dataclasses import asdict, replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from tokenleap.runtime.growth_plan import GrowthDraw, GrowthPlan
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.llama import JointInput, Rotary
from tokenleap.runtime.native.pack import CLinear, Format, PackedWeights
from tokenleap.runtime.native.packed import KeptWeights, PackedDecoder, PackedLayer
from tokenleap.runtime.network import GrownTree, GrowthLimit, Need

__all__ = [
    "AngleTables",
    "CBlockChain",
    "CBuffers",
    "CDecoder",
    "CDraw",
    "CFusion",
    "CLayer",
    "CNorm",
    "CPass",
    "CSource",
    "CTree",
    "CTrees",
    "NodeArrays",
    "TreeArrays",
    "structures",
]


class CNorm(Structure):
    """`Norm` in rows.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class CLayer(Structure):
    """`Layer` in pass.h."""

    _fields_ = (
        ("qkv", CLinear * 3),
        ("output", CLinear),
        ("source_query", CLinear),
        ("source_output", CLinear),
        ("gate_up", CLinear * 2),
        ("down", CLinear),
        ("attention_norm", CNorm),
        ("source_norm", CNorm),
        ("mlp_norm", CNorm),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention_after", c_void_p),
        ("mlp_after", c_void_p),
        ("index", c_int32),
        ("attends", c_int32),
        ("computes", c_int32),
        ("window", c_int32),
        ("angles", c_int32),
        ("unused", c_int32),
    )


class CDecoder(Structure):
    """`Decoder` in pass.h."""

    _fields_ = (
        ("layers", POINTER(CLayer)),
        ("head", CLinear),
        ("norm", CNorm),
        ("embedding", c_void_p),
        ("more", c_void_p),
        ("vocabulary", c_int64),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("heads", c_int32),
        ("key_heads", c_int32),
        ("width", c_int32),
        ("intermediate", c_int32),
        ("is_bf16", c_int32),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("logit_cap", c_float),
        ("score_cap", c_float),
        ("activation", c_int32),
        ("whole_norms", c_int32),
        ("ungated", c_int32),
        ("norms_sums", c_int32),
        ("position_embedding", c_void_p),
        ("embedded_positions", c_int64),
        ("unplaced_token", c_int64),
        ("distance_bias", c_void_p),
        ("distances_before", c_int64),
        ("distances_behind", c_int64),
        ("distance_bias_stride", c_int64),
        ("norm_before_residual", c_int32),
        ("norm_output", c_int32),
        ("embedding_norm", CNorm),
        ("state_norm", c_void_p),
        ("mix", CLinear),
    )


class CBuffers(Structure):
    """`Buffers` in pass.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_slots", c_int64),
        ("value_slots", c_int64),
    )


class CSource(Structure):
    """`Source` in pass.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("span", c_int64),
        ("positions", c_int64),
    )


class CPass(Structure):
    """`Pass` in pass.h."""

    _fields_ = (
        ("nodes", c_int32),
        ("scored", c_int32),
        ("threads", c_int32),
        ("most_seen", c_int32),
        ("angles", c_int64),
        ("tokens", c_void_p),
        ("states", c_void_p),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("slots", c_void_p),
        ("prefixes", c_void_p),
        ("tail_starts", c_void_p),
        ("tails", c_void_p),
        ("scored_nodes", c_void_p),
        ("buffers", c_void_p),
        ("sources", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("logits", c_void_p),
        ("argmax", c_void_p),
        ("hidden", c_void_p),
        ("hidden_slots", c_void_p),
        ("workspace", c_void_p),
    )


class CTree(Structure):
    """`Tree` in pass.h."""

    _fields_ = (
        ("least_token", c_double),
        ("least_path", c_double),
        ("depth", c_int32),
        ("nodes", c_int32),
        ("drafted", c_int32),
        ("undecided", c_int32),
    )


class CDraw(Structure):
    """`Draw` in pass.h."""

    _fields_ = (
        ("key", c_uint64 * 2),
        ("trial", c_uint64),
        ("stream", c_uint64),
        ("position", c_uint64),
        ("temperature", c_float),
        ("min_p", c_float),
        ("top_p", c_float),
        ("top_k", c_int32),
        ("coupled", c_int32),
        ("unused", c_int32),
    )


class CTrees(Structure):
    """`Trees` in pass.h."""

    _fields_ = (
        ("trees", POINTER(CTree)),
        ("token_ids", c_void_p),
        ("widths", c_void_p),
        ("levels", c_int32),
        ("beam", c_int32),
        ("most", c_int32),
        ("widest", c_int32),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("probabilities", c_void_p),
        ("draws", c_void_p),
        ("sources", c_void_p),
        ("shown", c_void_p),
    )


class CBlockChain(Structure):
    """`BlockChain` in block_chain.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("added", c_void_p),
        ("rows", c_void_p),
        ("tokens", c_void_p),
        ("probabilities", c_void_p),
        ("levels", c_int32),
        ("vocabulary", c_int32),
        ("stride", c_int32),
        ("size", c_int32),
        ("is_bf16", c_int32),
        ("candidates", c_int32),
        ("most", c_float),
    )


class CFusion(Structure):
    """`Fusion` in pass.h."""

    _fields_ = (
        ("fc", CLinear),
        ("norms", c_void_p),
        ("hidden", c_void_p),
        ("inputs", c_void_p),
        ("states", c_void_p),
        ("layers", c_int32),
        ("nodes", c_int32),
        ("threads", c_int32),
        ("is_bf16", c_int32),
        ("epsilon", c_float),
    )


# Makes the C structures of a decoder's weights.


def structures(packed: PackedDecoder, kept: KeptWeights) -> tuple[CDecoder, list[CLayer]]:
    """The structures of a decoder, to which its layers are not joined yet."""
    made = _Structures(packed, kept)
    layers = [made.layer(index) for index in range(packed.sizes.num_layers)]
    return made.decoder(), layers


class _Structures:
    def __init__(self, packed: PackedDecoder, kept: KeptWeights) -> None:
        self._packed, self._sizes, self._kept = packed, packed.sizes, kept

    def decoder(self) -> CDecoder:
        """Everything but the layers."""
        sizes = self._sizes
        traits = asdict(sizes.traits)
        del traits["learnt_scale"]  # rows have it already (`Network.extend`)
        return CDecoder(
            head=self._linear(self._packed.head()),
            norm=CNorm(self._float(sizes.norm)),
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
            return {"mix": self._linear(mix)}
        joint = self._sizes.joint
        if not isinstance(joint, JointInput):
            return {}
        return {
            "embedding_norm": CNorm(self._float(joint.embedding_norm)),
            "state_norm": self._float(joint.state_norm),
            "norm_before_residual": joint.norm_before_residual,
            "norm_output": joint.norm_output,
        }

    def layer(self, index: int) -> CLayer:
        """A layer."""
        weights = self._packed.layer(index)
        window = weights.window
        assert window is None or not window.chunked, "no model of the Llama family has chunks"
        return CLayer(
            qkv=(CLinear * 3)(*self._beside(weights.qkv)),
            output=self._linear(weights.output),
            gate_up=(CLinear * 2)(*self._beside(weights.gate_up)),
            down=self._linear(weights.down),
            attention_norm=CNorm(self._float(weights.attention_norm)),
            query_norm=self._float(weights.query_norm),
            key_norm=self._float(weights.key_norm),
            mlp_norm=CNorm(self._float(weights.mlp_norm)),
            attention_after=self._float(weights.attention_after),
            mlp_after=self._float(weights.mlp_after),
            index=index,
            attends=True,
            computes=True,
            window=0 if window is None else window.size,
            angles=self._angles(weights),
        )

    def _angles(self, weights: PackedLayer) -> int:
        """The layer's table of rotary angles, or -1."""
        if not weights.rotates:
            return -1
        return int(self._sizes.local_rotary is not None and weights.window is not None)

    def _beside(self, parts: Sequence[PackedWeights]) -> list[CLinear]:
        """Linear layers that read the same input rows, which have what all formats need."""
        rows = max(part.format for part in parts)
        assert len(parts) == 1 or min(part.format for part in parts) > Format.BFLOAT16
        made = [self._linear(part) for part in parts]
        for layer in made:
            layer.rows = rows
        return made

    def _linear(self, packed: PackedWeights) -> CLinear:
        if packed.bias is not None:
            self._kept.keep(packed.bias)
        return replace(packed, weight=self._kept.share(packed.weight)).c

    def _float(self, weight: Tensor | None) -> int | None:
        return None if weight is None else self._kept.keep(weight.float().contiguous()).data_ptr()


# The arrays that the structures of a call point to (`structures.py`); for `network.py`.


_MOST_CHILDREN = 64
"""See `Ranking::MOST` in ranking.h."""
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
        self._keeps_logits = self._draws is not None and plan.beam is None
        if self._draws is not None:
            self._sources = array("i", bytes(4 * count * most))
            self._shown = array("f", bytes(4 * count * most))
        self.rows = count * (sum(frontiers) if self._keeps_logits else max(frontiers))
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

    def grown(self, logits: Tensor) -> list[GrownTree]:
        """The trees, when they have grown.

        Args:
            logits: [rows, V] those of all passes.
        """
        return [self._tree(index, tree, logits) for index, tree in enumerate(self._trees)]

    def _tree(self, index: int, tree: CTree, logits: Tensor) -> GrownTree:
        if tree.undecided:
            return GrownTree((), (), (), undecided=True)
        first = index * self.arguments.most
        at = slice(first, first + tree.drafted)
        found = GrownTree(self._tokens[at], self._parents[at], self._probabilities[at])
        if not self._keeps_logits:
            return found
        return replace(found, logits=logits, rows=self._sources[at], shown=self._shown[at])


def _draws(limits: Sequence[GrowthLimit]) -> Array[CDraw] | None:
    draws = [limit.draw for limit in limits if limit.draw is not None]
    assert len(draws) in (0, len(limits)), "all trees of a call draw, or none"
    return (CDraw * len(draws))(*map(_draw, draws)) if draws else None


def _draw(draw: GrowthDraw) -> CDraw:
    noise = draw.noise
    _, trial, position, stream = noise.counter(noise.token_stream, 0)
    key = (c_uint64 * 2)(noise.seed & _LOW, noise.seed >> 64)
    limits = draw.limits
    return CDraw(
        key=key,
        trial=trial,
        stream=stream,
        position=position,
        temperature=draw.temperature,
        min_p=limits.min_p,
        top_p=limits.top_p,
        top_k=limits.top_k,
        coupled=draw.coupled,
    )


def _tree(limit: GrowthLimit) -> CTree:
    nodes = _NO_LIMIT if limit.nodes is None else limit.nodes
    return CTree(limit.min_token_prob, limit.min_path_prob, limit.depth, nodes)


class NodeArrays:
    """The nodes of all rows, as the arrays that `Pass` points to."""

    def __init__(self, inputs: PassInputs, need: Need) -> None:
        rows = [row for row in inputs.rows if len(row)]
        self._tokens = array("q", chain.from_iterable(row.tokens for row in rows))
        numbers = [range(row.start, row.start + len(row)) for row in rows]
        self._ints = {
            "positions": array("i", chain.from_iterable(row.positions for row in rows)),
            "prefixes": array("i", chain.from_iterable(row.prefixes for row in rows)),
            "slots": array("i", chain.from_iterable(numbers)),
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


# Tables of rotary angles, as the C++ code reads them.


_ANGLES = 256
"""Angles are computed for this many positions at once."""


class AngleTables:
    """Cosines and sines of one or more rotary embeddings, of half of a head each."""

    def __init__(self, rotaries: Sequence[Rotary], width: int) -> None:
        self._rotaries, self._half = rotaries, width // 2
        shape = (len(rotaries), 0, self._half)
        self.cos = torch.empty(shape, dtype=torch.float32, device="cpu")  # [R, positions, D/2]
        self.sin = torch.empty(shape, dtype=torch.float32, device="cpu")

    @property
    def positions(self) -> int:
        """How many positions the tables have."""
        return self.cos.shape[1]

    def reach(self, positions: int) -> None:
        """Extend the tables, if there are any, to at least this many positions.

        They grow by pieces of one size, because the bits of PyTorch's results may depend on the
        number of positions (invariant 7).
        """
        if not self._rotaries:
            return
        first = range(self.positions, positions, _ANGLES)
        pieces = [self._piece(position) for position in first]
        if pieces:
            cos, sin = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
            self.cos = torch.cat([self.cos, cos], dim=1)
            self.sin = torch.cat([self.sin, sin], dim=1)

    def _piece(self, first: int) -> tuple[Tensor, Tensor]:
        """[R, positions, D/2] each, from a position on."""
        angles = [each.angles(first, _ANGLES, torch.float32) for each in self._rotaries]
        cos, sin = zip(*angles, strict=True)
        return torch.stack(cos)[..., : self._half], torch.stack(sin)[..., : self._half]
