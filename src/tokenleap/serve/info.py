"""Information about a server, and its tokenizer: `/v1/models`, `/tokenize`, `/health`, ..."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from tokenleap import __version__
from tokenleap.core.sampler import check_token_ids
from tokenleap.engine.prompts import needed
from tokenleap.errors import TokenleapError
from tokenleap.serve.body import APIError, invalid, of_engine, read, takes
from tokenleap.serve.chat import chat_ids, refuse_special_tokens, text_ids
from tokenleap.serve.fields import DetokenizeBody, TokenizeBody
from tokenleap.serve.running import MAX_CONTEXTS, ServerState, state_of

__all__ = ["router"]

router = APIRouter()

_FOR_MESSAGES = (
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
)
"""Fields of `/tokenize` that a prompt has no use for."""


@router.get("/health")
async def health(request: Request) -> Response:
    """Readiness: 200 while the server takes requests, else 503."""
    state = state_of(request)
    return Response(status_code=200 if state.alive and not state.stopping else 503)


@router.get("/live")
async def live(request: Request) -> Response:
    """Liveness: 200 while the engine runs, also while the last requests end, else 503."""
    return Response(status_code=200 if state_of(request).alive else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of Tokenleap."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus, in its text format."""
    content, media_type = state_of(request).metrics.exposition()
    return Response(content, media_type=media_type)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The names of the one model that is served."""
    state = state_of(request)
    listed = [_model(state, name) for name in state.settings.served_model_names]
    return {"object": "list", "data": listed}


@router.get("/v1/models/{name:path}", responses={404: {"description": "no such model"}})
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model, by one of its names."""
    state = state_of(request)
    state.check_model(name)
    return _model(state, name)


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "tokenleap",
        "root": state.settings.model,
        "parent": None,
        "max_model_len": state.llm.llm.max_model_len,
        "traces": state.settings.traces,
        "shares_drafts": state.settings.share_drafts,
    }


@router.post("/tokenize", **takes(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    state = state_of(request)
    body = await read(request, TokenizeBody, state.settings)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "send either prompt or messages.")
    if body.messages is not None:
        refuse_special_tokens(given=body.add_special_tokens)
    elif name := next((name for name in _FOR_MESSAGES if getattr(body, name) is not None), None):
        raise invalid(name, f"{name} is for messages.")
    return JSONResponse(await _off_loop(request, body, partial(_tokenized, body, state)))


def _tokenized(body: TokenizeBody, state: ServerState) -> dict[str, Any]:
    llm, limit = state.llm.llm, replace(state.text_limit, times=MAX_CONTEXTS)
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = text_ids(body.prompt, llm.tokenizer, add_special_tokens=special, limit=limit)
    else:
        assert body.messages is not None
        ids = chat_ids(
            body.messages,
            llm.tokenizer,
            limit=limit,
            tools=body.tools or (),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    names = None
    if body.return_token_strs:
        names = needed(llm.tokenizer).convert_ids_to_tokens(ids)
    return {
        "count": len(ids),
        "max_model_len": llm.max_model_len,
        "tokens": ids,
        "token_strs": names,
    }


@router.post("/detokenize", **takes(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    body = await read(request, DetokenizeBody, state.settings)
    state.check_model(body.model)

    def decoded() -> dict[str, str]:
        llm = state.llm.llm
        if len(body.tokens) > (most := MAX_CONTEXTS * llm.max_model_len):
            raise invalid("tokens", f"tokens: at most {most} here, got {len(body.tokens)}.")
        check_token_ids("tokens", body.tokens, llm.engine.target.vocab_size)
        return {"prompt": str(needed(llm.tokenizer).decode(body.tokens))}

    return JSONResponse(await _off_loop(request, body, decoded))


async def _off_loop(request: Request, body: Any, act: Any) -> Any:
    state = state_of(request)
    state.enter(1)  # it waits for the same threads as an output
    try:
        return await state.llm.prepare(act, client=state.client_of(request))
    except APIError:
        raise
    except TokenleapError as error:
        state.check_open()
        raise of_engine(error, type(body).model_fields, "prompt") from error
    finally:
        state.leave(1)
