"""Training of a target that predicts a block of tokens after padding, for method `pad`.

After the text up to position t stand k padding tokens at positions t + 1 to t + k. The i-th of
them learns the distribution p of the target for position t + 1 + i, as in semi-autoregressive
fine-tuning (SPACE, Yi et al., arXiv 2402.11809). PaSS (Monea et al., arXiv 2311.13581) learns the
embedding of such tokens only; here the whole copy of the target learns:

    loss = L_own + lambda sum_k decay^k L_k

for the loss L_own of the copy's own distribution, and L_k of the k-th padding token. One pass
computes the text and many blocks after it: every block sees the text before it and itself.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

import torch
from annotated_types import Ge, Gt, Le
from pydantic import FiniteFloat
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tokenleap.core.config import Config
from tokenleap.drafters.heads.probe import Probe, Seen
from tokenleap.drafters.padding import MOST_PADDING, block_nodes, write_pass_tokens
from tokenleap.errors import ConfigError
from tokenleap.runtime.inputs import FULL, ExtendedEmbedding, windows_by_kind
from tokenleap.training.batches import Batch, Levels
from tokenleap.training.distill import decoder, embedding, output_layer, target_tokenizer
from tokenleap.training.method import (
    LOSSES,
    HeadParts,
    Learnt,
    Loss,
    LossName,
    Trainee,
    TrainingMethod,
    at_roots,
)
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.tuned import TUNING_RATES, TargetTrainee, TuningMethod, copy_of_target

__all__ = [
    "BlockTraining",
    "PadTrainee",
    "PadTraining",
    "PadTrainingOptions",
    "PassTrainee",
    "PassTraining",
    "PassTrainingOptions",
    "States",
    "block_levels",
    "padding_token",
    "pass_with_blocks",
    "some_blocks",
]


# Blocks of padding after many places of a text, in one pass of a language model.
#
# `pad` and `pass` train on them. After the text up to a root stand k padding tokens. Each of them
# sees the text up to the root and the padding before it, as it will when it drafts. A pass has
# blocks after some of the roots, so that they are together about as long as the text.


class States(Protocol):
    """A language model: [B, N] tokens -> [B, N, E] hidden states after the final norm."""

    def __call__(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Compute them; `arguments` are those of Transformers' models."""
        ...


class BlockTraining(TrainingMethod):
    """A method whose drafter drafts by blocks of padding."""

    @property
    @abstractmethod
    def block_length(self) -> int:
        """Tokens of a block, as it is trained."""

    @property
    def nodes_per_token(self) -> int:
        """See `TrainingMethod.nodes_per_token`: a block stands after the root and every token."""
        return block_nodes(self.served_tokens) // self.served_tokens

    def serving(self, folder: Path) -> dict[str, Any]:
        """See `TrainingMethod.serving`: blocks as long as those that were learnt."""
        nodes = block_nodes(self.block_length)
        return {**super().serving(folder), "num_speculative_tokens": nodes}


def block_levels(
    states: States, config: PreTrainedConfig, batch: Batch, padding: Tensor
) -> Iterator[Tensor]:
    """The states at the padding after every root, computed in several passes.

    Args:
        padding: [k] the tokens of a block.
    """
    apart = _apart(batch, len(padding))
    passes = [
        pass_with_blocks(states, config, _some(batch, n, apart), padding)[1] for n in range(apart)
    ]
    found = passes[0].new_zeros(*batch.roots.shape, *passes[0].shape[2:])
    for first, each in enumerate(passes):
        found[:, first::apart] = each
    yield from found.unbind(2)


def some_blocks(batch: Batch, num_pads: int) -> Batch:
    """The same text with as many of its roots, drawn at random, as one pass has blocks for."""
    apart = _apart(batch, num_pads)
    return _some(batch, int(torch.randint(apart, ())), apart)


def pass_with_blocks(
    states: States, config: PreTrainedConfig, batch: Batch, padding: Tensor
) -> tuple[Tensor, Tensor]:
    """[B, T + 1, E] states of the text, and [B, Q, k, E] of the blocks [k] after the roots."""
    size, (rows, blocks) = batch.tokens.shape[1], batch.roots.shape
    own = torch.arange(size, device=batch.tokens.device)
    ahead = 1 + torch.arange(len(padding), device=own.device)
    # Beyond the last token there is nothing to learn, and perhaps no position.
    behind = (batch.roots.unsqueeze(-1) + ahead).clamp(max=size - 1).flatten(1)
    pads = padding.to(own.device).repeat(blocks).expand(rows, -1)
    positions = torch.cat([own.expand(rows, -1), behind], dim=1)
    found = states(
        torch.cat([batch.tokens, pads], dim=1),
        position_ids=positions,
        attention_mask=_masks(_mask(batch.roots, size, len(padding)), positions, config),
    )
    padded = found[:, size:]
    return found[:, :size], padded.reshape(rows, blocks, len(padding), padded.shape[-1])


def _apart(batch: Batch, num_pads: int) -> int:
    """How many roots apart the blocks of a pass are: so that they are as long as the text."""
    return max(1, min(num_pads, batch.roots.shape[1]))


def _some(batch: Batch, first: int, apart: int) -> Batch:
    """The same text with some of its roots."""
    levels = Levels(*(each[:, :, first::apart] for each in batch.levels))
    return batch._replace(roots=batch.roots[:, first::apart], levels=levels)


def _masks(mask: Tensor, positions: Tensor, config: PreTrainedConfig) -> Tensor | dict[str, Tensor]:
    """A mask for layers that see everything, or one for each kind of layers.

    Args:
        mask: [B, 1, S, S] who sees whom without windows.
        positions: [B, S] of all tokens.
    """
    windows = windows_by_kind(config)
    if not windows:
        return mask
    keys = positions[:, None, None, :]
    near = {
        kind: mask & (keys >= window.first(positions)[:, None, :, None])
        for kind, window in windows.items()
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # all layers have the same window
        (found,) = near.values()
        return found
    return {kind: near.get(kind, mask) for kind in (FULL, *kinds)}


def _mask(roots: Tensor, size: int, num_pads: int) -> Tensor:
    """Who sees whom: [B, 1, S, S] for a text of `size` tokens and the blocks after its roots."""
    own = torch.arange(size, device=roots.device)
    text = (own <= own.unsqueeze(-1)).expand(len(roots), -1, -1)  # [B, T + 1, T + 1]
    to_text = (own <= roots.unsqueeze(-1)).repeat_interleave(num_pads, dim=1)
    pads = torch.arange(to_text.shape[1], device=roots.device)
    same = pads // num_pads == (pads // num_pads).unsqueeze(-1)
    to_pads = (same & (pads <= pads.unsqueeze(-1))).expand(len(roots), -1, -1)
    above = torch.cat([text, text.new_zeros(len(roots), size, len(pads))], dim=2)
    below = torch.cat([to_text, to_pads], dim=2)
    return torch.cat([above, below], dim=1).unsqueeze(1)


class PadTrainee(TargetTrainee):
    """A copy of the target that learns to predict after padding."""

    def __init__(
        self,
        lm: PreTrainedModel,
        vocab_size: int,
        loss: Loss,
        pad: int,
        num_pads: int,
        weight: float,
    ) -> None:
        super().__init__(lm, vocab_size, loss)
        self.pad, self.max_levels, self._weight = pad, num_pads, weight
        lm.set_attn_implementation("sdpa")  # it takes masks that say true and false
        self._config = lm.config.get_text_config()

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: the states at the padding after every root, in several passes."""
        return block_levels(self.states, self._config, batch, torch.full((num_levels,), self.pad))

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`; in training, only blocks after some roots are learnt."""
        if not self.training:
            return super().forward(batch, num_levels)
        some = some_blocks(batch, num_levels)
        padding = torch.full((num_levels,), self.pad)
        text, blocks = pass_with_blocks(self.states, self._config, some, padding)
        found = self.learnt(blocks.unbind(2), some)
        own, _ = self.level(at_roots(text, batch.roots + 1), 0, batch)
        first = torch.eye(num_levels, device=own.device)[0]
        return found._replace(losses=self._weight * found.losses + own * first)


def padding_token(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> int:
    """A token that stands for padding and does not occur in text.

    It is the mask or padding token, if it does not end sequences; or the last special token that
    has no other use. Without a tokenizer it is the last one of the vocabulary.
    """
    if tokenizer is None:
        return vocab_size - 1
    named: Any = tokenizer
    used = {named.bos_token_id, named.eos_token_id, named.unk_token_id}
    added = named.added_tokens_decoder.items()
    special = sorted((number for number, token in added if token.special), reverse=True)
    for token in (named.mask_token_id, named.pad_token_id, *special):
        if token is not None and token not in used and token < vocab_size:
            return int(token)
    raise ConfigError(
        "pad_token_id: the tokenizer has no padding token of its own: choose a token that does not "
        "occur in your text."
    )


class PadTrainingOptions(Config):
    """Options of `tokenleap train pad`.

    Args:
        pad_token_id: the padding token; None takes the mask or padding token unless it ends
            texts, or else the last special token without another use.
        num_pads: most tokens of a draft.
        draft_weight: weight of the losses after padding, relative to the copy's own.
        loss: of the drafter's distribution against the target's (docs/training.md).
    """

    pad_token_id: Annotated[int, Ge(0)] | None = None
    num_pads: Annotated[int, Ge(1), Le(MOST_PADDING)] = 4
    draft_weight: Annotated[FiniteFloat, Gt(0)] = 1.0
    loss: LossName = "kl"


class PadTraining(BlockTraining, TuningMethod):
    """Targets that predict after padding."""

    name: ClassVar[str] = "pad"
    summary: ClassVar[str] = "the target itself, so that padding after the text drafts"
    Options: ClassVar[type[Config]] = PadTrainingOptions

    @property
    def block_length(self) -> int:
        return self._options.num_pads

    @property
    def _options(self) -> PadTrainingOptions:
        assert isinstance(self.options, PadTrainingOptions)
        return self.options

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: all padding tokens are learnt from the first step on."""
        reason = "'pad' learns all of a block from the first step on: set num_pads."
        levels = self.block_length
        decided = settings.decided(reason, levels=levels, first_level_share=0.0)
        return decided.preferring(**TUNING_RATES)

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`."""
        options, vocab_size = self._options, parts.embedding.shape[0]
        pad = options.pad_token_id
        if pad is None:
            pad = padding_token(target_tokenizer(parts.name), vocab_size)
        if pad >= vocab_size:
            raise ConfigError(f"pad_token_id: must be 0 to {vocab_size - 1}, got {pad}.")
        loss = LOSSES[options.loss]
        lm = copy_of_target(parts)
        return PadTrainee(lm, vocab_size, loss, pad, options.num_pads, options.draft_weight)

    def notes(self, trainee: TargetTrainee) -> dict[str, Any]:
        """See `TuningMethod.notes`: what `pad` pads with."""
        assert isinstance(trainee, PadTrainee)
        return {"pad_token_id": trainee.pad}


# Training of look-ahead embeddings: PaSS (Monea et al., arXiv 2311.13581).
#
#     loss = sum_k decay^k E[loss(p, q_k)]
#
# After the text up to position t stand the look-ahead tokens [LA]_1 to [LA]_L. The i-th of them
# learns the target's distribution p for position t + 1 + i. Only the L embeddings learn: the target
# stays as it is, and so do its tokens.


class PassTrainee(Trainee):
    """Look-ahead embeddings that are being trained.

    Args:
        lm: a copy of the target. It is changed: its embedding gets the look-ahead tokens.
        rows: [L, E] the embeddings to begin with.
    """

    keeps_logits = False

    def __init__(self, lm: PreTrainedModel, vocab_size: int, loss: Loss, rows: Tensor) -> None:
        super().__init__(torch.arange(vocab_size), vocab_size, loss, len(rows))
        lm.requires_grad_(False)
        lm.set_attn_implementation("sdpa")  # it takes masks that say true and false
        self._config = lm.config.get_text_config()
        extended = ExtendedEmbedding(embedding(lm), rows)
        self.rows, self._first = extended.rows, extended.first
        lm.set_input_embeddings(extended)
        self._lm = [lm]  # in a list: checkpoints need the embeddings only

    @property
    def matrices(self) -> list[nn.Parameter]:
        """See `Trainee.matrices`: embeddings are none."""
        return []

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        """See `Trainee.outputs`: the states at the look-ahead tokens after every root."""
        return block_levels(self._states, self._config, batch, self._tokens(num_levels))

    def forward(self, batch: Batch, num_levels: int) -> Learnt:
        """See `Trainee.forward`; in training, only blocks after some roots are learnt."""
        if not self.training:
            return super().forward(batch, num_levels)
        some = some_blocks(batch, num_levels)
        _, blocks = pass_with_blocks(self._states, self._config, some, self._tokens(num_levels))
        return self.learnt(blocks.unbind(2), some)

    def _tokens(self, count: int) -> Tensor:
        """[k] ids of the first look-ahead tokens."""
        return torch.arange(self._first, self._first + count)

    def _states(self, tokens: Tensor, **arguments: Any) -> Tensor:
        lm: Any = self._lm[0]
        lm.to(self.rows.device)
        found: Tensor = decoder(lm)(input_ids=tokens, use_cache=False, **arguments)[0]
        return found

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        """See `Trainee.logits`: the target's output layer."""
        logits: Tensor = output_layer(self._lm[0])(outputs)
        return logits[..., : len(self.draft_tokens)].float()


class PassTrainingOptions(Config):
    """Options of `tokenleap train pass`.

    Args:
        num_tokens: look-ahead embeddings, and most tokens of a draft.
        loss: of the drafter's distribution against the target's (docs/training.md).
    """

    num_tokens: Annotated[int, Ge(1), Le(MOST_PADDING)] = 4
    loss: LossName = "kl"


class PassTraining(BlockTraining):
    """Look-ahead embeddings."""

    name: ClassVar[str] = "pass"
    summary: ClassVar[str] = "embeddings after the text, and nothing else (PaSS)"
    Options: ClassVar[type[Config]] = PassTrainingOptions

    @property
    def _options(self) -> PassTrainingOptions:
        assert isinstance(self.options, PassTrainingOptions)
        return self.options

    @property
    def draft_vocab_size(self) -> int:
        """See `TrainingMethod.draft_vocab_size`: no token is left out."""
        return sys.maxsize

    @property
    def block_length(self) -> int:
        return self._options.num_tokens

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """See `TrainingMethod.adapted`: all embeddings are learnt from the first step on."""
        reason = "'pass' learns all of its embeddings from the first step on: set num_tokens."
        levels = self.block_length
        decided = settings.decided(reason, levels=levels, first_level_share=0.0)
        of_matrices = (
            "it is for matrices, and 'pass' learns vectors only: remove it, or set "
            "vector_learning_rate."
        )
        settings.refuse(of_matrices, "optimizer", "learning_rate", "weight_decay")
        return decided.preferring(vector_learning_rate=_RATE)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """See `TrainingMethod.layers`: the copy of the target computes its states itself."""
        return ()

    def trainee(self, parts: HeadParts) -> Trainee:
        """See `TrainingMethod.trainee`; the embeddings begin like random tokens of the target."""
        options, (vocab_size, size) = self._options, parts.embedding.shape
        spread, mean = torch.std_mean(parts.embedding.float().cpu(), dim=0)
        rows = mean + spread * torch.randn(options.num_tokens, size)
        return PassTrainee(copy_of_target(parts), vocab_size, LOSSES[options.loss], rows)

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        return Probe.of(seen).note()

    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        assert isinstance(trainee, PassTrainee)
        write_pass_tokens(folder, trainee.rows, len(parts.embedding), parts.verifier, notes)


_RATE = 3e-3
"""Default learning rate: there are so few weights that each may go far."""
