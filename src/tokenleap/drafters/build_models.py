"""Builds the drafters with a model, a trained head or a part of the target (see `build.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenleap.drafters.tree_options import shape_of
from tokenleap.errors import ConfigError

if TYPE_CHECKING:
    from tokenleap.drafters.base import Drafter
    from tokenleap.drafters.heads.state_file import Layout
    from tokenleap.drafters.heads.state_net import StateNet
    from tokenleap.drafters.scorer import Scorer
    from tokenleap.drafters.spec import DrafterParts

__all__ = [
    "build_blockwise",
    "build_draft_model",
    "build_eagle",
    "build_early_exit",
    "build_hydra",
    "build_layer_skip",
    "build_medusa",
    "build_mlp_speculator",
    "build_parallel",
    "build_pass",
    "build_spec_drafter",
]


def build_draft_model(parts: DrafterParts) -> Drafter:
    """A smaller model, with whatever vocabulary.

    Raises:
        ConfigError: its vocabulary asks for drafting by text, and another option rules that out.
    """
    from tokenleap.drafters.learnable import LearnableModel
    from tokenleap.drafters.vocabulary import Vocabularies

    draft = parts.load_model().with_tokenizer(parts.options.draft_tokenizer)
    vocabularies = Vocabularies(parts.target, parts.tokenizer, draft)
    way = vocabularies.way(parts.options.vocabulary)
    drafter: Drafter
    if way == "same":
        scorer = vocabularies.same_model()
        drafter = _with_model(parts, scorer)
        if draft.source is not None:
            drafter.learnable = LearnableModel(scorer, draft.source, draft.model, parts.target)
    elif way == "intersection":
        drafter = _with_model(parts, vocabularies.translated_model())
    elif reason := parts.options.refused_for_text():
        raise ConfigError(f"{vocabularies.overlap(way)}; {reason}")
    else:
        drafter = vocabularies.text_drafter()
    drafter.vocabulary_overlap = vocabularies.overlap(way)
    return drafter


def build_eagle(parts: DrafterParts) -> Drafter:
    """A trained head with attention."""
    from tokenleap.drafters.heads.checkpoint import read_checkpoint
    from tokenleap.drafters.heads.eagle import EagleDrafter, load_head
    from tokenleap.drafters.learnable import LearnableEagle

    checkpoint = read_checkpoint(parts.model)
    quantization = parts.options.draft_quantization
    head, rows = load_head(checkpoint, parts.target, parts.tokenizer, quantization)
    parts.share_memory(rows)
    layers = head.layers
    shape = shape_of(parts.options)
    drafter = EagleDrafter(head, layers, parts.options, shape, coupled=parts.coupled)
    drafter.learnable = LearnableEagle(head, checkpoint.path, layers, parts.target, quantization)
    return drafter


def build_parallel(parts: DrafterParts) -> Drafter:
    """A trained head with attention that drafts a block in one pass."""
    from tokenleap.drafters.heads.checkpoint import read_checkpoint
    from tokenleap.drafters.heads.parallel import ParallelDrafter, load_parallel_head

    checkpoint = read_checkpoint(parts.model, ["peagle"])
    quantization = parts.options.draft_quantization
    head, rows = load_parallel_head(checkpoint, parts.target, parts.tokenizer, quantization)
    parts.share_memory(rows)
    layers = checkpoint.description.config.aux_layers
    shape = shape_of(parts.options)
    return ParallelDrafter(head, layers, parts.options, shape, coupled=parts.coupled)


def build_medusa(parts: DrafterParts) -> Drafter:
    """Heads, one for each drafted position."""
    from tokenleap.drafters.heads.medusa import MedusaNet
    from tokenleap.drafters.heads.state_layouts import fasterdecoding_medusa, vllm_medusa

    layouts = (fasterdecoding_medusa, vllm_medusa)
    return _state_head(parts, MedusaNet, *layouts)


def build_hydra(parts: DrafterParts) -> Drafter:
    """Heads that read the tokens drafted before."""
    from tokenleap.drafters.heads.hydra import HydraNet

    return _state_head(parts, HydraNet)


def build_blockwise(parts: DrafterParts) -> Drafter:
    """Layers before the target's output layer."""
    from tokenleap.drafters.heads.blockwise import BlockwiseNet

    return _state_head(parts, BlockwiseNet)


def build_mlp_speculator(parts: DrafterParts) -> Drafter:
    """A recurrent MLP."""
    from tokenleap.drafters.heads.mlp_speculator import MlpSpeculatorNet
    from tokenleap.drafters.heads.state_layouts import ibm_mlp_speculator

    return _state_head(parts, MlpSpeculatorNet, ibm_mlp_speculator)


def build_spec_drafter(parts: DrafterParts) -> Drafter:
    """An encoder-decoder of its own that fills a block of masks."""
    from tokenleap.drafters.block import BlockDrafter
    from tokenleap.drafters.spec_drafter import load_spec_drafter

    quantization = parts.options.draft_quantization
    scorer, rows = load_spec_drafter(parts.model, parts.target, quantization)
    parts.share_memory(rows)
    shape = shape_of(parts.options)
    return BlockDrafter(scorer, parts.options, shape, coupled=parts.coupled)


def build_pass(parts: DrafterParts) -> Drafter:
    """Look-ahead embeddings that the target's passes read."""
    from tokenleap.drafters.pass_tokens import PassDrafter, read_pass_tokens

    rows = read_pass_tokens(parts.model, parts.target)
    return PassDrafter(parts.target.network.extend(rows), len(rows))


def build_early_exit(parts: DrafterParts) -> Drafter:
    """The target's first layers."""
    from tokenleap.drafters.self_draft import exit_early

    return _with_model(parts, exit_early(parts.target, parts.options))


def build_layer_skip(parts: DrafterParts) -> Drafter:
    """The target without some of its sublayers."""
    from tokenleap.drafters.self_draft import skip_layers

    return _with_model(parts, skip_layers(parts.target, parts.options))


def _with_model(parts: DrafterParts, scorer: Scorer) -> Drafter:
    """Chains or trees from a drafting model."""
    from tokenleap.drafters.model_drafter import ModelDrafter

    shape = shape_of(parts.options)
    return ModelDrafter(scorer, parts.options, shape, coupled=parts.coupled)


def _state_head(parts: DrafterParts, kind: type[StateNet], *layouts: Layout) -> Drafter:
    """The drafter of a head without attention, from our own or a published layout."""
    from functools import partial

    from tokenleap.drafters.heads.probe import check_target
    from tokenleap.drafters.heads.state_file import load_net, read_state_file
    from tokenleap.drafters.heads.state_head import StateDrafter, StateHead
    from tokenleap.drafters.learnable import LearnableState

    read = partial(read_state_file, parts.model, kind, layouts)
    file = read()
    head = StateHead(load_net(file, kind, parts.target), parts.target)
    check_target(file.path.parent, file.verifier, file.notes, parts.target)
    shape = shape_of(parts.options)
    drafter = StateDrafter(head, parts.options, shape, coupled=parts.coupled)
    drafter.learnable = LearnableState(head, read, kind, parts.target)
    return drafter
