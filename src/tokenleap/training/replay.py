"""What a drafter learns from while it serves: the texts of running requests, and a buffer of them.

A `Mark` is a place at which the target's distribution is known, at the level of the draft that
came to it. A text becomes a `Window` when it has as many tokens as one, or ends. The next window
begins with a part of the last one, so that its first marks have a context, too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenleap.decode import Outcome
from tokenleap.request import Request
from tokenleap.training.batches import Batch, Levels
from tokenleap.training.features import TOP_K, quantize

__all__ = ["Buffer", "Mark", "Recorder", "Window", "marks_of"]

_CONTEXT = 4
"""Of a window, one token in so many is context from the window before."""


@dataclass(frozen=True)
class Mark:
    """A place to learn.

    Args:
        root: index of the token from which the draft started.
        level: of the draft; the token to guess is at `root + 1 + level`.
        tokens: [K] the target's most probable tokens there.
        logprobs: [K] their log-probabilities among each other.
    """

    root: int
    level: int
    tokens: Tensor
    logprobs: Tensor


def marks_of(outcome: Outcome, num_levels: int, *, only_rejected: bool) -> list[Mark]:
    """What a step has to teach.

    Args:
        outcome: of the step.
        num_levels: levels of drafting that are learnt. What is deeper in the draft is learnt as a
            level of a draft that starts later.
        only_rejected: only where the target decided otherwise than the draft, or without one; else
            at all accepted tokens, too.
    """
    nodes = [0, *outcome.accepted.path][: len(outcome.committed)]  # the output's end may cut them
    first = 0
    if only_rejected:
        whole = nodes[-1] and nodes[-1] not in outcome.draft.tree.parents
        first = len(nodes) if whole or len(nodes) <= len(outcome.accepted.path) else len(nodes) - 1
    if first == len(nodes):
        return []
    scores = outcome.output.scores[nodes[first:]]
    best = scores.topk(min(TOP_K, scores.shape[-1]))
    logprobs = best.values.float().log_softmax(-1)
    marks = []
    for place, depth in enumerate(range(first, len(nodes))):
        level = depth % num_levels
        root = outcome.root + depth - level
        marks.append(Mark(root, level, best.indices[place], logprobs[place]))
    return marks


@dataclass(frozen=True)
class Window:
    """A part of a text of n + 1 tokens, with Q marks.

    Args:
        tokens: [n + 1].
        hidden: [n, A, E] the target's hidden states in int8; A may be 0.
        scales: [n, A, G] their scales.
        roots: [Q] index in the window of the token in front of each mark's root.
        levels: [Q] of each mark.
        top_tokens: [Q, K] of each mark.
        top_logprobs: [Q, K] of each mark.
    """

    tokens: Tensor
    hidden: Tensor
    scales: Tensor
    roots: Tensor
    levels: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_levels(self) -> int:
        """Levels of drafting that its marks need."""
        return int(self.levels.max()) + 1

    def batch(self, device: torch.device) -> Batch:
        """The window alone, with nothing to learn but its marks."""
        roots, column = torch.unique(self.roots, return_inverse=True)
        levels = torch.arange(self.num_levels)[:, None]  # [L, 1]
        at = (roots + 2 + levels).clamp(max=len(self.tokens) - 1)  # [L, R] of the labels
        shape, places = at.shape, (self.levels, column)
        valid = torch.zeros(shape, dtype=torch.bool)
        tokens = self.top_tokens.new_zeros(*shape, self.top_tokens.shape[-1])
        logprobs = self.top_logprobs.new_zeros(tokens.shape)
        valid[places], tokens[places], logprobs[places] = True, self.top_tokens, self.top_logprobs
        learnt = Levels(self.tokens[at - 1], self.tokens[at], tokens, logprobs, valid)
        length = torch.tensor(len(self.hidden))
        parts = (self.hidden, self.scales, self.tokens, length, roots)
        hidden, scales, text, lengths, roots = (each[None].to(device) for each in parts)
        of_drafts = Levels(*(each[None].to(device) for each in learnt))
        return Batch(hidden, scales, text, lengths, roots, of_drafts)


class _Text:
    """The end of a request's text.

    Args:
        first: index of its first token.
    """

    def __init__(self, first: int) -> None:
        self.first = self.stop = first  # tokens whose hidden states are known
        self.marks: list[Mark] = []
        self._parts: list[tuple[int, Mapping[int, Tensor]]] = []  # tokens, their hidden states

    def __len__(self) -> int:
        return self.stop - self.first

    def keep(self, count: int, hidden: Mapping[int, Tensor]) -> None:
        """Append tokens with their hidden states, [n, E] of each layer."""
        self._parts.append((count, hidden))
        self.stop += count

    def cut(self, length: int) -> None:
        """Forget all but the last `length` tokens, and all marks."""
        self.marks = []
        while self._parts and len(self) - self._parts[0][0] >= length:
            self.first += self._parts.pop(0)[0]
        if (more := len(self) - length) > 0:
            count, hidden = self._parts[0]
            part = {layer: states[more:] for layer, states in hidden.items()}
            self._parts[0] = (count - more, part)
            self.first += more

    def hidden(self, layers: Sequence[int], size: int) -> Tensor:
        """[n, A, E] all hidden states."""
        if not layers:
            return torch.zeros(len(self), 0, size)
        every = [torch.cat([part[layer] for _, part in self._parts]) for layer in layers]
        return torch.stack(every, dim=1)


class Recorder:
    """Keeps the end of every running request's text, and makes windows of it.

    Args:
        layers: ids of the target's layers whose hidden states are kept, in this order.
        hidden_size: E, of the target.
        window: tokens of a window.
        num_levels, only_rejected: see `marks_of`.
    """

    def __init__(
        self,
        layers: Sequence[int],
        hidden_size: int,
        window: int,
        num_levels: int,
        *,
        only_rejected: bool,
    ) -> None:
        self._layers, self._hidden_size, self._window = layers, hidden_size, window
        self._num_levels, self._only_rejected = num_levels, only_rejected
        self._texts: dict[int, _Text] = {}  # by request key

    def observe_prefill(
        self, request: Request, start: int, hidden: Mapping[int, Tensor]
    ) -> Window | None:
        """Keep the hidden states of a prompt; a request that is computed again shows them twice."""
        if not self._layers:
            return None
        return self._keep(request, start, len(hidden[self._layers[0]]), hidden)

    def observe(self, outcome: Outcome) -> Window | None:
        """Keep what a step has committed; returns the window that is full."""
        count, hidden = len(outcome.committed), outcome.hidden if self._layers else {}
        count = min(count, 1 + len(outcome.accepted.path))
        kept = {layer: states[:count] for layer, states in hidden.items()}
        window = self._keep(outcome.request, outcome.root, count, kept)
        text = self._texts[outcome.request.key]
        marks = marks_of(outcome, self._num_levels, only_rejected=self._only_rejected)
        text.marks += [mark for mark in marks if mark.root > text.first]
        return window

    def release(self, request: Request) -> Window | None:
        """Forget a request; what is left of its text is a window."""
        text = self._texts.pop(request.key, None)
        return None if text is None else self._made(request, text)

    def _keep(
        self, request: Request, start: int, count: int, hidden: Mapping[int, Tensor]
    ) -> Window | None:
        """Append to a request's text; before that, make a window of it if it is full."""
        text = self._texts.get(request.key)
        if text is None or text.stop < start:
            text = self._texts[request.key] = self._new(start)
        again = text.stop - start
        if again >= count:
            return None
        window, context = None, self._window // _CONTEXT
        if len(text) + count - again >= self._window:
            window = self._made(request, text)
            text.cut(context)
        new = {layer: states[again:] for layer, states in hidden.items()}
        text.keep(count - again, new)
        if len(text) >= self._window:  # by one long prompt
            text.cut(context)
        return window

    def _new(self, start: int) -> _Text:
        """An empty text; where only tokens matter, with those before it."""
        if self._layers:
            return _Text(start)
        text = _Text(max(0, start - self._window // _CONTEXT))
        text.keep(start - text.first, {})
        return text

    @torch.inference_mode(mode=False)  # gradients will need these tensors
    def _made(self, request: Request, text: _Text) -> Window | None:
        """A window of a text; None if it has no marks."""
        if not text.marks:
            return None
        codes, scales = quantize(text.hidden(self._layers, self._hidden_size).cpu())
        return Window(
            torch.tensor(request.token_ids[text.first : text.stop + 1]),
            codes,
            scales,
            torch.tensor([mark.root - 1 - text.first for mark in text.marks]),
            torch.tensor([mark.level for mark in text.marks]),
            torch.stack([mark.tokens for mark in text.marks]).cpu(),
            torch.stack([mark.logprobs for mark in text.marks]).cpu(),
        )


class Buffer:
    """Windows to learn, in random order.

    Args:
        size: most tokens; the oldest windows are dropped first.
        passes: how often each window is drawn before it is dropped.
        seed: of the order.
    """

    def __init__(self, size: int, passes: int, seed: int) -> None:
        self._size, self._passes = size, passes
        self._dice = random.Random(seed)
        self._windows: list[tuple[Window, int]] = []  # with the number of times that it was drawn
        self.num_tokens = 0

    def add(self, window: Window) -> None:
        """Keep a window."""
        self._windows.append((window, 0))
        self.num_tokens += len(window)
        while self.num_tokens > self._size:
            self._drop(0)

    def draw(self) -> Window | None:
        """One of the windows; None if there is none."""
        if not self._windows:
            return None
        place = self._dice.randrange(len(self._windows))
        window, drawn = self._windows[place]
        self._windows[place] = (window, drawn + 1)
        if drawn + 1 == self._passes:
            self._drop(place)
        return window

    def _drop(self, place: int) -> None:
        self.num_tokens -= len(self._windows.pop(place)[0])
