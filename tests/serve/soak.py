"""A soak of the server: many clients, of which some leave, send nonsense, or hit faults.

Every answer is compared with that of the same request alone. The order of events is the machine's;
what each client does follows from a seed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Protocol

import httpx2
import psutil
import pytest

from tests.serve.support import MODEL, Served
from tokenleap.core.grammar import Grammar, Grammars
from tokenleap.core.structured import checked_source

__all__ = ["Soak", "faults", "live_objects"]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
FAULTY_RULE, FAULTY_DRAFTER = 1001, 1002
"""Seeds whose requests hit a fault."""
FAULTY_FORM = "[fault]{30}"
"""A regular expression whose grammar fails after a few tokens."""
BEGIN = 3
"""Tokens of an output before its fault."""

HELLO = [{"role": "user", "content": "hello hello hello"}]
SUFFIX, NONE = {"method": "suffix", "suffix_decoding_max_cached_requests": 2}, {"method": "none"}

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "hello", "temperature": 0, "max_tokens": 20}),
    (COMPLETIONS, {"prompt": "a b a b a b", "seed": 5, "n": 3, "max_tokens": 12}),
    (COMPLETIONS, {"prompt": ["one", "two two", "x" * 70], "seed": 6, "max_tokens": 9}),
    (COMPLETIONS, {"prompt": [7, 8, 9] * 168, "temperature": 0, "max_tokens": 30}),
    (COMPLETIONS, {"prompt": "hello", "temperature": 0, "echo": True, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": "aaaa", "temperature": 0, "speculative_config": NONE}),
    (COMPLETIONS, {"prompt": "abcabc", "seed": 7, "speculative_config": SUFFIX}),
    (COMPLETIONS, {"prompt": "ab ab", "temperature": 0, "speculative_config": {"method": "copy"}}),
    (COMPLETIONS, {"prompt": "q", "seed": 8, "guided_regex": "[ab]{6}"}),
    (COMPLETIONS, {"prompt": "q", "seed": 9, "guided_choice": ["yes", "no"]}),
    (COMPLETIONS, {"prompt": "pp", "seed": 10, "presence_penalty": 1.5, "top_k": 9}),
    (COMPLETIONS, {"prompt": "s" * 200, "seed": 11, "min_p": 0.1, "logit_bias": {"7": 3}}),
    (CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 15, "logprobs": True}),
    (CHAT, {"messages": HELLO, "seed": 12, "n": 2, "max_tokens": 8, "ignore_eos": True}),
    (CHAT, {"messages": [*HELLO, *HELLO], "seed": 13, "max_tokens": 6}),
    (RESPONSES, {"input": "hello", "temperature": 0, "max_output_tokens": 12}),
]
"""Requests of clients; all are answered."""

SPIES: list[dict[str, Any]] = [
    {"prompt": prompt, "speculative_config": {"method": method, "controller": "fixed"}}
    for prompt in ([7, 8, 9] * 20, [7, 8], [40, 41, 40, 41], [50])
    for method in ("suffix", "ngram")
]
"""Requests with a trace that begin like those of others; both methods draft from texts."""

FAULTS: list[tuple[str, dict[str, Any], bool]] = [
    (COMPLETIONS, {"prompt": "a", "seed": FAULTY_RULE, "max_tokens": 12}, True),
    (CHAT, {"messages": HELLO, "seed": FAULTY_RULE, "max_tokens": 12}, True),
    (RESPONSES, {"input": "a", "seed": FAULTY_RULE, "max_output_tokens": 12}, True),
    (COMPLETIONS, {"prompt": "a", "seed": 1, "guided_regex": FAULTY_FORM, "max_tokens": 12}, True),
    (COMPLETIONS, {"prompt": "aa", "seed": FAULTY_DRAFTER, "ignore_eos": True}, False),
]
"""Requests that hit a fault, and whether it ends them; without drafts a request goes on."""

MALFORMED: list[bytes] = [
    *(b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b'{"model": "tiny", "model": "tiny"}'),
    *(b"[" * 3000, b'{"model": "tiny"}', b'{"model": "other", "prompt": "a"}'),
    *(b'{"model": "tiny", "prompt": []}', b'{"model": "tiny", "prompt": "a", "n": 99}'),
    *(b'{"model": "tiny", "prompt": "a", "colour": 1}', b'{"model": "tiny", "prompt": [-1]}'),
    b'{"model": "tiny", "prompt": "a", "guided_regex": "("}',
    b'{"model": "tiny", "prompt": "a", "guided_json": {"type": "nothing"}}',
    b'{"model": "tiny", "prompt": "a", "logit_bias": {"100000": 1}}',
    b'{"model": "tiny", "prompt": "a", "speculative_config": {"method": "draft_model"}}',
    json.dumps({"model": MODEL, "prompt": "long" * 1000}).encode(),
]
"""Bodies that are refused."""


def _hostile() -> list[tuple[str, dict[str, Any]]]:
    """Small requests that cost much, or end a process, where nothing bounds them."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(3000))
    chained = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    references = {"$defs": {**chained, "d3000": {"type": "null"}}, "$ref": "#/$defs/d0"}
    nested: dict[str, Any] = {"type": "null"}
    for _ in range(400):
        nested = {"type": "array", "items": nested, "minItems": 1}
    names = [f"n{i}" for i in range(20_000)]
    wide = {"type": "object", "properties": {each: {} for each in names}, "required": names}
    function = {"name": "f", "parameters": references}
    called = {"type": "function", "function": {"name": "f"}}
    digits, repeated = "7" * 7_000_000, "(a?){5000}a{5000}"
    return [
        (COMPLETIONS, {"prompt": "a", "guided_grammar": f"start: r0\n{rules}\nr3000: /a/"}),
        (COMPLETIONS, {"prompt": "a", "guided_json": references}),
        (
            CHAT,
            {
                "messages": HELLO,
                "tools": [{"type": "function", "function": function}],
                "tool_choice": called,
            },
        ),
        (COMPLETIONS, {"prompt": "a", "guided_json": nested}),
        (COMPLETIONS, {"prompt": "a", "guided_json": '{"items":' * 20_000}),
        (COMPLETIONS, {"prompt": "a", "guided_json": wide}),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "a{1000000}"}),
        (COMPLETIONS, {"prompt": "a", "guided_regex": repeated}),
        (COMPLETIONS, {"prompt": "a", "guided_json": {"type": "string", "pattern": repeated}}),
        (COMPLETIONS, {"prompt": "a", "guided_choice": ["x" * 1_000_000, "y"]}),
        (COMPLETIONS, {"prompt": digits, "truncate_prompt_tokens": 5}),
        ("/tokenize", {"prompt": digits}),
        (COMPLETIONS, {"prompt": "a", "temperature": 1e-5, "logit_bias": {"7": 3.4e38}}),
    ]


ACTIONS = {
    "answer": 10,
    "leave": 4,
    "malformed": 3,
    "fault": 3,
    "half": 1,
    "spy": 2,
    "hostile": 1,
}
"""Actions of clients, and how often they occur."""


def _full(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {} if path == RESPONSES else {"return_token_ids": True}
    if path == COMPLETIONS:
        more["logprobs"] = 1
    return {"model": MODEL, **more, **fields}


class _Joined:
    """The pieces of each output, put together; they are equal for a whole and a streamed answer."""

    def __init__(self) -> None:
        self.outputs: dict[int, dict[str, Any]] = {}

    def add(self, choice: dict[str, Any]) -> None:
        found = self.outputs.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []})
        message = choice.get("message") or choice.get("delta") or choice
        found["text"] += message.get("text") or message.get("content") or ""
        found["ids"] += choice.get("token_ids", ())
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs")
        content = logprobs.get("content") or ()
        found["logprobs"] += [each["logprob"] for each in content] if values is None else values
        if choice.get("finish_reason") is not None:
            found["end"] = choice["finish_reason"], choice.get("stop_reason")


def _of_whole(answer: dict[str, Any]) -> Any:
    if "choices" not in answer:
        (message,) = answer["output"]
        return message["content"][0]["text"], answer["status"]
    joined = _Joined()
    for choice in answer["choices"]:
        joined.add(choice)
    return joined.outputs


def _of_events(lines: Sequence[str]) -> Any:
    """The answer; a text if the stream ended with an error."""
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [json.loads(each) for each in found if each != "[DONE]"]
    last = events[-1]
    if "error" in last:
        return last["error"]["message"]
    if last.get("type") == "response.failed":
        return last["response"]["error"]["message"]
    if "response" in last:
        deltas = "".join(each["delta"] for each in events if each["type"].endswith("text.delta"))
        assert deltas == last["response"]["output"][0]["content"][0]["text"]
        return _of_whole(last["response"])
    assert found[-1] == "[DONE]"
    joined = _Joined()
    for event in events:
        for choice in event["choices"]:
            joined.add(choice)
    return joined.outputs


@contextmanager
def faults(server: Served) -> Iterator[None]:
    """Let the requests of `FAULTS` fail in the rule, in the drafter, and in the grammar."""
    default = server.llm.engine._speculation.default
    rule, drafter = type(default.rule), type(default.drafter)
    accept, propose, compile_form = rule.accept, drafter.propose, Grammars.compile

    def accepting(self: Any, draft: Any, p: Any, noise: Any) -> Any:
        if p._sampler.params.seed == FAULTY_RULE and len(p._output_ids) >= BEGIN:
            raise RuntimeError("the rule was made to fail")
        return accept(self, draft, p, noise)

    def proposing(self: Any, batch: Any, budgets: Any) -> Any:
        for request in batch:
            if request.params.seed == FAULTY_DRAFTER and len(request.output_ids) >= BEGIN:
                raise RuntimeError("the drafter was made to fail")
        return propose(self, batch, budgets)

    def compiling(self: Any, form: Any) -> Grammar:
        made = compile_form(self, form)
        if FAULTY_FORM in checked_source(form):
            made.__class__ = _FaultyGrammar
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "accept", accepting)
        patch.setattr(drafter, "propose", proposing)
        patch.setattr(Grammars, "compile", compiling)
        yield


class _FaultyGrammar(Grammar):
    def allowed(self, output_ids: Sequence[int]) -> Any:
        if len(output_ids) >= BEGIN:
            raise RuntimeError("the grammar was made to fail")
        return super().allowed(output_ids)


class Asked(Protocol):
    """A server in this process or in another one."""

    url: str
    port: int
    http: httpx2.Client


class Soak:
    """Clients of a server, with the answers that they must get.

    Args:
        server: the server; nothing else is asked of it.
        seed: of what the clients do.
        clients: how many there are at a time.
        actions: what they do, and how often; faults can be made in this process only.

    Attributes:
        done: how often each was done.
        drafted: tokens that the traces of spies have shown.
        seconds: how long each answer took, once there was room for the request.
    """

    def __init__(
        self, server: Asked, seed: int, clients: int, actions: Mapping[str, float] = ACTIONS
    ) -> None:
        self._server, self._random, self._clients = server, random.Random(seed), clients
        self._actions = actions
        self.done = Counter[str]()
        self.drafted = 0
        self.seconds = list[float]()
        self._requests = cycle(range(len(REQUESTS)))
        self._faults = cycle(range(len(FAULTS)))
        self._malformed_bodies = cycle(MALFORMED)
        self._costly = cycle(_hostile())
        self._expected = [_of_whole(self._alone(*each)) for each in REQUESTS]
        self._without_fault = [
            None if ends else _of_whole(self._alone(path, fields)) for path, fields, ends in FAULTS
        ]

    def run(self, requests: int) -> None:
        """Send so many requests."""
        asyncio.run(self._run(requests))

    def _alone(self, path: str, fields: dict[str, Any]) -> Any:
        response = self._server.http.post(path, json=_full(path, fields))
        assert response.status_code == 200, response.text
        return response.json()

    async def _run(self, requests: int) -> None:
        names, weights = list(self._actions), list(self._actions.values())
        plan = iter(self._random.choices(names, weights, k=requests))
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._clients)
        async with httpx2.AsyncClient(
            base_url=self._server.url, timeout=240, limits=limits
        ) as client:

            async def work() -> None:
                for action in plan:
                    await getattr(self, f"_{action}")(client, random.Random(self._random.random()))
                    self.done[action] += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(self._clients):
                    group.create_task(work())

    async def _get(
        self, client: httpx2.AsyncClient, path: str, body: dict[str, Any]
    ) -> httpx2.Response:
        """The response, as soon as there is room for the request."""
        while True:
            began = time.perf_counter()
            response = await client.post(path, json=body)
            if response.status_code != 429:
                self.seconds.append(time.perf_counter() - began)
                return response
            assert response.headers["retry-after"] == "1"
            self.done["refused"] += 1
            await asyncio.sleep(0.01)

    # What a client does

    async def _asked(
        self, client: httpx2.AsyncClient, path: str, fields: dict[str, Any], chance: random.Random
    ) -> Any:
        """An answer, whole or in pieces: its outputs, or the message of its error."""
        stream = chance.random() < 0.5
        response = await self._get(client, path, {**_full(path, fields), "stream": stream})
        if response.status_code == 500 and not stream:
            return response.json()["error"]["message"]
        assert response.status_code == 200, response.text
        return _of_events(response.text.splitlines()) if stream else _of_whole(response.json())

    async def _answer(self, client: httpx2.AsyncClient, chance: random.Random) -> None:
        index = next(self._requests)
        found = await self._asked(client, *REQUESTS[index], chance)
        assert found == self._expected[index], REQUESTS[index]

    async def _fault(self, client: httpx2.AsyncClient, chance: random.Random) -> None:
        index = next(self._faults)
        path, fields, ends = FAULTS[index]
        found = await self._asked(client, path, fields, chance)
        if ends:
            assert "made to fail" in found
        else:
            assert found == self._without_fault[index]

    async def _leave(self, client: httpx2.AsyncClient, chance: random.Random) -> None:
        """Go away: before the answer, after a part of it, or in the middle of waiting for it."""
        path, fields = chance.choice(REQUESTS)
        stream = chance.random() < 0.7
        body = {**_full(path, fields), "stream": stream}
        if chance.random() < 0.5:
            task = asyncio.ensure_future(client.post(path, json=body))
            await asyncio.wait({task}, timeout=chance.random() / 20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        left = chance.randrange(4)
        async with client.stream("POST", path, json=body) as response:
            async for _ in response.aiter_lines():
                left -= 1
                if left < 0:
                    break

    async def _malformed(self, client: httpx2.AsyncClient, chance: random.Random) -> None:
        content = next(self._malformed_bodies)
        response = await client.post(chance.choice([COMPLETIONS, CHAT, RESPONSES]), content=content)
        assert 400 <= response.status_code < 500, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    async def _spy(self, client: httpx2.AsyncClient, chance: random.Random) -> None:
        """Whatever is drafted for a request is part of its own text."""
        more = {"max_tokens": 24, "temperature": 0, "tokenleap": {"trace": True}}
        body = {**_full(COMPLETIONS, chance.choice(SPIES)), **more}
        response = await self._get(client, COMPLETIONS, body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        steps = choice["tokenleap"]["trace"]["steps"]
        drafted = {token for step in steps for token in step["drafted"]}
        assert drafted <= {*body["prompt"], *choice["token_ids"]}, (drafted, body)
        self.drafted += len(drafted)

    async def _hostile(self, client: httpx2.AsyncClient, _: random.Random) -> None:
        """It is refused, or answered; a plain request beside it does not wait for it."""
        path, fields = next(self._costly)
        response = await client.post(path, json={"model": MODEL, "max_tokens": 4, **fields})
        assert response.status_code in (200, 400, 413, 429), (response.status_code, response.text)
        if response.status_code == 400:
            assert "\n" not in response.json()["error"]["message"]

    async def _half(self, _: httpx2.AsyncClient, chance: random.Random) -> None:
        """Send a part of a request, and close the connection."""
        path, fields = chance.choice(REQUESTS)
        body = json.dumps(_full(path, fields)).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        content = head.encode() + body
        _reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(content[: chance.randrange(len(content))])
        await writer.drain()
        writer.close()


def live_objects() -> tuple[Counter[str], int, int]:
    """Objects of this package's types by name, all objects, and open files."""
    gc.collect()
    objects = gc.get_objects()
    names = Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, objects)
        if str(kind.__module__).startswith("tokenleap")
    )
    return names, len(objects), psutil.Process().num_fds()
