"""`TrainingMethod`: the interface between the trainer and one kind of drafter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from tokenleap.core.config import Config
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.probe import Seen
from tokenleap.drafters.online import LossName
from tokenleap.training.batches import FIRST_LEARNT, Batch, Examples, TrainingSet
from tokenleap.training.features import Features
from tokenleap.training.settings import TrainingSettings

__all__ = [
    "LOSSES",
    "REST",
    "Current",
    "HeadParts",
    "Learnt",
    "Loss",
    "LossName",
    "OnPolicy",
    "OwnRate",
    "Rounds",
    "Teacher",
    "Trainee",
    "TrainingMethod",
    "at_roots",
]


# `Trainee`: a drafter with its loss, the module that the trainer wraps.
#
# Heads differ in what their levels compute (`outputs`) and in the weights that make logits of it
# (`logits`). What a level is to learn, and how often it is right, is the same for all.


_PLACES = 512
"""Places whose logits are in memory at a time, where they are computed again for the gradients."""


class Learnt(NamedTuple):
    """Results of one batch.

    Args:
        losses: [L] mean loss of each level.
        right: [B, L, Q] whether the most probable token of the draft is the one that the target
            wrote; false where there is nothing to learn.
        counts: [L] places of each level.
    """

    losses: Tensor
    right: Tensor
    counts: Tensor


class OwnRate(NamedTuple):
    """Weights that learn at a rate of their own: those of a target that is trained, too."""

    weights: list[nn.Parameter]
    learning_rate: float


def at_roots(x: Tensor, roots: Tensor) -> Tensor:
    """[B, T, ...] at the indices [B, Q] -> [B, Q, ...]."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(-1), roots]


class Trainee(nn.Module, ABC):
    """A drafter that is being trained.

    Args:
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        max_levels: most levels of a draft; None if there is no limit.
    """

    places: Tensor
    draft_tokens: Tensor

    keeps_logits: ClassVar[bool] = True
    """Whether logits are kept for the gradients. Else they are computed twice, in parts."""

    first_learnt: ClassVar[int] = FIRST_LEARNT
    """Index of the first token of a text that a draft can guess."""

    evaluated_levels: ClassVar[int] = 5
    """Levels whose acceptance is measured, if the drafter has as many; training may have fewer."""

    uses_all_weights: ClassVar[bool] = True
    """Whether every weight gets a gradient in every step."""

    reads_encoder: bool = False
    """Whether it reads what the target's encoder makes of the sources, `Batch.encoded`."""

    def __init__(
        self, draft_tokens: Tensor, vocab_size: int, loss: Loss, max_levels: int | None = None
    ) -> None:
        super().__init__()
        self.max_levels = max_levels
        places = torch.full((vocab_size,), -1)
        places[draft_tokens] = torch.arange(len(draft_tokens))
        self.register_buffer("places", places, persistent=False)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)
        self._loss = loss

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The weights that multiply states; embeddings only look rows up. See `optimizers`."""
        return [
            weight for weight in self.parameters() if weight.requires_grad and weight.dim() == 2
        ]

    @property
    def own_rate(self) -> OwnRate | None:
        """The weights that learn at a rate of their own; they are not in `matrices`."""
        return None

    def at_step(self, step: int, total: int) -> None:
        """Called before each step with its number, from 0, and the total.

        It does nothing by default.
        """

    @abstractmethod
    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """For each level [B, Q, E]: what `logits` is computed of, for every root."""

    @abstractmethod
    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """[N, E] outputs of a level -> [N, Vd] in float32."""

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """Losses and hits of the first levels of all drafts of a batch."""
        return self.learnt(self.outputs(batch, num_levels), batch)

    def learnt(self, outputs: Iterable[Tensor], batch: Batch) -> Learnt:
        """Losses and hits of levels whose outputs are [B, Q, E] each."""
        found = [self.level(each, level, batch) for level, each in enumerate(outputs)]
        losses, hits = zip(*found, strict=True)
        right = torch.stack(hits, dim=1)
        counts = batch.levels.valid[:, : right.shape[1]].sum((0, 2))
        return Learnt(torch.stack(losses), right, counts)

    def level(self, outputs: Tensor, level: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss of one level, and where it is right.

        Args:
            outputs: [B, Q, E].

        Returns:
            A scalar, and [B, Q] as in `Learnt`.
        """
        valid, levels = batch.levels.valid[:, level], batch.levels
        labels, tokens, logprobs = (
            each[:, level][valid]
            for each in (levels.labels, levels.teacher_tokens, levels.teacher_logprobs)
        )
        count = max(1, len(labels))
        size = count if self.keeps_logits else _PLACES
        given = (outputs[valid], labels, tokens, logprobs)
        parts = zip(*(torch.split(each, size) for each in given), strict=True)
        losses, guesses = zip(*(self._parts(level, *part) for part in parts), strict=True)
        right = torch.zeros_like(valid)
        right[valid] = torch.cat(guesses) == labels
        return torch.stack(losses).sum() / count, right

    def _parts(self, level: int, *given: Tensor) -> tuple[Tensor, Tensor]:
        """See `_places`; their logits are kept for the gradients, or computed again."""
        if self.keeps_logits:
            return self._places(level, *given)
        found: tuple[Tensor, Tensor] = checkpoint(self._places, level, *given, use_reentrant=False)
        return found

    def _places(
        self, level: int, outputs: Tensor, labels: Tensor, tokens: Tensor, logprobs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum of the losses of N places, and [N] the most probable token of each."""
        logits = self.logits(outputs, level)
        teacher = Teacher.of(labels, tokens, logprobs, self.places)
        return self._loss(logits, teacher).sum(), self.draft_tokens[logits.detach().argmax(-1)]


@dataclass(frozen=True)
class HeadParts:
    """Parts that a drafter is made of.

    Args:
        embedding: [V, E] the target's.
        output_rows: [V, E] of the target's output layer.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        final_norm: the target's norm before the output layer; None if it is not known.
        reload: loads the target's Transformers model once more; None if that is not possible.
        logits_bias: [V] that the target adds to what its output rows give; None if it adds nothing.
    """

    config: PretrainedConfig
    name: str
    embedding: Tensor
    output_rows: Tensor
    draft_tokens: Tensor
    num_layers: int
    final_norm: nn.Module | None
    reload: Callable[[], PreTrainedModel] | None = None
    logits_bias: Tensor | None = None

    @property
    def verifier(self) -> Verifier:
        """The target, for the drafter's file."""
        architectures = tuple(self.config.architectures or ())
        return Verifier(self.name, architectures, self.num_layers)


@dataclass(frozen=True)
class OnPolicy:
    """Text that the drafter writes while it learns."""

    share: float
    every: int


class TrainingMethod(ABC):
    """How one kind of drafter is made, trained and written."""

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Config]]
    tunes_target: ClassVar[bool] = False
    """Whether it writes a target of its own, for which the drafts are."""
    deeper: ClassVar[str] = "learn for more epochs"
    """The advice if later positions of drafts are much worse than the first."""

    for_sources: ClassVar[bool | None] = False
    """Whether it trains for encoder-decoders, or for decoder-only models; None for both."""

    def __init__(self, options: Config | None = None) -> None:
        self.options = self.Options() if options is None else options

    @property
    @abstractmethod
    def draft_vocab_size(self) -> int:
        """Most tokens of the draft vocabulary."""

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """The settings as this method needs them; the default keeps them."""
        return settings

    @property
    def on_policy(self) -> OnPolicy | None:
        """The part of the text that the drafter writes; None for nothing."""
        return None

    @property
    def num_drafters(self) -> int:
        """How many drafters are trained, one after the other."""
        return 1

    @property
    def nodes_per_token(self) -> int:
        """Nodes of a draft for each of its tokens, when chains of four are measured."""
        return self.num_drafters

    def missed(self, folder: Path, parts: HeadParts, data: TrainingSet) -> TrainingSet:
        """The data that the next drafter is to learn; by default all of it."""
        return data

    def finish(self, out: Path, folders: Sequence[Path]) -> None:
        """Write what serving needs beside the folders of several drafters; by default nothing."""
        assert list(folders) == [out]

    @property
    def learns_given_answers(self) -> bool:
        """Whether the answers in the user's files are learnt instead of the target's."""
        return False

    @property
    def served_tokens(self) -> int:
        """Tokens of the drafts with which the result is measured."""
        return 4

    @property
    def beam_width(self) -> int:
        """Width of the search by which an encoder-decoder writes what is learnt; 1 is greedy."""
        return 1

    @property
    def reads_encoder(self) -> bool:
        """Whether it reads what the target's encoder makes of the sources."""
        return False

    @abstractmethod
    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Ids of the target's layers whose hidden states it reads."""

    @abstractmethod
    def trainee(self, parts: HeadParts) -> Trainee:
        """A new drafter with random weights, drawn from PyTorch's generator."""

    @abstractmethod
    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """Write the drafter as `speculative_config` reads it; each file complete or not at all."""

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        """Notes by which serving tells the target and its layers; see `heads.probe`."""
        return {}

    def serving(self, folder: Path) -> dict[str, Any]:
        """The `speculative_config` that uses a written drafter."""
        return {"method": self.name, "model": str(folder)}


# Losses between a draft's distribution q and the target's p, of which the top K tokens are known.
#
#     kl:  KL(p || q) = sum_x p(x) (log p(x) - log q(x))
#     rkl: KL(q || p) = sum_x q(x) (log q(x) - log p(x))
#     jsd: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2
#     ce:  -log q(y) of the token y that the target wrote
#     tv:  1 - sum_x min(p(x), q(x)), the probability of a rejection (Leviathan et al., theorem 3.5)
#
# p is the target's distribution at temperature 1 over those of the K tokens that are in the draft
# vocabulary, normalised. A place whose K tokens are all outside it teaches nothing.
#
# So p is 0 for all other tokens. For kl, ce and tv they have no term. In jsd each has
# q(x) log 2 / 2. In rkl they would be infinite: all of them together count as one token whose p is
# `REST`, which draws q back to the K tokens and does not tell which of the others are worse.


REST = 1e-3
"""For rkl: p of all tokens together that the target is not known to write."""

_TINY = 1e-9
"""In place of 0 in a logarithm."""


@dataclass(frozen=True)
class Teacher:
    """The target's knowledge about N places, in ids of the draft vocabulary.

    Args:
        labels: [N] the token it wrote; -1 outside the draft vocabulary.
        tokens: [N, K] its most probable tokens; -1 outside the draft vocabulary.
        probs: [N, K] p, normalised; 0 for tokens outside.
    """

    labels: Tensor
    tokens: Tensor
    probs: Tensor

    @classmethod
    def of(cls, labels: Tensor, tokens: Tensor, logprobs: Tensor, places: Tensor) -> Teacher:
        """In ids of the draft vocabulary.

        Args:
            labels: [N] ids of the target.
            tokens: [N, K] ids of the target.
            logprobs: [N, K].
            places: [V] the target's id -> id in the draft vocabulary, or -1.
        """
        inside = places[tokens]
        probs = logprobs.exp().masked_fill(inside < 0, 0)
        total = probs.sum(-1, keepdim=True)
        return cls(places[labels], inside, probs / total.clamp(min=_TINY))


Loss = Callable[[Tensor, Teacher], Tensor]
"""Logits [N, Vd] in float32 and what the target knows -> [N] losses; 0 where it knows nothing."""


def _log_q(logits: Tensor, tokens: Tensor) -> Tensor:
    """[N, K] log-probabilities of draft tokens; those of -1 are meaningless."""
    chosen = logits.gather(1, tokens.clamp(min=0))
    return chosen - logits.logsumexp(-1, keepdim=True)


def kl(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    p = teacher.probs
    return (p * (p.clamp(min=_TINY).log() - _log_q(logits, teacher.tokens))).sum(-1)


def _of_known(logits: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """[N, K] log q and q; where p is 0, q is 0, too."""
    log_q = _log_q(logits, teacher.tokens).masked_fill(teacher.probs == 0, 0)
    return log_q, log_q.exp() * (teacher.probs > 0)


def rkl(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    log_q, q = _of_known(logits, teacher)
    known = (q * (log_q - teacher.probs.clamp(min=_TINY).log())).sum(-1)
    rest = (1 - q.sum(-1)).clamp(min=_TINY)
    return (known + rest * (rest / REST).log()) * (teacher.probs.sum(-1) > 0)


def jsd(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    p, (log_q, q) = teacher.probs, _of_known(logits, teacher)
    log_m = ((p + q) / 2).clamp(min=_TINY).log()
    of_p = (p * (p.clamp(min=_TINY).log() - log_m)).sum(-1)
    of_q = (q * (log_q - log_m)).sum(-1) + (1 - q.sum(-1)) * math.log(2)
    return (of_p + of_q) / 2 * (p.sum(-1) > 0)


def ce(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    known = teacher.labels >= 0
    return -(_log_q(logits, teacher.labels.unsqueeze(-1)).squeeze(-1) * known)


def tv(logits: Tensor, teacher: Teacher) -> Tensor:
    """See the module."""
    q = _log_q(logits, teacher.tokens).exp()
    known = teacher.probs.sum(-1) > 0
    return (1 - torch.minimum(teacher.probs, q).sum(-1)) * known


LOSSES: dict[str, Loss] = {"kl": kl, "rkl": rkl, "jsd": jsd, "ce": ce, "tv": tv}


# Text that changes while a drafter is trained: every so many steps there is other text.


class Rounds(Protocol):
    """Data that changes from round to round."""

    steps: int

    def begin(self, number: int, trainee: Trainee) -> None:
        """Prepare a round: called at its first step, and again if training continues there."""
        ...

    def examples(self, number: int) -> Examples:
        """The examples of a round, which was prepared, perhaps by another process."""
        ...


class Current(Examples):
    """The examples that are learnt now."""

    def __init__(self, now: Examples) -> None:
        self.use(now)

    def use(self, now: Examples) -> None:
        """Learn from this."""
        self._now, self.sizes = now, now.sizes

    def __getitem__(self, index: int) -> Features:
        features: Features = self._now[index]
        return features
