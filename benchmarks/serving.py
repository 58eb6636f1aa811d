"""A load test of `tokenleap serve`, and of llama.cpp's `llama-server` beside it.

1 to 16 clients send a request each, read its stream, and send the next. All servers get the same
prompts from the same HTTP client, and take turns burst by burst; while one works, the others wait.

    python -m benchmarks.serving --prompts spec_bench.jsonl --gguf model.gguf --llama-server PATH

`benchmarks/llama_server.sh` builds `llama-server`. All servers serve the same GGUF file, in the
numbers of the file. `--contestant tokenleap --contestant replicas` compares one server with
`--replicas` of it on Ray, which share the same threads (the extra `ray`). Ray's own processes run
all the time. Exits with 1 if a request failed, or if greedy answers with speculation differ from
those without.

- first: seconds from when a request was sent to its first text.
- per token: seconds per token after the first one, of a request.
- tokens/s: tokens of all answers over the time from the first request to the last answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import fmean, quantiles
from typing import IO, Annotated, TypeAlias

import httpx2
import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import in_turn, machine, one_line_errors, report
from tokenleap.bench.prompts_file import Prompt, read_prompts, stratified
from tokenleap.bench.report import markdown_table
from tokenleap.bench.summary import t_ratio

SPECULATION, NONE, DRAFT, REPLICAS = "tokenleap", "none", "draft_model", "replicas"
LLAMA, LLAMA_SPEC, LLAMA_DRAFT = "llama-server", "llama-server --spec-default", "llama-server -md"
CONTESTANTS = (SPECULATION, NONE, DRAFT, REPLICAS, LLAMA, LLAMA_SPEC, LLAMA_DRAFT)
CLIENTS = (1, 4, 8, 16)
CONTEXT = 2048
WARM_UP = 4
LEVEL = 0.95

Bursts: TypeAlias = "dict[tuple[str, int], list[Burst]]"
"""By contestant and number of clients, one per round."""


@one_line_errors()
def main(
    prompts: harness.Prompts,
    gguf: Annotated[Path, typer.Option(help="The model that all serve.", exists=True)],
    contestant: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(CONTESTANTS)} (repeatable). Default: all but {REPLICAS}."),
    ] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="llama.cpp's `llama-server`.", exists=True)
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="A smaller GGUF file with the same tokens.", exists=True)
    ] = None,
    clients: Annotated[
        list[int] | None, typer.Option(help="Clients at once (repeatable).", min=1)
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests per round, at least two of each client.")
    ] = 8,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds.")] = 3,
    max_tokens: harness.MaxTokens = 48,
    max_prompt_chars: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out: all servers have one context.")
    ] = 1500,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Rows of tokenleap's batch.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each server.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, help="Of the contestant replicas.")] = 2,
    speculative_config: Annotated[
        str | None, typer.Option(help="Instead of the default speculation.", metavar="JSON")
    ] = None,
    seed: harness.Seed = 0,
) -> None:
    """Measure the servers and print Markdown tables."""
    pool = [p for p in read_prompts(prompts) if len(p.text) <= max_prompt_chars]
    if not pool:
        raise BenchmarkError(f"no prompt has at most {max_prompt_chars} characters.")
    levels = tuple(clients or CLIENTS)
    counts = {level: max(requests, 2 * level) for level in levels}
    texts = stratified(pool, WARM_UP + rounds * sum(counts.values()), seed)
    own = tokenleap_command(gguf, speculative_config, max_num_seqs)
    share = max(1, threads // replicas)
    commands = {
        SPECULATION: own,
        NONE: tokenleap_command(gguf, '{"method": "none"}', max_num_seqs),
        REPLICAS: [*own, "--replicas", str(replicas), "--threads", str(share)],
    }
    if draft_model is not None:
        config = json.dumps({"method": "draft_model", "model": str(draft_model)})
        commands[DRAFT] = tokenleap_command(gguf, config, max_num_seqs)
    if llama_server is not None:
        llama = llama_command(llama_server, gguf, threads, max(levels))
        commands |= {LLAMA: llama, LLAMA_SPEC: [*llama, "--spec-default"]}
        if draft_model is not None:
            # Without a type it loads the draft model, and drafts nothing.
            commands[LLAMA_DRAFT] = [*llama, "-md", str(draft_model), "--spec-type", "draft-simple"]
    chosen = _contestants(contestant, commands)

    def send_to(url: str, prompts: Sequence[Prompt], clients: int) -> Burst:
        return asyncio.run(send(url, prompts, clients, max_tokens, temperature))

    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(started(name, commands[name], threads)) for name in chosen
        }
        bursts = _measured(servers, texts, counts, rounds, send_to)
    found = {
        f"{level} client{'s' * (level > 1)}": _table(bursts, chosen, level) for level in levels
    }
    remark = (
        f"{', '.join(map(str, counts.values()))} requests a round, {rounds} rounds, at most "
        f"{max_tokens} tokens, {gguf.name}; in brackets {LEVEL:.0%} intervals over rounds."
    )
    print(report("serving", machine("cpu"), *chain.from_iterable(found.items()), remark))
    if wrong := _wrong(bursts, greedy=temperature == 0):
        typer.echo("\n".join(wrong), err=True)
        raise typer.Exit(1)


def _contestants(given: Sequence[str] | None, commands: Mapping[str, object]) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(given or (name for name in commands if name != REPLICAS)))
    if unknown := [name for name in chosen if name not in CONTESTANTS]:
        raise BenchmarkError(f"no contestant {unknown[0]!r}: choose of {', '.join(CONTESTANTS)}.")
    if missing := [name for name in chosen if name not in commands]:
        raise BenchmarkError(f"{missing[0]} needs --llama-server, or --draft-model.")
    if not {SPECULATION, NONE} & set(chosen):
        raise BenchmarkError(f"--contestant: one of {SPECULATION} and {NONE} counts the tokens.")
    return chosen


def _measured(
    servers: Mapping[str, Server],
    texts: Sequence[Prompt],
    counts: Mapping[int, int],
    rounds: int,
    send_to: Callable[[str, Sequence[Prompt], int], Burst],
) -> Bursts:
    """All bursts: the servers take turns, with the same prompts and as many clients."""
    for server in servers.values():
        server.wait()
        send_to(server.url, texts[:WARM_UP], WARM_UP)  # pays for buffers and cost curves
    # New ones for each burst, because servers cache prefixes.
    prompts = cycle(texts[WARM_UP:] or texts)
    planned = [
        (list(islice(prompts, count)), level)
        for _ in range(rounds)
        for level, count in counts.items()
    ]

    def burst(name: str, plan: tuple[list[Prompt], int]) -> Burst:
        return send_to(servers[name].url, *plan)

    made = in_turn(list(servers), planned, 1, burst, doing="bursts")
    found: Bursts = {(name, level): [] for name in servers for level in counts}
    for name, bursts in made.items():
        for (_, level), (one,) in zip(planned, bursts, strict=True):
            found[name, level].append(one)
    return _counted(found, next(server for name, server in servers.items() if _is_own(name)))


def _counted(bursts: Bursts, counter: Server) -> Bursts:
    """The bursts with the tokens of their answers, by one tokenizer."""
    with httpx2.Client(base_url=counter.url, timeout=60) as client:

        def counted(burst: Burst) -> Burst:
            answers = []
            for answer in burst.answers:
                body = {"prompt": answer.text, "add_special_tokens": False}
                tokens = client.post("/tokenize", json=body).json()["count"]
                answers.append(replace(answer, tokens=tokens))
            return replace(burst, answers=answers)

        return {place: list(map(counted, listed)) for place, listed in bursts.items()}


def _table(bursts: Bursts, chosen: Sequence[str], clients: int) -> str:
    others = [name for name in _others(chosen) if name in chosen]
    rows = []
    for name in chosen:
        listed = bursts[name, clients]
        answers = [answer for burst in listed for answer in burst.answers if answer.error is None]
        rows.append(
            [
                name,
                *_times([answer.first for answer in answers]),
                *_times([answer.per_token for answer in answers]),
                f"{fmean(burst.tokens_per_second for burst in listed):.1f}",
                *(_ratios(bursts, name, other, clients) for other in others),
            ]
        )
    header = ["server", "first p50", "p95", "per token p50", "p95", "tokens/s"]
    return markdown_table([*header, *(f"over {other}" for other in others)], rows)


def _others(chosen: Sequence[str]) -> tuple[str, ...]:
    """Whom the others are compared with."""
    return (SPECULATION,) if REPLICAS in chosen else (NONE, LLAMA)


def _is_own(name: str) -> bool:
    return not name.startswith(LLAMA)


def _times(seconds: Sequence[float]) -> tuple[str, str]:
    if len(seconds) < 2:
        return "-", "-"
    cuts = quantiles(seconds, n=20, method="inclusive")
    return f"{cuts[9]:.3f}", f"{cuts[18]:.3f}"


def _ratios(bursts: Bursts, name: str, other: str, clients: int) -> str:
    """Tokens/s over those of another server, round by round."""
    if name == other:
        return ""
    pairs = zip(bursts[name, clients], bursts[other, clients], strict=True)
    return str(t_ratio([a.tokens_per_second / b.tokens_per_second for a, b in pairs], LEVEL))


def _wrong(bursts: Bursts, *, greedy: bool) -> list[str]:
    """Errors: failed requests, and greedy answers that speculation changed."""
    lines = [
        f"{name}, {clients} clients, prompt {answer.prompt}: {answer.error}"
        for (name, clients), listed in bursts.items()
        for burst in listed
        for answer in burst.answers
        if answer.error is not None
    ]
    texts: dict[str, str] = {}
    for (name, _), listed in bursts.items():
        if greedy and _is_own(name):
            for answer in [a for burst in listed for a in burst.answers if a.error is None]:
                if answer.text != texts.setdefault(answer.prompt, answer.text):
                    lines.append(f"prompt {answer.prompt}: another answer of {name}")
    return lines


# The load


@dataclass(frozen=True)
class Answer:
    """The answer to a request; its times count from when it was sent.

    Tokens are counted after the load, with one tokenizer for all contestants.
    """

    prompt: str
    text: str
    first: float
    last: float
    tokens: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float:
        return (self.last - self.first) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Burst:
    """The answers to the requests of one round, in order; seconds until the last."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


async def send(
    url: str, prompts: Sequence[Prompt], clients: int, max_tokens: int, temperature: float
) -> Burst:
    """Send a chat request for each prompt, so many at once, and read the streams."""
    # A connection for each request: llama-server closes them while the next request is on its way.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        began, free = time.perf_counter(), asyncio.Semaphore(clients)

        async def one(prompt: Prompt) -> Answer:
            body = {
                "messages": [{"role": "user", "content": prompt.text}],
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": prompt.seed,
                "stream": True,
            }
            async with free:
                sent = time.perf_counter()
                try:
                    return await _read(client, prompt, body, sent)
                except (httpx2.HTTPError, ValueError, LookupError) as error:
                    passed = time.perf_counter() - sent
                    return Answer(prompt.id, "", passed, passed, error=str(error) or repr(error))

        answers = await asyncio.gather(*map(one, prompts))
        return Burst(answers, time.perf_counter() - began)


async def _read(
    client: httpx2.AsyncClient, prompt: Prompt, body: dict[str, object], sent: float
) -> Answer:
    text, first, last = "", 0.0, 0.0
    async with client.stream("POST", "/v1/chat/completions", json={"model": "m", **body}) as got:
        if got.status_code != 200:
            await got.aread()
            raise BenchmarkError(f"status {got.status_code}: {got.text[:200]}")
        async for line in got.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise BenchmarkError(str(chunk["error"]))
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece:
                    last = time.perf_counter() - sent
                    first = first or last
                    text += piece
    if not text:
        raise BenchmarkError("no text")
    return Answer(prompt.id, text, first, last)


# The servers


_PATIENCE = 300.0
"""Seconds in which a server has to load its model."""


@dataclass(frozen=True)
class Server:
    """A server's process; `log` has what it wrote."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: IO[str]

    def wait(self) -> None:
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise BenchmarkError(f"{self.name} ended: {self._last_line()}")
            with suppress(httpx2.HTTPError):
                if httpx2.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise BenchmarkError(f"{self.name} did not start in {_PATIENCE:.0f} s.")

    def _last_line(self) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.process.returncode}"


@contextmanager
def started(name: str, command: Sequence[str], threads: int) -> Iterator[Server]:
    """A server on a free port, which is ended at last."""
    port = _free_port()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [part.replace("{port}", str(port)) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C goes to this process alone, which ends them
        )
        try:
            yield Server(name, f"http://127.0.0.1:{port}", process, log)
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def tokenleap_command(model: Path, config: str | None, max_num_seqs: int) -> list[str]:
    """`tokenleap serve` on a free port; config None is the default speculation."""
    command = [sys.executable, "-m", "tokenleap", "serve", str(model), "--port", "{port}"]
    command += ["--served-model-name", "m", "--max-num-seqs", str(max_num_seqs)]
    command += ["--quiet", "--no-log-requests"]
    return command + ([] if config is None else ["--speculative-config", config])


def llama_command(program: Path, gguf: Path, threads: int, slots: int) -> list[str]:
    """`llama-server` on a free port, with a slot for each client."""
    command = [str(program), "-m", str(gguf), "--alias", "m", "--port", "{port}"]
    command += ["-np", str(slots), "-c", str(slots * CONTEXT)]
    return [*command, "-t", str(threads), "-tb", str(threads)]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as at:
        port: int = at.getsockname()[1]
        return port


if __name__ == "__main__":
    typer.run(main)
