"""Drafting text: the draft model writes in its own tokens, the target's tokenizer splits it anew.

The string-level way of Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", for models with few tokens in common. The text is
generated greedily and nothing is drawn, so that q is one-hot in the target's tokens and every rule
treats it as it treats a quotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from foretoken.control import Budget
from foretoken.core.params import SamplingParams
from foretoken.core.tree import Draft, chain
from foretoken.drafters.base import Drafter
from foretoken.drafters.draft_model import OwnModel
from foretoken.drafters.model_drafter import ModelDrafter
from foretoken.drafters.shapes import Chain, TreeOptions
from foretoken.drafters.translation import INCOMPLETE, Script, Translator
from foretoken.request import Request
from foretoken.runtime.target import Target

__all__ = ["Splitter", "TextDrafter"]

SHORTEST_TAIL = 4
"""Committed tokens that are split again along with the draft, and on to the beginning of a word."""
LONGEST_TAIL = 32
"""Where no word begins."""


class Splitter:
    """Splits text that continues committed tokens.

    Args:
        script: the target's tokens as text.
        texts: [V] the text of each of them inside a text.
    """

    def __init__(self, script: Script, texts: Sequence[str]) -> None:
        self._script = script
        self._starts_word = [text[:1].isspace() for text in texts]
        self._special = frozenset(script.tokenizer.all_special_ids)

    def before(self, tokens: Sequence[int]) -> str | None:
        """Text that the last committed tokens end with; None inside a character."""
        text = self._script.decode_inside(self._tail(tokens))
        return None if text.endswith(INCOMPLETE) else text

    def split(self, tokens: Sequence[int], text: str) -> list[int]:
        """The tokens that follow the committed ones when the text is appended to theirs.

        Splitting both together may join them differently from how they were committed. Then what
        begins where the committed text ends is the draft; and where a token would reach across that
        place, which cannot be any more, the text is split by itself.
        """
        tail, before = self._tail(tokens), self.before(tokens)
        if not text or before is None:
            return []
        together = self._script.encode_inside(before + text)
        if together[: len(tail)] == tail:
            return together[len(tail) :]
        for count in range(len(together)):
            if self._script.decode_inside(together[:count]) == before:
                return together[count:]
        return self._script.encode_inside(text)

    def _tail(self, tokens: Sequence[int]) -> list[int]:
        """The last tokens, from where splitting does not depend on what came before."""
        start = len(tokens)
        while start > 0 and len(tokens) - start < LONGEST_TAIL:
            if tokens[start - 1] in self._special:
                break
            start -= 1
            if len(tokens) - start >= SHORTEST_TAIL and self._starts_word[tokens[start]]:
                break
        return list(tokens[start:])


class TextDrafter(Drafter):
    """Chains of the target's tokens from a draft model with others.

    Args:
        model: the draft model.
        script: its tokens as text.
        translator: makes its ids of the committed tokens.
        splitter: makes the target's tokens of its text.
        vocab_size: V of the target.
    """

    def __init__(
        self,
        model: Target,
        script: Script,
        translator: Translator,
        splitter: Splitter,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._script = script
        self._translator = translator
        self._splitter = splitter
        self._vocab_size = vocab_size
        self._special = frozenset(script.tokenizer.all_special_ids)
        self._writer = ModelDrafter(OwnModel(model), TreeOptions(), Chain(), coupled=False)
        self._readers: dict[int, Request] = {}

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Write, then split."""
        readers = {r.key: reader for r in batch if (reader := self._reader(r)) is not None}
        written = self._writer.propose(
            list(readers.values()),
            [budget for r, budget in zip(batch, budgets, strict=True) if r.key in readers],
        )
        texts = dict(zip(readers, map(self._text, written), strict=True))
        return [
            self._draft(request, texts.get(request.key, ""), budget.chain)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def rewind(self, request: Request) -> None:
        """Nothing to do: the reader is compared with the committed tokens anyway."""

    def release(self, request: Request) -> None:
        """Free the reader's row."""
        self._translator.release(request)
        reader = self._readers.pop(request.key, None)
        if reader is not None:
            self._writer.release(reader)

    def _reader(self, request: Request) -> Request | None:
        """A greedy request over the translated tokens; None where there is no text to continue."""
        tokens = self._translator.translate(request)
        if not tokens or self._splitter.before(request.token_ids) is None:
            return None
        reader = self._readers.get(request.key)
        if reader is None:
            reader = self._readers[request.key] = Request(
                tokens,
                SamplingParams(temperature=0, max_tokens=None),
                vocab_size=self._model.vocab_size,
                max_model_len=self._model.max_model_len,
            )
        reader.token_ids = list(tokens)
        return reader

    def _text(self, written: Draft) -> str:
        """What was written, up to a special token, whole characters only."""
        tokens = takewhile(lambda token: token not in self._special, written.tree.tokens[1:])
        return self._script.decode_inside(list(tokens)).rstrip(INCOMPLETE)

    def _draft(self, request: Request, text: str, length: int) -> Draft:
        split = self._splitter.split(request.token_ids, text)
        known = takewhile(lambda token: token < self._vocab_size, split)
        return Draft.deterministic(chain([request.root, *list(known)[:length]]))
