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

`engine/online.py` loads this module by its name. It needs no package beside those of serving.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from tokenleap.decode import Outcome
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.feature_net import FeatureNet
from tokenleap.drafters.heads.state_net import StateNet
from tokenleap.drafters.learnable import LearnableHead, LearnableModel
from tokenleap.drafters.online import Learnable, OnlineOptions, OnlineReport
from tokenleap.errors import CompatibilityError, ConfigError, TrainingError, in_one_line
from tokenleap.request import Request
from tokenleap.runtime.target import Target
from tokenleap.training.distill import DistillTrainee
from tokenleap.training.draft_lm import checked, write_lm
from tokenleap.training.eagle import EagleTrainee
from tokenleap.training.eagle1 import Eagle1Trainee
from tokenleap.training.losses import LOSSES
from tokenleap.training.optimizers import optimizers_of
from tokenleap.training.pace import Pace
from tokenleap.training.replay import Buffer, Recorder, Window
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.state_heads import StateTrainee
from tokenleap.training.trainee import Trainee

__all__ = ["OnlineLearner"]

_LEVELS = 4
"""Most levels of a draft that are learnt as such; see `replay.marks_of`."""

_MAX_GRAD_NORM = 1.0

_MORE_POSITIONS = 2
"""Rows of an embedding of positions beside those of the context: OPT has two."""


class OnlineLearner:
    """See `drafters.online.Learner`.

    Args:
        learnable: what learns.
        options: how.
        target: the target.

    Raises:
        ConfigError: the folder to save to cannot be written.
        CompatibilityError: a draft model's logits are not its output layer's, or it has an
            embedding for each position.
    """

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
        """See `Learner.report`."""
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
        """See `Learner.observe`."""

        def record() -> None:
            for outcome in outcomes:
                self._keep(self._recorder.observe(outcome))

        self._watch(record)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """See `Learner.observe_prefill`."""
        self._watch(lambda: self._keep(self._recorder.observe_prefill(request, start, hidden)))

    def release(self, request: Request) -> None:
        """See `Learner.release`; the text of a request that failed is not learnt."""
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
        """Do this unless learning has ended, and count the time."""
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
        """See `Learner.work`."""
        self._pace.served(max(0.0, seconds - self._watched))
        self._watched = 0.0
        while self._failure is None and self._pace.take():
            with self._pace.timed(), self._guarded(), _gradients():
                if not self._slice():
                    self._pace.waive()
                    return

    def _slice(self) -> bool:
        """Do one thing; False if there is nothing to do."""
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
        """Add the gradient of one window."""
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
        """See `Learner.forget`."""
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
    """The network with its loss, without the noise and dropout of training from scratch."""
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
    """Refuse a draft model for which text that is cut off at the front is another text.

    Raises:
        CompatibilityError: it has an embedding for each position.
    """
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
