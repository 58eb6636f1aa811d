"""The interface between a target and the code that computes its passes.

A network gets the nodes of a pass and the KV slab. It writes the nodes' KV to the slab and returns
a `PassOutput`. For CPUs there are three networks: `native/` is the Llama family in C++, `lean.py`
the same in few PyTorch operations, and `module.py` runs any Transformers module. On a GPU, `cuda/`
replays CUDA graphs of the latter two. `choose.py` picks one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from torch import Tensor

from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.kv_slab import KVSlab

__all__ = ["LOGITS", "Need", "Network", "PassOutput"]


@dataclass(frozen=True)
class Need:
    """What a pass returns besides writing the KV; other outputs are not computed.

    Args:
        logits: whether logits are needed.
        hidden: layer ids whose hidden states are needed, ascending. Id k means the residual stream
            entering layer k, and the number of layers means the one entering the final norm (the
            convention of speculators and vLLM).
    """

    logits: bool = True
    hidden: tuple[int, ...] = ()


LOGITS = Need()


@dataclass(frozen=True)
class PassOutput:
    """What a pass computed, for T nodes.

    Args:
        logits: [T, V], or None if not needed.
        argmax: [T] the token of each node's largest logit, the first of equals. None if the network
            does not compute it along with the logits.
        hidden: layer id -> [T, E] in the model's dtype, for the layers asked for.
    """

    logits: Tensor | None
    argmax: Sequence[int] | None = None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)

    def rows(self, nodes: slice) -> PassOutput:
        """The output for some adjacent nodes; its tensors are views."""
        return PassOutput(
            None if self.logits is None else self.logits[nodes],
            None if self.argmax is None else self.argmax[nodes],
            {layer: states[nodes] for layer, states in self.hidden.items()} if self.hidden else {},
        )

    def argmax_of(self, node: int) -> int:
        """The token of a node's largest logit, the first of equals."""
        return int(self.scores[node].argmax()) if self.argmax is None else self.argmax[node]

    @property
    def scores(self) -> Tensor:
        """`logits`, of a pass that was asked for them."""
        assert self.logits is not None, "the pass was not asked for logits"
        return self.logits


class Network(Protocol):
    """A decoder-only model over a KV slab."""

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
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        """Run one pass; `KVSlab.begin` has prepared the slab for it.

        Args:
            inputs: the T nodes, their mask in the network's dtype.
            slab: holds the KV; the network adds that of the nodes.
            need: what to return.
        """
        ...

    def first_layers(self, count: int) -> Self:
        """The first `count` layers with the final norm and head, on the same weights and KV."""
        ...

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Self:
        """The network without the attention or MLP of these layers, on the same weights and KV."""
        ...
