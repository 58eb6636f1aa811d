"""Log-probabilities of outputs and prompts, in the forms that OpenAI's and vLLM's APIs have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from tokenleap.core.detokenizer import Pieces
from tokenleap.core.distribution import Logprob, PromptLogprobs, TokenLogprobs

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's API does the same."""


def completion_logprobs(
    tokens: Iterable[TokenLogprobs | None],
    ids: Sequence[int],
    texts: Sequence[str],
    pieces: Pieces,
    offset: int = 0,
) -> dict[str, Any]:
    """Those of `/v1/completions`."""
    listed = list(tokens)
    return {
        "tokens": pieces.all_of(ids),
        "token_logprobs": [
            None if each is None else _finite(each[token].logprob)
            for token, each in zip(ids, listed, strict=True)
        ],
        "top_logprobs": [None if each is None else _by_text(each, pieces) for each in listed],
        "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
    }


def _by_text(found: TokenLogprobs, pieces: Pieces) -> dict[str, float]:
    """Log-probabilities by text, the token's own among them; the best of equal texts counts."""
    by_text: dict[str, float] = {}
    for token, each in sorted(found.items(), key=_rank):
        by_text.setdefault(pieces.of(token), _finite(each.logprob))
    return by_text


def _rank(found: tuple[int, Logprob]) -> int:
    return found[1].rank


def chat_logprobs(tokens: Iterable[TokenLogprobs], num_top: int, pieces: Pieces) -> dict[str, Any]:
    """Those of `/v1/chat/completions`."""

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        text = pieces.of(token)
        known = None if "\ufffd" in text else list(text.encode(errors="replace"))
        return {"token": text, "logprob": _finite(found.logprob), "bytes": known}

    return {
        "content": [
            {
                **entry(*next(iter(found.items()))),
                "top_logprobs": [
                    entry(*best) for best in sorted(found.items(), key=_rank)[:num_top]
                ],
            }
            for found in tokens
        ]
    }


def prompt_logprobs(found: PromptLogprobs | None) -> list[Any] | None:
    """Those of the prompt, as vLLM's API has them."""
    if found is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": _finite(each.logprob),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token, each in position.items()
        }
        for position in found
    ]


def _finite(value: float) -> float:
    return max(value, _LEAST)
