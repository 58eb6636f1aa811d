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
from transformers import PreTrainedTokenizerBase

from tokenleap.core.tree import TokenTree
from tokenleap.drafters.draft_model import OwnModel, scored
from tokenleap.drafters.heads.checkpoint import Checkpoint
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.eagle_weights import head_passes
from tokenleap.drafters.heads.feature_net import FeatureNet
from tokenleap.drafters.heads.folder import check_layers, vocabulary_weights
from tokenleap.drafters.heads.fusion import Fusion
from tokenleap.drafters.heads.head_drafter import HeadDrafter
from tokenleap.drafters.heads.probe import check_head
from tokenleap.errors import CompatibilityError
from tokenleap.request import Request
from tokenleap.runtime.native.decoder import NativeDecoder
from tokenleap.runtime.network import GrownTree, GrowthLimit, GrowthPlan, Network, PassOutput
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target

__all__ = ["EagleDrafter", "EagleHead", "head_net", "load_head", "load_parts"]


class _States:
    """States, or hidden states, of adjacent tokens or of the nodes of a tree, in one buffer."""

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

    def __getitem__(self, places: slice | Sequence[int]) -> Tensor:
        """[n, E] a view for a slice, else a copy."""
        index = places if isinstance(places, slice) else list(places)
        return self._buffer[: self._length][index]


_MOST_WAITING = 512
"""Parts of a text whose states are not made yet: each of them holds on to the output of a pass."""


class _Committed:
    """The states of a request's committed tokens. They are made when they are first read.

    A head that drafts in only some of the steps then makes the states of many tokens at once.

    Args:
        fusion: makes states of hidden states.
    """

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self._made = _States()
        self._waiting: list[tuple[int, Mapping[int, Tensor]]] = []  # number of tokens, their states
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def keep(self, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep the hidden states, [n, E] of each layer, of the tokens from `start` on."""
        assert start <= self._length, "hidden states of tokens before these are missing"
        if start < self._length:
            self.cut(start)
        count = len(hidden[self.fusion.layers[0]])
        self._waiting.append((count, hidden))
        self._length += count
        if len(self._waiting) == _MOST_WAITING:
            self._make()

    def cut(self, length: int) -> None:
        """Forget all but the first `length`."""
        while self._waiting and self._length > length:
            count, hidden = self._waiting.pop()
            left = max(0, count - (self._length - length))
            self._length -= count - left
            if left:
                part = {layer: states[:left] for layer, states in hidden.items()}
                self._waiting.append((left, part))
        self._made.cut(length)
        self._length = min(self._length, length)

    def __getitem__(self, tokens: slice) -> Tensor:
        """[n, E] a view."""
        if self._waiting:
            self._make()
        return self._made[tokens]

    @torch.inference_mode()  # as in a step, since prompts are shown outside of one
    def _make(self) -> None:
        parts = [hidden for _, hidden in self._waiting]
        hidden = {layer: torch.cat([part[layer] for part in parts]) for layer in self.fusion.layers}
        self._made.keep(len(self._made), self.fusion(hidden))
        self._waiting = []


class EagleHead(OwnModel):
    """A head with KV rows of its own (see `scorer.Scorer`).

    Args:
        head: computes pairs of token and state.
        fusion: makes states of hidden states.
        token_ids: [Vd] the target's ids of the tokens that it can draft, ascending.

    Attributes:
        layers: ids of the target's layers whose hidden states it reads.
    """

    def __init__(self, head: Passes, fusion: Fusion, token_ids: Tensor) -> None:
        super().__init__(head)
        self.token_ids = token_ids.to(head.device)
        self.layers = fusion.layers
        self._fusion = fusion
        self._states: dict[int, _Committed] = {}  # by request key
        self._outputs: dict[int, _States] = {}  # request key -> states behind the nodes of its tree

    def use_head(self, network: Network, fusion: Fusion) -> None:
        """Draft with other weights of the same sizes, on the KV and the states that are there."""
        self.use(network)
        self._fusion = fusion
        for states in self._states.values():
            states.fusion = fusion

    def seen(self, request: Request) -> Sequence[int]:
        """The token of every pair: all committed tokens but the first."""
        return request.token_ids[1:]

    def room(self, request: Request) -> int:
        """See `OwnModel.room`; 0 for a text of one token, of which there is no state."""
        return super().room(request) if len(request.token_ids) > 1 else 0

    def pending(self, request: Request) -> list[int]:
        """See `OwnModel.pending`."""
        assert len(self._states[request.key]) == len(self.seen(request))
        return super().pending(request)

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the head; logits [n, Vd] of the tokens `token_ids`."""
        new = zip(keys, trees, num_computed, strict=True)
        states = [self._states_of_new_nodes(*each) for each in new]
        layer = self._model.network.num_layers
        need = scored(num_computed, (layer,))
        outputs = self._model.verify(keys, trees, num_computed, need, states)
        for key, first, output in zip(keys, num_computed, outputs, strict=True):
            self._outputs.setdefault(key, _States()).keep(first, output.hidden[layer])
        return outputs

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        """See `GrowingScorer`."""
        states = [
            self._states[key][-len(tokens) :] for key, tokens in zip(keys, pending, strict=True)
        ]
        return self._model.grow(keys, pending, plan, limits, self.token_ids, states)

    def _states_of_new_nodes(self, key: int, tree: TokenTree, num_computed: int) -> Tensor:
        """[n, E] the states of a tree's new nodes: the target's, then the parents' outputs."""
        states = self._states[key]
        num_cached = self._model.cached(key)  # pairs before those of the tree
        committed = states[num_cached + num_computed :]
        drafted = tree.parents[max(num_computed, len(states) - num_cached) :]
        if not drafted:
            return committed
        of_parents = self._outputs[key][drafted]
        return torch.cat([committed, of_parents]) if len(committed) else of_parents

    def _prefill(self, request: Request, start: int, stop: int) -> None:
        states = self._states[request.key][start:stop]
        self._model.prefill(request.key, self.seen(request)[start:stop], states=states)

    def keep(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep the hidden states of the committed tokens from `start` on.

        Args:
            request: the request.
            start: index of the first of n tokens.
            hidden: layer id -> [n, E] the target's hidden states.
        """
        states = self._states.get(request.key)
        if states is None:
            states = self._states[request.key] = _Committed(self._fusion)
        states.keep(start, hidden)

    def rewind(self, request: Request) -> None:
        """Forget the states of tokens that were taken back."""
        if request.key in self._states:
            self._states[request.key].cut(len(request.token_ids) - 1)

    def release(self, request: Request) -> None:
        """Free the request's KV row and states."""
        super().release(request)
        for kept in (self._states, self._outputs):
            kept.pop(request.key, None)


class EagleDrafter(HeadDrafter):
    """Chains and trees from an EAGLE head (see `HeadDrafter`)."""


def head_net(checkpoint: Checkpoint, target: Target) -> EagleNet:
    """The network of a checkpoint, over a target's weights.

    Raises:
        CompatibilityError: it was trained for another model.
        ModelError: its file is damaged.
    """
    placed = checkpoint.for_target(target.network.num_layers)
    net = placed.net(*vocabulary_weights(target), target.final_norm)
    if isinstance(net, FeatureNet) and target.final_norm is None:
        raise CompatibilityError(
            f"{checkpoint.path}: an EAGLE-1 head reads hidden states after the final norm, and it "
            "is not known which norm of this architecture that is."
        )
    return net


def load_parts(
    checkpoint: Checkpoint,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization: str | None = None,
) -> tuple[EagleNet, Passes, Fusion]:
    """The head of a checkpoint for a target, its KV rows, and what makes its states.

    Args:
        checkpoint: the head's folder.
        target: the target.
        tokenizer: the target's, if it has one; see `probe.check_head`.
        quantization: of the head; see `head_network`.

    Raises:
        CompatibilityError: it was trained for another model.
        ModelError: its file is damaged.
    """
    check_layers(checkpoint.path, checkpoint.description.verifier, target.network.num_layers)
    net = head_net(checkpoint, target)
    if int(net.draft_tokens[-1]) >= target.vocab_size:
        raise CompatibilityError(
            f"{checkpoint.path}: the head drafts tokens that this model cannot: train one for it."
        )
    check_head(checkpoint, net.to(target.device), target, tokenizer)
    passes = head_passes(net, target, quantization)
    native = isinstance(passes.network, NativeDecoder)
    return net, passes, Fusion(net, target.dtype, target.device, native=native)


def load_head(
    checkpoint: Checkpoint,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization: str | None = None,
) -> tuple[EagleHead, Passes]:
    """The head of a checkpoint for a target, and its KV rows: see `load_parts`."""
    net, passes, fusion = load_parts(checkpoint, target, tokenizer, quantization)
    return EagleHead(passes, fusion, net.draft_tokens), passes
