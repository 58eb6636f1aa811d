"""Options of methods that draft with a model, a trained head or a part of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from annotated_types import Ge, Gt, Le, Len
from pydantic import AfterValidator, PrivateAttr, model_validator

from tokenleap.core.config import PathText
from tokenleap.drafters.sampled import OF_Q
from tokenleap.drafters.tree_options import TreeOptions
from tokenleap.drafters.tuned_layers import LayerIndices, TunedLayers

__all__ = [
    "DraftModelOptions",
    "DraftQuantization",
    "EagleOptions",
    "EarlyExitOptions",
    "LayerSkipOptions",
    "SpecDrafterOptions",
    "StateHeadOptions",
]


def _tokenizer(value: Any) -> Any:
    if value is None or isinstance(value, str | Path):
        return value
    from transformers import PreTrainedTokenizerBase

    if not isinstance(value, PreTrainedTokenizerBase):
        raise ValueError(  # noqa: TRY004 - pydantic takes only ValueErrors
            "it must be a tokenizer, or a folder or alias that holds one"
        )
    return value


LONGEST_CHAIN = 8
"""Longest chain of a draft model whose length is chosen from step to step."""

_Tokenizer: TypeAlias = Annotated[Any, AfterValidator(_tokenizer)]


DraftQuantization: TypeAlias = Literal["none", "int8", "int4"] | None
"""How a draft model's weights are rounded. None chooses: int4 if the model is loaded by its name
and the target runs in int4 or in a GGUF file's own numbers, else as the target's. int4 includes the
output layer. The output does not depend on it."""


class DraftModelOptions(TreeOptions):
    """Options of `draft_model`, besides those of trees.

    Args:
        vocabulary: how to use a draft model with another vocabulary than the target's. `same`
            refuses it. `intersection` drafts only tokens that both models have. `text` drafts
            greedy chains of text, which the target's tokenizer tokenises again. `auto` is `same`
            if the vocabularies are the same, else `intersection` if the draft model has at least
            half of the target's tokens, else `text`. `LLM.vocabulary_overlap` reports the choice.
        draft_tokenizer: the draft model's tokenizer, or a folder or alias that holds it. None takes
            the tokenizer in the draft model's folder.
        draft_quantization: see `DraftQuantization`.
    """

    vocabulary: Literal["auto", "same", "intersection", "text"] = "auto"
    draft_tokenizer: _Tokenizer = None
    draft_quantization: DraftQuantization = None

    def longest_chain(self) -> int | None:
        """See `DrafterOptions.longest_chain`: chains end early where the model is unsure."""
        return LONGEST_CHAIN if self.tree is None else None

    @model_validator(mode="after")
    def _text_is_drafted_greedily(self) -> Self:
        if self.vocabulary == "text" and (reason := self.refused_for_text()):
            raise ValueError(reason)
        return self

    def refused_for_text(self) -> str | None:
        """Why vocabulary 'text' cannot be used with the other options; None if it can."""
        for name in ("tree", "expansion", *OF_Q):
            if name in self.model_fields_set:
                return (
                    f"{name}: with vocabulary 'text' drafts are greedy chains: remove it, or set "
                    "vocabulary to 'intersection'."
                )
        return None


class EagleOptions(TreeOptions):
    """Options of `eagle` and `parallel`, besides those of trees.

    Args:
        draft_quantization: of the head's weights. None chooses: int8 on the native runtime,
            unless the model runs in float32; elsewhere `none`. Drafts are a little less exact in
            int8, and cheaper. The output does not depend on it.
    """

    draft_quantization: Literal["none", "int8"] | None = None


class StateHeadOptions(TreeOptions):
    """Options of `medusa`, `hydra`, `blockwise` and `mlp_speculator`: those of trees."""


class SpecDrafterOptions(TreeOptions):
    """Options of `spec_drafter`, besides those of trees.

    Args:
        draft_quantization: of the drafter's weights. None chooses: as the target's, or int8 on the
            native runtime if the target runs in bfloat16 and blocks may be short. The output does
            not depend on it.
    """

    draft_quantization: Literal["none", "int8"] | None = None


class EarlyExitOptions(TreeOptions):
    """Options of `early_exit`, besides those of trees.

    Args:
        exit_layer: number of layers that draft, followed by the final norm and head. None is half
            of the target's layers.
        exit_layers: at least two such numbers, ascending, instead of a fixed one. The first of them
            whose most probable token is that of the one before drafts, or else the last one.
        exit_confidence: with `exit_layers`, a layer whose most probable token has at least this
            probability drafts, too.
    """

    exit_layer: Annotated[int, Ge(1)] | None = None
    exit_layers: Annotated[tuple[Annotated[int, Ge(1)], ...], Len(2)] | None = None
    exit_confidence: Annotated[float, Gt(0), Le(1)] | None = None

    @model_validator(mode="after")
    def _one_way_to_exit(self) -> Self:
        layers = self.exit_layers
        if layers is not None and self.exit_layer is not None:
            raise ValueError("exit_layer fixes the layer: remove it, or exit_layers.")
        if layers is not None and list(layers) != sorted(set(layers)):
            raise ValueError("exit_layers: list them in ascending order, each once.")
        if layers is None and self.exit_confidence is not None:
            raise ValueError("exit_confidence is for exit_layers: set them, too.")
        return self


class LayerSkipOptions(TreeOptions):
    """Options of `layer_skip`, besides those of trees.

    Args:
        skip_attention: layers (from 0) whose attention is left out.
        skip_mlp: layers (from 0) whose MLP is left out. Without any option, every second layer is
            skipped whole, except the first and the last.
        layers: a file made by `tokenleap tune-layers`, instead of the other two. It also sets the
            draft length, unless `num_speculative_tokens` is given.
    """

    skip_attention: LayerIndices = ()
    skip_mlp: LayerIndices = ()
    layers: PathText | None = None

    _tuned: TunedLayers | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.layers is not None:
            for name in ("skip_attention", "skip_mlp"):
                if name in self.model_fields_set:
                    raise ValueError(f"layers names a file that says what to skip: remove {name}.")
            self._tuned = TunedLayers.load(self.layers)
        return self

    def default_num_speculative_tokens(self) -> int | None:
        """The number of nodes of a static tree, else the draft length of the file, if any."""
        implied = super().default_num_speculative_tokens()
        return self._tuned.num_speculative_tokens if implied is None and self._tuned else implied

    def skipped(self, num_layers: int) -> dict[str, LayerIndices]:
        """The sublayers to leave out of a model.

        Args:
            num_layers: layers of the model.

        Returns:
            Layers (from 0) under "skip_attention" and "skip_mlp".

        Raises:
            CompatibilityError: the file was made for a model with another number of layers.
        """
        chosen: LayerSkipOptions | TunedLayers = self
        if self._tuned is not None and self.layers is not None:
            self._tuned.check_fits(self.layers, num_layers)
            chosen = self._tuned
        if chosen.skip_attention or chosen.skip_mlp:
            return {"skip_attention": chosen.skip_attention, "skip_mlp": chosen.skip_mlp}
        return dict.fromkeys(("skip_attention", "skip_mlp"), tuple(range(1, num_layers - 1, 2)))
