"""`eagle`: a trained head drafts from the target's hidden states (Li et al., arXiv 2503.01840).

`EagleHead` is the `Scorer` that `ModelDrafter` uses, so chains, trees and exact q come from there.
The head's row of KV holds pairs: token t + 1 with the state of position t (see `eagle_net.py`). The
states of committed tokens come from the target's hidden states; those of drafted tokens are the
head's own outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.decode import Outcome, StepTimes
from foretoken.drafters.draft_model import OwnModel
from foretoken.drafters.heads.checkpoint import Checkpoint
from foretoken.drafters.heads.eagle_weights import head_passes
from foretoken.drafters.heads.fusion import Fusion
from foretoken.drafters.model_drafter import ModelDrafter
from foretoken.drafters.shapes import Shape, TreeOptions
from foretoken.errors import CompatibilityError
from foretoken.request import Request
from foretoken.runtime.network import Need, PassOutput
from foretoken.runtime.passes import Passes
from foretoken.runtime.target import Target

__all__ = ["EagleDrafter", "EagleHead", "EagleOptions", "load_head"]


class EagleOptions(TreeOptions):
    """Options of `eagle`: those of trees."""


class _States:
    """The states of a request's committed tokens, in one growing buffer."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def keep(self, start: int, states: Tensor) -> None:
        """Keep states [n, E] of the tokens from `start` on; those behind them are forgotten."""
        assert start <= self._length, "states of tokens before these are missing"
        stop = start + len(states)
        if stop > len(self._buffer):
            larger = states.new_empty(max(64, 2 * stop), states.shape[1])
            if start:
                larger[:start] = self._buffer[:start]
            self._buffer = larger
        self._buffer[start:stop] = states
        self._length = stop

    def cut(self, length: int) -> None:
        """Forget all but the first `length`."""
        self._length = min(self._length, length)

    def __getitem__(self, tokens: slice) -> Tensor:
        """[n, E] a view."""
        return self._buffer[: self._length][tokens]


class EagleHead(OwnModel):
    """A head with KV rows of its own (see `model_drafter.Scorer`).

    Args:
        head: computes pairs of token and state.
        fusion: makes states of hidden states.
        token_ids: [Vd] the target's ids of the tokens that it can draft, ascending.
    """

    def __init__(self, head: Passes, fusion: Fusion, token_ids: Tensor) -> None:
        super().__init__(head)
        self.token_ids = token_ids.to(head.device)
        self._head, self._fusion = head, fusion
        self._states: dict[int, _States] = {}  # request key -> states of its committed tokens
        self._first: dict[int, int] = {}  # request key -> pairs before those of the present tree
        self._outputs: dict[int, Tensor] = {}  # request key -> [n, E] states behind its nodes

    def seen(self, request: Request) -> Sequence[int]:
        """The token of every pair: all committed tokens but the first."""
        return request.token_ids[1:]

    def room(self, request: Request) -> int:
        """See `OwnModel.room`; 0 for a text of one token, of which there is no state."""
        return super().room(request) if len(request.token_ids) > 1 else 0

    def pending(self, request: Request) -> list[int]:
        """See `OwnModel.pending`."""
        assert len(self._states[request.key]) == len(self.seen(request))
        pending = super().pending(request)
        self._first[request.key] = len(self.seen(request)) - len(pending)
        self._outputs.pop(request.key, None)
        return pending

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the head; logits [n, Vd] of the tokens `token_ids`."""
        new = zip(keys, trees, num_computed, strict=True)
        states = [self._states_of_new_nodes(*each) for each in new]
        last = self._head.network.num_layers
        need = Need(hidden=(last,))
        outputs = self._head.verify(keys, trees, num_computed, need, states)
        for key, output in zip(keys, outputs, strict=True):
            new_states, earlier = output.hidden[last], self._outputs.get(key)
            both = new_states if earlier is None else torch.cat([earlier, new_states])
            self._outputs[key] = both
        return outputs

    def _states_of_new_nodes(self, key: int, tree: TokenTree, num_computed: int) -> Tensor:
        """[n, E] the states of a tree's new nodes: the target's, then the parents' outputs."""
        first, states = self._first[key], self._states[key]
        num_pending = len(states) - first
        committed = states[first + num_computed :]
        drafted = tree.parents[max(num_computed, num_pending) :]
        if not drafted:
            return committed
        of_parents = self._outputs[key][list(drafted)]
        return torch.cat([committed, of_parents]) if len(committed) else of_parents

    def _prefill(self, request: Request, start: int, stop: int) -> None:
        states = self._states[request.key][start:stop]
        self._head.prefill(request.key, self.seen(request)[start:stop], states=states)

    @torch.inference_mode()  # as in a step, since prompts are shown outside of one
    def keep(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Make and keep the states of the committed tokens from `start` on.

        Args:
            request: the request.
            start: index of the first of n tokens.
            hidden: layer id -> [n, E] the target's hidden states.
        """
        self._states.setdefault(request.key, _States()).keep(start, self._fusion(hidden))

    def rewind(self, request: Request) -> None:
        """Forget the states of tokens that were taken back."""
        if request.key in self._states:
            self._states[request.key].cut(len(request.token_ids) - 1)

    def release(self, request: Request) -> None:
        """Free the request's KV row and states."""
        super().release(request)
        for kept in (self._states, self._first, self._outputs):
            kept.pop(request.key, None)


class EagleDrafter(ModelDrafter):
    """Chains and trees from a trained head.

    Args:
        head: the head with its KV.
        layers: ids of the target's layers whose hidden states it reads.
        options, shape, coupled: see `ModelDrafter`.
    """

    def __init__(
        self,
        head: EagleHead,
        layers: Sequence[int],
        options: EagleOptions,
        shape: Shape,
        *,
        coupled: bool,
    ) -> None:
        super().__init__(head, options, shape, coupled=coupled)
        self.hidden_layers = tuple(sorted(layers))
        self._head = head

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """See `Drafter.observe_prefill`."""
        self._head.keep(request, start, hidden)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Take the hidden states of the committed nodes."""
        for outcome in outcomes:
            request = outcome.request
            root = len(request.token_ids) - len(outcome.committed) - 1
            # The end of the output may cut the accepted path.
            kept = len(outcome.committed)
            hidden = {layer: states[:kept] for layer, states in outcome.hidden.items()}
            self._head.keep(request, root, hidden)

    def rewind(self, request: Request) -> None:
        """See `Drafter.rewind`."""
        self._head.rewind(request)


def load_head(checkpoint: Checkpoint, target: Target) -> tuple[EagleHead, Passes]:
    """The head of a checkpoint for a target, and its KV rows.

    Raises:
        CompatibilityError: it was trained for another model.
        ModelError: its file is damaged.
    """
    verifier = checkpoint.description.verifier
    layers = target.network.num_layers
    if verifier.num_layers not in (None, layers):
        raise CompatibilityError(
            f"{checkpoint.path}: this head was trained for {verifier.name_or_path} with "
            f"{verifier.num_layers} layers, and this model has {layers}: train one for it."
        )
    weights = target.vocabulary_weights
    if weights is None:
        raise CompatibilityError(
            "the weights of this model's output layer are not in memory any more: name the head in "
            "LLM(speculative_config=...)."
        )
    net = checkpoint.net(*weights)
    if int(net.draft_tokens[-1]) >= target.vocab_size:
        raise CompatibilityError(
            f"{checkpoint.path}: the head drafts tokens that this model cannot: train one for it."
        )
    passes = head_passes(net, target)
    fusion = Fusion(net, target.dtype, target.device)
    return EagleHead(passes, fusion, net.draft_tokens), passes
