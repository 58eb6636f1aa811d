"""A draft model whose logits have another width than the target's, over the same tokens.

Vocabularies are padded behind their last token to a size that suits the hardware, differently for
models of one family. The draft model's logits are cut to the target's width, or padded by minus
infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core.tree import TokenTree
from foretoken.runtime.network import LOGITS, Need, PassOutput
from foretoken.runtime.target import Target

__all__ = ["resized"]


def resized(model: Target, vocab_size: int) -> Target:
    """The model with logits of this width; the same if it has it."""
    return model if model.vocab_size == vocab_size else _Resized(model, vocab_size)


class _Resized(Target):
    """A model over another's rows and weights, with logits of another width."""

    def __init__(self, model: Target, vocab_size: int) -> None:
        vars(self).update(vars(model))  # what is loaded and checked already
        self._own_size = model.vocab_size
        self.vocab_size = vocab_size

    def prefill(
        self, key: int, tokens: Sequence[int], hidden_layers: tuple[int, ...] = ()
    ) -> Mapping[int, Tensor]:
        """See `Target.prefill`."""
        return super().prefill(key, self._known(tokens), hidden_layers)

    def verify(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        need: Need = LOGITS,
    ) -> list[PassOutput]:
        """See `Target.verify`."""
        trees = [TokenTree(self._known(tree.tokens), tree.parents) for tree in trees]
        outputs = super().verify(keys, trees, num_computed, need)
        # The argmax may be a token that is cut off.
        return [PassOutput(self._fitted(o.scores), hidden=o.hidden) for o in outputs]

    def _known(self, tokens: Sequence[int]) -> tuple[int, ...]:
        # The target's padding says nothing, and this model has no place for it.
        return tuple(token if token < self._own_size else 0 for token in tokens)

    def _fitted(self, logits: Tensor) -> Tensor:
        """[n, V] from [n, own V]."""
        missing = max(0, self.vocab_size - self._own_size)
        return functional.pad(logits[:, : self.vocab_size], (0, missing), value=-torch.inf)
