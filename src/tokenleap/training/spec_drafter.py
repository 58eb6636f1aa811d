"""Training of Spec-Drafters (SpecDec, Xia et al., arXiv 2203.16487, equations 5 to 7).

    loss = -mean over j of log P(y_(p + j) | y_1 ... y_p, x), j = 1 ... k

for a prefix of p tokens, drawn uniformly for each text and step, and k masks after it, which are
predicted at once. Labels end with the text; masks after it learn nothing. The loss is smoothed.
Beyond the paper, a step can learn from several prefixes of a text, each with masks of its own, and
with `Transitions`, y_(p + j - 1) is given, too.

Training glances (GLAT, Qian et al., arXiv 2008.07905): of the masks, as many as a share of those
that were wrong in a first pass, drawn at random, get their label in place of the mask and leave
the loss. The share falls from 0.5 to 0.3. Both, and the published values of the options, are as
in the code of the authors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSeq2SeqLM, BartConfig, PreTrainedConfig, PreTrainedModel

from tokenleap.drafters.blocks import Transitions, save_transitions
from tokenleap.drafters.spec_drafter import SpecDrafterNotes, save_vocabulary
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.runtime.seq2seq.structure import position_table
from tokenleap.training.distill import output_layer, write_lm
from tokenleap.training.features import Batch
from tokenleap.training.method import Plan, TrainingMethod, TrainingSettings
from tokenleap.training.trainee import LOSSES, HeadParts, Learnt, Trainee, block_mask

_HALVED_BELOW = 0.25
_LOGITS = 1 << 25
"""Logits of one part of a step; those of a batch of the published size are one part if there are
few tokens."""
_PLACES = 8192
"""Tokens and masks of a pass, when all prefixes of a batch are evaluated."""

_Share = Annotated[FiniteFloat, Ge(0), Lt(1)]

_UPDATES, _WARMUP = 300_000, 10_000
"""Published steps."""


class SpecDrafterTraining(TrainingMethod):
    """An encoder-decoder that fills blocks of masks.

    Args:
        num_masks: k, the tokens of a block: most tokens of a draft.
        shape: layers of the drafter, for a target with E encoder and D decoder layers: `full` is
            2E + 2, `balanced` E + 1 and D + 1, `small` E + 2.
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
        draft_vocab_size: most tokens that it can draft: those that the target writes most often;
            null for all. Each pass of the drafter then takes less time, where its vocabulary is
            large.
    """

    name: ClassVar[str] = "spec_drafter"
    summary: ClassVar[str] = "an encoder-decoder that fills a block of masks (SpecDec)"
    for_sources: ClassVar[bool | None] = True

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
    draft_vocab_size: Annotated[int, Ge(1)] | None = None

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
        return self.size < _HALVED_BELOW and self.encoder == "own"

    @property
    def plan(self) -> Plan:
        return Plan(
            given_answers=self.answers == "fixed",
            beam_width=5 if self.answers == "beam" else 1,
            reads_encoder=self.encoder == "target",
            served_tokens=self.num_masks,
            draft_vocab_size=self.draft_vocab_size,
        )

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """The published values, scaled by `size`."""
        reason = "a block of masks is learnt at once: remove it."
        given, size = settings.model_fields_set, self.size
        steps = {} if "epochs" in given else {"max_steps": max(1, round(_UPDATES * size))}
        if "warmup" not in given:
            steps["warmup_steps"] = max(1, round(_WARMUP * size))
        return settings.decided(reason, levels=1, first_level_share=0.0).preferring(
            optimizer="adamw",
            betas=(0.9, 0.999),
            learning_rate=5e-4,
            vector_learning_rate=5e-4,
            schedule="inverse_sqrt",
            accumulation=4,
            max_grad_norm=5.0,
            evaluate_every=max(100, round(1000 * size)),
            average=10,
            patience=0,
            **steps,
        )

    def trainee(self, parts: HeadParts) -> SpecDrafterTrainee:
        vocab_size = parts.vocab_size
        lm = new_masked_lm(
            parts.config,
            vocab_size,
            self.num_masks,
            self.shape,
            halved=self.halved,
            dropout=self.dropout,
            own_encoder=self.encoder == "own",
        )
        if parts.embedding.device.type == "cpu":
            # The gradients of PyTorch's fused attention take three times as long on a CPU.
            lm.set_attn_implementation("eager")
        if self.from_target:
            if parts.reload is None:
                raise ConfigError("from_target: load the target by name, or set it to false.")
            copy_target(parts.reload(), lm)
        notes = SpecDrafterNotes(
            self.num_masks,
            vocab_size,
            vocab_size,
            self.encoder,
            fewer_masks=self.fewer_masks,
            transitions=self.transitions,
            draft_vocab_size=None if self.draft_vocab_size is None else len(parts.draft_tokens),
        )
        return SpecDrafterTrainee(lm, notes, self)


# The networks of Spec-Drafters: encoder-decoders with a token for masks.
#
# Masks differ by their positions alone, so the decoder learns its positions, also those of classes
# that keep them fixed (Marian, Pegasus).
#
# A drafter has the class of its target, so that it can start from the target's encoder. T5's
# relative positions cannot tell later masks apart, so drafters of T5 are BARTs.


_WIDTHS = (
    *("d_model", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_SPECIAL = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
)
_T5_POSITIONS = 1024
"""T5 has no limit; the drafter of one does not draft for longer texts."""


def new_masked_lm(
    target: PreTrainedConfig,
    vocab_size: int,
    num_masks: int,
    shape: str,
    *,
    halved: bool = False,
    dropout: float = 0.1,
    own_encoder: bool = True,
) -> PreTrainedModel:
    """A drafter with random weights, in float32.

    Args:
        shape: of a target with E encoder and D decoder layers: `full` has 2E and 2, `balanced`
            E + 1 and D + 1, `small` E and 2.
        own_encoder: whether it has an encoder. Without one, what belongs to an encoder alone has no
            gradients, since nothing reads it.
    """
    config: Any = _like_bart(target)
    encoder, decoder = config.encoder_layers, config.decoder_layers
    shapes = {"full": (2 * encoder, 2), "balanced": (encoder + 1, decoder + 1)}
    config.encoder_layers, config.decoder_layers = shapes.get(shape, (encoder, 2))
    if not own_encoder:
        config.encoder_layers = 0
    config.num_hidden_layers = config.encoder_layers
    config.max_position_embeddings += num_masks
    if getattr(config, "share_encoder_decoder_embeddings", True):
        config.vocab_size = vocab_size + 1
    if getattr(config, "decoder_vocab_size", None) is not None:
        config.decoder_vocab_size = vocab_size + 1
    config.dropout = dropout
    config.encoder_layerdrop = config.decoder_layerdrop = 0.0
    if halved:
        _halve(config)
    kind: Any = AutoModelForSeq2SeqLM
    lm: Any = kind.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if not own_encoder:
        _freeze_encoder(lm)
    positions = lm.get_decoder().embed_positions
    if isinstance(positions, nn.Embedding):
        positions.weight.requires_grad_(True)
        lm._keys_to_ignore_on_save = None  # Marian would leave them out
    return cast(PreTrainedModel, lm)


def _freeze_encoder(lm: Any) -> None:
    """Learn nothing in what neither the decoder nor the output layer reads."""
    read = {
        id(w) for part in (lm.get_decoder(), lm.get_output_embeddings()) for w in part.parameters()
    }
    for weight in lm.parameters():
        weight.requires_grad_(id(weight) in read)


def _like_bart(target: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration with the fields of BART's."""
    if target.model_type == "whisper":
        raise CompatibilityError("a Spec-Drafter reads text, and this target reads audio.")
    if hasattr(target, "encoder_layers"):
        return deepcopy(target)
    given: Any = target
    special: dict[str, Any] = {name: getattr(target, name, None) for name in _SPECIAL}
    return BartConfig(
        vocab_size=given.vocab_size,
        d_model=given.d_model,
        encoder_layers=given.num_layers,
        decoder_layers=given.num_decoder_layers,
        encoder_attention_heads=given.num_heads,
        decoder_attention_heads=given.num_heads,
        encoder_ffn_dim=given.d_ff,
        decoder_ffn_dim=given.d_ff,
        max_position_embeddings=_T5_POSITIONS,
        **special,
    )


def _halve(config: Any) -> None:
    for name in _WIDTHS:
        width = getattr(config, name)
        if width % 2:
            raise ConfigError(f"size: the target's {name} is {width}, which cannot be halved.")
        setattr(config, name, width // 2)


@torch.no_grad()
def copy_target(target: PreTrainedModel, lm: PreTrainedModel) -> None:
    """Start from a target's encoder, embeddings, and some of its decoder layers.

    Decoder layers come from all depths of the target's, the first and the last among them: they
    have learnt which tokens of the source matter, which takes a decoder longest. Further layers
    stay random.
    """
    if type(target) is not type(lm):
        raise CompatibilityError(
            f"from_target: a drafter of {type(target).__name__} is a {type(lm).__name__}, which "
            "cannot have its layers: set it to false."
        )
    given = target.state_dict()
    depths = _spread(lm.config.decoder_layers, target.config.decoder_layers)
    for name, weight in lm.state_dict().items():
        source = _DECODER_LAYER.sub(lambda found: f"{found[1]}{depths[int(found[2])]}.", name)
        if source in given:
            # There is one token more, and there are more positions.
            places = tuple(slice(size) for size in given[source].shape)
            weight[places] = given[source].to(weight)


_DECODER_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.")


def _spread(count: int, depth: int) -> list[int]:
    """So many of `depth` layers, evenly spread; beyond that, layers that are not there."""
    if count > depth:
        return list(range(count))
    return [round(place * (depth - 1) / max(1, count - 1)) for place in range(count)]


class SpecDrafterTrainee(Trainee):
    first_learnt: ClassVar[int] = 1
    evaluated_levels: ClassVar[int] = 10
    keeps_logits: ClassVar[bool] = False

    def __init__(
        self, lm: PreTrainedModel, notes: SpecDrafterNotes, options: SpecDrafterTraining
    ) -> None:
        vocabulary = torch.arange(notes.vocab_size)
        super().__init__(vocabulary, notes.vocab_size, LOSSES["ce"], notes.num_masks)
        self._lm = [lm]  # in a list: its embedding has several names, and a checkpoint needs one
        self.weights = nn.ParameterList(lm.parameters())
        self.transitions = (
            Transitions(output_layer(lm).weight.shape[1]) if notes.transitions else None
        )
        self.tables = [each.weight for each in lm.modules() if isinstance(each, nn.Embedding)]
        self.notes, self._options = notes, options

    @property
    def lm(self) -> PreTrainedModel:
        return self._lm[0]

    def train(self, mode: bool = True) -> Self:
        self.lm.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the drafter's buffers, too."""
        parts: tuple[Any, ...] = (self.lm, super())
        for part in parts:
            part._apply(fn, recurse)
        return self

    @property
    def shown(self) -> float:
        """Share of the wrong masks whose labels are shown: fewer and fewer."""
        (first, last), (step, total) = self._options.glancing, self.step
        return first + (last - first) * step / total

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        count = self._count()
        # Shorter blocks leave room for more prefixes.
        most = self._options.prefixes * self.notes.num_masks // count
        prefixes, drawn = some_prefixes(batch, most)
        rows = mask_rows(batch.tokens, prefixes, count, self.notes.mask_token_id)
        labels = _tokens_at(batch, rows.places)
        valid = drawn[..., None] & (rows.places <= batch.lengths[:, None, None])  # in the text
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
        return F.embedding(tokens, output_layer(self.lm).weight)

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
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
        """Without that of the mask."""
        layer, size = output_layer(self.lm), self.notes.vocab_size
        more = getattr(self.lm, "final_logits_bias", None)
        biases = [layer.bias, None if more is None else more[0]]
        given = [bias[:size] for bias in biases if bias is not None]
        bias = sum(given[1:], given[0]) if given else None
        return F.linear(outputs, layer.weight[:size], bias).float()

    def write(self, parts: HeadParts, folder: Path, notes: Mapping[str, Any]) -> None:
        more: list[Callable[[Path], None]] = []
        if self.transitions is not None:
            more.append(partial(save_transitions, self.transitions))
        if self.notes.draft_vocab_size is not None:
            more.append(partial(save_vocabulary, parts.draft_tokens))
        write_lm(self.lm, parts.name, folder, {**self.notes.note(), **notes}, more)

    def _encoded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, S, E] what the encoder makes of the sources, and [B, S] where they are."""
        columns = torch.arange(batch.sources.shape[1], device=batch.sources.device)
        mask = (columns < batch.source_lengths[:, None]).long()
        if self.notes.encoder == "target":
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
    """Lengths of prefixes of each text, drawn among those before a part to learn.

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


def _tokens_at(batch: Batch, places: Tensor) -> Tensor:
    """[B, P, k] the tokens at these places of the texts; after a text, any."""
    within = places.clamp(max=batch.tokens.shape[1] - 1)
    return batch.tokens.gather(1, within.flatten(1)).view_as(within)


def some_of(places: Tensor, counts: Tensor) -> Tensor:
    """[..., k] a random choice of `counts` [...] of the true `places` [..., k]."""
    scores = torch.rand(places.shape, device=places.device).masked_fill(~places, -1.0)
    ranks = scores.argsort(-1, descending=True).argsort(-1)
    return (ranks < counts[..., None]) & places


# Rows of texts with blocks of masks after several prefixes of each, for Spec-Drafters.
#
# A row has the columns of its text, and after them k masks for each prefix. Text is causal, and
# masks see a prefix and their own block. So the text is computed once for all its blocks, and each
# block gets what it would get alone.


class MaskRows(NamedTuple):
    """R texts of T columns with P blocks of k masks each, W = T + P k columns.

    Args:
        tokens: [R, W].
        positions: [R, W] those of masks continue after their prefix.
        sees: [R, 1, W, W] which columns each column sees.
        places: [R, P, k] the places in the text that masks stand for.
    """

    tokens: Tensor
    positions: Tensor
    sees: Tensor
    places: Tensor

    def showing(self, shown: Tensor, labels: Tensor) -> MaskRows:
        """The same with `labels` [R, P, k] in place of the masks that are `shown`."""
        size = self.tokens.shape[1] - self.places[0].numel()
        masks = self.tokens[:, size:]
        filled = torch.where(shown.flatten(1), labels.flatten(1), masks)
        return self._replace(tokens=torch.cat([self.tokens[:, :size], filled], 1))


def mask_rows(tokens: Tensor, prefixes: Tensor, count: int, mask_token_id: int) -> MaskRows:
    """So many masks after prefixes of texts.

    Args:
        tokens: [R, T].
        prefixes: [R, P] their lengths.
    """
    rows, blocks = prefixes.shape
    text = tokens[:, : int(prefixes.max())]
    size, masks = text.shape[1], blocks * count
    places = prefixes[:, :, None] + torch.arange(count, device=tokens.device)
    own = torch.arange(size, device=tokens.device)
    return MaskRows(
        torch.cat([text, text.new_full((rows, masks), mask_token_id)], 1),
        torch.cat([own.expand(rows, -1), places.flatten(1)], 1),
        block_mask(prefixes, size, count, causal=False),
        places,
    )


def mask_states(lm: Any, rows: MaskRows, encoded: Tensor, source_mask: Tensor) -> Tensor:
    """[R, P, k, E] the states of all masks.

    Args:
        encoded: [R, S, E] what an encoder made of the sources.
        source_mask: [R, S] where they are.
    """
    decoder = lm.get_decoder()
    with _at_positions(lm, decoder, rows):
        hidden: Tensor = decoder(
            input_ids=rows.tokens,
            attention_mask=_additive_mask(rows.sees),
            encoder_hidden_states=encoded,
            encoder_attention_mask=source_mask,
            use_cache=False,
        ).last_hidden_state
    masks = hidden[:, -rows.places[0].numel() :]
    return masks.reshape(*rows.places.shape, masks.shape[-1])


def _additive_mask(sees: Tensor) -> Tensor:
    device = sees.device.type
    low = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if low else torch.float32
    added = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return added.masked_fill_(~sees, torch.finfo(dtype).min)


@contextmanager
def _at_positions(lm: Any, decoder: Any, rows: MaskRows) -> Iterator[None]:
    """Within it, the decoder's tokens are at the positions of these rows.

    Its own forward pass counts columns, and takes no positions.
    """
    module = decoder.embed_positions
    found = F.embedding(rows.positions, position_table(lm, module))
    if not isinstance(module, nn.Embedding):  # M2M100's: padding has none
        found = found.masked_fill((rows.tokens == module.padding_idx)[..., None], 0)
    module.forward = lambda *_given, **_named: found
    try:
        yield
    finally:
        del module.forward  # that of its class is seen again
