"""`NativeNetwork`: runs a decoder through the C++ code in this folder (see `Network`).

`network.py` makes one of a model of the Llama family, and `seq2seq.py` of an encoder-decoder.

Every kernel sums in one order, whatever else the pass computes. So invariant 7 holds for any number
of nodes (down to one), rows and threads, and for trees, too. Logits are float32. With bfloat16,
int8 and int4, numbers between linear layers are rounded less often than in PyTorch.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from ctypes import (
    CDLL,
    addressof,
    byref,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
    sizeof,
)
from dataclasses import dataclass
from threading import Lock
from typing import Self

import torch
from torch import Tensor

from tokenleap.core.config import MIB
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import LogitsDraw, Noise, draw_by
from tokenleap.errors import ModelError
from tokenleap.runtime.cores import available_cores
from tokenleap.runtime.growth_plan import GrowthPlan
from tokenleap.runtime.inputs import PassInputs, StateRows
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.llama import DecoderWeights, LinearWeights
from tokenleap.runtime.native.build import FORMATS, MOST_HIDDEN_SIZE, library, wrong_sizes
from tokenleap.runtime.native.pack import PANEL, Format, pack, panel_bytes
from tokenleap.runtime.native.packed import PackedDecoder, Packing
from tokenleap.runtime.native.structures import (
    AngleTables,
    CBlockChain,
    CDecoder,
    CDraw,
    CFusion,
    CLayer,
    CLinear,
    CPass,
    CSource,
    CTree,
    CTrees,
    KeptWeights,
    NodeArrays,
    TreeArrays,
    draw_of,
    noise_of,
    structures,
)
from tokenleap.runtime.network import (
    CHAIN_CANDIDATES,
    MOST_ADDED,
    ChainingNetwork,
    GrowingNetwork,
    GrownTree,
    GrowthLimit,
    HiddenStates,
    Need,
    PassOutput,
)


@dataclass(frozen=True)
class DecoderParts:
    """A decoder for the C++ code."""

    decoder: CDecoder  # the layers are not joined to it yet
    layers: Sequence[CLayer]
    kept: KeptWeights
    angles: AngleTables
    learnt_scale: float = 1.0
    reads_states: bool = False  # it is a drafting head, which reads a state beside each token


class _Scratch:
    """Memory that one call after another uses."""

    def __init__(self) -> None:
        self._size = self._address = 0

    def address(self, size: int) -> int:
        """The address of so many bytes."""
        if self._size < size:
            self._memory, self._size = _empty(size, dtype=torch.uint8), size
            self._address = self._memory.data_ptr()
        return self._address


class NativeNetwork(GrowingNetwork, ChainingNetwork):
    """A decoder in C++ (see `Network`)."""

    least_nodes = 1
    name = "native"
    exact_trees = True
    pads_rows = False

    def __init__(self, loaded: CDLL, parts: DecoderParts) -> None:
        self._library = loaded
        draw_by(NativeDraws(loaded))
        self._lock = Lock()  # the workspace serves one thread at a time
        self._decoder, self._kept, self._angles = parts.decoder, parts.kept, parts.angles
        self._learnt_scale, self._reads_states = parts.learnt_scale, parts.reads_states
        self._workspace, self._grown_logits, self._grown_states = (_Scratch() for _ in range(3))
        dtype = torch.bfloat16 if self._decoder.is_bf16 else torch.float32
        self._more = _empty(0, self._decoder.hidden_size, dtype=dtype)
        self._like = _empty(self._decoder.key_heads, self._decoder.width, dtype=dtype)
        self._vocab_size = int(self._decoder.head.outputs)
        self._use(parts.layers)

    def _use(self, layers: Sequence[CLayer]) -> None:
        self._layers = (CLayer * len(layers))(*layers)
        self._decoder.layers = self._layers
        self._decoder.num_layers = len(layers)
        self._indices = [layer.index for layer in layers]
        self._slots: dict[tuple[int, ...], array[int]] = {}
        passing = self.weight_bytes > _MOST_KEPT
        for linear in self._linears():
            linear.passing = passing

    def _linears(self) -> Iterator[CLinear]:
        for layer in self._layers:
            yield from (*layer.qkv, layer.output, layer.source_query, layer.source_output)
            yield from (*layer.gate_up, layer.down)
        yield from (self._decoder.mix, self._decoder.head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the linear layers that a pass reads."""
        return sum(map(_bytes, self._linears()))

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def extend(self, rows: Tensor) -> int:
        first = int(self._decoder.vocabulary) + len(self._more)
        with self._lock:
            rows = (rows * self._learnt_scale).to(self._more)
            self._more = self._kept.keep(torch.cat([self._more, rows]))
            self._decoder.more = self._more.data_ptr()
        return first

    def first_layers(self, count: int) -> Self:
        return self._with(self._layers[:count])

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Self:
        layers = []
        for place, layer in enumerate(self._layers):
            other = CLayer.from_buffer_copy(layer)
            other.attends = layer.attends and place not in attention
            other.computes = layer.computes and place not in mlp
            layers.append(other)
        return self._with(layers)

    def _with(self, layers: Sequence[CLayer]) -> Self:
        other = copy(self)
        other._decoder = CDecoder.from_buffer_copy(self._decoder)
        other._use(layers)
        return other

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        nodes = NodeArrays(inputs, need)
        logits, argmax = _empty(nodes.scored, self._vocab_size), array("q", bytes(8 * nodes.scored))
        arguments = self._pass(inputs, nodes)
        arguments.logits, arguments.argmax = logits.data_ptr(), argmax.buffer_info()[0]
        hidden: Mapping[int, Tensor] = {}
        if need.hidden:
            shape = (len(need.hidden), len(nodes), self._decoder.hidden_size)
            together = _empty(*shape, dtype=self._like.dtype)
            arguments.hidden = together.data_ptr()
            arguments.hidden_slots = self._hidden_slots(need.hidden)
            hidden = HiddenStates(together, need.hidden, range(len(nodes)))
        with self._lock:
            self._prepare(arguments, inputs, slab)
            self._library.tokenleap_forward(byref(self._decoder), byref(arguments))
        if not need.logits:
            return PassOutput(None, None, hidden)
        return PassOutput(logits, None if -1 in argmax else argmax, hidden)

    def grow(
        self,
        inputs: PassInputs,
        slab: KVSlab,
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None = None,
    ) -> list[GrownTree]:
        nodes = NodeArrays(inputs, Need(last=1))
        trees = TreeArrays(plan, limits, token_ids, len(nodes))
        arguments, most = self._pass(inputs, nodes), trees.arguments.widest
        logits = _empty(trees.rows, self._vocab_size) if trees.keeps_logits else None
        with self._lock:
            if logits is not None:
                arguments.logits = logits.data_ptr()
            else:
                size = trees.rows * self._vocab_size * sizeof(c_float)
                arguments.logits = self._grown_logits.address(size)
            if self._reads_states:
                size = most * self._decoder.hidden_size * self._like.element_size()
                arguments.hidden = self._grown_states.address(size)
                arguments.hidden_slots = self._hidden_slots((self.num_layers,))
            arguments.nodes = most  # for the size of the workspace
            self._prepare(arguments, inputs, slab)
            arguments.nodes = len(nodes)
            self._library.tokenleap_grow(
                byref(self._decoder), byref(arguments), byref(trees.arguments)
            )
        return trees.grown(logits)

    def best_chain(
        self, logits: Tensor, transitions: tuple[Tensor, Tensor] | None
    ) -> tuple[list[int], list[float]] | None:
        added, rows = transitions or (None, None)
        readable = logits.dtype == torch.float32 and logits.stride(1) == 1
        if not readable or not (rows is None or _can_be_read(rows)):
            return None
        if added is not None and rows is not None:
            assert (added.shape, added.dtype) == (rows.shape, rows.dtype)
            assert added.is_contiguous()
            assert len(rows) >= logits.shape[1]
        levels = len(logits)
        tokens, probabilities = (c_int32 * levels)(), (c_float * levels)()
        self._library.tokenleap_chain(
            byref(
                CBlockChain(
                    logits=logits.data_ptr(),
                    added=None if added is None else added.data_ptr(),
                    rows=None if rows is None else rows.data_ptr(),
                    tokens=addressof(tokens),
                    probabilities=addressof(probabilities),
                    levels=levels,
                    vocabulary=logits.shape[1],
                    stride=logits.stride(0),
                    size=0 if rows is None else rows.shape[1],
                    is_bf16=rows is not None and rows.dtype == torch.bfloat16,
                    candidates=CHAIN_CANDIDATES,
                    most=MOST_ADDED,
                )
            )
        )
        return list(tokens), list(probabilities)

    def _pass(self, inputs: PassInputs, nodes: NodeArrays) -> CPass:
        """The arguments of a pass without what it writes to; valid as long as both of these."""
        arguments = CPass(
            nodes=len(nodes),
            scored=nodes.scored,
            threads=num_threads(),
            most_seen=inputs.span,
            **nodes.addresses(),
        )
        states = inputs.states
        assert (states is not None) == self._reads_states
        if states is not None:
            assert states.count == len(nodes)
            arguments.states = _address(states, self._decoder.hidden_size, self._like.dtype)
        return arguments

    def _hidden_slots(self, layers: tuple[int, ...]) -> int:
        """The address of each layer id's index in `layers`, or -1 if it is not there."""
        if layers not in self._slots:
            slots = array("i", [-1] * (self.num_layers + 1))
            for slot, layer in enumerate(layers):
                slots[layer] = slot
            self._slots[layers] = slots
        return self._slots[layers].buffer_info()[0]

    def _prepare(self, arguments: CPass, inputs: PassInputs, slab: KVSlab) -> None:
        """Fill in what all passes share: buffers, rotary angles and memory to work in."""
        angles = self._angles
        angles.reach(arguments.most_seen)
        arguments.buffers = self._buffers_of(slab)
        arguments.cos, arguments.sin, arguments.angles = angles.cos, angles.sin, angles.positions
        needed = self._library.tokenleap_workspace(byref(self._decoder), byref(arguments))
        arguments.workspace = self._workspace.address(needed)

    def _buffers_of(self, slab: KVSlab) -> int:
        """The address of the slab's buffers."""
        slab.reserve(self._indices, self._like)
        if slab.mover is None:
            heads, width = self._like.shape
            slab.mover = SlotMover(self._library, heads, width * self._like.element_size())
        return slab.addresses.buffer_info()[0]


@dataclass(frozen=True)
class SlotMover:
    """See `SlabBuffers.mover`."""

    library: CDLL
    heads: int
    slot_bytes: int  # of one head

    def __call__(self, addresses: array[int], row: int, start: int, nodes: Sequence[int]) -> None:
        places = array("q", nodes)
        self.library.tokenleap_move(
            c_void_p(addresses.buffer_info()[0]),
            len(addresses) // 4,
            c_int64(row * self.heads),
            self.heads,
            c_int64(self.slot_bytes),
            c_int64(start),
            c_void_p(places.buffer_info()[0]),
            len(places),
        )


_MOST_KEPT = 24 * MIB
"""Weights of more bytes pass the caches by. They would not stay there until the next pass, and what
drafters, Python and attention read would not, either."""


def _bytes(linear: CLinear) -> int:
    of_panel = panel_bytes(Format(linear.format), linear.inputs)
    assert of_panel is not None
    return of_panel * int(linear.outputs) // PANEL


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for the C++ code, whatever PyTorch's default dtype and device are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _can_be_read(rows: Tensor) -> bool:
    """Whether chains can be chosen with transitions of this kind."""
    known = rows.dtype in (torch.float32, torch.bfloat16)
    return known and rows.shape[1] % 16 == 0 and rows.is_contiguous()


def checked(loaded: CDLL) -> CDLL:
    """The library, after a check that its structures have the sizes of the Python ones."""
    loaded.tokenleap_workspace.restype = loaded.tokenleap_row_bytes.restype = c_size_t
    loaded.tokenleap_draw.restype = c_int64
    sizes = (c_int32 * 12)()
    loaded.tokenleap_sizes(sizes)
    structures = (
        *(CLinear, CLayer, CDecoder, CPass, CTree, CTrees, CFusion, CDraw),
        *(CSource, CBlockChain),
    )
    ours = [sizeof(each) for each in structures]
    of_buffers = 4 * array("q").itemsize  # see `SlabBuffers.addresses`
    assert list(sizes) == [*ours, of_buffers, MOST_HIDDEN_SIZE]
    return loaded


@dataclass(frozen=True)
class NativeDraws:
    """See `core.noise.FasterDraws`."""

    library: CDLL

    @staticmethod
    def reads(values: Tensor) -> bool:
        floats = values.dtype == torch.float32 and values.device.type == "cpu"
        return floats and values.is_contiguous()

    def from_probs(
        self, noise: Noise, distribution: Distribution, depth: int, trial: int
    ) -> int | None:
        probs, ids = distribution.probs, distribution.support
        if not self.reads(probs):
            return None
        found = self.library.tokenleap_draw(
            byref(noise_of(noise, depth, trial)),
            c_void_p(probs.data_ptr()),
            c_void_p(None if ids is None else ids.data_ptr()),
            c_int64(len(probs)),
            num_threads(),
        )
        return None if found < 0 else int(found)

    def from_logits(self, draws: Sequence[LogitsDraw]) -> Sequence[int | None]:
        if not all(self.reads(draw.logits) for draw in draws):
            return [None] * len(draws)
        tokens = (c_int64 * len(draws))()
        self.library.tokenleap_draw_rows(
            (CDraw * len(draws))(
                *(draw_of(d.noise, d.params.temperature, d.params) for d in draws)
            ),
            (c_void_p * len(draws))(*(draw.logits.data_ptr() for draw in draws)),
            len(draws),
            c_int64(len(draws[0].logits)),
            num_threads(),
            tokens,
        )
        return [None if token < 0 else token for token in tokens]


class NativeDecoder(NativeNetwork):
    """A decoder of the Llama family, or a drafting head with such layers (see `Network`).

    Linear layers become packed copies, "int8", "int4" (with the head in int8), or as they are,
    unless they are packed already. What has the same bits in `beside` is in memory once.
    """

    def __init__(
        self,
        weights: DecoderWeights | PackedDecoder,
        quantization: str | None = None,
        *flags: str,
        beside: NativeDecoder | None = None,
    ) -> None:
        loaded = checked(library(*flags))
        packed = weights if isinstance(weights, PackedDecoder) else Packing(weights, quantization)
        sizes = packed.sizes
        if (reason := wrong_sizes(sizes)) is not None:  # files that were packed may have changed
            raise ModelError(reason)
        rotaries = [sizes.rotary, *([] if sizes.local_rotary is None else [sizes.local_rotary])]
        kept = KeptWeights(None if beside is None else beside._kept)
        decoder, layers = structures(packed, kept)
        kept.close()
        parts = DecoderParts(
            decoder,
            layers,
            kept,
            AngleTables(rotaries, sizes.width),
            sizes.traits.learnt_scale,
            reads_states=sizes.joint is not None,
        )
        super().__init__(loaded, parts)

    def between(self, first: int, last: int) -> NativeDecoder:
        return self._with(self._layers[first:last])

    def feed(self, states: Tensor) -> int:
        self._more = states.to(self._more).contiguous()
        self._decoder.more = self._more.data_ptr()
        return int(self._decoder.vocabulary)

    def narrowed(self, size: int) -> NativeDecoder:
        layers = [CLayer.from_buffer_copy(layer) for layer in self._layers]
        for layer in layers:
            layer.window = size if layer.window else 0
        return self._with(layers)


class NativeFusion:
    """`fc [norm(h_1); ...; norm(h_A)]` of the hidden states of A layers, fc [E, A E].

    A state has the same bits for any number of tokens.
    """

    def __init__(self, fc: Tensor, norms: Sequence[Tensor], epsilon: float) -> None:
        self._library = checked(library())
        self._size, self._dtype = len(fc), fc.dtype
        self._kept = KeptWeights()
        self._fc = self._kept.linear(pack(LinearWeights(fc, None), FORMATS[fc.dtype]))
        self._norms = torch.cat([norm.float() for norm in norms]) if norms else None
        self._row_bytes = int(self._library.tokenleap_row_bytes(byref(self._fc)))
        self._epsilon = epsilon
        self._lock, self._inputs = Lock(), _Scratch()

    def __call__(
        self, parts: Sequence[Mapping[int, Tensor]], layers: Sequence[int], to: StateRows
    ) -> None:
        """Write the states of n tokens, whose hidden states are given in parts."""
        rows, count = array("Q"), to.count
        kept = [_row_addresses(part, layer, rows) for layer in layers for part in parts]
        assert len(rows) == count * len(layers)
        with self._lock:
            arguments = CFusion(
                fc=self._fc,
                norms=None if self._norms is None else self._norms.data_ptr(),
                hidden=rows.buffer_info()[0],
                inputs=self._inputs.address(count * self._row_bytes),
                states=_address(to, self._size, self._dtype),
                layers=len(layers),
                nodes=count,
                threads=num_threads(),
                is_bf16=self._dtype == torch.bfloat16,
                epsilon=self._epsilon,
            )
            self._library.tokenleap_fuse(byref(arguments))
        del kept


def _address(states: StateRows, size: int, dtype: torch.dtype) -> int:
    """The address of rows of this size."""
    buffer = states.buffer
    assert buffer.dtype == dtype
    assert buffer.shape[1] == size
    assert buffer.is_contiguous()
    return buffer.data_ptr() + states.first * size * buffer.element_size()


def _row_addresses(hidden: Mapping[int, Tensor], layer: int, to: array[int]) -> Tensor:
    """Append the address of each row of a layer's states; returns what has to stay until then."""
    if isinstance(hidden, HiddenStates):
        states, nodes = hidden.together, hidden.nodes
        place = hidden.layers.index(layer) * states.shape[1]
    else:
        states, place = hidden[layer].contiguous(), 0
        nodes = range(len(states))
    size = states.shape[-1] * states.element_size()
    first = states.data_ptr() + place * size
    to.extend([first + node * size for node in nodes])
    return states


# How many threads a pass has.


_default: int | None = torch.get_num_threads()
"""PyTorch does not tell whether somebody has set it, so this counts as its own number."""
_CORES = available_cores()


def num_threads() -> int:
    """PyTorch's number; but the one it had when this module was imported is cut to the cores.

    PyTorch does not know the quotas of containers. More threads than that would use up the quota by
    waiting for each other. To have more, set `OMP_NUM_THREADS` or call `set_num_threads`.
    """
    asked = torch.get_num_threads()
    if asked <= _CORES or asked != _default or "OMP_NUM_THREADS" in os.environ:
        return asked
    return _CORES


def set_num_threads(count: int) -> None:
    """Let this process compute with so many threads, whatever its quota."""
    global _default
    torch.set_num_threads(count)
    _default = None
