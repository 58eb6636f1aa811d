"""Online learning of drafters: the options, and the interfaces between serving and learning.

Online speculative decoding (OSD, Liu et al., arXiv 2310.07177): while requests are served, the
drafter learns from what the target says of the same text. Serving needs two things of that. A
`Learner` is shown the outcomes of all steps, and gets time to learn between steps. It changes the
drafter only through `Learnable.use`, also between steps. So the weights that drafted are those that
q was computed with, and every acceptance rule stays exact. `training/online.py` has the learner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, Self, TypeAlias

from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator

from tokenleap.core.config import Config, PathText

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokenleap.decode import Outcome
    from tokenleap.request import Request

LossName: TypeAlias = Literal["kl", "rkl", "jsd", "tv", "ce"]
"""The losses of `training/trainee.py`."""


class OnlineOptions(Config):
    """How a drafter learns while it serves (`SpeculativeConfig.online`).

    Args:
        share: most of the time that learning may take, as a share of serving and learning
            together.
        every: learn once after so many steps, instead of a share of the time. Runs are then
            reproducible.
        buffer_size: most tokens of text that are kept to learn from, context included. The oldest
            are dropped first.
        window: tokens of text that are learnt from at once. Learning pauses serving for as long as
            one window takes.
        passes: how often a window is learnt before it is dropped.
        positions: what is learnt: `all` positions of the output, or only the `rejected` ones and
            those at which nothing was drafted, as in the paper.
        batch_size: fewest positions of an update of the weights.
        swap_every: updates after which the drafter gets the new weights.
        learning_rate: of AdamW, constant.
        loss: between the drafter's distribution and the target's (see `training/trainee.py`).
        save: folder to which the drafter is written whenever it gets new weights; None for none.
        seed: of the order in which windows are learnt.
    """

    share: Annotated[FiniteFloat, Gt(0), Lt(1)] = 0.1
    every: Annotated[int, Ge(1)] | None = None
    buffer_size: Annotated[int, Ge(1)] = 16384
    window: Annotated[int, Ge(16), Le(4096)] = 128
    passes: Annotated[int, Ge(1)] = 2
    positions: Literal["all", "rejected"] = "all"
    batch_size: Annotated[int, Ge(1)] = 128
    swap_every: Annotated[int, Ge(1)] = 4
    learning_rate: Annotated[FiniteFloat, Gt(0)] = 1e-4
    loss: LossName = "kl"
    save: PathText | None = None
    seed: Annotated[int, Ge(0)] = 0

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.every is not None and "share" in self.model_fields_set:
            raise ValueError("every: 'share' also says how much to learn: remove one of the two.")
        if self.buffer_size < self.window:
            raise ValueError(
                f"buffer_size: it has to hold a window of {self.window} tokens: raise it, or lower "
                "'window'."
            )
        return self


class Learnable(ABC):
    """A drafting model whose weights can be replaced between steps.

    Attributes:
        layers: ids of the target's layers whose hidden states it reads, in the order in which its
            network takes them.
    """

    layers: tuple[int, ...] = ()

    @abstractmethod
    def net(self) -> nn.Module:
        """A new copy of the weights that were loaded, in float32, to be trained."""

    @abstractmethod
    def use(self, net: nn.Module) -> None:
        """Draft with a copy of these weights from the next step on.

        The KV of running requests stays. It was computed with the earlier weights, which makes
        their next drafts a little worse and q no less exact: q is what was computed, from whatever
        KV. To compute it again would cost a pass over the text of all running requests at every
        swap. New requests compute everything with the new weights.
        """


@dataclass(frozen=True)
class OnlineReport:
    """Report on what a drafter has learnt so far.

    Args:
        positions: that came into the buffer.
        kept_tokens: tokens of text in the buffer.
        updates: of the weights.
        swaps: times that the drafter got new weights.
        loss: mean over the last update's positions; None before the first update.
        learning_seconds: time that learning took, with watching the outcomes.
        serving_seconds: time that the steps took, without that.
        failure: why learning has ended; None if it goes on. The drafter then keeps its weights.
    """

    positions: int
    kept_tokens: int
    updates: int
    swaps: int
    loss: float | None
    learning_seconds: float
    serving_seconds: float
    failure: str | None

    @property
    def share(self) -> float:
        """Share of the time that learning took."""
        return self.learning_seconds / max(1e-9, self.learning_seconds + self.serving_seconds)


class Learner(Protocol):
    """Teaches one drafter. No error in it reaches the requests: it then stops learning."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See the outcomes of a step, inside it."""
        ...

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """See the hidden states of a prompt (see `Drafter.observe_prefill`)."""
        ...

    def release(self, request: Request) -> None:
        """A request has ended."""
        ...

    def work(self, seconds: float) -> None:
        """Learn for as long as is due, after a step that took so many seconds."""
        ...

    def forget(self) -> None:
        """Return to the weights that were loaded, and forget all text."""
        ...

    @property
    def report(self) -> OnlineReport:
        """Report on what it has learnt so far."""
        ...
