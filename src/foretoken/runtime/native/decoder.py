"""`NativeDecoder`: runs the Llama family through the C++ code in this folder (see `Network`).

Every kernel sums in one order, whatever else the pass computes. So invariant 7 holds for any number
of nodes (down to one), rows and threads, and for trees, too. Logits are float32. With bfloat16,
int8 and int4, numbers between linear layers are rounded less often than in PyTorch.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from copy import copy
from ctypes import (
    CDLL,
    Array,
    addressof,
    byref,
    c_int32,
    c_size_t,
    sizeof,
)
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.kv_slab import KVSlab
from foretoken.runtime.llama import DecoderWeights, JointInput
from foretoken.runtime.native.arguments import (
    CBuffers,
    CDecoder,
    CDraw,
    CFusion,
    CLayer,
    CPass,
    CTree,
    CTrees,
    NodeArrays,
    TreeArrays,
)
from foretoken.runtime.native.build import library
from foretoken.runtime.native.kept_weights import KeptWeights
from foretoken.runtime.native.pack import CLinear, Format, PackedWeights
from foretoken.runtime.native.packed import PackedDecoder, PackedLayer, Packing
from foretoken.runtime.native.support import MOST_HIDDEN_SIZE
from foretoken.runtime.native.threads import num_threads
from foretoken.runtime.network import (
    GrowingNetwork,
    GrownTree,
    GrowthLimit,
    GrowthPlan,
    Need,
    PassOutput,
)

__all__ = ["NativeDecoder", "checked"]

_ANGLES = 256
"""Rotary angles are computed for this many positions at once."""


@dataclass(frozen=True)
class _Pass:
    """The arguments of a pass, what it writes to, and what else they point to."""

    arguments: CPass
    logits: Tensor
    argmax: array[int]
    hidden: Tensor
    kept: list[object]


class NativeDecoder(GrowingNetwork):
    """A decoder of the Llama family, or a drafting head with such layers (see `Network`).

    Args:
        weights: its weights, in float32 or bfloat16; those of a model for which `why_not_native`
            returns None. Linear layers are packed copies, unless they are packed already.
        quantization: "int8", "int4" (with the head in int8), or None; not for packed weights.
        *flags: further flags for the compiler (see `library`).
        beside: a network that stays in memory. What has the same bits in its embedding or linear
            layers is in memory once.

    Raises:
        NativeLibraryError: the library is not available.
    """

    least_nodes = 1
    name = "native"
    exact_trees = True

    def __init__(
        self,
        weights: DecoderWeights | PackedDecoder,
        quantization: str | None = None,
        *flags: str,
        beside: NativeDecoder | None = None,
    ) -> None:
        self._library = checked(library(*flags))
        self._lock = Lock()  # the workspace serves one thread at a time
        packed = weights if isinstance(weights, PackedDecoder) else Packing(weights, quantization)
        sizes = packed.sizes
        dtype = sizes.embedding.dtype
        self._kept: KeptWeights = KeptWeights(None if beside is None else beside._kept)
        layers = [self._layer(index, packed.layer(index)) for index in range(sizes.num_layers)]
        head = packed.head()
        self._vocab_size = head.outputs
        self._rotary = sizes.rotary
        self._reads_states = sizes.joint is not None
        self._cos, self._sin = _empty(0, sizes.width // 2), _empty(0, sizes.width // 2)
        self._workspace = _empty(0, dtype=torch.uint8)
        self._seen_addresses: list[tuple[int, int, int, int]] = []
        self._buffers = (CBuffers * 0)()
        self._more = _empty(0, sizes.hidden_size, dtype=dtype)
        self._like = _empty(1, sizes.key_heads, 1, sizes.width, dtype=dtype)
        self._decoder = CDecoder(
            head=self._linear(head),
            norm=self._float(sizes.norm),
            embedding=self._kept.share(sizes.embedding.contiguous()).data_ptr(),
            vocabulary=len(sizes.embedding),
            hidden_size=sizes.hidden_size,
            heads=sizes.heads,
            key_heads=sizes.key_heads,
            width=sizes.width,
            intermediate=sizes.inner_size,
            is_bf16=dtype == torch.bfloat16,
            epsilon=sizes.epsilon,
            scaling=sizes.scaling,
            **self._joint(packed),
        )
        self._kept.close()
        self._use(layers)

    def _joint(self, packed: PackedDecoder) -> dict[str, Any]:
        """The fields of `CDecoder` for a drafting head's input."""
        if (mix := packed.mix()) is not None:
            return {"mix": self._linear(mix)}
        joint = packed.sizes.joint
        if not isinstance(joint, JointInput):
            return {}
        return {
            "embedding_norm": self._float(joint.embedding_norm),
            "state_norm": self._float(joint.state_norm),
            "norm_before_residual": joint.norm_before_residual,
            "norm_output": joint.norm_output,
        }

    def _use(self, layers: Sequence[CLayer]) -> None:
        self._layers = (CLayer * len(layers))(*layers)
        self._decoder.layers = self._layers
        self._decoder.num_layers = len(layers)

    def _layer(self, index: int, weights: PackedLayer) -> CLayer:
        window = weights.window
        assert window is None or not window.chunked, "no model of the Llama family has chunks"
        return CLayer(
            qkv=(CLinear * 3)(*self._beside(weights.qkv)),
            output=self._linear(weights.output),
            gate_up=(CLinear * 2)(*self._beside(weights.gate_up)),
            down=self._linear(weights.down),
            attention_norm=self._float(weights.attention_norm),
            query_norm=self._float(weights.query_norm),
            key_norm=self._float(weights.key_norm),
            mlp_norm=self._float(weights.mlp_norm),
            index=index,
            attends=True,
            computes=True,
            window=0 if window is None else window.size,
        )

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

    @property
    def num_layers(self) -> int:
        """Decoder layers, including those whose sublayers are skipped."""
        return len(self._layers)

    def extend(self, rows: Tensor) -> int:
        """See `Network.extend`."""
        first = int(self._decoder.vocabulary) + len(self._more)
        with self._lock:
            self._more = self._kept.keep(torch.cat([self._more, rows.to(self._more)]))
            self._decoder.more = self._more.data_ptr()
        return first

    def between(self, first: int, last: int) -> NativeDecoder:
        """See `ContinuingNetwork.between`."""
        return self._with(self._layers[first:last])

    def feed(self, states: Tensor) -> int:
        """See `ContinuingNetwork.feed`."""
        self._more = states.to(self._more).contiguous()
        self._decoder.more = self._more.data_ptr()
        return int(self._decoder.vocabulary)

    def first_layers(self, count: int) -> NativeDecoder:
        """See `Network.first_layers`."""
        return self._with(self._layers[:count])

    def without(self, attention: Collection[int], mlp: Collection[int]) -> NativeDecoder:
        """See `Network.without`."""
        layers = []
        for place, layer in enumerate(self._layers):
            other = CLayer.from_buffer_copy(layer)
            other.attends = layer.attends and place not in attention
            other.computes = layer.computes and place not in mlp
            layers.append(other)
        return self._with(layers)

    def narrowed(self, size: int) -> NativeDecoder:
        """See `WindowedNetwork.narrowed`."""
        layers = [CLayer.from_buffer_copy(layer) for layer in self._layers]
        for layer in layers:
            layer.window = size if layer.window else 0
        return self._with(layers)

    def _with(self, layers: Sequence[CLayer]) -> NativeDecoder:
        other = copy(self)
        other._decoder = CDecoder.from_buffer_copy(self._decoder)
        other._use(layers)
        return other

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        """See `Network.forward`; padding is not computed."""
        made = self._pass(inputs, need)
        with self._lock:
            self._prepare(made.arguments, slab)
            self._library.foretoken_forward(byref(self._decoder), byref(made.arguments))
        states = dict(zip(need.hidden, made.hidden, strict=True))
        if not need.logits:
            return PassOutput(None, None, states)
        return PassOutput(made.logits, made.argmax, states)

    def grow(
        self,
        inputs: PassInputs,
        slab: KVSlab,
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None = None,
    ) -> list[GrownTree]:
        """See `GrowingNetwork.grow`."""
        count = sum(map(len, inputs.rows))
        trees = TreeArrays(plan, limits, token_ids, count)
        behind = () if inputs.states is None else (self.num_layers,)
        widest = trees.arguments.widest
        made = self._pass(inputs, Need(last=1, hidden=behind), widest, trees.rows)
        with self._lock:
            self._prepare(made.arguments, slab)
            made.arguments.nodes = count
            self._library.foretoken_grow(
                byref(self._decoder), byref(made.arguments), byref(trees.arguments)
            )
        return trees.grown(made.logits)

    def _pass(self, inputs: PassInputs, need: Need, later: int = 0, rows: int = 0) -> _Pass:
        """A pass, with memory for one over `later` nodes and for `rows` rows of logits, too."""
        nodes = NodeArrays(inputs, need)
        most, scored = max(len(nodes), later), max(nodes.scored, rows)
        logits = _empty(scored, self._vocab_size)
        argmax = array("q", bytes(8 * scored))
        shape = (len(need.hidden), most, self._decoder.hidden_size)
        hidden = _empty(*shape, dtype=self._like.dtype)
        arguments = CPass(
            nodes=most,
            scored=nodes.scored,
            threads=num_threads(),
            most_seen=inputs.span,
            logits=logits.data_ptr(),
            argmax=argmax.buffer_info()[0],
            **nodes.addresses(),
        )
        made = _Pass(arguments, logits, argmax, hidden, [nodes])
        if need.hidden:
            slots = self._hidden_slots(need.hidden)
            arguments.hidden, arguments.hidden_slots = hidden.data_ptr(), slots.buffer_info()[0]
            made.kept.append(slots)
        assert (inputs.states is not None) == self._reads_states
        if inputs.states is not None:
            assert len(inputs.states) == len(nodes)
            given = inputs.states.to(self._like.dtype).contiguous()
            arguments.states = given.data_ptr()
            made.kept.append(given)
        return made

    def _hidden_slots(self, layers: Sequence[int]) -> array[int]:
        """[num_layers + 1] each layer id's index in `layers`, or -1 if it is not there."""
        slots = array("i", [-1] * (self.num_layers + 1))
        for slot, layer in enumerate(layers):
            slots[layer] = slot
        return slots

    def _prepare(self, arguments: CPass, slab: KVSlab) -> None:
        """Fill in what all passes share: buffers, rotary angles and memory to work in."""
        self._reach(arguments.most_seen)
        arguments.buffers = addressof(self._buffers_of(slab))
        arguments.cos, arguments.sin = self._cos.data_ptr(), self._sin.data_ptr()
        needed = self._library.foretoken_workspace(byref(self._decoder), byref(arguments))
        if len(self._workspace) < needed:
            self._workspace = _empty(needed, dtype=torch.uint8)
        arguments.workspace = self._workspace.data_ptr()

    def _buffers_of(self, slab: KVSlab) -> Array[CBuffers]:
        """The slab's buffers as `Pass` takes them; updated when they have moved."""
        if self._seen_addresses is not slab.addresses:
            slab.reserve([layer.index for layer in self._layers], self._like)
            addresses = self._seen_addresses = slab.addresses
            self._buffers = (CBuffers * len(addresses))(*(CBuffers(*at) for at in addresses))
        return self._buffers

    def _reach(self, positions: int) -> None:
        """Extend the tables of rotary angles to at least this many positions.

        They grow by pieces of one size, because the bits of PyTorch's results may depend on the
        number of positions (invariant 7).
        """
        known, half = self._cos.shape
        pieces = [
            self._rotary.angles(first, _ANGLES, torch.float32)
            for first in range(known, positions, _ANGLES)
        ]
        if pieces:
            cos, sin = (torch.cat(parts)[:, :half] for parts in zip(*pieces, strict=True))
            self._cos, self._sin = torch.cat([self._cos, cos]), torch.cat([self._sin, sin])


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for the C++ code, whatever PyTorch's default dtype and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def checked(loaded: CDLL) -> CDLL:
    """The library, after a check that its structures have the sizes of the Python ones."""
    loaded.foretoken_workspace.restype = loaded.foretoken_row_bytes.restype = c_size_t
    sizes = (c_int32 * 10)()
    loaded.foretoken_sizes(sizes)
    structures = (CLinear, CLayer, CDecoder, CBuffers, CPass, CTree, CTrees, CFusion, CDraw)
    ours = [sizeof(each) for each in structures]
    assert list(sizes) == [*ours, MOST_HIDDEN_SIZE]
    return loaded
