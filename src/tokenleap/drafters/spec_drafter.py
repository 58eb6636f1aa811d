"""`spec_drafter`: an encoder-decoder of its own fills a block of masks (SpecDec, arXiv 2203.16487).

Xia et al., "Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
Generation". The Spec-Drafter reads the source itself. After the text so far it puts k [MASK]
tokens, each at its own position, so that every drafted token has an attention query of its own
(equation 5). One pass predicts all of them at once (equation 6). The paper's decoder recomputes the
text in every pass. Ours attends to the text causally, so its KV is kept, and a pass computes the
new tokens and the masks; the masks see the text and one another, as in the paper.

`tokenleap train spec_drafter` writes the folder: a Hugging Face model with one token more than the
target, the mask, and `transitions.safetensors` if there are `Transitions`. With a draft vocabulary,
`draft_vocabulary.safetensors` has its tokens, and the output layer is cut to them when the drafter
is loaded. Its `config.json` says how many masks it was trained with, and whether the encoder is its
own. If it is the target's, the folder has an encoder without layers, which is never run: the
drafter's decoder reads what the target's encoder made of the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenleap import models
from tokenleap.core.per_request import PerRequest
from tokenleap.drafters.blocks import MATRIX, TRANSITIONS_FILE, BlockScorer, TokenTransitions
from tokenleap.drafters.heads.folder import (
    CONFIG,
    Verifier,
    check_tensors,
    draft_tokens,
    read_json,
    read_tensors,
    validated,
)
from tokenleap.drafters.heads.probe import check_target
from tokenleap.drafters.heads.shipped import existing_folder
from tokenleap.drafters.models import open_row
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.models.support import check_supported, context_length
from tokenleap.request import Request
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.cpu import check_quantization
from tokenleap.runtime.native.seq2seq import why_not_native_seq2seq
from tokenleap.runtime.passes import Passes, SourceRows
from tokenleap.runtime.target import Target

_LONG = 15
"""From so many masks on, processors with AMX fill them faster in bfloat16 than in int8."""
VOCABULARY_FILE, OFFSETS = "draft_vocabulary.safetensors", "d2t"
"""The file of a draft vocabulary, and its only tensor (see `draft_tokens`)."""
NOTES = "spec_drafter"
"""Where `SpecDrafterNotes` are among the notes on the training in `config.json`."""


@dataclass(frozen=True)
class SpecDrafterNotes:
    """Notes of a folder about its drafter.

    Args:
        fewer_masks: whether it has learnt blocks of fewer masks, too. Then a block has as many as
            the draft has tokens.
        draft_vocab_size: tokens that it can draft; None for all.
    """

    num_masks: Annotated[int, Gt(0)]
    mask_token_id: Annotated[int, Gt(0)]
    vocab_size: Annotated[int, Gt(0)]
    encoder: Literal["own", "target"] = "own"
    fewer_masks: bool = False
    transitions: bool = False
    draft_vocab_size: Annotated[int, Gt(0)] | None = None

    def note(self) -> dict[str, Any]:
        """The entry in `config.json`, among the notes on the training."""
        return {NOTES: asdict(self)}


class MaskScorer(BlockScorer):
    """A model whose passes fill blocks of masks (see `BlockScorer`).

    Args:
        encoder: rows of the model whose encoder it reads; None if the encoder is its own.
        token_ids: [Vd] the target's ids of the tokens that it can draft, ascending; None for all.
    """

    def __init__(
        self,
        model: Passes,
        notes: SpecDrafterNotes,
        encoder: SourceRows | None = None,
        transitions: TokenTransitions | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        super().__init__(model)
        self._notes, self._encoder, self.transitions = notes, encoder, transitions
        self.token_ids = token_ids
        self.prepare_blocks(notes.num_masks)
        self._masks = PerRequest[int]()  # of the next block

    def admit(self, requests: Sequence[Request], num_nodes: int) -> Sequence[Request]:
        """See `OwnModel.admit`; masks take positions, whatever the size of the draft."""
        return super().admit(requests, self.most_depth)

    def pending(self, request: Request) -> list[int]:
        depth = self._depths[request.key] if self._notes.fewer_masks else self.most_depth
        self._masks[request.key] = min(depth, self.room(request))
        return super().pending(request)

    def _open_row(self, request: Request) -> None:
        key, source = request.key, request.source
        encoded = None
        if self._encoder is not None and source is not None:
            encoded = self._encoder.encoded(key, source)
        open_row(self._model, key, source, encoded)

    def block(self, keys: Sequence[int], pending: Sequence[Sequence[int]]) -> list[Tensor]:
        """See `BlockScorer.block`: as many masks as in training, if they fit."""
        masks = [self._masks[key] for key in keys]
        found = self._model.fill(keys, pending, masks, self._notes.mask_token_id)
        return [logits[:, : self._notes.vocab_size] for logits in found]


def load_spec_drafter(
    path: str | Path, target: Target, quantization: str | None = None
) -> tuple[MaskScorer, Passes]:
    """The drafter of a folder for a target, and its KV rows."""
    folder = existing_folder(path)
    written = read_json(folder / CONFIG).get("tokenleap")
    given: Mapping[str, Any] = written if isinstance(written, dict) else {}
    if NOTES not in given:
        raise ModelError(
            f"{folder / CONFIG} does not describe a Spec-Drafter: is this a folder that `tokenleap "
            "train spec_drafter` has written?"
        )
    notes = validated(SpecDrafterNotes, given[NOTES], folder / CONFIG)
    model: Any = models.load_model(folder, target.dtype, target.device, fills_masks=True)
    check_supported(model, length := context_length(model.config, None))
    if model.get_output_embeddings().out_features <= notes.mask_token_id:
        raise ModelError(f"{folder / CONFIG}: the drafter has no token {notes.mask_token_id}.")
    token_ids = None
    if notes.draft_vocab_size is not None:
        token_ids = _cut_to_vocabulary(model, folder / VOCABULARY_FILE, notes).to(target.device)
    transitions = None
    if notes.transitions:
        rows = model.get_output_embeddings().weight.detach()[: notes.vocab_size]
        transitions = _transitions(folder / TRANSITIONS_FILE, rows)
    network = network_for(model, _quantization(model, notes, target, quantization), target.runtime)
    passes = Passes(network, length, target.dtype, target.device)
    _check_tokens(folder, passes, notes, target)
    passes.allocate()
    check_target(folder, Verifier(str(given.get("target", "another model"))), given, target)
    if notes.encoder == "own":
        return MaskScorer(passes, notes, None, transitions, token_ids), passes
    assert target.source_network is not None, "the strategy has checked this"
    scorer = MaskScorer(passes, notes, target, transitions, token_ids)
    target.source_network.encoder_readers.add(scorer)
    return scorer, passes


def _quantization(
    model: PreTrainedModel, notes: SpecDrafterNotes, target: Target, given: str | None
) -> str | None:
    """Of the drafter's weights. A short draft in int8 takes less time, and is hardly less exact."""
    if given is not None:
        asked = None if given == "none" else given
        check_quantization(asked, target.device, "draft_quantization")
        return asked
    short = notes.fewer_masks or notes.num_masks < _LONG
    native = target.network.name == "native" and why_not_native_seq2seq(model) is None
    faster = short and native and target.dtype == torch.bfloat16
    return target.quantization or ("int8" if faster else None)


def _transitions(path: Path, rows: Tensor) -> TokenTransitions:
    """Those of a file, for a drafter whose output layer has these rows [V, E]."""
    size = rows.shape[1]
    tensors = read_tensors(path)
    check_tensors(path, tensors, {MATRIX: rows.new_empty(size, size)}, "a Spec-Drafter")
    return TokenTransitions(tensors[MATRIX].to(rows.device), rows)


def save_vocabulary(tokens: Tensor, folder: Path) -> None:
    """Write a draft vocabulary [Vd], ascending."""
    save_file({OFFSETS: tokens.cpu() - torch.arange(len(tokens))}, folder / VOCABULARY_FILE)


def _cut_to_vocabulary(model: Any, path: Path, notes: SpecDrafterNotes) -> Tensor:
    """Leave the output layer only the rows of the draft vocabulary of a file; returns that."""
    assert notes.draft_vocab_size is not None
    offsets = read_tensors(path).get(OFFSETS)
    tokens = draft_tokens(path, offsets, notes.draft_vocab_size, notes.vocab_size)
    layer = model.get_output_embeddings()
    for name, values in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(values[tokens], requires_grad=False))
    layer.out_features = len(tokens)
    if (bias := getattr(model, "final_logits_bias", None)) is not None:
        model.final_logits_bias = bias[:, tokens]
    return tokens


def _check_tokens(folder: Path, model: Passes, notes: SpecDrafterNotes, target: Target) -> None:
    """Refuse a drafter that cannot read or write what the target does."""
    own, theirs = model.source_network, target.source_network
    assert theirs is not None, "the strategy has checked this"
    if own is None:
        raise ModelError(f"{folder}: this is no encoder-decoder.")
    if theirs.num_bins is not None:
        raise CompatibilityError("method 'spec_drafter' reads text, and the target reads audio.")
    reads = notes.encoder == "target" or own.source_vocab_size >= theirs.source_vocab_size
    if notes.vocab_size != target.vocab_size or not reads:
        raise CompatibilityError(
            f"{folder}: this drafter was trained for a target with {notes.vocab_size} tokens, and "
            f"this one has {target.vocab_size}: train one for this model."
        )
    if notes.encoder == "target" and own.encoded_size != theirs.encoded_size:
        raise CompatibilityError(
            f"{folder}: this drafter reads encoders of width {own.encoded_size}, and that of this "
            f"target has {theirs.encoded_size}: train one for this model."
        )
