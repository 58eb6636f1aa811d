"""`TranslatedModel`: a draft model restricted to the tokens that it shares with the target.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies": the token-level intersection. `vocabulary.Vocabularies` makes it for
`vocabulary="intersection"`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenleap.core.tree import TokenTree
from tokenleap.drafters.draft_model import OwnModel
from tokenleap.drafters.translation import Translator
from tokenleap.request import Request
from tokenleap.runtime.network import GrowthLimit, GrowthPlan, PassOutput
from tokenleap.runtime.target import Target

__all__ = ["TranslatedModel"]


class TranslatedModel(OwnModel):
    """A draft model restricted to the tokens that both models have (see `Scorer`).

    It reads the committed tokens in translation. It drafts only shared tokens, which have ids in
    both vocabularies. All other tokens have logits of minus infinity. The sampler's distribution
    over the remaining tokens is the restricted and renormalised q.

    Args:
        model: the draft model.
        translator: converts the committed tokens to the draft model's ids.
        to_draft: [V] the draft model's id of each of the target's tokens; -1 if it lacks the token.
    """

    def __init__(self, model: Target, translator: Translator, to_draft: Sequence[int]) -> None:
        super().__init__(model, partial=True)
        self._translator = translator
        self._to_draft = to_draft
        shared = [(token, own) for token, own in enumerate(to_draft) if own >= 0]
        # [S] the S shared tokens, in the target's ids and in the draft model's
        self._shared, self._shared_own = torch.tensor(shared, device=model.device).T
        self._num_pending: dict[int, int] = {}  # request key -> tokens of the last `pending`

    def seen(self, request: Request) -> Sequence[int]:
        """See `OwnModel.seen`."""
        return self._translator.translate(request)

    def room(self, request: Request) -> int:
        """See `OwnModel.room`; 0 if the translation is empty."""
        return super().room(request) if self.seen(request) else 0

    def pending(self, request: Request) -> list[int]:
        """See `OwnModel.pending`; in the draft model's ids."""
        pending = super().pending(request)
        self._num_pending[request.key] = len(pending)
        return pending

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the draft model; the logits [n, V] are those of the target's tokens."""
        trees = [self._translated(*pair) for pair in zip(keys, trees, strict=True)]
        outputs = super().verify(keys, trees, num_computed)
        return [PassOutput(self._restricted(output.scores)) for output in outputs]

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> None:
        """None: the draft model's most probable tokens may not be shared."""

    def release(self, request: Request) -> None:
        """Free the request's KV row, and forget its translation."""
        super().release(request)
        self._translator.release(request)
        self._num_pending.pop(request.key, None)

    def _translated(self, key: int, tree: TokenTree) -> TokenTree:
        """The tree in the draft model's ids; its pending tokens are in these ids already."""
        count = self._num_pending[key]
        drafted = [self._to_draft[token] for token in tree.tokens[count:]]
        assert all(token >= 0 for token in drafted), "only shared tokens are drafted"
        return TokenTree((*tree.tokens[:count], *drafted), tree.parents)

    def _restricted(self, logits: Tensor) -> Tensor:
        """Logits [n, V] of the target's tokens, from the draft model's logits [n, own V]."""
        restricted = logits.new_full((len(logits), len(self._to_draft)), -torch.inf)
        restricted[:, self._shared] = logits[:, self._shared_own]
        return restricted
