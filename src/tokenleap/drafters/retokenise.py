"""Drafting text: the draft model writes in its own tokens, and the target's tokenizer splits it.

The string-level method of Timor et al., "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", for models with few tokens in common.
`draft_model` uses it with `vocabulary="text"`. The draft model generates greedily, so nothing is
drawn and q is one-hot in the target's tokens. Every rule treats such a draft like one that was
looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tokenleap.control import Budget
from tokenleap.core.params import SamplingParams
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.draft_model import OwnModel
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.drafters.shapes import Chain
from tokenleap.drafters.translation import INCOMPLETE, Script, Translator
from tokenleap.drafters.tree_options import TreeOptions
from tokenleap.request import Request
from tokenleap.runtime.target import Target

__all__ = ["Splitter", "TextDrafter"]

SHORTEST_TAIL = 4
"""Fewest committed tokens that are split again along with the draft. The tail then extends back to
the beginning of a word."""
LONGEST_TAIL = 32
"""Most of these tokens, if no word begins earlier."""


class Splitter:
    """Splits text that continues committed tokens into the target's tokens.

    Args:
        script: converts between the target's tokens and text.
        texts: [V] the text of each of the target's tokens inside a text.
    """

    def __init__(self, script: Script, texts: Sequence[str]) -> None:
        self._script = script
        self._starts_word = [text[:1].isspace() for text in texts]
        self._special = frozenset(script.tokenizer.all_special_ids)

    def before(self, tokens: Sequence[int]) -> str | None:
        """The text of the last committed tokens; None if they end inside a character."""
        text = self._script.decode_inside(self._tail(tokens))
        return None if text.endswith(INCOMPLETE) else text

    def split(self, tokens: Sequence[int], text: str) -> list[int]:
        """The tokens that follow the committed ones if `text` is appended to their text.

        Committed tail and new text are split together. This may split the tail differently from its
        committed tokens. The tokens that begin at the end of the committed text are then the
        result. If a token crosses that border, the new text is split alone.

        Args:
            tokens: the committed tokens.
            text: the text that continues them.
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
        """The last tokens, from a point where splitting no longer depends on earlier tokens."""
        start = len(tokens)
        while start > 0 and len(tokens) - start < LONGEST_TAIL:
            if tokens[start - 1] in self._special:
                break
            start -= 1
            if len(tokens) - start >= SHORTEST_TAIL and self._starts_word[tokens[start]]:
                break
        return list(tokens[start:])


class TextDrafter(Drafter):
    """Chains of the target's tokens from a draft model with other tokens.

    Args:
        model: the draft model.
        script: converts between the draft model's tokens and text.
        translator: converts the committed tokens to the draft model's ids.
        splitter: converts the draft model's text to the target's tokens.
        vocab_size: V, the width of the target's logits.
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
        self._shadows: dict[int, Request] = {}  # key -> a request over the translated tokens

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """The draft model writes text, and the splitter converts it to the target's tokens."""
        shadows = {r.key: shadow for r in batch if (shadow := self._shadow(r)) is not None}
        written = self._writer.propose(
            list(shadows.values()),
            [budget for r, budget in zip(batch, budgets, strict=True) if r.key in shadows],
        )
        texts = dict(zip(shadows, map(self._text, written), strict=True))
        return [
            self._draft(request, texts.get(request.key, ""), budget.chain)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def rewind(self, request: Request) -> None:
        """Nothing to do: `_shadow` translates the committed tokens in every step."""

    def release(self, request: Request) -> None:
        """Free the draft model's KV of the request, and forget its translation."""
        self._translator.release(request)
        shadow = self._shadows.pop(request.key, None)
        if shadow is not None:
            shadow.fail_with(request)
            self._writer.release(shadow)

    def _shadow(self, request: Request) -> Request | None:
        """A greedy request over the translated tokens; None if there is no text to continue."""
        tokens = self._translator.translate(request)
        if not tokens or self._splitter.before(request.token_ids) is None:
            return None
        shadow = self._shadows.get(request.key)
        if shadow is None:
            shadow = self._shadows[request.key] = Request(
                tokens,
                SamplingParams(temperature=0, max_tokens=None),
                vocab_size=self._model.vocab_size,
                max_model_len=self._model.max_model_len,
            )
        shadow.token_ids = list(tokens)
        return shadow

    def _text(self, written: Draft) -> str:
        """The written text up to a special token, without an unfinished character."""
        tokens = takewhile(lambda token: token not in self._special, written.tree.tokens[1:])
        return self._script.decode_inside(list(tokens)).rstrip(INCOMPLETE)

    def _draft(self, request: Request, text: str, length: int) -> Draft:
        split = self._splitter.split(request.token_ids, text)
        in_vocabulary = takewhile(lambda token: token < self._vocab_size, split)
        return Draft.deterministic(chain([request.root, *list(in_vocabulary)[:length]]))
