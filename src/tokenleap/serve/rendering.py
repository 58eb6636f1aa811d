"""Parts of responses that several endpoints share: usage, log-probabilities, details."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tokenleap.core.logprobs import PromptLogprobs, TokenLogprobs
from tokenleap.core.sequence import Scope
from tokenleap.outputs import CompletionOutput, RequestOutput, StreamedToken
from tokenleap.serve.fields import Details
from tokenleap.serve.running import Run
from tokenleap.serve.state import Pieces

__all__ = [
    "all_outputs",
    "chat_logprobs",
    "completion_logprobs",
    "details_of",
    "new_id",
    "prompt_logprobs",
    "stop_fields",
    "usage_of",
]

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's API does the same."""


def new_id(kind: str) -> str:
    """An id such as "cmpl-..."."""
    return f"{kind}{uuid.uuid4().hex}"


def usage_of(run: Run, outputs: Sequence[CompletionOutput] | None = None) -> dict[str, Any]:
    """OpenAI's usage object, of what was generated so far.

    Args:
        run: the run.
        outputs: its outputs, if they have ended; None looks at what there is.
    """
    if outputs is None:
        metrics = [r.metrics for request in run.requests for r in request.job.requests]
    else:
        metrics = [output.metrics for output in outputs]
    firsts = [request.job.requests[0].metrics for request in run.requests]
    prompt, written = run.prompt_tokens, sum(each.generated_tokens for each in metrics)
    cached = sum(each.cached_prompt_tokens + each.cached_source_tokens for each in firsts)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(request.job.requests[0].prediction for request in run.requests):
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": sum(each.accepted_prediction_tokens for each in metrics),
            "rejected_prediction_tokens": sum(each.rejected_prediction_tokens for each in metrics),
        }
    return usage


def stop_fields(output: CompletionOutput | None, reason: str | None = None) -> dict[str, Any]:
    """Why an output has ended, with vLLM's `stop_reason`; None while it runs.

    Args:
        output: the output if it has ended.
        reason: replaces the reason "stop".
    """
    if output is None:
        return {"finish_reason": None}
    finish = output.finish_reason
    finish = reason if reason is not None and finish == "stop" else finish
    return {"finish_reason": finish, "stop_reason": output.stop_reason}


# Log-probabilities


def completion_logprobs(
    tokens: Iterable[TokenLogprobs | None],
    ids: Sequence[int],
    texts: Sequence[str],
    pieces: Pieces,
    offset: int = 0,
) -> dict[str, Any]:
    """Those of `/v1/completions`.

    Args:
        tokens: one for each token; None for a prompt's first one.
        ids: the tokens.
        texts: what each token added to the text.
        pieces: the texts of single tokens.
        offset: length of the text before.
    """
    listed = list(tokens)
    return {
        "tokens": pieces.all_of(ids),
        "token_logprobs": [None if each is None else _finite(each.logprob) for each in listed],
        "top_logprobs": [None if each is None else _by_text(each, pieces) for each in listed],
        "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
    }


def _by_text(token: TokenLogprobs, pieces: Pieces) -> dict[str, float]:
    """Log-probabilities by text, the token's own among them; the best of equal texts counts."""
    found: dict[str, float] = {}
    for each, value in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(pieces.of(each), _finite(value))
    return found


def chat_logprobs(tokens: Iterable[TokenLogprobs], num_top: int, pieces: Pieces) -> dict[str, Any]:
    """Those of `/v1/chat/completions`."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text = pieces.of(token)
        known = None if "\ufffd" in text else list(text.encode(errors="replace"))
        return {"token": text, "logprob": _finite(value), "bytes": known}

    return {
        "content": [
            {
                **entry(each.token_id, each.logprob),
                "top_logprobs": [entry(*best) for best in each.top[:num_top]],
            }
            for each in tokens
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


# Speculation


def details_of(
    wanted: Details | None,
    tokens: Sequence[StreamedToken],
    output: CompletionOutput | None,
    scope: Scope,
) -> Mapping[str, Any]:
    """The field `tokenleap` of a choice, if the request asks for it.

    Args:
        wanted: what it asks for.
        tokens: new tokens.
        output: the output if it has ended.
        scope: of its request. If others share its drafts, what was drafted for it and not accepted
            may be their text: the trace is without it.
    """
    if wanted is None:
        return {}
    found: dict[str, Any] = {}
    if wanted.tokens:
        found["tokens"] = [
            {"id": token.token_id, "text": token.text, "origin": str(token.origin)}
            for token in tokens
        ]
    if wanted.metrics and output is not None:
        found["metrics"] = output.metrics.as_dict()
    if wanted.trace and output is not None:
        trace = output.trace if scope.private else output.trace.withheld()
        found["trace"] = trace.as_dict()
    return {"tokenleap": found}


def all_outputs(results: Sequence[RequestOutput]) -> list[CompletionOutput]:
    """The outputs of all prompts, in order."""
    return [output for result in results for output in result.outputs]
