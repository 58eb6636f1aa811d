"""`OnlineLearner`: a drafter learns while it serves (OSD, Liu et al., arXiv 2310.07177).

    loss = E[D(p, q)] over the positions of the served text

for the target's distribution p there and the drafter's q, as in `tokenleap train`; q is that of the
level at which the position was drafted. OSD learns rejected positions only (`positions`). With the
accepted ones the drafter keeps what it knows, and learns faster. Positions at which nothing was
drafted count in both cases: a drafter that the controller has put aside may become worth it.

Learning is done in slices between the steps of the engine, in the thread that serves: a second one
would compete with the passes for the processor. A slice is the gradient of one window, an update of
the weights, or their exchange. There are as many slices as the share of the time allows: time that
was served adds to a credit, and time that was learnt is taken from it.

`engine/strategies.py` loads this module by its name. It needs no package beside those of serving.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from tokenleap.core import clock
from tokenleap.decode import Outcome
from tokenleap.drafters.heads.eagle_net import EagleNet, FeatureNet
from tokenleap.drafters.heads.state_net import StateNet
from tokenleap.drafters.learnable import LearnableHead, LearnableModel
from tokenleap.drafters.model_drafter import States
from tokenleap.drafters.online import Learnable, OnlineOptions, OnlineReport
from tokenleap.errors import CompatibilityError, ConfigError, TrainingError, in_one_line
from tokenleap.request import Request
from tokenleap.runtime.target import Target
from tokenleap.training.distill import DistillTrainee, checked, write_lm
from tokenleap.training.eagle import Eagle1Trainee, EagleTrainee
from tokenleap.training.features import TOP_K, Batch, Levels, quantize
from tokenleap.training.method import TrainingSettings
from tokenleap.training.state_heads import StateTrainee
from tokenleap.training.trainee import LOSSES, Trainee
from tokenleap.training.trainer import optimizers_of

_LEVELS = 4
"""Most levels of a draft that are learnt as such; see `marks_of`."""

_MAX_GRAD_NORM = 1.0

_MORE_POSITIONS = 2
"""Rows of an embedding of positions beside those of the context: OPT has two."""


class OnlineLearner:
    """See `drafters.online.Learner`."""

    def __init__(self, learnable: Learnable, options: OnlineOptions, target: Target) -> None:
        self._learnable, self._options, self._target = learnable, options, target
        if options.save is not None:
            _check_writable(Path(options.save))
        with _gradients():
            self._net = learnable.net()
            self._trainee = _trainee(self._net, options, target)
            self._loaded = [weight.detach().clone() for weight in self._trainee.parameters()]
        self._begin()

    def _begin(self) -> None:
        options = self._options
        self._optimizers = _optimizers(self._trainee, options)
        num_levels = min(_LEVELS, self._trainee.max_levels or _LEVELS)
        if isinstance(self._trainee, DistillTrainee):
            num_levels = 1  # each of its levels is the same distribution at another place
        self._recorder = Recorder(
            self._learnable.layers,
            self._target.hidden_size,
            options.window,
            num_levels,
            only_rejected=options.positions == "rejected",
        )
        self._buffer = Buffer(options.buffer_size, options.passes, options.seed)
        self._pace = Pace(options)
        self._watched = 0.0  # learning time within the current step
        self._gathered = 0  # marks of the gradient
        self._loss = 0.0  # sum over them
        self._last_loss: float | None = None
        self._positions = self._updates = self._swaps = self._new_updates = 0
        self._failure: str | None = None

    @property
    def report(self) -> OnlineReport:
        return OnlineReport(
            self._positions,
            self._buffer.num_tokens,
            self._updates,
            self._swaps,
            self._last_loss,
            self._pace.learning,
            self._pace.serving,
            self._failure,
        )

    # Watching

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        def record() -> None:
            for outcome in outcomes:
                self._keep(self._recorder.observe(outcome))

        self._watch(record)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        self._watch(lambda: self._keep(self._recorder.observe_prefill(request, start, hidden)))

    def release(self, request: Request) -> None:
        self._watch(lambda: self._forget(request))

    def _forget(self, request: Request) -> None:
        window = self._recorder.release(request)
        if request.failure is None:
            self._keep(window)

    def _keep(self, window: Window | None) -> None:
        if window is not None:
            self._buffer.add(window)
            self._positions += len(window.roots)

    def _watch(self, act: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        before = self._pace.learning
        with self._pace.timed(), self._guarded():
            act()
        self._watched += self._pace.learning - before

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error ends learning, and nothing else."""
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            self._failure = in_one_line(error)

    # Learning

    def work(self, seconds: float) -> None:
        self._pace.served(max(0.0, seconds - self._watched))
        self._watched = 0.0
        while self._failure is None and self._pace.take():
            with self._pace.timed(), self._guarded(), _gradients():
                if not self._slice():
                    self._pace.waive()
                    return

    def _slice(self) -> bool:
        if self._new_updates >= self._options.swap_every:
            self._swap()
        elif self._gathered >= self._options.batch_size:
            self._update()
        else:
            window = self._buffer.draw()
            if window is None:
                return False
            self._learn(window)
        return True

    def _learn(self, window: Window) -> None:
        device, dtype = self._target.device, self._target.dtype
        batch = window.batch(device)
        low = dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            found = self._trainee(batch, window.num_levels)
        counts = batch.levels.valid.sum((0, 2))
        loss = (found.losses * counts).sum()
        if not loss.isfinite():
            raise TrainingError(_diverged("the loss", self._options))
        loss.backward()
        self._loss += float(loss.detach())
        self._gathered += int(counts.sum())

    def _update(self) -> None:
        weights = [each for each in self._trainee.parameters() if each.grad is not None]
        for weight in weights:
            assert weight.grad is not None
            weight.grad /= self._gathered
        nn.utils.clip_grad_norm_(weights, _MAX_GRAD_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._last_loss = self._loss / self._gathered
        self._loss, self._gathered = 0.0, 0
        self._updates += 1
        self._new_updates += 1

    def _swap(self) -> None:
        if not all(bool(weight.isfinite().all()) for weight in self._trainee.parameters()):
            raise TrainingError(_diverged("a weight", self._options))
        self._new_updates = 0
        self._learnable.use(self._net)
        self._swaps += 1
        if self._options.save is not None:
            _write(self._learnable, self._net, Path(self._options.save))

    def forget(self) -> None:
        with torch.no_grad():
            for weight, loaded in zip(self._trainee.parameters(), self._loaded, strict=True):
                weight.copy_(loaded)
                weight.grad = None
        self._begin()
        self._learnable.use(self._net)


def _diverged(what: str, options: OnlineOptions) -> str:
    return f"{what} is not a finite number: lower learning_rate ({options.learning_rate:g})."


@contextmanager
def _gradients() -> Iterator[None]:
    """Gradients can be computed, whatever the caller has switched off."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


def _trainee(net: nn.Module, options: OnlineOptions, target: Target) -> Trainee:
    loss = LOSSES[options.loss]
    trainee: Trainee
    if isinstance(net, FeatureNet):
        trainee = Eagle1Trainee(net, loss, noise=0.0, feature_weight=0.0)
    elif isinstance(net, EagleNet):
        trainee = EagleTrainee(net, loss, noise=0.0)
    elif isinstance(net, StateNet):
        assert target.final_norm is not None
        trainee = StateTrainee(net, target.final_norm, loss, noise=0.0)
    else:
        lm: Any = net
        checked(lm, "online: this draft model")
        _refuse_positions(lm)
        trainee = DistillTrainee(lm, target.vocab_size, loss)
    return trainee.to(target.device).train(mode=False)


def _refuse_positions(lm: PreTrainedModel) -> None:
    """Refuse a draft model for which text that is cut off at the front is another text."""
    most = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    sizes = [each.num_embeddings for each in lm.modules() if isinstance(each, nn.Embedding)]
    if most is not None and any(0 <= size - most <= _MORE_POSITIONS for size in sizes):
        raise CompatibilityError(
            "online: this draft model has an embedding for each position, and what it learns from "
            "are windows of text, whose positions begin at 0: use a draft model with rotary "
            "positions."
        )


def _optimizers(trainee: Trainee, options: OnlineOptions) -> list[Optimizer]:
    rate = options.learning_rate
    settings = TrainingSettings(
        optimizer="adamw", learning_rate=rate, vector_learning_rate=rate, weight_decay=0.0
    )
    return optimizers_of(trainee, settings)


def _write(learnable: Learnable, net: nn.Module, folder: Path) -> None:
    if isinstance(learnable, LearnableHead):
        learnable.write(net, folder)
    else:
        assert isinstance(learnable, LearnableModel)
        lm: Any = net
        write_lm(lm, learnable.name, folder, {"online": True})


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"save: {folder} cannot be written: {error.strerror}.") from None


# What a drafter learns from while it serves: the texts of running requests, and a buffer of them.
#
# A `Mark` is a place at which the target's distribution is known, at the level of the draft that
# came to it. A text becomes a `Window` when it has as many tokens as one, or ends. The next window
# begins with a part of the last one, so that its first marks have a context, too.


_CONTEXT = 4
"""Of a window, one token in so many is context from the window before."""


@dataclass(frozen=True)
class Mark:
    """A place to learn.

    Args:
        level: of the draft; the token to guess is at `root + 1 + level`.
        tokens: [K] the target's most probable tokens there.
        logprobs: [K] their log-probabilities among each other.
    """

    root: int
    level: int
    tokens: Tensor
    logprobs: Tensor


def marks_of(outcome: Outcome, num_levels: int, *, only_rejected: bool) -> list[Mark]:
    """The places of a step that can be learnt.

    Args:
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
        roots: [Q] index in the window of the token before each mark's root.
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
    def __init__(self, first: int) -> None:
        self.first = self.stop = first  # tokens whose hidden states are known
        self.marks: list[Mark] = []
        self._hidden: dict[int, States] = {}  # by layer

    def __len__(self) -> int:
        return self.stop - self.first

    @torch.inference_mode()
    def keep(self, count: int, hidden: Mapping[int, Tensor]) -> None:
        """Append tokens with their hidden states, [n, E] of each layer."""
        for layer, states in hidden.items() if count else ():
            self._hidden.setdefault(layer, States()).keep(len(self), states)
        self.stop += count

    def cut(self, length: int) -> None:
        """Forget all but the last `length` tokens, and all marks."""
        count = min(length, len(self))
        last = {layer: states[len(self) - count :] for layer, states in self._hidden.items()}
        self.first = self.stop = self.stop - count
        self.marks, self._hidden = [], {}
        self.keep(count, last)

    def hidden(self, layers: Sequence[int], size: int) -> Tensor:
        if not layers:
            return torch.zeros(len(self), 0, size)
        return torch.stack([self._hidden[layer][:] for layer in layers], dim=1)


class Recorder:
    """Keeps the end of every running request's text, and makes windows of it.

    Args:
        layers: ids of the target's layers whose hidden states are kept, in this order.
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
        count, hidden = len(outcome.committed), outcome.hidden if self._layers else {}
        count = min(count, 1 + len(outcome.accepted.path))
        kept = {layer: states[:count] for layer, states in hidden.items()}
        window = self._keep(outcome.request, outcome.root, count, kept)
        text = self._texts[outcome.request.key]
        marks = marks_of(outcome, self._num_levels, only_rejected=self._only_rejected)
        text.marks += [mark for mark in marks if mark.root > text.first]
        return window

    def release(self, request: Request) -> Window | None:
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
        passes: how often each window is drawn before it is dropped.
    """

    def __init__(self, size: int, passes: int, seed: int) -> None:
        self._size, self._passes = size, passes
        self._dice = random.Random(seed)
        self._windows: list[tuple[Window, int]] = []  # with the number of times that it was drawn
        self.num_tokens = 0

    def add(self, window: Window) -> None:
        self._windows.append((window, 0))
        self.num_tokens += len(window)
        while self.num_tokens > self._size:
            self._drop(0)

    def draw(self) -> Window | None:
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


# How much a drafter may learn while it serves: a share of the time, or a count of steps.


class Pace:
    def __init__(self, options: OnlineOptions) -> None:
        self._rate = options.share / (1 - options.share)
        self._every = options.every
        self._credit = 0.0  # seconds
        self._steps = 0
        self.learning = self.serving = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = clock.now()
        try:
            yield
        finally:
            seconds = clock.now() - began
            self.learning += seconds
            self._credit -= seconds

    def served(self, seconds: float) -> None:
        self.serving += seconds
        self._credit += self._rate * seconds
        self._steps += 1

    def take(self) -> bool:
        """Whether a slice is due; it is then taken."""
        if self._every is None:
            return self._credit > 0
        due = self._steps >= self._every
        self._steps -= self._every if due else 0
        return due

    def waive(self) -> None:
        """There was nothing to learn: time that was not used is not made up for."""
        self._credit, self._steps = min(0.0, self._credit), 0
