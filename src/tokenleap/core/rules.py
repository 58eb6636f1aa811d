"""`DecodingRules`: what `generate()` does to the logits because the generation config says so.

Models are published with such rules: mBART must begin with the language, BART must end with an
end-of-sequence token, Qwen2.5 has a repetition penalty. Outputs equal those of `generate()` only
under the same rules. The rules belong to p, so the sampler applies them at every node of a tree,
over that node's own path (invariant 6). Most of them are masks. A mask that leaves the largest
logit alone does not change the argmax, so greedy requests still read the argmax of all nodes at
once, unless a rule moves logits up or down (`DecodingRules.shifts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenleap.core.references import Source
from tokenleap.errors import CompatibilityError

if TYPE_CHECKING:
    from transformers import GenerationConfig


class TokenSet:
    """A set of tokens, and their places in a row of logits; others forbid nothing there.

    Some models suppress hundreds of tokens at every position. So the places are kept.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = frozenset(tokens)
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    def __contains__(self, token: int) -> bool:
        return token in self._tokens

    def forbid(self, logits: Tensor) -> None:
        """Set the logits [V] of these tokens to -inf."""
        if self._tokens:
            logits.index_fill_(0, self._places_in(logits), -torch.inf)

    def _places_in(self, logits: Tensor) -> Tensor:
        row = logits.shape[0], logits.device
        if row not in self._places:
            inside = sorted(token for token in self._tokens if 0 <= token < logits.shape[0])
            self._places[row] = torch.tensor(inside, dtype=torch.long, device=logits.device)
        return self._places[row]


REFUSED: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "stop_strings": (None,),
    "max_time": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
}
"""Fields of a generation config that change the output and are not applied: neutral values."""

REFUSED_SAMPLED: dict[str, tuple[Any, ...]] = {
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}
"""The same for those that `generate()` reads if `do_sample` is set."""

Ngram = tuple[int, ...]


@dataclass(frozen=True)
class Timestamps:
    """Whisper's rule of timestamps, the tokens after `none`: they come in pairs, and ascend."""

    none: int
    most_first: int | None = None  # the largest at the beginning of an output, from 0; None for any

    def apply(self, logits: Tensor, output: Sequence[int], eos: int) -> None:
        """Mask what may not follow, as `WhisperTimeStampLogitsProcessor`; arguments as there."""
        first = self.none + 1
        logits[self.none] = -torch.inf
        last = bool(output) and output[-1] >= first
        paired = len(output) < 2 or output[-2] >= first
        if last:
            logits[slice(first, None) if paired else slice(None, eos)] = -torch.inf
        if stamps := [token for token in output if token >= first]:
            logits[first : stamps[-1] + (paired or not last)] = -torch.inf
        if not output:
            logits[:first] = -torch.inf
            if self.most_first is not None:
                logits[first + self.most_first + 1 :] = -torch.inf
        log_probs = logits.float().log_softmax(-1)
        if log_probs[first:].logsumexp(-1) > log_probs[:first].max():
            logits[:first] = -torch.inf


@dataclass(frozen=True)
class DecodingRules:
    """The rules of one model, under the names of Transformers' `GenerationConfig`.

    The source of a decoder-only model is its prompt.
    """

    bad_words_ids: tuple[Ngram, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()  # also not first after a forced one
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()  # once `max_tokens` is reached; () for any
    min_length: int = 0  # tokens before the end, those of the decoder's prompt included
    min_new_tokens: int | None = None  # instead of `min_length`, without the prompt
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0  # n-grams of the source do not come at all
    encoder_repetition_penalty: float = 1.0  # multiplies positive logits of its tokens
    repetition_penalty: float = 1.0
    sequence_bias: tuple[tuple[Ngram, float], ...] = ()  # added to the last token's logit
    # from which token on, and the growth of the end's logits
    exponential_decay_length_penalty: tuple[int, float] | None = None
    timestamps: Timestamps | None = None
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def of(
        config: GenerationConfig | None, eos_token_ids: Sequence[int], vocab_size: int
    ) -> DecodingRules:
        given: dict[str, Any] = {"eos_token_ids": tuple(eos_token_ids)}
        sampled = REFUSED_SAMPLED if getattr(config, "do_sample", False) else {}
        for name, neutral in {**REFUSED, **sampled}.items():
            if getattr(config, name, None) not in neutral:
                raise CompatibilityError(
                    f"the model's generation config sets {name}, which is not applied here: remove "
                    "it from generation_config.json, or ignore that file (generation_config="
                    "'none')."
                )
        for name in _KINDS:
            if (value := getattr(config, name, None)) is not None:
                given[name] = _frozen(name, value)
        _check_tokens(given, vocab_size)
        return DecodingRules(**given)

    @property
    def shifts(self) -> bool:
        """Whether a rule besides the repetition penalty changes logits without forbidding them."""
        moved = self.sequence_bias or self.exponential_decay_length_penalty is not None
        moved = moved or self.timestamps is not None  # it compares logits
        return bool(moved) or self.encoder_repetition_penalty != 1

    def for_output(
        self, prompt_ids: Sequence[int], source: Source | None, max_tokens: int
    ) -> OutputRules | None:
        """None if none of the output's logits ever changes."""
        read = prompt_ids if source is None else source.tokens
        rules = OutputRules(self, prompt_ids, read, max_tokens)
        return rules if rules.active else None

    @cached_property
    def never(self) -> TokenSet:
        """Tokens that are forbidden at every place where no token is forced."""
        eos = {(token,) for token in self.eos_token_ids}
        return TokenSet(w[0] for w in self.bad_words_ids if len(w) == 1 and w not in eos)

    @cached_property
    def suppressed(self) -> TokenSet:
        return TokenSet(self.suppress_tokens)

    @cached_property
    def suppressed_first(self) -> TokenSet:
        return TokenSet((*self.suppress_tokens, *self.begin_suppress_tokens))

    @cached_property
    def bad_phrases(self) -> tuple[Ngram, ...]:
        return tuple(word for word in self.bad_words_ids if len(word) > 1)


class OutputRules:
    """The rules as they hold for one output.

    `source_ids` are empty for audio, and the prompt's without a source.
    """

    def __init__(
        self,
        rules: DecodingRules,
        prompt_ids: Sequence[int],
        source_ids: Sequence[int],
        max_tokens: int,
    ) -> None:
        self._rules = rules
        self._prompt = list(prompt_ids)
        self._source_ids = source_ids
        self._last = max_tokens - 1
        least = rules.min_new_tokens
        self._least = rules.min_length - len(prompt_ids) if least is None else least

    @property
    def active(self) -> bool:
        rules = self._rules
        sizes = rules.no_repeat_ngram_size, rules.encoder_no_repeat_ngram_size
        tokens = rules.bad_words_ids, rules.suppress_tokens, rules.begin_suppress_tokens
        forced = self.first is not None or bool(rules.forced_eos_token_id)
        moved = rules.shifts or self.repetition_penalty != 1
        return forced or self._least > 0 or any((*sizes, *tokens)) or moved

    @property
    def shifts(self) -> bool:
        return self._rules.shifts

    @property
    def repetition_penalty(self) -> float:
        """The model's own, which the sampler applies."""
        return self._rules.repetition_penalty

    @property
    def first(self) -> int | None:
        """The token that the output must begin with, if it is longer than that."""
        return self._rules.forced_bos_token_id if len(self._prompt) == 1 else None

    def keep(self, token: int, output_ids: Sequence[int]) -> bool:
        """Whether the rules leave the largest logit of a position the largest."""
        if token in self._suppressed(len(output_ids)):
            return False
        if forced := self._forced(len(output_ids)):
            return forced == (token,)
        if token in self._rules.never:
            return False
        return not any(token in banned for banned in self._banned(output_ids))

    def shift(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Apply what precedes the repetition penalty to logits [V], which are changed."""
        if self._rules.sequence_bias:
            text, bias = [*self._prompt, *output_ids], torch.zeros_like(logits)
            for sequence, value in self._rules.sequence_bias:
                if ends_with(text, sequence[:-1]):
                    bias[sequence[-1]] += value
            logits += bias
        if (penalty := self._rules.encoder_repetition_penalty) != 1 and self._source_ids:
            read = torch.tensor(sorted(set(self._source_ids)), device=logits.device)
            read, factor = read[read < len(logits)], 1 / penalty
            values = logits[read]
            logits[read] = torch.where(values < 0, values * factor, values / factor)
        return logits

    def apply(self, logits: Tensor, output_ids: Sequence[int]) -> Tensor:
        """Mask logits [V], which are changed: -inf where forbidden, 0 where forced."""
        if forced := self._forced(len(output_ids)):
            logits.fill_(-torch.inf)
            logits[list(forced)] = 0
        else:
            self._rules.never.forbid(logits)
            banned = {token for group in self._banned(output_ids) for token in group}
            if banned:
                TokenSet(banned).forbid(logits)
        self._hurry(logits, len(output_ids))
        self._suppressed(len(output_ids)).forbid(logits)
        if self._rules.timestamps is not None:
            eos = min(self._rules.eos_token_ids, default=len(logits))
            self._rules.timestamps.apply(logits, output_ids, eos)
        return logits

    def _hurry(self, logits: Tensor, num_output: int) -> None:
        """Apply `exponential_decay_length_penalty`."""
        start, factor = self._rules.exponential_decay_length_penalty or (num_output, 1.0)
        tokens = [token for token in self._rules.eos_token_ids if token < len(logits)]
        if num_output > start and tokens:
            ends = logits[tokens]
            more = ends.abs() * (factor ** (num_output - start) - 1)
            logits[tokens] = ends + more.masked_fill(~ends.isfinite(), 0)

    def _forced(self, num_output: int) -> tuple[int, ...]:
        """The only tokens that may follow so many; empty if there is a choice."""
        if num_output == self._last and self._rules.forced_eos_token_id:
            return self._rules.forced_eos_token_id
        return () if num_output or self.first is None else (self.first,)

    def _suppressed(self, num_output: int) -> TokenSet:
        """The tokens that may not follow so many, not even if they are forced (as `generate()`)."""
        first = num_output == (0 if self.first is None else 1)
        return self._rules.suppressed_first if first else self._rules.suppressed

    def _banned(self, output_ids: Sequence[int]) -> Iterator[Iterable[int]]:
        """The tokens that may not come next because of the text, in groups."""
        rules = self._rules
        if len(output_ids) < self._least:
            yield rules.eos_token_ids
        if not (rules.bad_phrases or rules.no_repeat_ngram_size or self._source_ngrams):
            return
        text = [*self._prompt, *output_ids]
        yield [word[-1] for word in rules.bad_phrases if ends_with(text, word[:-1])]
        if rules.no_repeat_ngram_size:
            yield _completions(text, rules.no_repeat_ngram_size)
        if self._source_ngrams:
            last = _last(text, rules.encoder_no_repeat_ngram_size - 1)
            yield self._source_ngrams.get(last, ())

    @cached_property
    def _source_ngrams(self) -> dict[Ngram, set[int]]:
        """The source's n-grams that may not come: the last tokens by those before them."""
        size, found = self._rules.encoder_no_repeat_ngram_size, dict[Ngram, set[int]]()
        if size:
            for start in range(len(self._source_ids) - size + 1):
                *before, token = self._source_ids[start : start + size]
                found.setdefault(tuple(before), set()).add(token)
        return found


def _frozen(name: str, value: Any) -> Any:
    try:
        return _KINDS[name](value)
    except (TypeError, ValueError, OverflowError):
        raise CompatibilityError(
            f"the model's generation config has a wrong value of {name}, {str(value)[:80]}: "
            "correct it in generation_config.json."
        ) from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError
    return int(value)


def _ids(value: Any) -> Ngram:
    return tuple(map(_whole, value if isinstance(value, list | tuple) else [value]))


def _words(value: Any) -> tuple[Ngram, ...]:
    words = tuple(map(_ids, value))
    if not all(words):
        raise ValueError
    return words


def _factor(value: Any) -> float:
    if not 0 < value < math.inf:
        raise ValueError
    return float(value)


def _biases(value: Any) -> tuple[tuple[Ngram, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    found = {_words([sequence])[0]: float(bias) for sequence, bias in pairs}
    if any(math.isnan(bias) for bias in found.values()):
        raise ValueError
    return tuple(found.items())


def _decay(value: Any) -> tuple[int, float]:
    start, factor = value
    return _whole(start), _factor(factor)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "bad_words_ids": _words,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "forced_bos_token_id": _whole,
    "forced_eos_token_id": _ids,
    "min_length": _whole,
    "min_new_tokens": _whole,
    "no_repeat_ngram_size": _whole,
    "encoder_no_repeat_ngram_size": _whole,
    "encoder_repetition_penalty": _factor,
    "repetition_penalty": _factor,
    "sequence_bias": _biases,
    "exponential_decay_length_penalty": _decay,
}
"""How the value of each field is read."""


def _check_tokens(given: dict[str, Any], vocab_size: int) -> None:
    """Refuse forced tokens and bad words that the model does not have, as `generate()` does."""
    first = given.get("forced_bos_token_id")
    named = {
        "forced_bos_token_id": () if first is None else (first,),
        "forced_eos_token_id": given.get("forced_eos_token_id", ()),
        "bad_words_ids": [token for word in given.get("bad_words_ids", ()) for token in word],
        "sequence_bias": [token for word, _ in given.get("sequence_bias", ()) for token in word],
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise CompatibilityError(
                    f"the model's generation config sets {name} to token id {token}, which is "
                    f"outside the vocabulary (0 to {vocab_size - 1}): correct it in "
                    "generation_config.json."
                )


def _last(text: Sequence[int], length: int) -> Ngram:
    return tuple(text[max(0, len(text) - length) :])


def ends_with(text: Sequence[int], ending: Ngram) -> bool:
    return _last(text, len(ending)) == ending


def _completions(text: list[int], size: int) -> Iterator[int]:
    """The tokens that would repeat an n-gram of the text."""
    last = list(_last(text, size - 1))
    if not last:
        yield from text
    elif len(text) >= size:
        for place in _places(text[:-1], last[-1]):
            if place + 2 >= size and text[place + 2 - size : place + 1] == last:
                yield text[place + 1]


def _places(text: list[int], token: int) -> Iterator[int]:
    place = -1
    for _ in range(text.count(token)):  # much faster than to look at each token here
        place = text.index(token, place + 1)
        yield place
