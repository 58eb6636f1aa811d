"""`Trainee`: a network with its loss, as the trainer and the online learner run it.

Networks differ in what their levels compute (`outputs`) and in the weights that make logits of it
(`logits`). Labels, teacher, losses and acceptance are the same for all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.errors import CompatibilityError
from tokenleap.models.support import context_length
from tokenleap.runtime.target import Target
from tokenleap.training.features import FIRST_LEARNT, Batch

_PLACES = 512
"""Places whose logits are in memory at a time, where they are computed again for the gradients."""


@dataclass(frozen=True)
class HeadParts:
    """The target's parts that a drafter is made of.

    Args:
        embedding: [V, E].
        output_rows: [V, E] of the output layer.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        final_norm: the norm before the output layer; None if it is not known.
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

    @classmethod
    def of(
        cls, target: Target, name: str, weights: tuple[Tensor, Tensor], draft_tokens: Tensor
    ) -> Self:
        """Of a target with its embedding and output rows, and a draft vocabulary."""
        return cls(
            target.config,
            name,
            *weights,
            draft_tokens,
            target.network.num_layers,
            target.final_norm,
            target.reload,
            target.logits_bias,
        )

    @property
    def vocab_size(self) -> int:
        return len(self.embedding)

    @property
    def vocabulary(self) -> tuple[Tensor, Tensor, Tensor]:
        """The embedding, and the output rows and ids of the draft vocabulary."""
        return self.embedding, self.output_rows[self.draft_tokens], self.draft_tokens

    def norm_for(self, method: str) -> nn.Module:
        """The final norm, which a method needs."""
        if self.final_norm is None:
            raise CompatibilityError(
                f"method '{method}' reads hidden states after the final norm, and this "
                "architecture's is not known: train 'eagle'."
            )
        return self.final_norm

    @property
    def verifier(self) -> Verifier:
        """The target, for the drafter's file."""
        architectures = tuple(self.config.architectures or ())
        return Verifier(self.name, architectures, self.num_layers)


def block_mask(prefixes: Tensor, size: int, count: int, *, causal: bool) -> Tensor:
    """[R, 1, W, W] who sees whom in texts of `size` columns with P blocks of `count` after them.

    Text sees the text up to itself. A block sees a prefix, of length [R, P], and all of itself, or
    with `causal` only what comes before.
    """
    rows, blocks = prefixes.shape
    columns = torch.arange(size + blocks * count, device=prefixes.device)
    number = (columns - size).div(count, rounding_mode="floor")  # of the block; below 0 in the text
    last = torch.cat([columns[:size].expand(rows, -1) + 1, prefixes.repeat_interleave(count, 1)], 1)
    in_text = (number < 0) & (columns < last[:, :, None])
    in_block = (number >= 0) & (number == number[:, None])
    if causal:
        in_block = in_block & (columns <= columns[:, None])
    return (in_text | in_block)[:, None]


def llama_fields(config: Any) -> dict[str, Any]:
    """Context, norm and positions of a target, for the configuration of a new Llama layer."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return {
        "max_position_embeddings": context_length(config, None),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.get("rope_theta", 10000.0),
        },
    }


class Learnt(NamedTuple):
    """Result of one batch.

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

    weights: Sequence[nn.Parameter] = ()
    learning_rate: float = 0.0


def at_roots(x: Tensor, roots: Tensor) -> Tensor:
    """[B, T, ...] at the indices [B, Q] -> [B, Q, ...]."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(-1), roots]


def at_level(states: Tensor, batch: Batch, level: int) -> Tensor:
    """[B, T, ...] at the token before the one that each root's level guesses -> [B, Q, ...]."""
    return at_roots(states, (batch.roots + 1 + level).clamp(max=states.shape[1] - 1))


class Trainee(nn.Module, ABC):
    """A drafter that is being trained.

    A subclass computes `outputs`, makes `logits` of them and writes its folder. One that learns
    from something else than its drafts has `learn`, too.

    Args:
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        max_levels: most levels of a draft; None if there is no limit.

    Attributes:
        step: number of the step to come, from 0, and the total; the trainer sets it.
        tables: weights that only look rows up, or share rows with such; they have the optimizer of
            vectors.
        own_rate: weights that learn at a rate of their own.
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

    def __init__(
        self, draft_tokens: Tensor, vocab_size: int, loss: Loss, max_levels: int | None = None
    ) -> None:
        super().__init__()
        self.max_levels = max_levels
        self.step = (0, 1)
        self.tables: Sequence[Tensor] = ()
        self.own_rate = OwnRate()
        places = torch.full((vocab_size,), -1)
        places[draft_tokens] = torch.arange(len(draft_tokens))
        self.register_buffer("places", places, persistent=False)
        self.register_buffer("draft_tokens", draft_tokens, persistent=False)
        self._loss = loss

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The weights that multiply states; see `trainer.optimizers_of`."""
        others = {id(weight) for weight in (*self.tables, *self.own_rate.weights)}
        return [
            weight
            for weight in self.parameters()
            if weight.requires_grad and weight.dim() == 2 and id(weight) not in others
        ]

    @abstractmethod
    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """For each level [B, Q, E]: what `logits` is computed of, for every root."""

    @abstractmethod
    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """[N, E] outputs of a level -> [N, Vd] in float32."""

    @abstractmethod
    def write(self, parts: HeadParts, folder: Path, notes: Mapping[str, Any]) -> None:
        """Write the drafter as `speculative_config` reads it; each file complete or not at all."""

    def probe(self, seen: Seen) -> Mapping[str, Any]:
        """Notes by which serving tells the target and its layers; see `heads.probe`."""
        return Probe.of(seen).note()

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """Losses and hits of the first levels of all drafts of a batch; in training, `learn`."""
        if self.training:
            return self.learn(batch, num_levels)
        return self.learnt(self.outputs(batch, num_levels), batch)

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        return self.learnt(self.outputs(batch, num_levels), batch)

    def learnt(self, outputs: Iterable[Tensor], batch: Batch) -> Learnt:
        """Losses and hits of levels whose outputs are [B, Q, E] each."""
        found = [self.level(each, level, batch) for level, each in enumerate(outputs)]
        losses, hits = zip(*found, strict=True)
        right = torch.stack(hits, dim=1)
        counts = batch.levels.valid[:, : right.shape[1]].sum((0, 2))
        return Learnt(torch.stack(losses), right, counts)

    def level(self, outputs: Tensor, level: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss of one level with outputs [B, Q, E], and [B, Q] where it is right."""
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


# Losses between a draft's distribution q and the target's p, of which the top K tokens are known.
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
        """From labels [N], tokens [N, K] and logprobs [N, K] in ids of the target.

        Args:
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
    """KL(p || q) = sum_x p(x) (log p(x) - log q(x))."""
    p = teacher.probs
    return (p * (p.clamp(min=_TINY).log() - _log_q(logits, teacher.tokens))).sum(-1)


def _of_known(logits: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """[N, K] log q and q; where p is 0, q is 0, too."""
    log_q = _log_q(logits, teacher.tokens).masked_fill(teacher.probs == 0, 0)
    return log_q, log_q.exp() * (teacher.probs > 0)


def rkl(logits: Tensor, teacher: Teacher) -> Tensor:
    """KL(q || p) = sum_x q(x) (log q(x) - log p(x))."""
    log_q, q = _of_known(logits, teacher)
    known = (q * (log_q - teacher.probs.clamp(min=_TINY).log())).sum(-1)
    rest = (1 - q.sum(-1)).clamp(min=_TINY)
    return (known + rest * (rest / REST).log()) * (teacher.probs.sum(-1) > 0)


def jsd(logits: Tensor, teacher: Teacher) -> Tensor:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    p, (log_q, q) = teacher.probs, _of_known(logits, teacher)
    log_m = ((p + q) / 2).clamp(min=_TINY).log()
    of_p = (p * (p.clamp(min=_TINY).log() - log_m)).sum(-1)
    of_q = (q * (log_q - log_m)).sum(-1) + (1 - q.sum(-1)) * math.log(2)
    return (of_p + of_q) / 2 * (p.sum(-1) > 0)


def ce(logits: Tensor, teacher: Teacher) -> Tensor:
    """-log q(y) of the token y that the target wrote."""
    known = teacher.labels >= 0
    return -(_log_q(logits, teacher.labels.unsqueeze(-1)).squeeze(-1) * known)


def tv(logits: Tensor, teacher: Teacher) -> Tensor:
    """1 - sum_x min(p(x), q(x)): the probability of a rejection (Leviathan et al., theorem 3.5)."""
    q = _log_q(logits, teacher.tokens).exp()
    known = teacher.probs.sum(-1) > 0
    return (1 - torch.minimum(teacher.probs, q).sum(-1)) * known


LOSSES: dict[str, Loss] = {"kl": kl, "rkl": rkl, "jsd": jsd, "ce": ce, "tv": tv}
