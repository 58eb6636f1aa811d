"""Draft models whose logits have another width than the target's, with the same tokens.

Vocabularies are padded behind their last token to a size that suits the hardware, and models of one
family may be padded differently. `resized` cuts a draft model's logits to the target's width, or
pads them with minus infinity. `draft_model` and `cascade` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tokenleap.core.tree import TokenTree
from tokenleap.runtime.network import LOGITS, GrownTree, GrowthLimit, GrowthPlan, Need, PassOutput
from tokenleap.runtime.target import Target

__all__ = ["resized"]


def resized(model: Target, vocab_size: int) -> Target:
    """A model with logits of width `vocab_size`; `model` itself if it has this width.

    Args:
        model: the draft model. The result shares its rows and weights.
        vocab_size: V, the width of the target's logits.
    """
    return model if model.vocab_size == vocab_size else _Resized(model, vocab_size)


class _Resized(Target):
    """A model over another model's rows and weights, with logits of another width."""

    def __init__(self, model: Target, vocab_size: int) -> None:
        vars(self).update(vars(model))  # share all state instead of loading again
        self._own_size = model.vocab_size
        self.vocab_size = vocab_size

    def prefill(
        self,
        key: int,
        tokens: Sequence[int],
        hidden_layers: tuple[int, ...] = (),
        states: Tensor | None = None,
        read_logits: Callable[[Tensor], object] | None = None,
    ) -> Mapping[int, Tensor]:
        """See `Passes.prefill`."""
        assert read_logits is None, "nobody asks a draft model for a prompt's probabilities"
        return super().prefill(key, self._without_padding(tokens), hidden_layers, states)

    def verify(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        need: Need = LOGITS,
        states: Sequence[Tensor] | None = None,
    ) -> list[PassOutput]:
        """See `Passes.verify`."""
        trees = [TokenTree(self._without_padding(tree.tokens), tree.parents) for tree in trees]
        outputs = super().verify(keys, trees, num_computed, need, states)
        # Without an argmax: the network's may be a token that is cut off.
        return [PassOutput(self._fitted(o.scores), hidden=o.hidden) for o in outputs]

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
        token_ids: Tensor | None = None,
        states: Sequence[Tensor] | None = None,
    ) -> list[GrownTree] | None:
        """See `Passes.grow`; None if the most probable tokens may be some that are cut off."""
        if self._own_size > self.vocab_size:
            return None
        pending = [self._without_padding(tokens) for tokens in pending]
        return super().grow(keys, pending, plan, limits, token_ids, states)

    def _without_padding(self, tokens: Sequence[int]) -> tuple[int, ...]:
        # The target's padding tokens have no meaning, and this model has no embedding for them.
        return tuple(token if token < self._own_size else 0 for token in tokens)

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits [n, V] from the model's own logits [n, own V]."""
        missing = max(0, self.vocab_size - self._own_size)
        return functional.pad(logits[:, : self.vocab_size], (0, missing), value=-torch.inf)
