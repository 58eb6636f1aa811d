"""Heads without attention: a draft's next token depends on a state of its own path alone.

`medusa`, `hydra`, `blockwise` and `mlp_speculator` are such heads. Every node of a draft has a
state. That of the root comes from the target's hidden state at the position before it, after the
target's final norm (what the target's own output layer reads), and from the root's token. That of
any other node comes from its parent's state, its token and its depth. The head for this depth turns
the state into logits of the next token.

A `StateNet` is what training trains. `state.py` serves the same module, with its linear layers
packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor, nn

Size = Annotated[int, Gt(0)]
Depth = Annotated[int, Gt(0), Le(256)]


@dataclass(frozen=True)
class StateConfig:
    """Sizes and variants of a head.

    Args:
        own_rows: whether each depth has an output layer of its own. Else all share the target's
            output rows of the draft vocabulary, which are not trained and not in the file.
    """

    hidden_size: Size
    vocab_size: Size
    draft_vocab_size: Size
    num_heads: Depth
    own_rows: bool = False

    def fault(self) -> str | None:
        """A contradiction in it; None if there is none."""
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
    heads: nn.ModuleList

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
        self.build()

    @abstractmethod
    def build(self) -> None:
        """Make the layers of its own, among them mostly `heads`, one for each depth."""

    @classmethod
    def reads_embedding(cls, config: StateConfig) -> bool:
        return cls.reads_tokens

    @property
    def output_width(self) -> int:
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

        Returns:
            [..., S].
        """

    def outputs(self, states: Tensor, depth: int) -> Tensor:
        """[..., S] states of nodes at a depth -> what the output layer reads."""
        x: Tensor = self.heads[depth](states)
        return x

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


class _HiddenNet(StateNet):
    """A state is the hidden state itself."""

    reads_tokens = False

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden

    def advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return states


# `medusa`: K heads on one hidden state, one for each position (Cai et al., arXiv 2401.10774).
#
# The head for depth k predicts from the hidden state h alone (equation 1 of the paper):
#
#     logits = W_k (x + SiLU(U_k x + b_k)),  x = h;  of several blocks, each reads the last one's x.
#
# It does not know the tokens drafted before it, so all nodes of a depth have the same children. W_k
# is a head's own output layer, as published, or the target's own one over a draft vocabulary, which
# costs no space and is what we train.


@dataclass(frozen=True)
class MedusaConfig(StateConfig):
    """See `StateConfig`."""

    num_layers: Depth = 1
    bias: bool = True


class _Block(nn.Module):
    """The blocks of one head; the names of its tensors are vLLM's."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        layers = [linear(size, size, bias=config.bias) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaNet(_HiddenNet):
    """See `StateNet`."""

    METHOD = "medusa"
    Config: ClassVar[type[StateConfig]] = MedusaConfig

    config: MedusaConfig

    def build(self) -> None:
        self.blocks = nn.ModuleList([_Block(self.config) for _ in range(self.config.num_heads)])

    def outputs(self, states: Tensor, depth: int) -> Tensor:
        x: Tensor = self.blocks[depth](states)
        return x

    def initialise(self) -> None:
        """Zero the blocks, so that every head begins as the target's own output layer."""
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)


# `hydra`: Medusa's heads, which also read the tokens drafted before (Ankner et al., 2402.05109).
#
# The head for depth k reads the hidden state h and the embeddings of the root and of the k tokens
# drafted after it:
#
#     x = R_k s + SiLU(U_k s + b_k),  s = [h; e(t_0); ...; e(t_k)],  then Medusa's blocks,
#     logits = W_k x.
#
# The embedding is the target's. W_k is a head's own output layer, or the target's own one over a
# draft vocabulary. Hydra++ adds a decoder layer before the heads (its prefix layer), which is not
# part of this: a head that wants attention is `eagle`'s.


@dataclass(frozen=True)
class HydraConfig(StateConfig):
    """See `StateConfig`.

    Args:
        num_layers: blocks of each head, the one that reads the tokens included.
    """

    num_layers: Depth = 1


class _HydraHead(nn.Module):
    def __init__(self, config: HydraConfig, depth: int) -> None:
        super().__init__()
        size, joined = config.hidden_size, (depth + 2) * config.hidden_size
        self.residual = linear(joined, size, bias=True)
        widths = [joined, *[size] * (config.num_layers - 1)]
        self.layers = nn.ModuleList([linear(width, size, bias=True) for width in widths])

    def forward(self, states: Tensor) -> Tensor:
        """[..., (k + 2) E] -> [..., E]."""
        first, *others = self.layers
        x: Tensor = self.residual(states) + F.silu(first(states))
        for layer in others:
            x = x + F.silu(layer(x))
        return x


class HydraNet(StateNet):
    """See `StateNet`. A state is [h; e(t_0); ...; e(t_k)]."""

    METHOD = "hydra"
    Config: ClassVar[type[StateConfig]] = HydraConfig
    reads_tokens = True

    config: HydraConfig

    def build(self) -> None:
        depths = range(self.config.num_heads)
        self.heads = nn.ModuleList([_HydraHead(self.config, depth) for depth in depths])

    def initialise(self) -> None:
        """Every head begins as the target's own output layer on h."""
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)
        for head in cast("list[_HydraHead]", list(self.heads)):
            nn.init.eye_(head.residual.weight.data[:, : self.config.hidden_size])

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.advance(hidden, tokens, 0)

    def advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        return torch.cat([states, self.embedding[tokens].to(states.dtype)], dim=-1)


# `blockwise`: heads that extend the target's output layer (Stern et al., arXiv 1811.03115).
#
# Section 4 of the paper puts one feed-forward layer with a residual connection for each of the next
# positions between the decoder's output h and the output layer, which all positions share:
#
#     logits_k = W (h + V_k relu(U_k h + a_k) + b_k),  W the target's output rows.
#
# The paper counts the target's own prediction as p_1; the heads here are its p_2 to p_(K+1). The
# target's pass that verifies a block also gives the h for the next one, so prediction and
# verification are one pass (section 4, "combined scoring and proposal model").


@dataclass(frozen=True)
class BlockwiseConfig(StateConfig):
    """See `StateConfig`."""

    inner_size: Size = 1024


class _BlockwiseHead(nn.Module):
    def __init__(self, config: BlockwiseConfig) -> None:
        super().__init__()
        self.hidden = linear(config.hidden_size, config.inner_size, bias=True)
        self.output = linear(config.inner_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.output(F.relu(self.hidden(x)))
        return y


class BlockwiseNet(_HiddenNet):
    """See `StateNet`."""

    METHOD = "blockwise"
    Config: ClassVar[type[StateConfig]] = BlockwiseConfig

    config: BlockwiseConfig

    def build(self) -> None:
        heads = [_BlockwiseHead(self.config) for _ in range(self.config.num_heads)]
        self.heads = nn.ModuleList(heads)

    def initialise(self) -> None:
        """Random hidden layers after zeros, so that every head begins as the target's own."""
        for head in cast("list[_BlockwiseHead]", list(self.heads)):
            nn.init.normal_(head.hidden.weight, std=self.config.hidden_size**-0.5)
            for zero in (head.hidden.bias, head.output.weight, head.output.bias):
                nn.init.zeros_(zero)


# `mlp_speculator`: a recurrent MLP over drafted tokens (Wertheimer et al., arXiv 2404.19124).
#
# The state z_k at depth k comes from the state above, which is h for the root, and the token's
# embedding e_k(t_k):
#
#     z_k = GELU(norm_k(P_k z_(k-1) + (w_e / w_s) e_k(t_k))),  logits = W_k z_k,
#     w_s = 0.5^(0.5 / K),  w_e = sqrt((1 - w_s^2) I / 2),
#
# with an RMSNorm that has a bias, as in IBM's implementation. Weights may be tied over the depths
# (P_0 apart, whose input is h). In the form that we train, the embedding is the target's, brought
# to the scale of the published ones, and W_k is the target's output rows times a layer of the
# head's own, as states are not hidden states of the target.


EPSILON = 1e-6
"""Of all norms, as in IBM's implementation."""


@dataclass(frozen=True)
class MlpSpeculatorConfig(StateConfig):
    """See `StateConfig`.

    Args:
        scale_input: whether hidden states are normalised and scaled by sqrt(1/2) first.
        own_embedding: whether the head has an embedding of its own, not the target's.
    """

    inner_size: Size = 1024
    tie_weights: bool = True
    scale_input: bool = True
    own_embedding: bool = False

    def fault(self) -> str | None:
        if not self.own_embedding and self.inner_size != self.hidden_size:
            return (
                f"inner_size must be the hidden_size of {self.hidden_size} with the target's "
                "embedding"
            )
        return super().fault()

    @property
    def emb_weight(self) -> float:
        """w_e / w_s, the weight of the embedding beside the projected state."""
        state_weight: float = 0.5 ** (0.5 / self.num_heads)
        variance = (1 - state_weight**2) * self.inner_size / 2
        return float(variance**0.5 / state_weight)


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor(size))
        self.bias = nn.Parameter(Tensor(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., I] in the dtype of the weights, whatever autocast says."""
        x = x.to(self.weight.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, EPSILON) + self.bias


class MlpSpeculatorNet(StateNet):
    """See `StateNet`; tensor names are IBM's, with lm_heads for head."""

    METHOD = "mlp_speculator"
    Config: ClassVar[type[StateConfig]] = MlpSpeculatorConfig
    reads_tokens = True
    config: MlpSpeculatorConfig

    def build(self) -> None:
        config = self.config
        size, own = config.hidden_size, config.inner_size
        count = 1 if config.tie_weights else config.num_heads
        later = min(count, config.num_heads - 1) if config.tie_weights else count - 1
        projections = [linear(size, own), *(linear(own, own) for _ in range(later))]
        self.proj = nn.ModuleList(projections)
        self.ln = nn.ModuleList([_Norm(own) for _ in range(count)])
        owned = count if config.own_embedding else 0
        self.emb = nn.ModuleList([_embedding(config.vocab_size, own) for _ in range(owned)])
        self.out = None if config.own_rows else linear(own, size)

    @classmethod
    def reads_embedding(cls, config: StateConfig) -> bool:
        assert isinstance(config, MlpSpeculatorConfig)
        return not config.own_embedding

    @property
    def output_width(self) -> int:
        return self.config.inner_size if self.config.own_rows else self.config.hidden_size

    @property
    def num_own_rows(self) -> int:
        return min(1, super().num_own_rows) if self.config.tie_weights else super().num_own_rows

    def initialise(self) -> None:
        """Draw weights as IBM's implementation does."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.config.inner_size**-0.5)
        for norm in cast("list[_Norm]", list(self.ln)):
            nn.init.ones_(norm.weight)
            nn.init.zeros_(norm.bias)

    def copy_rows(self, rows: Tensor) -> None:
        """See `StateNet.copy_rows`: states are no hidden states, so rows stay random."""

    def start(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        if self.config.scale_input:
            hidden = F.rms_norm(hidden, hidden.shape[-1:], None, EPSILON) * 0.5**0.5
        return self.advance(hidden, tokens, 0)

    def advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        projected: Tensor = _of(self.proj, depth)(states)
        embedded = self._embedded(tokens, depth).to(projected.dtype)
        mixed = projected + self.config.emb_weight * embedded
        return F.gelu(_of(self.ln, depth)(mixed))

    def _embedded(self, tokens: Tensor, depth: int) -> Tensor:
        """[...] -> [..., I]."""
        if self.config.own_embedding:
            own: Tensor = _of(self.emb, depth)(tokens)
            return own
        rows = self.embedding[tokens]
        scale = float(self.config.inner_size**-0.5)
        return F.rms_norm(rows, rows.shape[-1:], None, EPSILON) * scale

    def outputs(self, states: Tensor, depth: int) -> Tensor:
        x: Tensor = states if self.out is None else self.out(states)
        return x


def _of(modules: nn.ModuleList, depth: int) -> nn.Module:
    """The module of a depth; the last one is that of all later depths."""
    return modules[min(depth, len(modules) - 1)]


def _embedding(vocab_size: int, size: int) -> nn.Embedding:
    """A layer whose weights are set later."""
    skip_init: Any = nn.utils.skip_init
    layer: nn.Embedding = skip_init(nn.Embedding, vocab_size, size)
    return layer
