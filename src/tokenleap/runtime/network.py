"""The interface between a target and the code that computes its passes.

A network gets the nodes of a pass and the KV slab. It writes the nodes' KV to the slab and returns
a `PassOutput`. For CPUs there are three networks: `native/` is the Llama family in C++, `lean.py`
some of it in few PyTorch operations, and `module.py` runs any Transformers module; on a GPU, these
two run. Encoder-decoders, which also are a `SourceNetwork`, run in
`native/seq2seq.py` or in the PyTorch operations of `seq2seq/`. `choose.py` picks one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, runtime_checkable
from weakref import WeakSet

from torch import Tensor

from tokenleap.core.references import Source
from tokenleap.runtime.cpu import prepare_vector_math
from tokenleap.runtime.growth_plan import GrowthDraw, GrowthPlan
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.kv_slab import KVSlab

prepare_vector_math()  # before any network computes


@dataclass(frozen=True)
class Need:
    """Outputs of a pass besides the KV that it writes; others are not computed.

    A layer id k means the residual stream entering layer k, and the number of layers the one
    entering the final norm (the convention of speculators and vLLM).
    """

    logits: bool = True
    last: int | None = None  # logits of the last `last` nodes of each row; None means of all
    hidden: tuple[int, ...] = ()  # layer ids, ascending


LOGITS = Need()


class HiddenStates(Mapping[int, Tensor]):
    """Layer id -> [n, E] hidden states of some nodes of a pass.

    They are looked up when they are read, which takes PyTorch longer than native code takes for the
    states of a few nodes: that reads `together`.

    Args:
        together: [A, T, E] of all nodes of the pass.
        layers: [A] ids.
        nodes: [n] of the T.
    """

    def __init__(self, together: Tensor, layers: Sequence[int], nodes: Sequence[int]) -> None:
        self.together, self.layers, self.nodes = together, layers, nodes

    def __getitem__(self, layer: int) -> Tensor:
        if layer not in self.layers:
            raise KeyError(layer)
        states, nodes = self.together[self.layers.index(layer)], self.nodes
        if isinstance(nodes, range):
            return states[nodes.start : nodes.stop]  # a view
        return states[nodes]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def states_of(hidden: Mapping[int, Tensor], nodes: slice | Sequence[int]) -> Mapping[int, Tensor]:
    """The hidden states of some of the nodes."""
    if isinstance(hidden, HiddenStates):
        known = hidden.nodes
        chosen = known[nodes] if isinstance(nodes, slice) else [known[node] for node in nodes]
        return HiddenStates(hidden.together, hidden.layers, chosen)
    return {layer: states[nodes] for layer, states in hidden.items()}


def num_states(hidden: Mapping[int, Tensor]) -> int:
    """The number of nodes that these are hidden states of."""
    if isinstance(hidden, HiddenStates):
        return len(hidden.nodes)
    return len(next(iter(hidden.values())))


@dataclass(frozen=True)
class PassOutput:
    """Results of a pass for T nodes, L of which were to have logits (`Need.last`)."""

    logits: Tensor | None  # [L, V]
    # [L], the first of equals; None if not computed with the logits, or the largest one is infinite
    argmax: Sequence[int] | None = None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # layer id -> [T, E]

    def rows(self, nodes: slice, scored: slice) -> PassOutput:
        """The output for some adjacent ones of the T nodes and of the L; its tensors are views."""
        logits = None if self.logits is None else self.logits[scored]
        argmax = None if self.argmax is None else self.argmax[scored]
        return PassOutput(logits, argmax, self.hidden and states_of(self.hidden, nodes))

    def argmax_of(self, node: int) -> int:
        """The token of a node's largest logit, the first of equals."""
        return int(self.scores[node].argmax()) if self.argmax is None else self.argmax[node]

    @property
    def scores(self) -> Tensor:
        """`logits`, of a pass that was asked for them."""
        assert self.logits is not None, "the pass was not asked for logits"
        return self.logits


class Network(Protocol):
    """A decoder-only model, or the decoder of an encoder-decoder, over a KV slab."""

    @property
    def name(self) -> str:
        """The runtime's name as shown to users."""
        ...

    @property
    def exact_trees(self) -> bool:
        """Whether a node of a tree gets the bits of the same tokens in a chain (invariant 7)."""
        ...

    @property
    def least_nodes(self) -> int:
        """Fewest nodes of a pass over one row for which invariant 7 holds; fewer are padded."""
        ...

    @property
    def pads_rows(self) -> bool:
        """Whether attention computes as many nodes for each row as for the longest."""
        ...

    @property
    def num_layers(self) -> int: ...

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        """Run one pass; `KVSlab.begin` has prepared the slab for it."""
        ...

    def extend(self, rows: Tensor) -> int:
        """Give embeddings [L, E] to the next token ids after the vocabulary, for later passes.

        The target never writes such a token, so nodes that have one are never accepted. Parts of
        this network (`first_layers`, `without`) that exist already may not know them.
        """
        ...

    def first_layers(self, count: int) -> Self:
        """The first `count` layers with the final norm and head, on the same weights and KV."""
        ...

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Self:
        """The network without the attention or MLP of these layers, on the same weights and KV."""
        ...


@dataclass(frozen=True)
class GrowthLimit:
    """Where the growth of one tree ends."""

    depth: int
    # no level is added to so many; with `GrowthPlan.beam`, the most probable of all may be kept
    nodes: int | None
    scored: int  # most drafted nodes that are computed; each takes a KV slot
    min_token_prob: float = 0.0  # nothing is drafted below less probable tokens
    min_path_prob: float = 0.0  # nor below less probable paths
    draw: GrowthDraw | None = None  # None for the most probable tokens


@dataclass(frozen=True)
class GrownTree:
    """A tree of n drafted nodes, parents first."""

    tokens: Sequence[int]
    parents: Sequence[int]  # [n] index of a drafted node, or -1 for a child of the root
    # [n] given the ancestors, before truncation or see `GrowthDraw.coupled`; NaN if logits are
    probabilities: Sequence[float]
    logits: Tensor | None = None  # [L, V] of nodes with children, if siblings were drawn
    rows: Sequence[int] = ()  # [n] the row of `logits` that each node was drawn from
    shown: Sequence[float] = ()  # [n] probabilities before truncation
    # rounding might have changed a draw: the tree is empty, and has to be drawn level by level
    undecided: bool = False
    levels: int = 0  # that have grown in passes of their own


class GrowingNetwork(ABC):
    """A network that drafts trees of most probable or of drawn tokens in one call.

    `drafters.model_drafter` grows the same trees with a pass per level. The calls between the
    passes of a small network take as long as the passes.
    """

    @abstractmethod
    def grow(
        self,
        inputs: PassInputs,
        slab: KVSlab,
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None = None,
    ) -> list[GrownTree]:
        """Draft one tree after the last node of each row that has nodes.

        `token_ids` [V] are the tokens that logits stand for, if not 0, 1, ...
        """


CHAIN_CANDIDATES = 16  # tokens of a level that transitions are added to, the most probable ones
MOST_ADDED = 60.0
"""The most that transitions add to a logit: its exponential is a finite number of 32 bits."""


class ChainingNetwork(ABC):
    """A network that chooses the tokens of a chain faster than PyTorch's operations."""

    @abstractmethod
    def best_chain(
        self, logits: Tensor, transitions: tuple[Tensor, Tensor] | None
    ) -> tuple[list[int], list[float]] | None:
        """The [K] most probable tokens, each after the one before, and their probabilities.

        Logits are [K, V]. Transitions are A and W [V, E]: after a token u, the logit of w gets
        A_u^T W_w more (up to `MOST_ADDED`) if w is among the best `CHAIN_CANDIDATES` of its level.
        None if it cannot, for these types and sizes.
        """


@runtime_checkable
class ContinuingNetwork(Network, Protocol):
    """A network whose layers can go on from hidden states of an earlier pass."""

    def between(self, first: int, last: int) -> Self:
        """Layers `first` to `last` - 1 with the final norm and head, on the same weights and KV.

        Its passes read what `feed` was given in place of embeddings.
        """
        ...

    def feed(self, states: Tensor) -> int:
        """Set the hidden states [T, E] that the nodes of the next pass begin with."""
        ...


@runtime_checkable
class WindowedNetwork(Network, Protocol):
    """A network some of whose layers may see only what is near (`inputs.py`)."""

    def narrowed(self, size: int) -> Self:
        """The network with windows of `size` tokens, which checks of a few tokens reach beyond."""
        ...


# What networks of encoder-decoders have besides `network.Network`: their rows read sources.


class RowState(NamedTuple):
    """Keys and values that the decoder reads of one source of n positions; never changed."""

    keys: Tensor  # [layers, H, span, D] of the cross-attention
    values: Tensor  # [layers, H, span, D]
    mask: Tensor  # [span], 0 where there is a source position, -inf in the padding after
    encoded: Tensor  # [n, E] for a drafter that reads it (`keeps_encoded`), or [0, E]


class SourceNetwork(ABC):
    """A network whose rows read a source through cross-attention: an encoder-decoder.

    Each row that takes part in a pass has the source's `RowState` as its state in the slab.
    """

    source_limit: int | None  # most tokens; audio has exactly so many frames
    source_vocab_size: int  # 0 if the model reads audio
    num_bins: int | None  # of the features of audio; None if the model reads text
    encoded_size: int
    encoder_readers: WeakSet[object]  # living drafters without an encoder of their own

    @property
    def keeps_encoded(self) -> bool:
        """Whether row states that `encode` returns have what the encoder returned."""
        return len(self.encoder_readers) > 0

    def encode(self, source: Source) -> RowState:
        return self.read(self.encoded(source), keep=self.keeps_encoded)

    @abstractmethod
    def encoded(self, source: Source) -> Tensor:
        """Run the encoder over one source alone, so that its bits [n, E] depend on nothing else."""

    @abstractmethod
    def read(self, encoded: Tensor, *, keep: bool = False) -> RowState:
        """The decoder's state from an encoder's output [n, E], its own or another model's."""

    @property
    @abstractmethod
    def probe_source(self) -> Source:
        """A short source, which the rows of checks and measurements read."""

    @abstractmethod
    def state_bytes(self, source: Source) -> int: ...
