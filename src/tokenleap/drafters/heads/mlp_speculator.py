"""`mlp_speculator`: a recurrent MLP over drafted tokens (Wertheimer et al., arXiv 2404.19124).

The state z_k at depth k comes from the state above, which is h for the root, and the token's
embedding e_k(t_k):

    z_k = GELU(norm_k(P_k z_(k-1) + (w_e / w_s) e_k(t_k))),  logits = W_k z_k,
    w_s = 0.5^(0.5 / K),  w_e = sqrt((1 - w_s^2) I / 2),

with an RMSNorm that has a bias, as in IBM's implementation. Weights may be tied over the depths
(P_0 apart, whose input is h). In the form that we train, the embedding is the target's, brought to
the scale of the published ones, and W_k is the target's output rows times a layer of the head's
own, as states are not hidden states of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.drafters.heads.state_net import Size, StateConfig, StateNet, linear

__all__ = ["MlpSpeculatorConfig", "MlpSpeculatorNet"]

EPSILON = 1e-6
"""Of all norms, as in IBM's implementation."""


@dataclass(frozen=True)
class MlpSpeculatorConfig(StateConfig):
    """See `StateConfig`.

    Args:
        inner_size: I, of the states.
        tie_weights: whether all depths share their weights.
        scale_input: whether hidden states are normalised and scaled by sqrt(1/2) first.
        own_embedding: whether the head has an embedding of its own, not the target's.
    """

    inner_size: Size = 1024
    tie_weights: bool = True
    scale_input: bool = True
    own_embedding: bool = False

    def fault(self) -> str | None:
        """See `StateConfig.fault`."""
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

    def __init__(
        self,
        config: MlpSpeculatorConfig,
        embedding: Tensor,
        rows: Tensor,
        draft_tokens: Tensor,
    ) -> None:
        super().__init__(config, embedding, rows, draft_tokens)
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
        """See `StateNet.reads_embedding`."""
        assert isinstance(config, MlpSpeculatorConfig)
        return not config.own_embedding

    @property
    def output_width(self) -> int:
        """See `StateNet.output_width`."""
        return self.config.inner_size if self.config.own_rows else self.config.hidden_size

    @property
    def num_own_rows(self) -> int:
        """See `StateNet.num_own_rows`."""
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
        """See `StateNet.start`."""
        if self.config.scale_input:
            hidden = F.rms_norm(hidden, hidden.shape[-1:], None, EPSILON) * 0.5**0.5
        return self.advance(hidden, tokens, 0)

    def advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """See `StateNet.advance`."""
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
        """See `StateNet.outputs`."""
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
