"""What a Spec-Drafter learns (SpecDec, Xia et al., arXiv 2203.16487, equations 5 to 7).

    loss = -mean over j of log P(y_(p + j) | y_1 ... y_p, x), j = 1 ... k

for a prefix of p tokens, drawn uniformly for each text and step, and k masks behind it, which are
predicted at once. Labels end with the text; masks behind it learn nothing. The loss is smoothed.

Training glances (GLAT, Qian et al., arXiv 2008.07905): of the masks, as many as a share of those
that were wrong in a first pass, drawn at random, get their label in place of the mask and leave the
loss. The share falls from 0.5 to 0.3. Both, and the published values of the options, are as in the
code of the authors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel

from foretoken.core.config import Config
from foretoken.drafters.spec_drafter import SpecDrafterNotes
from foretoken.training.batches import Batch
from foretoken.training.draft_lm import output_layer
from foretoken.training.losses import LOSSES
from foretoken.training.trainee import Learnt, Trainee

__all__ = ["SpecDrafterTrainee", "SpecDrafterTrainingOptions", "some_of", "some_prefixes"]

_HALVED_BELOW = 0.25
_PLACES = 8192
"""Tokens and masks of a pass, when all prefixes of a batch are evaluated."""

_Share = Annotated[FiniteFloat, Ge(0), Lt(1)]


class SpecDrafterTrainingOptions(Config):
    """Options of `foretoken train spec_drafter`.

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
            drawn for each batch. Then short drafts take fewer masks, and less time.
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


class _Blocks(NamedTuple):
    """R texts with a block of k masks behind a prefix of each, W columns.

    Args:
        tokens: [R, W].
        sees: [R, 1, W, W] which columns each column sees: those of a prefix what precedes them,
            those behind it all of the prefix and of the masks.
        masks: [R, k] the columns of the masks.
    """

    tokens: Tensor
    sees: Tensor
    masks: Tensor


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
        """Of one prefix of each text in training; see `Trainee.forward` for evaluations."""
        if not self.training:
            return super().forward(batch, num_levels)
        prefixes = some_prefixes(batch)
        blocks = self._blocks(batch.tokens, prefixes, self._count())
        labels, valid = _labels(batch, blocks.masks)
        source = self._encoded(batch)
        with torch.no_grad():
            guesses = self.logits(self._filled(blocks, *source), 0).argmax(-1)
            wrong = (guesses != labels) & valid
            shown = some_of(valid, (self.shown * wrong.sum(-1)).long())
        tokens = blocks.tokens.scatter(
            1, blocks.masks, torch.where(shown, labels, self.notes.mask_token_id)
        )
        logits = self.logits(self._filled(blocks._replace(tokens=tokens), *source), 0)
        learnt = valid & ~shown
        smoothing = self._options.label_smoothing
        loss = F.cross_entropy(logits[learnt], labels[learnt], label_smoothing=smoothing)
        right = ((guesses == labels) & valid)[:, :1, None]
        return Learnt(loss[None], right, valid[:, 0].sum()[None])

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
            blocks = self._blocks(batch.tokens[row], prefix, self.notes.num_masks)
            filled = self._filled(blocks, states[row], mask[row])
            found[row, place] = filled[:, :num_levels].to(found.dtype)
        for level in range(num_levels):
            yield found[:, :, level]

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """See `Trainee.logits`: without that of the mask."""
        logits = output_layer(self.lm)(outputs)
        bias = getattr(self.lm, "final_logits_bias", None)
        total: Tensor = logits if bias is None else logits + bias[0]
        return total[..., : self.notes.vocab_size].float()

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
        """Masks of the blocks of a training batch."""
        most = self.notes.num_masks
        return int(torch.randint(1, most + 1, ())) if self.notes.fewer_masks else most

    def _blocks(self, tokens: Tensor, prefixes: Tensor, count: int) -> _Blocks:
        """So many masks behind prefixes [R] of texts [R, T]."""
        mask = self.notes.mask_token_id
        columns = torch.arange(int(prefixes.max()) + count, device=tokens.device)
        known = columns < prefixes[:, None]
        kept = F.pad(tokens, (0, count), value=mask)[:, : len(columns)]
        in_order = columns <= columns[:, None]
        in_block = columns < (prefixes + count)[:, None, None]
        sees = torch.where(known[:, :, None], in_order, in_block)
        masks = prefixes[:, None] + columns[:count]
        return _Blocks(torch.where(known, kept, mask), sees[:, None], masks)

    def _filled(self, blocks: _Blocks, states: Tensor, source_mask: Tensor) -> Tensor:
        """[R, k, E] the states of the masks, for R encoded sources."""
        lm: Any = self.lm
        decoder = lm.get_decoder()
        hidden: Tensor = decoder(
            input_ids=blocks.tokens,
            attention_mask=blocks.sees,
            encoder_hidden_states=states,
            encoder_attention_mask=source_mask,
            use_cache=False,
        ).last_hidden_state
        return hidden.gather(1, blocks.masks[..., None].expand(-1, -1, hidden.shape[-1]))


def some_prefixes(batch: Batch) -> Tensor:
    """[B] the length of a prefix of each text, uniform among those in front of a part to learn."""
    counts = batch.levels.valid[:, 0].sum(-1)
    chosen = (torch.rand(len(counts), device=counts.device) * counts).long()
    return batch.roots.gather(1, chosen[:, None])[:, 0] + 1


def _labels(batch: Batch, masks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, k] the tokens at these places of the texts, and whether there are any."""
    valid = masks <= batch.lengths[:, None]
    return batch.tokens.gather(1, masks.clamp(max=batch.tokens.shape[1] - 1)), valid


def some_of(places: Tensor, counts: Tensor) -> Tensor:
    """[B, k] a random choice of `counts` [B] of the true `places` [B, k]."""
    scores = torch.rand(places.shape, device=places.device).masked_fill(~places, -1.0)
    ranks = scores.argsort(-1, descending=True).argsort(-1)
    return (ranks < counts[:, None]) & places
