"""The options of all methods, importable without PyTorch, as help pages and checks need them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from annotated_types import Ge, Gt, Le, Len, MinLen
from pydantic import AfterValidator, Field, PrivateAttr, Strict, field_validator, model_validator

from tokenleap.control.features import LONGEST_CONTEXT, NUM_RANKS
from tokenleap.core.config import Config, PathText
from tokenleap.core.files import read_json, write_whole
from tokenleap.core.structured import Structured
from tokenleap.drafters.base import DrafterOptions, InnerConfig
from tokenleap.drafters.shapes import MAX_NODES, OF_Q, SampledOptions, TreeOptions
from tokenleap.errors import (
    CompatibilityError,
    ConfigError,
    ModelError,
    TokenleapError,
    in_one_line,
)

_CONFIG, _TYPE = "config.json", "tokenleap_drafters"


def write_drafters(folder: Path, names: Sequence[str]) -> None:
    """Say which folders of draft models inside this folder belong together."""
    text = json.dumps({"model_type": _TYPE, "drafters": list(names)}, indent=2) + "\n"
    try:
        write_whole(folder / _CONFIG, lambda to: to.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {in_one_line(error)}.") from None


def drafters_in(folder: str | Path) -> list[dict[str, Any]]:
    """A configuration for each draft model of a folder."""
    found = [Path(folder) / name for name in _names(Path(folder))]
    if missing := [each for each in found if not _is_file(each / _CONFIG)]:
        raise ConfigError(
            f"there is no draft model in {missing[0]!s:.300}, of which {folder} tells."
        )
    return [{"method": "draft_model", "model": str(each)} for each in found]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # it is no name of a file
        return False


def _names(folder: Path) -> list[str]:
    try:
        config = read_json(folder / _CONFIG)
        names = config["drafters"] if config["model_type"] == _TYPE else None
    except (OSError, ValueError, KeyError, TypeError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{folder} has no draft models that belong together: give a folder that `tokenleap "
            "train boost` has written, or a list of configurations."
        )
    return names


# Options of methods that look up, count or guess tokens without a drafting model.
#
# `tokenleap methods` and the checks of a `speculative_config` read them, so no module here imports
# PyTorch, Transformers or NumPy.


LONGEST_ALIGNED = 32
"""Longest suffix that `copy` compares, in tokens. It bounds the work on inputs with repetitions."""


class NgramOptions(DrafterOptions):
    """Options of `ngram`.

    Args:
        prompt_lookup_max: longest suffix that is looked up, in tokens.
        prompt_lookup_min: shortest suffix that is looked up, in tokens.
    """

    prompt_lookup_max: Annotated[int, Ge(1), Le(64)] = 4
    prompt_lookup_min: Annotated[int, Ge(1), Le(64)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is larger than "
                f"prompt_lookup_max ({self.prompt_lookup_max})."
            )
        return self


class SuffixOptions(DrafterOptions):
    """Options of `suffix`.

    Args:
        suffix_decoding_max_tree_depth: most tokens of match and draft together.
        suffix_decoding_max_cached_requests: most earlier outputs that are kept; 0 keeps none.
        suffix_decoding_max_cached_tokens: most tokens of earlier outputs that are kept, at about
            0.4 kB each; 0 keeps none.
        suffix_decoding_max_spec_factor: most drafted tokens per matched token: alpha of the paper.
            It is 1 there and in vLLM. It is larger here because the controller cuts tokens that do
            not pay.
        suffix_decoding_min_token_prob: smallest estimated path probability of a drafted token.
        branching: draft trees, for rules that take trees; otherwise chains.
    """

    suffix_decoding_max_tree_depth: Annotated[int, Ge(2), Le(256)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Ge(0)] = 10_000
    suffix_decoding_max_cached_tokens: Annotated[int, Ge(0)] = 100_000
    suffix_decoding_max_spec_factor: Annotated[float, Gt(0), Le(256)] = 2.0
    suffix_decoding_min_token_prob: Annotated[float, Ge(0), Le(1)] = 0.1
    branching: bool = False

    def draft_length(self, match: int) -> int:
        """Most tokens that are drafted after a match of this many tokens."""
        longest = int(self.suffix_decoding_max_spec_factor * match + 1e-6)
        return max(0, min(longest, self.suffix_decoding_max_tree_depth - match))


class CopyOptions(DrafterOptions):
    """Options of `copy`.

    Args:
        copy_start: index in the prompt (or in an encoder-decoder's source) of the input's first
            token. A negative index counts from the prompt's end, as in Python's slices. None is the
            prompt's beginning.
        copy_end: index after the input's last token, likewise. None is the prompt's end.
        copy_min_match: shortest suffix that aligns text and input again, in tokens. None is 1 for
            an encoder-decoder's source, unless tokens may be inserted, and 2 for a prompt.
        copy_insertions: whether tokens that align with nothing count as inserted, as marks are:
            copying goes on where it stopped. After `MOST_INSERTED` of them it ends.
    """

    copy_start: int | None = None
    copy_end: int | None = None
    copy_min_match: Annotated[int, Ge(1), Le(LONGEST_ALIGNED)] | None = None
    copy_insertions: bool = False

    def min_match(self, *, of_source: bool) -> int:
        """`copy_min_match`, or its default for this input."""
        if self.copy_min_match is not None:
            return self.copy_min_match
        return 1 if of_source and not self.copy_insertions else 2

    def region(self, tokens: Sequence[int]) -> Sequence[int]:
        """The input within a prompt or source; empty if that is too short."""
        return tokens[self.copy_start : self.copy_end]

    @property
    def explicit(self) -> bool:
        """Whether the input is a region instead of the whole prompt or source."""
        return self.copy_start is not None or self.copy_end is not None


LONGEST_PREDICTED = 32
"""Default draft length of `prediction`. Predictions are mostly right, so long drafts pay."""


class PredictionOptions(DrafterOptions):
    """Options of `prediction`.

    Args:
        drafter: configuration of what drafts where there is no prediction, or where it is of no
            use: `method` and that method's own fields. None drafts nothing there.
    """

    drafter: InnerConfig | None = None


class RecycleOptions(DrafterOptions):
    """Options of `recycle`.

    Args:
        recycle_top_k: number of tokens kept for each context; k in the paper.
        recycle_context: longest context, in tokens; 1 in the paper.
        recycle_max_contexts: most contexts kept, at about 0.3 kB each. If there are more, the least
            recently seen ones are dropped.
    """

    recycle_top_k: Annotated[int, Ge(1), Le(NUM_RANKS)] = NUM_RANKS
    recycle_context: Annotated[int, Ge(1), Le(LONGEST_CONTEXT)] = LONGEST_CONTEXT
    recycle_max_contexts: Annotated[int, Ge(1)] = 100_000


class RegexOptions(DrafterOptions):
    """Options of `regex`.

    Args:
        expected: the form that the outputs of requests without `structured_outputs` probably have,
            given like `structured_outputs`. Drafting ends if an output does not follow it. With
            None such requests get no drafts.
    """

    expected: Structured | None = None


class RestOptions(DrafterOptions):
    """Options of `rest`.

    Args:
        datastore: a file made by `tokenleap datastore build`.
        max_match: longest suffix that is looked up, in tokens.
        min_match: shortest suffix that is looked up, in tokens.
        max_hits: most occurrences that are read. If there are more, they are sorted by their
            continuations, and `max_hits` of them at equal distances are read.
        branching: draft trees, for rules that take trees; otherwise chains.
    """

    datastore: PathText = ""
    max_match: Annotated[int, Ge(1), Le(256)] = 16
    min_match: Annotated[int, Ge(1), Le(256)] = 2
    max_hits: Annotated[int, Ge(1), Le(10_000)] = 64
    branching: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.datastore:
            raise ValueError(
                "method 'rest' needs 'datastore': a file made by 'tokenleap datastore build'."
            )
        if self.min_match > self.max_match:
            raise ValueError(
                f"min_match ({self.min_match}) is larger than max_match ({self.max_match})."
            )
        return self


class CountedOptions(SampledOptions):
    """Options of drafters that draw from counts; they do not take those of the request.

    Args:
        draft_temperature: the probabilities are raised to the power 1 / draft_temperature. With 0
            the most probable token is drafted, for sampled requests too. None is 0 for greedy
            requests and 1 (q is what was counted) for sampled ones.
        draft_top_k: draw from the k most probable tokens; None and 0 from all.
        draft_top_p: draw from the smallest set of most probable tokens whose mass reaches this;
            None and 1 from all.
    """


class NgramTableOptions(CountedOptions):
    """Options of `ngram_table`, besides those of `CountedOptions`.

    Args:
        window: number of latest tokens that are counted. None counts the whole text, as the source
            does: memory then grows with the text, and with it the time to read a prompt.
    """

    window: Annotated[int, Ge(2), Le(1_000_000)] | None = None


class CorpusNgramOptions(CountedOptions):
    """Options of `corpus_ngram`, besides those of `CountedOptions`.

    Args:
        corpus: a file made by `tokenleap ngrams build` or `tokenleap ngrams write`.
        order: tokens of the longest n-grams that are used: 3 (trigrams), 2 (bigrams), or 1, which
            always drafts the same token for greedy requests: the most frequent one.
    """

    corpus: PathText = ""
    order: Annotated[int, Ge(1), Le(3)] = 3

    @model_validator(mode="after")
    def _has_corpus(self) -> Self:
        if not self.corpus:
            raise ValueError(
                "method 'corpus_ngram' needs 'corpus': a file made by 'tokenleap ngrams'."
            )
        return self


class LookaheadOptions(DrafterOptions):
    """Options of `lookahead`.

    Args:
        window_size: columns of the window; W of the paper.
        ngram_size: tokens of an n-gram; N of the paper. The window has one row less.
        max_ngrams: most n-grams that are drafted in one step, and kept for each first token; G of
            the paper.
        pool_from_prompt: whether the pool starts with the n-grams of the prompt, or of an
            encoder-decoder's source.
    """

    window_size: Annotated[int, Ge(1), Le(32)] = 5
    ngram_size: Annotated[int, Ge(2), Le(16)] = 3
    max_ngrams: Annotated[int, Ge(1), Le(64)] = 3
    pool_from_prompt: bool = True

    def default_num_speculative_tokens(self) -> int:
        """The nodes of all drafted n-grams and the whole window together."""
        return (self.ngram_size - 1) * (self.max_ngrams + self.window_size)


class PadOptions(DrafterOptions):
    """Options of `pad`.

    Args:
        pad_token_id: the padding token. None takes the one that the target was trained with, or
            the first of the mask, padding and end-of-sequence tokens that the tokenizer has, or
            else token 0.
    """

    pad_token_id: Annotated[int, Ge(0)] | None = None


class PassOptions(DrafterOptions):
    """`pass` has no options."""


# Files that say which sublayers `layer_skip` leaves out of a model.
#
# `tokenleap tune-layers` writes them, and the option `layers` reads them. A file is a JSON object,
# which can also be written by hand:
#
#     {"format": "tokenleap-layers-1", "skip_attention": [3, 5], "skip_mlp": [5],
#      "num_hidden_layers": 30, "num_speculative_tokens": 3, "measured": {...}}


FORMAT: Final = "tokenleap-layers-1"

LayerIndices = tuple[Annotated[int, Ge(0)], ...]
"""The type of an option that lists layers, counted from 0."""


class TunedLayers(Config):
    """A skip set, and the draft length with which it was fastest.

    Args:
        format: the kind of file and its version.
        skip_attention: layers (from 0) whose attention is left out.
        skip_mlp: layers (from 0) whose MLP is left out.
        num_hidden_layers: layers of the model that it was found for.
        num_speculative_tokens: the draft length, in tokens.
        measured: how it was measured and with which result. It informs people and has no effect.

    Raises:
        ConfigError: a layer does not exist, or the skip set is empty.
    """

    format: Literal["tokenleap-layers-1"] = FORMAT
    skip_attention: LayerIndices
    skip_mlp: LayerIndices
    num_hidden_layers: Annotated[int, Strict(), Ge(1)]
    num_speculative_tokens: Annotated[int, Strict(), Ge(1), Le(256)]
    measured: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        for name in ("skip_attention", "skip_mlp"):
            highest = max(getattr(self, name), default=0)
            if highest >= self.num_hidden_layers:
                raise ValueError(f"{name}: layer {highest} of {self.num_hidden_layers} layers")
        if not (self.skip_attention or self.skip_mlp):
            raise ValueError("it leaves nothing out")
        return self

    @classmethod
    def load(cls, path: str) -> TunedLayers:
        """Read a file.

        Raises:
            TokenleapError: the file cannot be read, is damaged, or is of another kind.
        """
        try:
            value = read_json(Path(path))
        except OSError as error:
            raise TokenleapError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError:
            value = None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise TokenleapError(
                f"{path} is not a valid layers file: make one with 'tokenleap tune-layers'."
            )
        try:
            return cls(**value)
        except (TokenleapError, TypeError) as error:
            reason = str(error).rstrip(".")
            raise TokenleapError(
                f"{path} is damaged ({reason}): make it again with 'tokenleap tune-layers'."
            ) from error

    def check_fits(self, path: str, num_layers: int) -> None:
        """Check that the file was made for a model with this number of layers.

        Args:
            path: the file, for the message.
            num_layers: layers of the model.

        Raises:
            CompatibilityError: it was made for another number of layers.
        """
        if self.num_hidden_layers != num_layers:
            raise CompatibilityError(
                f"{path} was made for a model of {self.num_hidden_layers} layers and this one has "
                f"{num_layers}: make one for this model with 'tokenleap tune-layers'."
            )


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
"""How the weights of a draft model or a head are rounded."""


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
        draft_quantization: how the draft model's weights are rounded; int4 includes the output
            layer. None chooses: int4 if the model is loaded by its name and the target runs in int4
            or from a GGUF file, else as the target's. The output does not depend on it.
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
        draft_quantization: how the head's weights are rounded; int4 includes the output layer.
            None chooses: on the native runtime int4 if the target runs in int4 or from a GGUF file,
            else int8, unless the model runs in float32; elsewhere `none`. The output does not
            depend on it.
    """

    draft_quantization: DraftQuantization = None


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


# Options of methods that combine others.


class CascadeOptions(DrafterOptions):
    """Options of `cascade`.

    Args:
        drafter: configuration of the inner drafter: `method` and that method's own fields. It may
            be another cascade.
        inner_num_speculative_tokens: draft length of the inner drafter, in tokens.
        draft_quantization: how the draft model's weights are rounded, as for `draft_model`.
    """

    drafter: InnerConfig
    inner_num_speculative_tokens: Annotated[int, Ge(1), Le(64)] = 3
    draft_quantization: DraftQuantization = None

    def longest_chain(self) -> int | None:
        """See `DrafterOptions.longest_chain`: chains end early where the middle model is unsure."""
        return LONGEST_CHAIN


class CombineOptions(DrafterOptions):
    """Options of `ensemble`.

    Args:
        drafters: at least two configurations, each with `method` and that method's own fields; or
            the folder of draft models that `tokenleap train boost` has written.
    """

    drafters: Annotated[tuple[InnerConfig, ...], MinLen(2)]

    @field_validator("drafters", mode="before")
    @classmethod
    def _drafters_of_a_folder(cls, value: Any) -> Any:
        return drafters_in(value) if isinstance(value, str | Path) else value


class SwitchOptions(CombineOptions):
    """Options of `switch`, besides those of `CombineOptions`.

    Args:
        try_every: a request tries another drafter in every such drafting step (16: every 16th).
    """

    try_every: Annotated[int, Ge(2)] = 16


class HorizontalOptions(DrafterOptions):
    """Options of `horizontal_cascade`.

    Args:
        drafters: configurations in order of position, each with `method` and that method's fields.
        tokens: most tokens that each drafter adds, in the same order.
    """

    drafters: Annotated[tuple[InnerConfig, ...], MinLen(2)]
    tokens: tuple[Annotated[int, Ge(1), Le(MAX_NODES)], ...]

    @model_validator(mode="after")
    def _one_number_per_drafter(self) -> Self:
        if len(self.tokens) != len(self.drafters):
            raise ValueError(
                f"tokens: give one number per drafter, got {len(self.tokens)} for "
                f"{len(self.drafters)} drafters."
            )
        return self

    def default_num_speculative_tokens(self) -> int:
        """The tokens of all drafters together."""
        return sum(self.tokens)


class HybridOptions(DrafterOptions):
    """Options of `hybrid`.

    Args:
        lookup: configuration of the lookup: `method` and that method's own fields.
        drafter: configuration of the trained drafter in the same way, without `model`, which is
            that of `hybrid`. `num_speculative_tokens` is the most nodes of a trained draft.
    """

    lookup: InnerConfig = Field({"method": "suffix"})
    drafter: InnerConfig = Field({"method": "eagle"})

    @model_validator(mode="after")
    def _drafter_fits(self) -> Self:
        if "model" in self.drafter:
            raise ValueError("drafter takes the 'model' of 'hybrid': set it there.")
        most = self.drafter.get("num_speculative_tokens", 1)
        if type(most) is not int or not 1 <= most <= MAX_NODES:
            raise ValueError(
                f"drafter: num_speculative_tokens must be 1 to {MAX_NODES}, got {most!r}."
            )
        return self
