"""Training through a copy of the target: early exits, and blocks of padding after the text.

`early_exit` and `pad` change the copy and write it as a new model. Drafts for it are lossless with
respect to it, not to the target that it was made of. That one stays as it is and is the teacher:
its own text and its most probable tokens are what the copy learns, so that the copy changes little
(self-distillation; Cai et al., arXiv 2401.10774, section 2.3.2). `pass` learns a few embeddings
through a frozen copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, model_validator
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tokenleap.drafters.online import LossName
from tokenleap.drafters.padding import MOST_PADDING, block_nodes, write_pass_tokens
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.runtime.cpu import decoder_layers
from tokenleap.runtime.inputs import FULL, ExtendedEmbedding, windows_by_kind
from tokenleap.runtime.target import final_norm
from tokenleap.training.distill import (
    DistillTrainee,
    checked,
    decoder,
    embedding,
    lm_logits,
    target_tokenizer,
)
from tokenleap.training.features import Batch, Levels
from tokenleap.training.method import Plan, TrainingMethod, TrainingSettings
from tokenleap.training.trainee import (
    LOSSES,
    HeadParts,
    Learnt,
    Loss,
    Trainee,
    at_level,
    at_roots,
    block_mask,
)

TUNING_RATES = {"learning_rate": 2e-4, "vector_learning_rate": 1e-4}
"""The default learning rates of a model that has learnt already; see `TrainingSettings`."""

_EMBEDDING_RATE = 3e-3
"""That of a few embeddings: there are so few weights that each may go far."""


class TargetTrainee(DistillTrainee):
    """A copy of the target that learns from it.

    Level k of a draft is its own distribution at the position of the k-th token, so level 0 is what
    has to stay as it was.
    """

    keeps_logits = False


def copy_of_target(parts: HeadParts) -> PreTrainedModel:
    """The target's Transformers model once more, in float32 and ready to be trained."""
    if parts.reload is None:
        raise CompatibilityError(
            "what changes the target trains a copy of it, which has to be loaded: give a folder or "
            "an alias, not a loaded model."
        )
    lm: Any = parts.reload()
    return checked(lm.float().requires_grad_(True), parts.name)


# Training of a target whose first layers draft: LayerSkip (Elhoushi et al., arXiv 2404.16710).
#
# Layer l of L (from 0) is left out for a conversation with the probability (section 4.1)
#
#     p(l, t) = S(t) D(l) p_max,   D(l) = e^(l ln 2 / (L - 1)) - 1,
#
# at step t of T, with S(t) = 1 (`constant`) or e^(t ln 2 / (T - 1)) - 1 (`exponential`). The loss
# is
#
#     sum_l w(t, l) E[loss(p, q_l)],   w(t, l) = C(t, l) e(l) / sum_i C(t, i) e(i),
#
# over the exits: q_l is what final norm and output layer make of the state after layer l, and
#
#     e(l) = s (0 + 1 + ... + l) for l < L - 1,   e(L - 1) = L - 1 + s (0 + 1 + ... + (L - 2)).
#
# The curriculum C chooses exits: every R-th layer, another one in each step (`rotational`), or all
# from layer L - 1 down to one that moves to layer 0 in the first half of the steps (`gradual`). The
# last layer is always among them. The paper's loss is `ce`; `kl` keeps the target's distribution.


class EarlyExitTrainee(TargetTrainee):
    def __init__(
        self, lm: PreTrainedModel, vocab_size: int, num_layers: int, options: EarlyExitTraining
    ) -> None:
        super().__init__(lm, vocab_size, LOSSES[options.loss])
        self._options, self._num_layers = options, num_layers
        self._exit_layer = options.exit_layer or num_layers // 2

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        drafts = self._exits(batch.tokens, [self._exit_layer - 1])[0]
        for level in range(num_levels):
            yield at_level(drafts, batch, level)

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        weights = self._options.learnt_exits(self._num_layers, *self.step)
        dropout = self._options.dropout(self._num_layers, *self.step)
        wanted = [self._exit_layer - 1, *weights]
        drafts, *exits = (
            at_roots(each, batch.roots + 1) for each in self._exits(batch.tokens, wanted, dropout)
        )
        with torch.no_grad():
            _, right = self.level(drafts, 0, batch)
        losses = [self.level(each, 0, batch)[0] for each in exits]
        loss = sum(weight * each for weight, each in zip(weights.values(), losses, strict=True))
        assert isinstance(loss, Tensor)
        counts = batch.levels.valid[:, :1].sum((0, 2))
        return Learnt(loss.unsqueeze(0), right.unsqueeze(1), counts)

    def _exits(
        self, tokens: Tensor, layers: Sequence[int], dropout: Tensor | None = None
    ) -> list[Tensor]:
        """[B, T, E] after the final norm, after each of these layers."""
        norm, stack = final_norm(self.lm), decoder_layers(self.lm)
        assert norm is not None
        with _recorded(stack, _dropped(dropout, len(tokens))) as found:
            self.states(tokens)
        return [norm(found[layer]) for layer in layers]


def _dropped(dropout: Tensor | None, size: int) -> Tensor | None:
    """[L, B] whether a layer is left out for a conversation; drawn on the CPU on every device."""
    return None if dropout is None else torch.rand(len(dropout), size) < dropout.unsqueeze(1)


@contextmanager
def _recorded(stack: nn.ModuleList, dropped: Tensor | None) -> Iterator[list[Tensor]]:
    """While a model runs, leave layers out for some conversations, and record what follows each.

    Args:
        dropped: [L, B] whether a layer is left out; None leaves nothing out.
    """
    found: list[Tensor] = []

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entered = args[0] if args else kwargs["hidden_states"]
        left = output[0] if isinstance(output, tuple) else output
        if dropped is not None:
            out = dropped[len(found)].to(left.device)[:, None, None]
            left = torch.where(out, entered, left)
        found.append(left)
        return (left, *output[1:]) if isinstance(output, tuple) else left

    hooks = [layer.register_forward_hook(after, with_kwargs=True) for layer in stack]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class EarlyExitTraining(TrainingMethod):
    """Targets whose first layers draft.

    Args:
        exit_layer: layers that will draft; None means half of them, as in method `early_exit`.
            Training is the same for all of them.
        max_dropout: how often the last layer is left out; earlier ones less often,
            exponentially.
        dropout_growth: whether dropout stays as it is (`constant`) or grows with the steps, for a
            model from scratch (`exponential`).
        exit_scale: weight of the exits, relative to the last layer.
        exits: those that a step learns: every `rotation`-th layer, another one each time
            (`rotational`), or more and more from the last one down (`gradual`).
        rotation: of `rotational` exits; None means a quarter of the layers.
        loss: of the drafter's distribution against the target's (docs/training.md).
    """

    name: ClassVar[str] = "early_exit"
    summary: ClassVar[str] = "the target itself, so that its first layers draft (LayerSkip)"
    tunes_target: ClassVar[bool] = True

    exit_layer: Annotated[int, Ge(1)] | None = None
    max_dropout: Annotated[FiniteFloat, Ge(0), Lt(1)] = 0.1
    dropout_growth: Literal["constant", "exponential"] = "constant"
    exit_scale: Annotated[FiniteFloat, Gt(0)] = 0.2
    exits: Literal["rotational", "gradual"] = "rotational"
    rotation: Annotated[int, Ge(1)] | None = None
    loss: LossName = "kl"

    @model_validator(mode="after")
    def _rotation_is_used(self) -> Self:
        if self.rotation is not None and self.exits != "rotational":
            raise ValueError("rotation: the exits are 'gradual': remove it.")
        return self

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        reason = "all levels of a draft come from the same exit: remove it."
        decided = settings.decided(reason, levels=1, first_level_share=0.0, decay=1.0)
        return decided.preferring(**TUNING_RATES)

    def trainee(self, parts: HeadParts) -> Trainee:
        count = parts.num_layers
        for name in ("exit_layer", "rotation"):
            if (getattr(self, name) or 1) >= count:
                raise ConfigError(
                    f"{name}: must be below the {count} layers of the target: lower it."
                )
        if parts.final_norm is None:
            raise CompatibilityError(
                "early exits need the final norm, and this architecture's is not known."
            )
        return EarlyExitTrainee(copy_of_target(parts), parts.vocab_size, count, self)

    def dropout(self, num_layers: int, step: int, total: int) -> Tensor:
        """[L] p(l, t)."""
        layers = torch.arange(num_layers, dtype=torch.float32)
        over_layers = (layers * log(2) / max(1, num_layers - 1)).exp() - 1
        grows = self.dropout_growth == "exponential"
        over_time = 2 ** (step / max(1, total - 1)) - 1 if grows else 1.0
        return over_time * self.max_dropout * over_layers

    def learnt_exits(self, num_layers: int, step: int, total: int) -> dict[int, float]:
        """Layer -> w(t, l), for the layers whose exits are learnt."""
        last = num_layers - 1
        if self.exits == "gradual":
            chosen = range(max(0, last - 2 * num_layers * step // max(1, total)), last)
        else:
            rotation = self.rotation or max(1, num_layers // 4)
            chosen = range(-step % rotation, last, rotation)
        weights = {layer: self.exit_scale * layer * (layer + 1) / 2 for layer in chosen}
        weights[last] = last + self.exit_scale * (last - 1) * last / 2
        total_weight = sum(weights.values())
        return {layer: weight / total_weight for layer, weight in weights.items() if weight}

    def serving(self, folder: Path) -> dict[str, Any]:
        chosen = {} if self.exit_layer is None else {"exit_layer": self.exit_layer}
        return {"method": self.name, **chosen}


# Blocks of padding after many places of a text, in one pass of a language model.
#
# After the text up to position t, k padding tokens have positions t + 1 to t + k. The i-th of them
# learns the distribution p of the target for position t + 1 + i. `pad` trains the whole copy, as in
# semi-autoregressive fine-tuning (SPACE, Yi et al., arXiv 2402.11809):
#
#     loss = L_own + lambda sum_k decay^k L_k
#
# for the loss L_own of the copy's own distribution, and L_k of the k-th padding token. `pass`
# (PaSS, Monea et al., arXiv 2311.13581) learns the embeddings of k look-ahead tokens only:
#
#     loss = sum_k decay^k E[loss(p, q_k)]
#
# Each padding token sees the text up to the root and the padding before it, as it will when it
# drafts. A pass has blocks after some of the roots, so that they are together about as long as the
# text.


class _States(Protocol):
    """A language model: [B, N] tokens -> [B, N, E] hidden states after the final norm."""

    def __call__(self, tokens: Tensor, **arguments: Any) -> Tensor: ...


def _block_levels(
    states: _States, config: PreTrainedConfig, batch: Batch, padding: Tensor
) -> Iterator[Tensor]:
    """The states at the padding after every root, computed in several passes.

    Args:
        padding: [k] the tokens of a block.
    """
    apart = _apart(batch, len(padding))
    passes = [
        _pass_with_blocks(states, config, _some(batch, n, apart), padding)[1] for n in range(apart)
    ]
    found = passes[0].new_zeros(*batch.roots.shape, *passes[0].shape[2:])
    for first, each in enumerate(passes):
        found[:, first::apart] = each
    yield from found.unbind(2)


def _some_blocks(batch: Batch, num_pads: int) -> Batch:
    """The same text with as many of its roots, drawn at random, as one pass has blocks for."""
    apart = _apart(batch, num_pads)
    return _some(batch, int(torch.randint(apart, ())), apart)


def _pass_with_blocks(
    states: _States, config: PreTrainedConfig, batch: Batch, padding: Tensor
) -> tuple[Tensor, Tensor]:
    """[B, T + 1, E] states of the text, and [B, Q, k, E] of the blocks [k] after the roots."""
    size, (rows, blocks) = batch.tokens.shape[1], batch.roots.shape
    own = torch.arange(size, device=batch.tokens.device)
    ahead = 1 + torch.arange(len(padding), device=own.device)
    # Beyond the last token there is nothing to learn, and perhaps no position.
    after = (batch.roots.unsqueeze(-1) + ahead).clamp(max=size - 1).flatten(1)
    pads = padding.to(own.device).repeat(blocks).expand(rows, -1)
    positions = torch.cat([own.expand(rows, -1), after], dim=1)
    mask = block_mask(batch.roots + 1, size, len(padding), causal=True)
    found = states(
        torch.cat([batch.tokens, pads], dim=1),
        position_ids=positions,
        attention_mask=_masks(mask, positions, config),
    )
    padded = found[:, size:]
    return found[:, :size], padded.reshape(rows, blocks, len(padding), padded.shape[-1])


def _apart(batch: Batch, num_pads: int) -> int:
    """How many roots apart the blocks of a pass are: so that they are as long as the text."""
    return max(1, min(num_pads, batch.roots.shape[1]))


def _some(batch: Batch, first: int, apart: int) -> Batch:
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


class PadTrainee(TargetTrainee):
    def __init__(
        self, lm: PreTrainedModel, vocab_size: int, pad: int, options: PadTraining
    ) -> None:
        super().__init__(lm, vocab_size, LOSSES[options.loss])
        self.pad, self.max_levels, self._weight = pad, options.num_pads, options.draft_weight
        self.notes = {"pad_token_id": pad}
        lm.set_attn_implementation("sdpa")  # it takes masks that say true and false
        self._config = lm.config.get_text_config()

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        return _block_levels(self.states, self._config, batch, self._padding(num_levels))

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        """Blocks after some roots, and the whole text."""
        some, padding = _some_blocks(batch, num_levels), self._padding(num_levels)
        text, blocks = _pass_with_blocks(self.states, self._config, some, padding)
        found = self.learnt(blocks.unbind(2), some)
        own, _ = self.level(at_roots(text, batch.roots + 1), 0, batch)
        first = torch.eye(num_levels, device=own.device)[0]
        return found._replace(losses=self._weight * found.losses + own * first)

    def _padding(self, count: int) -> Tensor:
        return torch.full((count,), self.pad)


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


class _BlockTraining(TrainingMethod):
    """Drafters that draft by blocks of padding.

    Args:
        loss: of the drafter's distribution against the target's (docs/training.md).
    """

    loss: LossName = "kl"

    @property
    def plan(self) -> Plan:
        """A block stands after the root and every token."""
        return Plan(nodes_per_token=block_nodes(4) // 4)


class PadTraining(_BlockTraining):
    """Targets that predict after padding.

    Args:
        pad_token_id: the padding token; None takes the mask or padding token unless it ends
            texts, or else the last special token without another use.
        num_pads: most tokens of a draft.
        draft_weight: weight of the losses after padding, relative to the copy's own.
    """

    name: ClassVar[str] = "pad"
    summary: ClassVar[str] = "the target itself, so that padding after the text drafts"
    tunes_target: ClassVar[bool] = True

    pad_token_id: Annotated[int, Ge(0)] | None = None
    num_pads: Annotated[int, Ge(1), Le(MOST_PADDING)] = 4
    draft_weight: Annotated[FiniteFloat, Gt(0)] = 1.0

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        reason = "'pad' learns all of a block from the first step on: set num_pads."
        decided = settings.decided(reason, levels=self.num_pads, first_level_share=0.0)
        return decided.preferring(**TUNING_RATES)

    def trainee(self, parts: HeadParts) -> Trainee:
        vocab_size, pad = parts.vocab_size, self.pad_token_id
        if pad is None:
            pad = padding_token(target_tokenizer(parts.name), vocab_size)
        if pad >= vocab_size:
            raise ConfigError(f"pad_token_id: must be 0 to {vocab_size - 1}, got {pad}.")
        return PadTrainee(copy_of_target(parts), vocab_size, pad, self)

    def serving(self, folder: Path) -> dict[str, Any]:
        return {"method": self.name, "num_speculative_tokens": block_nodes(self.num_pads)}


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
        self.tables = (extended.rows,)
        self._lm = [lm]  # in a list: checkpoints need the embeddings only

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        return _block_levels(self._states, self._config, batch, self._tokens(num_levels))

    def learn(self, batch: Batch, num_levels: int) -> Learnt:
        some = _some_blocks(batch, num_levels)
        _, blocks = _pass_with_blocks(self._states, self._config, some, self._tokens(num_levels))
        return self.learnt(blocks.unbind(2), some)

    def _tokens(self, count: int) -> Tensor:
        return torch.arange(self._first, self._first + count)

    def _states(self, tokens: Tensor, **arguments: Any) -> Tensor:
        lm: Any = self._lm[0]
        lm.to(self.rows.device)
        found: Tensor = decoder(lm)(input_ids=tokens, use_cache=False, **arguments)[0]
        return found

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        return lm_logits(self._lm[0], outputs, len(self.draft_tokens))

    def write(self, parts: HeadParts, folder: Path, notes: Mapping[str, Any]) -> None:
        write_pass_tokens(folder, self.rows, parts.vocab_size, parts.verifier, notes)


class PassTraining(_BlockTraining):
    """Look-ahead embeddings.

    Args:
        num_tokens: look-ahead embeddings, and most tokens of a draft.
    """

    name: ClassVar[str] = "pass"
    summary: ClassVar[str] = "embeddings after the text, and nothing else (PaSS)"

    num_tokens: Annotated[int, Ge(1), Le(MOST_PADDING)] = 4

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        reason = "'pass' learns all of its embeddings from the first step on: set num_tokens."
        decided = settings.decided(reason, levels=self.num_tokens, first_level_share=0.0)
        of_matrices = (
            "it is for matrices, and 'pass' learns vectors only: remove it, or set "
            "vector_learning_rate."
        )
        settings.refuse(of_matrices, "optimizer", "learning_rate", "weight_decay")
        return decided.preferring(vector_learning_rate=_EMBEDDING_RATE)

    def trainee(self, parts: HeadParts) -> Trainee:
        """The embeddings begin like random tokens of the target."""
        spread, mean = torch.std_mean(parts.embedding.float().cpu(), dim=0)
        rows = mean + spread * torch.randn(self.num_tokens, len(mean))
        return PassTrainee(copy_of_target(parts), parts.vocab_size, LOSSES[self.loss], rows)

    def serving(self, folder: Path) -> dict[str, Any]:
        nodes = block_nodes(self.num_tokens)
        return {**super().serving(folder), "num_speculative_tokens": nodes}
