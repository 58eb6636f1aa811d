"""Heads without attention: a draft's next token depends on a state of its own path alone.

`medusa`, `hydra`, `blockwise` and `mlp_speculator` are such heads. Every node of a draft has a
state. That of the root comes from the target's hidden state at the position before it, after the
target's final norm (what the target's own output layer reads), and from the root's token. That of
any other node comes from its parent's state, its token and its depth. The head for this depth turns
the state into logits of the next token.

A `StateNet` is what training trains. `state_head.py` serves the same module, with its linear layers
packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor, nn

__all__ = ["Depth", "FrozenLinear", "Size", "StateConfig", "StateNet", "linear", "normed"]

Size = Annotated[int, Gt(0)]
Depth = Annotated[int, Gt(0), Le(256)]


@dataclass(frozen=True)
class StateConfig:
    """Sizes and variants of a head.

    Args:
        hidden_size: E, of the target's hidden states.
        vocab_size: V, of the target.
        draft_vocab_size: Vd, the tokens that the head can draft.
        num_heads: K, most tokens of a draft.
        own_rows: whether each depth has an output layer of its own. Else all share the target's
            output rows of the draft vocabulary, which are not trained and not in the file.
    """

    hidden_size: Size
    vocab_size: Size
    draft_vocab_size: Size
    num_heads: Depth
    own_rows: bool = False

    def fault(self) -> str | None:
        """What is contradictory in it; None if nothing is."""
        if self.draft_vocab_size > self.vocab_size:
            return f"draft_vocab_size is above the vocab_size of {self.vocab_size}"
        return None


class FrozenLinear(nn.Module):
    """`y = x W^T + b` with a weight [out, in] and a bias that are neither trained nor saved."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the weight's dtype."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    """A layer whose weights are set later: drawing them would take seconds for a large head."""
    skip_init: Any = nn.utils.skip_init
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs, bias=bias)
    return layer


def normed(norm: nn.Module, hidden: Tensor) -> Tensor:
    """[..., E] hidden states after the target's final norm, in float32; computed in its dtype."""
    own = next((weight.dtype for weight in norm.parameters()), hidden.dtype)
    found: Tensor = norm(hidden.to(own))
    return found.float()


class StateNet(nn.Module, ABC):
    """A head as a PyTorch module. Depths are counted from the root, which has depth 0.

    `state_dict()` is what a folder of our own holds; `lm_heads` are there with `own_rows` only.

    Args:
        config: its sizes.
        embedding: [V, E] the target's, shared and not trained.
        rows: [V, E] the target's output rows; those of the draft vocabulary are shared and not
            trained.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
    """

    METHOD: ClassVar[str]
    """The name under which users choose it."""
    Config: ClassVar[type[StateConfig]]
    """The class of its configuration."""
    reads_tokens: ClassVar[bool]
    """Whether logits depend on the drafted tokens. Else they depend on the depth alone."""

    embedding: Tensor
    d2t: Tensor

    def __init__(
        self, config: StateConfig, embedding: Tensor, rows: Tensor, draft_tokens: Tensor
    ) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("d2t", draft_tokens - torch.arange(len(draft_tokens)))
        width, size = self.output_width, config.draft_vocab_size
        self.lm_heads = nn.ModuleList([linear(width, size) for _ in range(self.num_own_rows)])
        self.rows: nn.Module | None = None
        if not config.own_rows:
            self.rows = FrozenLinear(rows[draft_tokens.to(rows.device)])

    @classmethod
    def reads_embedding(cls, config: StateConfig) -> bool:
        """Whether a head needs the target's embedding."""
        return cls.reads_tokens

    @property
    def output_width(self) -> int:
        """Width of what the output layers read."""
        return self.config.hidden_size

    @property
    def num_own_rows(self) -> int:
        """Number of output layers of its own; the last one is that of all later depths."""
        return self.config.num_heads if self.config.own_rows else 0

    @property
    def draft_tokens(self) -> Tensor:
        """[Vd] the target's ids of the draft vocabulary, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @abstractmethod
    def initialise(self) -> None:
        """Set the weights for training; without it they are undefined."""

    @abstractmethod
    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The states of roots.

        Args:
            hidden: [..., E] the target's hidden states at the positions before them, after its
                final norm.
            tokens: [...] the roots.

        Returns:
            [..., S], with S depending on the depth.
        """

    @abstractmethod
    def advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """The states of nodes at a depth of 1 or more.

        Args:
            states: [..., S] of their parents.
            tokens: [...] the nodes' tokens.
            depth: the nodes' depth.

        Returns:
            [..., S].
        """

    @abstractmethod
    def outputs(self, states: Tensor, depth: int) -> Tensor:
        """[..., S] states of nodes at a depth -> what the output layer reads."""

    def output_layer(self, depth: int) -> nn.Module:
        """The output layer for the tokens after nodes at a depth."""
        if self.rows is not None:
            return self.rows
        return self.lm_heads[min(depth, len(self.lm_heads) - 1)]

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """[..., S] states of nodes at a depth -> [..., Vd] logits of the tokens after them."""
        logits: Tensor = self.output_layer(depth)(self.outputs(states, depth))
        return logits

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The logits of all depths along given tokens.

        Args:
            hidden: [..., E] as in `start`.
            tokens: [..., K] the root, and the tokens after it.

        Returns:
            [..., K, Vd] in float32; the logits at k are for the token after tokens[k].
        """
        own = next(self.parameters()).dtype
        states = self.start(hidden.to(own), tokens[..., 0])
        found = [self.logits(states, 0)]
        for depth in range(1, self.config.num_heads):
            states = self.advance(states, tokens[..., depth], depth)
            found.append(self.logits(states, depth))
        return torch.stack(found, dim=-2).float()

    def add_bias(self, bias: Tensor | None) -> None:
        """Add what the target adds to its logits [V], if the output rows are the target's."""
        if bias is None or self.rows is None:
            return
        weight = cast("FrozenLinear", self.rows).weight
        chosen = bias.detach()[self.draft_tokens.to(bias.device)].to(weight)
        self.rows = FrozenLinear(weight, chosen)

    def copy_rows(self, rows: Tensor) -> None:
        """Start own output layers from the target's output rows [V, E], as Medusa-1 does."""
        for layer in self.lm_heads:
            cast("nn.Linear", layer).weight.data.copy_(rows[self.draft_tokens])

    def wanted(self) -> Mapping[str, Tensor]:
        """Tensors of the names and shapes that a file has to have, `d2t` apart."""
        return {name: tensor for name, tensor in self.state_dict().items() if name != "d2t"}
