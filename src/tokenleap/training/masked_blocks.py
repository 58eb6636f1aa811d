"""What a Spec-Drafter learns (SpecDec, Xia et al., arXiv 2203.16487, equations 5 to 7).

    loss = -mean over j of log P(y_(p + j) | y_1 ... y_p, x), j = 1 ... k

for a prefix of p tokens, drawn uniformly for each text and step, and k masks behind it, which are
predicted at once. Labels end with the text; masks behind it learn nothing. The loss is smoothed.
Beyond the paper, a step can learn from several prefixes of a text, each with masks of its own
(`mask_rows.py`), and with `Transitions`, y_(p + j - 1) is given, too.

Training glances (GLAT, Qian et al., arXiv 2008.07905): of the masks, as many as a share of those
that were wrong in a first pass, drawn at random, get their label in place of the mask and leave the
loss. The share falls from 0.5 to 0.3. Both, and the published values of the options, are as in the
code of the authors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tokenleap.core.config import Config
from tokenleap.drafters.spec_drafter import SpecDrafterNotes
from tokenleap.drafters.transitions import Transitions
from tokenleap.training.batches import Batch
from tokenleap.training.draft_lm import output_layer
from tokenleap.training.losses import LOSSES
from tokenleap.training.mask_rows import MaskRows, mask_rows, mask_states
from tokenleap.training.trainee import Learnt, Trainee

__all__ = ["SpecDrafterTrainee", "SpecDrafterTrainingOptions", "some_of", "some_prefixes"]

_HALVED_BELOW = 0.25
_LOGITS = 1 << 25
"""Logits of one part of a step; those of a batch of the published size are one part if there are
few tokens."""
_PLACES = 8192
"""Tokens and masks of a pass, when all prefixes of a batch are evaluated."""

_Share = Annotated[FiniteFloat, Ge(0), Lt(1)]


class SpecDrafterTrainingOptions(Config):
    """Options of `tokenleap train spec_drafter`.

    Args:
        num_masks: k, the tokens of a block: most tokens of a draft.
        shape: layers of the drafter, see `new_masked_lm`.
        encoder: `own`, or the `target`'s: then the drafter is a decoder alone, as wide as the
            target's, and reads what the target's encoder has made of the source.
        size: scales the number of steps. Below 0.25, it halves the widths of a drafter with an
            encoder of its own.
        from_target: whether it starts from the target's encoder, embeddings, and some of its
            decoder layers.
        answers: who writes what is learnt: the target `greedy` or by `beam` search of width 5, or
            the user (`fixed`).
        dropout: of its layers.
        label_smoothing: share of the loss that all tokens have alike.
        fewer_masks: whether blocks of 1 to `num_masks` masks are learnt; the number is
            drawn for each batch, short ones more often. Then short drafts take fewer masks, and
            less time.
        transitions: whether a token of a draft also depends on the one before it, see
            `Transitions`. In the paper it does not.
        prefixes: how many prefixes of a text a step learns from, each with a block of its own; the
            paper's is one. A text teaches more with more of them, and is computed once for all.
            With `fewer_masks`, there are more of them where blocks are shorter: a text always has
            about `prefixes` times `num_masks` masks.
        glancing: the share of wrong masks that are shown, at the first and at the last step.
    """

    num_masks: Annotated[int, Ge(1), Le(256)] = 25
    shape: Literal["full", "balanced", "small"] = "full"
    encoder: Literal["own", "target"] = "own"
    size: Annotated[FiniteFloat, Gt(0), Le(1)] = 1.0
    from_target: bool = False
    answers: Literal["greedy", "beam", "fixed"] = "greedy"
    dropout: _Share = 0.1
    label_smoothing: _Share = 0.1
    fewer_masks: bool = False
    transitions: bool = False
    prefixes: Annotated[int, Ge(1), Le(256)] = 1
    glancing: tuple[_Share, _Share] = (0.5, 0.3)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.from_target and self.halved:
            raise ValueError(
                f"from_target: needs the target's widths, and sizes below {_HALVED_BELOW} halve "
                "them: raise size and lower max_steps, or set it to false."
            )
        return self

    @property
    def halved(self) -> bool:
        """Whether the drafter's widths are half of the target's."""
        return self.size < _HALVED_BELOW and self.encoder == "own"


class SpecDrafterTrainee(Trainee):
    """A Spec-Drafter that is being trained.

    Args:
        lm: the drafter.
        notes: its sizes.
        options: of the training.
    """

    first_learnt: ClassVar[int] = 1
    evaluated_levels: ClassVar[int] = 10
    keeps_logits: ClassVar[bool] = False

    def __init__(
        self, lm: PreTrainedModel, notes: SpecDrafterNotes, options: SpecDrafterTrainingOptions
    ) -> None:
        vocabulary = torch.arange(notes.vocab_size)
        super().__init__(vocabulary, notes.vocab_size, LOSSES["ce"], notes.num_masks)
        self._lm = [lm]  # in a list: its embedding has several names, and a checkpoint needs one
        self.weights = nn.ParameterList(lm.parameters())
        self.transitions = (
            Transitions(output_layer(lm).weight.shape[1]) if notes.transitions else None
        )
        self.notes, self._options = notes, options
        self.reads_encoder = notes.encoder == "target"
        self.shown = options.glancing[0]

    @property
    def lm(self) -> PreTrainedModel:
        """The drafter."""
        return self._lm[0]

    def train(self, mode: bool = True) -> Self:
        """See `nn.Module.train`."""
        self.lm.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the drafter's buffers, too."""
        parts: tuple[Any, ...] = (self.lm, super())
        for part in parts:
            part._apply(fn, recurse)
        return self

    @property
    def matrices(self) -> list[nn.Parameter]:
        """See `Trainee.matrices`: without embeddings, and output rows that are tied to them."""
        tables = {
            id(layer.weight) for layer in self.lm.modules() if isinstance(layer, nn.Embedding)
        }
        return [weight for weight in super().matrices if id(weight) not in tables]

    def at_step(self, step: int, total: int) -> None:
        """See `Trainee.at_step`: fewer and fewer labels are shown."""
        first, last = self._options.glancing
        self.shown = first + (last - first) * step / total

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """Of some prefixes of each text in training; see `Trainee.forward` for evaluations."""
        if not self.training:
            return super().forward(batch, num_levels)
        count = self._count()
        # Shorter blocks leave room for more prefixes.
        most = self._options.prefixes * self.notes.num_masks // count
        prefixes, drawn = some_prefixes(batch, most)
        rows = mask_rows(batch.tokens, prefixes, count, self.notes.mask_token_id)
        labels, valid = _labels(batch, rows.places)
        valid &= drawn[..., None]
        source = self._encoded(batch)
        with torch.no_grad():
            right = torch.zeros_like(valid)
            states = self._states(rows, source, valid, batch)
            right[valid] = torch.cat(
                [
                    _are_best(self.logits(part, 0), wanted)
                    for part, wanted in self._parts_of(states, labels[valid])
                ]
            )
            wrong = (valid & ~right).sum(-1)
            shown = some_of(valid, (self.shown * wrong).long())
        learnt = valid & ~shown
        states = self._states(rows.showing(shown, labels), source, learnt, batch)
        loss = self._mean_loss(states, labels[learnt])
        return Learnt(loss[None], right[:, None, :, 0], valid[..., 0].sum()[None])

    def _mean_loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """Of masks with states [N, E]."""
        parts = self._parts_of(states, labels)
        if len(parts) == 1:
            return self._loss_of(states, labels) / max(1, len(labels))
        # Logits of one part at a time are in memory; they are computed again for the gradients.
        losses: list[Tensor] = [
            checkpoint(self._loss_of, *part, use_reentrant=False) for part in parts
        ]
        return torch.stack(losses).sum() / len(labels)

    def _loss_of(self, states: Tensor, labels: Tensor) -> Tensor:
        smoothing = self._options.label_smoothing
        logits = self.logits(states, 0)
        return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")

    def _parts_of(self, states: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """States and labels of so many masks that their logits fit `_LOGITS`."""
        size = max(1, _LOGITS // self.notes.vocab_size)
        return list(zip(torch.split(states, size), torch.split(labels, size), strict=True))

    def _states(
        self, rows: MaskRows, source: tuple[Tensor, Tensor], chosen: Tensor, batch: Batch
    ) -> Tensor:
        """[N, E] what `logits` reads at those masks [R, P, k] that are chosen."""
        states = mask_states(self.lm, rows, *source)[chosen]
        if self.transitions is not None:
            before = _tokens_at(batch, rows.places - 1)
            added = self.transitions(self._rows(before[chosen]))
            first = torch.arange(chosen.shape[-1], device=chosen.device).expand_as(chosen) == 0
            states = states + added.masked_fill(first[chosen][:, None], 0)
        return states

    def _rows(self, tokens: Tensor) -> Tensor:
        """[..., E] the output layer's rows of tokens."""
        return F.embedding(tokens, output_layer(self.lm).weight)

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: states of the masks behind every prefix that is a root."""
        states, mask = self._encoded(batch)
        rows, places = batch.levels.valid[:, 0].nonzero(as_tuple=True)
        prefixes = batch.roots[rows, places] + 1
        size = max(1, _PLACES // (batch.tokens.shape[1] + self.notes.num_masks))
        shape = (*batch.roots.shape, num_levels, states.shape[-1])
        found = torch.zeros(shape, device=states.device, dtype=states.dtype)
        for row, place, prefix in zip(
            *(torch.split(each, size) for each in (rows, places, prefixes)), strict=True
        ):
            blocks = mask_rows(
                batch.tokens[row], prefix[:, None], self.notes.num_masks, self.notes.mask_token_id
            )
            filled = mask_states(self.lm, blocks, states[row], mask[row])[:, 0]
            found[row, place] = filled[:, :num_levels].to(found.dtype)
        for level in range(num_levels):
            states = found[:, :, level]
            if level and self.transitions is not None:
                before = self._rows(batch.levels.inputs[:, level])
                states = states + self.transitions(before).to(states)
            yield states

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """See `Trainee.logits`: without that of the mask."""
        layer, size = output_layer(self.lm), self.notes.vocab_size
        more = getattr(self.lm, "final_logits_bias", None)
        biases = [layer.bias, None if more is None else more[0]]
        given = [bias[:size] for bias in biases if bias is not None]
        bias = sum(given[1:], given[0]) if given else None
        return F.linear(outputs, layer.weight[:size], bias).float()

    def _encoded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, S, E] what the encoder makes of the sources, and [B, S] where they are."""
        columns = torch.arange(batch.sources.shape[1], device=batch.sources.device)
        mask = (columns < batch.source_lengths[:, None]).long()
        if self.reads_encoder:
            return batch.encoded.float(), mask
        lm: Any = self.lm
        states: Tensor = lm.get_encoder()(batch.sources, attention_mask=mask).last_hidden_state
        return states, mask

    def _count(self) -> int:
        """Masks of the blocks of a training batch: short ones are drawn more often."""
        most = self.notes.num_masks
        if not self.notes.fewer_masks:
            return most
        return min(most, int((most + 1) ** torch.rand(()).item()))


def some_prefixes(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Lengths of prefixes of each text, drawn among those in front of a part to learn.

    Returns:
        [B, P] different prefixes of each text, and whether there are so many of them.
    """
    valid = batch.levels.valid[:, 0]
    scores = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, -1.0)
    best = scores.topk(min(count, valid.shape[1]), dim=-1)
    return batch.roots.gather(1, best.indices) + 1, best.values >= 0


def _are_best(logits: Tensor, labels: Tensor) -> Tensor:
    """[N] whether no logit is above the label's; much faster on a CPU than `argmax`.

    With mixed precision some logits are equal, so it is true a little more often.
    """
    return logits.gather(1, labels[:, None])[:, 0] >= logits.amax(-1)


def _labels(batch: Batch, places: Tensor) -> tuple[Tensor, Tensor]:
    """[B, P, k] the tokens at these places of the texts, and whether there are any."""
    return _tokens_at(batch, places), places <= batch.lengths[:, None, None]


def _tokens_at(batch: Batch, places: Tensor) -> Tensor:
    """[B, P, k] the tokens at these places of the texts; behind a text, any."""
    within = places.clamp(max=batch.tokens.shape[1] - 1)
    return batch.tokens.gather(1, within.flatten(1)).view_as(within)


def some_of(places: Tensor, counts: Tensor) -> Tensor:
    """[..., k] a random choice of `counts` [...] of the true `places` [..., k]."""
    scores = torch.rand(places.shape, device=places.device).masked_fill(~places, -1.0)
    ranks = scores.argsort(-1, descending=True).argsort(-1)
    return (ranks < counts[..., None]) & places
