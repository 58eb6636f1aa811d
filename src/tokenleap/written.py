"""`Written`: what a request has generated so far, as text and as what users get back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from tokenleap.core.detokenizer import Detokenizer
from tokenleap.core.params import SamplingParams
from tokenleap.outputs import StreamedToken
from tokenleap.trace import Trace

__all__ = ["Written"]


class Written:
    """The generated tokens of one output, with their texts, origins and log-probabilities.

    Args:
        params: its sampling parameters.
        tokenizer: makes text and finds stop strings; with None the text stays empty.

    Attributes:
        tokens: the tokens so far.
        trace: what every step did.
    """

    def __init__(self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokens: list[StreamedToken] = []
        self.trace = Trace()
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = Detokenizer(
            self._tokenizer,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        self._fresh: deque[StreamedToken] = deque()  # one thread takes while another publishes

    def __len__(self) -> int:
        return len(self.tokens)

    # Text

    @property
    def text(self) -> str:
        """The text so far, including the part that is held back."""
        return self._detokenizer.text

    @property
    def stopped_at(self) -> str | None:
        """The stop string that was met, or None."""
        return self._detokenizer.stopped_at

    def text_of(self, token: int, *, may_stop: bool) -> str:
        """The text that becomes final with the next token.

        Args:
            token: the token; `add` is called with it.
            may_stop: whether it may end the output.
        """
        params = self._params
        hidden = token in params.stop_token_ids and not params.include_stop_str_in_output
        return "" if may_stop and hidden else self._detokenizer.add(token, may_stop=may_stop)

    def rest(self) -> str:
        """The text that was held back, of an output that has ended."""
        return self._detokenizer.finish()

    def add(self, token: StreamedToken) -> None:
        """Append a token."""
        self.tokens.append(token)

    def break_off(self) -> None:
        """Add the text that was held back to the last token."""
        rest = self.rest()
        if self.tokens:
            last = self.tokens[-1]
            self.tokens[-1] = replace(last, text=last.text + rest)

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of a whole output; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        skip = self._params.skip_special_tokens
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip))

    def piece(self, token: int) -> str | None:
        """A token's own text, empty if the tokenizer cannot decode it; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        try:
            return str(self._tokenizer.decode([token]))
        except Exception:  # a rejected token must not fail the output
            return ""

    def name_tokens(self) -> None:
        """Give the trace the texts of its tokens."""
        if self._tokenizer is not None:
            self.trace.pieces = {token: self.piece(token) or "" for token in self.trace.tokens()}

    # What was not taken yet

    @property
    def has_fresh(self) -> bool:
        """Whether `take` has tokens to give."""
        return bool(self._fresh)

    def publish(self, tokens: Sequence[StreamedToken]) -> None:
        """Let `take` give these tokens."""
        self._fresh.extend(tokens)

    def take(self) -> tuple[StreamedToken, ...]:
        """Tokens published since the last call, whichever thread ran the steps."""
        fresh = []
        while self._fresh:
            fresh.append(self._fresh.popleft())
        return tuple(fresh)
