"""A load test of `tokenleap serve`: with speculation, without, replicas, and llama.cpp's server.

Requests come as a Poisson process at several rates, whether earlier ones have ended or not. All
contestants get the same prompts at the same times from the same HTTP client, and take turns burst
by burst; while one works, the others wait.

    python -m benchmarks.serving --prompts spec_bench.jsonl --gguf model.gguf

`--contestant tokenleap --contestant replicas` compares one server with `--replicas` of it on Ray,
which share the same threads (the extra `ray`). Ray's own processes run all the time.

Every contestant serves the same GGUF file, in the numbers of the file. llama.cpp's server needs
`pip install 'llama-cpp-python[server]'`, here or in the environment of `--llama-python`. Exits with
1 if a request failed, or if greedy answers with speculation differ from those without.

- first: seconds from when a request was due to its first text.
- per token: seconds per token after the first one, of a request.
- tokens/s: tokens of all answers over the time from the first arrival to the last answer.
- goodput: requests per second that kept `--max-first` and `--max-per-token`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
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
from typing import IO, Annotated, Any, TypeAlias

import httpx2
import typer

from benchmarks import BenchmarkError, harness
from benchmarks.harness import in_turn, machine, one_line_errors, report
from tokenleap.bench.prompts_file import Prompt, read_prompts, stratified
from tokenleap.bench.report import markdown_table
from tokenleap.bench.summary import t_ratio

SPECULATION, NONE, LLAMA, REPLICAS = "tokenleap", "none", "llama.cpp", "replicas"
DEFAULTS = (SPECULATION, NONE, LLAMA)
CONTESTANTS = (*DEFAULTS, REPLICAS)
RATES = (0.5, 1.0, 2.0)
LEVEL = 0.95

Bursts: TypeAlias = "dict[tuple[str, float], list[Burst]]"
"""By contestant and rate, one per round."""


@one_line_errors()
def main(
    prompts: harness.Prompts,
    gguf: Annotated[Path, typer.Option(help="The model that all serve.", exists=True)],
    contestant: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(CONTESTANTS)} (repeatable). Default: the first three."),
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second (repeatable).", min=0.01)
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests per round, rate, server.")] = 20,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds.")] = 3,
    max_tokens: harness.MaxTokens = 48,
    max_prompt_chars: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out: all servers have one context.")
    ] = 1500,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Rows of tokenleap's batch.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each server.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, help="Of the contestant replicas.")] = 2,
    max_first: Annotated[float, typer.Option(min=0, help="Limit of goodput, seconds.")] = 2.0,
    max_per_token: Annotated[float, typer.Option(min=0, help="Limit of goodput, seconds.")] = 0.1,
    llama_python: Annotated[
        str, typer.Option(help="Interpreter that has llama-cpp-python[server].")
    ] = sys.executable,
    speculative_config: Annotated[
        str | None, typer.Option(help="Instead of the default speculation.", metavar="JSON")
    ] = None,
    seed: harness.Seed = 0,
) -> None:
    """Measure the servers and print Markdown tables."""
    chosen = _contestants(contestant, llama_python)
    pool = [p for p in read_prompts(prompts) if len(p.text) <= max_prompt_chars]
    if not pool:
        raise BenchmarkError(f"no prompt has at most {max_prompt_chars} characters.")
    rates = tuple(rate or RATES)
    texts = stratified(pool, requests * rounds * len(rates), seed)
    own = tokenleap_command(gguf, speculative_config, max_num_seqs)
    shared = ["--replicas", str(replicas), "--threads", str(max(1, threads // replicas))]
    commands = {
        SPECULATION: own,
        NONE: tokenleap_command(gguf, '{"method": "none"}', max_num_seqs),
        LLAMA: llama_command(llama_python, gguf, threads, 2048),
        REPLICAS: [*own, *shared],
    }

    def send_to(url: str, prompts: Sequence[Prompt], due: Sequence[float]) -> Burst:
        return asyncio.run(send(url, prompts, due, max_tokens, temperature))

    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(started(name, commands[name], threads)) for name in chosen
        }
        bursts = _measured(servers, texts, rates, requests, rounds, send_to, seed)
    found = {
        f"{each:g} requests per second": _table(bursts, chosen, each, max_first, max_per_token)
        for each in rates
    }
    remark = (
        f"{requests} requests a round, {rounds} rounds, at most {max_tokens} tokens, {gguf.name}; "
        f"in brackets {LEVEL:.0%} intervals over rounds."
    )
    print(report("serving", machine("cpu"), *chain.from_iterable(found.items()), remark))
    if wrong := _wrong(bursts, greedy=temperature == 0):
        typer.echo("\n".join(wrong), err=True)
        raise typer.Exit(1)


def _contestants(given: Sequence[str] | None, llama_python: str) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(given or DEFAULTS))
    if unknown := [name for name in chosen if name not in CONTESTANTS]:
        raise BenchmarkError(f"no contestant {unknown[0]!r}: choose of {', '.join(CONTESTANTS)}.")
    if not {SPECULATION, NONE} & set(chosen):
        raise BenchmarkError(f"--contestant: one of {SPECULATION} and {NONE} counts the tokens.")
    if LLAMA in chosen and llama_is_missing(llama_python):
        message = f"llama.cpp's server is not installed for {llama_python}: "
        message += "pip install 'llama-cpp-python[server]', or name --llama-python."
        if given:
            raise BenchmarkError(message)
        typer.echo(f"Without llama.cpp: {message}", err=True)
        chosen = tuple(name for name in chosen if name != LLAMA)
    return chosen


def _measured(
    servers: Mapping[str, Server],
    texts: Sequence[Prompt],
    rates: Sequence[float],
    requests: int,
    rounds: int,
    send_to: Callable[[str, Sequence[Prompt], Sequence[float]], Burst],
    seed: int,
) -> Bursts:
    """All bursts: the servers take turns, with the same prompts at the same times."""
    for server in servers.values():
        server.wait()
        send_to(server.url, texts[:4], [0.0] * len(texts[:4]))  # pays for buffers and cost curves
    prompts = cycle(texts)  # new ones for each burst, because servers cache prefixes
    planned = [
        (rate, list(islice(prompts, requests)), arrivals(requests, rate, f"{seed}/{turn}/{rate}"))
        for turn in range(rounds)
        for rate in rates
    ]

    def burst(name: str, plan: tuple[float, list[Prompt], list[float]]) -> Burst:
        return send_to(servers[name].url, *plan[1:])

    made = in_turn(list(servers), planned, 1, burst, doing="bursts")
    found: Bursts = {(name, rate): [] for name in servers for rate in rates}
    for name, bursts in made.items():
        for (rate, *_), (one,) in zip(planned, bursts, strict=True):
            found[name, rate].append(one)
    return _counted(found, next(server for name, server in servers.items() if name != LLAMA))


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


def _table(
    bursts: Bursts, chosen: Sequence[str], rate: float, max_first: float, max_per_token: float
) -> str:
    rows = []
    for name in chosen:
        listed = bursts[name, rate]
        answers = [answer for burst in listed for answer in burst.answers if answer.error is None]
        rows.append(
            [
                name,
                *_times([answer.first for answer in answers]),
                *_times([answer.per_token for answer in answers]),
                f"{fmean(burst.tokens_per_second for burst in listed):.1f}",
                f"{fmean(burst.goodput(max_first, max_per_token) for burst in listed):.2f}",
                *(_ratios(bursts, name, other, rate) for other in _others(chosen)),
            ]
        )
    header = ["server", "first p50", "p95", "per token p50", "p95", "tokens/s", "goodput"]
    header += [f"speed over {other}" for other in _others(chosen)]
    return markdown_table(header, rows)


def _others(chosen: Sequence[str]) -> list[str]:
    """Whom the others are compared with."""
    with_replicas = (SPECULATION,) if REPLICAS in chosen else ()
    return [name for name in (*with_replicas, NONE, LLAMA) if name in chosen]


def _times(seconds: Sequence[float]) -> tuple[str, str]:
    if len(seconds) < 2:
        return "-", "-"
    cuts = quantiles(seconds, n=20, method="inclusive")
    return f"{cuts[9]:.3f}", f"{cuts[18]:.3f}"


def _ratios(bursts: Mapping[Any, Sequence[Burst]], name: str, other: str, rate: float) -> str:
    """Mean time of a request with the other server over that with this one, round by round.

    Below its capacity a server cannot have more tokens/s than are asked for; the time of a request
    tells servers apart at every rate.
    """
    if name == other:
        return ""
    pairs = zip(bursts[other, rate], bursts[name, rate], strict=True)
    ratios = [_mean_time(theirs) / _mean_time(ours) for theirs, ours in pairs]
    return str(t_ratio(ratios, LEVEL))


def _mean_time(burst: Burst) -> float:
    return fmean(answer.last for answer in burst.answers)


def _wrong(bursts: Bursts, *, greedy: bool) -> list[str]:
    """Errors: failed requests, and greedy answers that speculation changed."""
    lines = [
        f"{name}, {rate:g}/s, prompt {answer.prompt}: {answer.error}"
        for (name, rate), listed in bursts.items()
        for burst in listed
        for answer in burst.answers
        if answer.error is not None
    ]
    texts: dict[str, str] = {}
    for (name, _), listed in bursts.items():
        if greedy and name != LLAMA:
            for answer in [a for burst in listed for a in burst.answers if a.error is None]:
                if answer.text != texts.setdefault(answer.prompt, answer.text):
                    lines.append(f"prompt {answer.prompt}: another answer of {name}")
    return lines


# The load: requests are sent when they are due, however many still run


@dataclass(frozen=True)
class Answer:
    """The answer to a request; its times count from when the request was due.

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
    """The answers to the requests of one round at one rate, in order; seconds until the last."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def goodput(self, first: float, per_token: float) -> float:
        """Requests per second that kept both limits, in seconds."""
        kept = [
            answer
            for answer in self.answers
            if answer.error is None and answer.first <= first and answer.per_token <= per_token
        ]
        return len(kept) / self.seconds


def arrivals(count: int, rate: float, seed: str) -> list[float]:
    """When requests are due: a Poisson process of `rate` per second that begins at 0."""
    gaps, due = random.Random(seed), [0.0]
    while len(due) < count:
        due.append(due[-1] + gaps.expovariate(rate))
    return due


async def send(
    url: str, prompts: Sequence[Prompt], due: Sequence[float], max_tokens: int, temperature: float
) -> Burst:
    """Send a chat request for each prompt when it is due, and read the streams."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        began = time.perf_counter()

        async def one(prompt: Prompt, at: float) -> Answer:
            await asyncio.sleep(began + at - time.perf_counter())
            body = {
                "messages": [{"role": "user", "content": prompt.text}],
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": prompt.seed,
                "stream": True,
            }
            try:
                return await _read(client, prompt, body, began + at)
            except (httpx2.HTTPError, ValueError, LookupError) as error:
                now = time.perf_counter() - began - at
                return Answer(prompt.id, "", now, now, error=str(error) or repr(error))

        pairs = zip(prompts, due, strict=True)
        answers = await asyncio.gather(*(one(*pair) for pair in pairs))
        return Burst(answers, time.perf_counter() - began)


async def _read(
    client: httpx2.AsyncClient, prompt: Prompt, body: dict[str, object], due: float
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
                    last = time.perf_counter() - due
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
                if httpx2.get(f"{self.url}/v1/models", timeout=5).status_code == 200:
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


def llama_command(python: str, gguf: Path, threads: int, context: int) -> list[str]:
    """llama.cpp's server on a free port. It serves one request at a time, in order of arrival."""
    command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--model_alias", "m"]
    command += ["--port", "{port}", "--n_ctx", str(context), "--n_threads", str(threads)]
    # Else a new request ends the one that runs.
    return [*command, "--n_threads_batch", str(threads), "--interrupt_requests", "False"]


def llama_is_missing(python: str) -> bool:
    found = subprocess.run([python, "-c", "import llama_cpp.server.app"], capture_output=True)
    return found.returncode != 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as at:
        port: int = at.getsockname()[1]
        return port


if __name__ == "__main__":
    typer.run(main)
