"""Texts beside a prompt (references and predictions), and their conversion to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from tokenleap.core.references import NO_REFERENCES, References
from tokenleap.drafters.base import Drafter
from tokenleap.engine.prompts import checked_text, needed, tokens_of
from tokenleap.errors import CompatibilityError, PromptError
from tokenleap.runtime.target import Target

__all__ = [
    "QUOTING",
    "GivenPrediction",
    "GivenReferences",
    "ReferenceReader",
    "check_quotes",
    "per_prompt",
    "predictions_per_prompt",
]

GivenReferences: TypeAlias = Sequence[str | Sequence[int]] | None
"""What one prompt's drafts may quote: texts, or lists of token ids."""

GivenPrediction: TypeAlias = str | Sequence[int] | None
"""What the output of one prompt is expected to repeat: a text, or token ids."""

QUOTING = ("copy", "ngram", "suffix")
"""The methods that draft from references, besides those that combine others."""


@dataclass(frozen=True)
class ReferenceReader:
    """Reads references for one model.

    A text is split into tokens as if it began a text of its own. Where it continues a line in the
    output, the tokens of its first word may differ from these; all others are the same.

    Args:
        target: the model.
        tokenizer: its tokenizer, or None.
    """

    target: Target
    tokenizer: PreTrainedTokenizerBase | None

    def read(self, given: GivenReferences | References) -> References:
        """The references of one prompt; those that were read already are returned as they are.

        Raises:
            PromptError: they are no list of texts, or have ids outside the vocabulary.
        """
        if given is None:
            return NO_REFERENCES
        if isinstance(given, References):
            return given
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise PromptError("references: expected a list of texts, or of lists of token ids.")
        return References(tuple(self._tokens("references", each) for each in given))

    def read_all(self, given: Sequence[GivenReferences | References]) -> list[References]:
        """The references of each prompt; those that several prompts share are read once."""
        return _once(self.read, given)

    def prediction(self, given: GivenPrediction | References) -> References:
        """The prediction of one prompt, as references of one text; none of an empty text.

        Raises:
            PromptError: it is neither text nor token ids, or has ids outside the vocabulary.
        """
        if isinstance(given, References):
            return given
        tokens = () if given is None else self._tokens("prediction", given)
        return References((tokens,)) if tokens else NO_REFERENCES

    def predictions(self, given: Sequence[GivenPrediction | References]) -> list[References]:
        """The prediction of each prompt; one that several prompts share is read once."""
        return _once(self.prediction, given)

    def _tokens(self, name: str, given: Any) -> tuple[int, ...]:
        if isinstance(given, str):
            return tuple(self._encoded(name, given))
        if not _is_ids(given):
            each = "each is" if name == "references" else "it is"
            raise PromptError(f"{name}: {each} a text or a list of token ids.")
        highest = self.target.vocab_size - 1
        for token in given:
            if not 0 <= token <= highest:
                raise PromptError(
                    f"{name}: token id {token} is outside the vocabulary (0 to {highest})."
                )
        return tuple(given)

    def _encoded(self, name: str, text: str) -> Sequence[int]:
        """The tokens that an output would have, without special tokens."""
        text, tokenizer = checked_text(name, text), needed(self.tokenizer)
        return tokens_of(tokenizer, text, in_output=self.target.reads_source)


def per_prompt(count: int, given: Any) -> list[GivenReferences]:
    """The references of each of several prompts, as the user gave them.

    Args:
        count: the number of prompts.
        given: None, a list of references that all prompts share, or a list with such a list or
            None for each prompt.

    Raises:
        PromptError: it is none of these, or has another length than there are prompts.
    """
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    shared = not listed or not given
    if shared or any(isinstance(item, str) or (item and _is_ids(item)) for item in given):
        return [given] * count
    if len(given) != count:
        raise PromptError(
            f"references: {len(given)} lists for {count} prompts: give one list of texts for all "
            "prompts, or one list per prompt."
        )
    return list(given)


def predictions_per_prompt(count: int, given: Any) -> list[GivenPrediction]:
    """The prediction of each of several prompts, as the user gave it.

    Args:
        count: the number of prompts.
        given: a prediction for all, or a list with one (or None) for each.

    Raises:
        PromptError: the list has another length than there are prompts.
    """
    if given is None or isinstance(given, str) or (given and _is_ids(given)):
        return [given] * count
    if not isinstance(given, Sequence) or len(given) != count:
        raise PromptError(
            f"prediction: expected a text for all prompts, or a list with one for each of the "
            f"{count} prompts."
        )
    return list(given)


def check_quotes(method: str, drafter: Drafter) -> None:
    """Refuse references that no draft could come from.

    Raises:
        CompatibilityError: the drafter of this method does not quote references.
    """
    if not drafter.quotes_references:
        names = " or ".join(", ".join(f"'{name}'" for name in QUOTING).rsplit(", ", 1))
        raise CompatibilityError(
            f"references: method '{method}' does not quote them: draft with {names}, or with a "
            "method that combines one of them with others, such as 'ensemble'."
        )


def _once(read: Callable[[Any], References], given: Sequence[Any]) -> list[References]:
    """What `read` makes of each value, the same object for the same one."""
    found = {key: read(each) for key, each in {id(each): each for each in given}.items()}
    return [found[id(each)] for each in given]


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes | bytearray)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )
