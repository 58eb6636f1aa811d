"""Tiny Spec-Drafters with random weights, for the encoder-decoders of `tiny_seq2seq`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.heads import lasting_folder
from tests.tiny_seq2seq import VOCAB_SIZE, seq2seq_config
from tokenleap.drafters.blocks import Transitions, save_transitions
from tokenleap.drafters.spec_drafter import SpecDrafterNotes, save_vocabulary
from tokenleap.training.distill import write_lm
from tokenleap.training.spec_drafter import new_masked_lm


def spec_drafter_of(
    name: str = "bart",
    num_masks: int = 5,
    shape: str = "small",
    seed: int = 0,
    encoder: Literal["own", "target"] = "own",
    *,
    fewer_masks: bool = False,
    transitions: bool = False,
    draft_vocab_size: int | None = None,
) -> tuple[PreTrainedModel, SpecDrafterNotes]:
    """A Spec-Drafter with random weights for one of `SEQ2SEQ`."""
    torch.manual_seed(seed)
    config, own_encoder = seq2seq_config(name), encoder == "own"
    lm = new_masked_lm(config, VOCAB_SIZE, num_masks, shape, own_encoder=own_encoder)
    for parameter in lm.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    lm.train(False)
    sizes = (num_masks, VOCAB_SIZE, VOCAB_SIZE)
    return lm, SpecDrafterNotes(*sizes, encoder, fewer_masks, transitions, draft_vocab_size)


def random_vocabulary(size: int) -> Tensor:
    """Some tokens of the target's."""
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    return order[:size].sort().values


def random_transitions(lm: Any, seed: int = 0) -> Transitions:
    """Transitions for a Spec-Drafter that change most of its drafts."""
    found = Transitions(size := lm.get_output_embeddings().weight.shape[1])
    generator = torch.Generator().manual_seed(seed)
    found.matrix.data = torch.randn(size, size, generator=generator)
    return found


def save_spec_drafter(
    folder: Path, lm: PreTrainedModel, notes: SpecDrafterNotes, **more: Any
) -> None:
    """Write it as one that was trained for a model called "tiny", which is no folder."""
    write_lm(lm, "tiny", folder, {**notes.note(), **more})
    if notes.transitions:
        save_transitions(random_transitions(lm), folder)
    if notes.draft_vocab_size is not None:
        save_vocabulary(random_vocabulary(notes.draft_vocab_size), folder)


@cache
def random_spec_drafter(
    name: str = "bart",
    num_masks: int = 5,
    encoder: Literal["own", "target"] = "own",
    *,
    fewer_masks: bool = False,
    transitions: bool = False,
    draft_vocab_size: int | None = None,
) -> str:
    """A folder with random weights, until the tests are over."""
    folder = lasting_folder()
    made = spec_drafter_of(
        name,
        num_masks,
        encoder=encoder,
        fewer_masks=fewer_masks,
        transitions=transitions,
        draft_vocab_size=draft_vocab_size,
    )
    save_spec_drafter(folder, *made)
    return str(folder)
