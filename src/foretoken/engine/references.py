"""The texts that a user names as references, and their conversion to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from foretoken.core.references import NO_REFERENCES, References
from foretoken.drafters.base import Drafter
from foretoken.engine.prompts import checked_text, needed, tokens_of
from foretoken.errors import CompatibilityError, PromptError
from foretoken.runtime.target import Target

__all__ = ["QUOTING", "GivenReferences", "ReferenceReader", "check_quotes", "per_prompt"]

GivenReferences: TypeAlias = Sequence[str | Sequence[int]] | None
"""What one prompt's drafts may quote: texts, or lists of token ids."""

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

    def read(self, given: GivenReferences) -> References:
        """The references of one prompt.

        Raises:
            PromptError: they are no list of texts, or have ids outside the vocabulary.
        """
        if given is None:
            return NO_REFERENCES
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise PromptError("references: expected a list of texts, or of lists of token ids.")
        return References(tuple(map(self._tokens, given)))

    def read_all(self, count: int, given: Any) -> list[References]:
        """The references of `count` prompts; those that several prompts share are read once.

        Args:
            count: the number of prompts.
            given: see `per_prompt`.

        Raises:
            PromptError: as in `read` and `per_prompt`.
        """
        listed = per_prompt(count, given)
        read = {id(each): self.read(each) for each in {id(each): each for each in listed}.values()}
        return [read[id(each)] for each in listed]

    def _tokens(self, reference: Any) -> tuple[int, ...]:
        if isinstance(reference, str):
            return tuple(self._encoded(reference))
        if not _is_ids(reference):
            raise PromptError("references: each is a text or a list of token ids.")
        highest = self.target.vocab_size - 1
        for token in reference:
            if not 0 <= token <= highest:
                raise PromptError(
                    f"references: token id {token} is outside the vocabulary (0 to {highest})."
                )
        return tuple(reference)

    def _encoded(self, text: str) -> Sequence[int]:
        """The tokens that an output would have, without special tokens."""
        text, tokenizer = checked_text("references", text), needed(self.tokenizer)
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


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes | bytearray)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )
