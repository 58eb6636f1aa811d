"""A load test of `tokenleap serve`: with speculation, without, replicas, and llama.cpp's server.

Requests come as a Poisson process at several rates, whether earlier ones have ended or not. All
contestants get the same prompts at the same times from the same HTTP client, and take turns burst
by burst; while one works, the others wait.

    python -m benchmarks.serving --prompts spec_bench.jsonl --gguf model.gguf

`--contestant tokenleap --contestant replicas` compares one server with `--replicas` of it on Ray,
which share the same threads (`pip install 'tokenleap[ray]'`). Ray's own processes run all the time.

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
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import fmean, quantiles
from typing import Annotated, Any, TypeAlias

import httpx2
import torch
import typer

from benchmarks import BenchmarkError, flags
from benchmarks.report import (
    command_line,
    in_one_line,
    machine,
    markdown_table,
    one_line_errors,
    progress_bar,
)
from benchmarks.serving_load import Answer, Burst, arrivals, send
from benchmarks.serving_servers import (
    Server,
    llama_command,
    llama_is_missing,
    tokenleap_command,
)
from tokenleap.bench.prompts_file import Prompt, read_prompts, stratified
from tokenleap.bench.rows import t_ratio
from tokenleap.bench.run import order

__all__ = ["main"]

SPECULATION, NONE, LLAMA, REPLICAS = "tokenleap", "none", "llama.cpp", "replicas"
DEFAULTS = (SPECULATION, NONE, LLAMA)
CONTESTANTS = (*DEFAULTS, REPLICAS)
RATES = (0.5, 1.0, 2.0)
LEVEL = 0.95

Bursts: TypeAlias = dict[tuple[str, float], list[Burst]]
"""By contestant and rate, one per round."""


def main(
    prompts: flags.Prompts,
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
    max_tokens: flags.MaxTokens = 48,
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
    seed: flags.Seed = 0,
) -> None:
    """Measure the servers and print Markdown tables."""
    with one_line_errors():
        chosen = _contestants(contestant, llama_python)
        pool = [p for p in read_prompts(prompts) if len(p.text) <= max_prompt_chars]
        if not pool:
            raise BenchmarkError(f"no prompt has at most {max_prompt_chars} characters.")
        rates = tuple(rate or RATES)
        texts = stratified(pool, requests * rounds * len(rates), seed)
        commands = {
            SPECULATION: tokenleap_command(
                str(gguf), speculative_config, quantization=None, max_num_seqs=max_num_seqs
            ),
            NONE: tokenleap_command(
                str(gguf), '{"method": "none"}', quantization=None, max_num_seqs=max_num_seqs
            ),
            LLAMA: llama_command(llama_python, gguf, threads, 2048),
            REPLICAS: [
                *tokenleap_command(
                    str(gguf), speculative_config, quantization=None, max_num_seqs=max_num_seqs
                ),
                *("--replicas", str(replicas), "--threads", str(max(1, threads // replicas))),
            ],
        }
        with ExitStack() as stack:
            servers = [
                stack.enter_context(Server(name, commands[name], threads)) for name in chosen
            ]
            for server in servers:
                server.wait()
            bursts = _measured(
                servers, texts, rates, requests, rounds, max_tokens, temperature, seed
            )
            counter = next((s for s in servers if s.name != LLAMA), None)
            bursts = _counted(bursts, counter)
    print(command_line("benchmarks.serving"), "\n")
    for each in rates:
        print(f"{each:g} requests per second\n")
        print(_table(bursts, chosen, each, max_first, max_per_token), "\n")
    print(f"{requests} requests a round, {rounds} rounds, at most {max_tokens} tokens,", end=" ")
    print(f"{gguf.name}; in brackets {LEVEL:.0%} intervals over rounds.", end=" ")
    print(f"{in_one_line(machine(torch.device('cpu')))}.")
    wrong = _wrong(bursts, greedy=temperature == 0)
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
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
    servers: Sequence[Server],
    texts: Sequence[Prompt],
    rates: Sequence[float],
    requests: int,
    rounds: int,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> Bursts:
    """All bursts; the servers take turns, in an order that changes."""
    found: Bursts = {(server.name, rate): [] for server in servers for rate in rates}
    with progress_bar() as bar:
        task = bar.add_task("", total=rounds * len(rates) * len(servers))
        for server in servers:  # the first pass pays for buffers and cost curves
            bar.update(task, description=f"warm up {server.name}")
            asyncio.run(send(server.url, texts[:4], [0.0] * len(texts[:4]), 16, temperature))
        turn, prompts = 0, cycle(texts)  # new ones for each burst, for the caches of prefixes
        for number in range(rounds):
            for rate in rates:
                part = [next(prompts) for _ in range(requests)]
                due = arrivals(requests, rate, f"{seed}/{number}/{rate}")
                for server in order(servers, turn):
                    bar.update(task, description=f"{rate:g}/s {server.name}")
                    burst = asyncio.run(send(server.url, part, due, max_tokens, temperature))
                    found[server.name, rate].append(burst)
                    bar.advance(task)
                turn += 1
    return found


def _counted(bursts: Bursts, counter: Server | None) -> Bursts:
    """The bursts with the tokens of their answers, by one tokenizer."""
    assert counter is not None, "one of the contestants is ours"
    with httpx2.Client(base_url=counter.url, timeout=60) as client:

        def tokens(answer: Answer) -> Answer:
            body = {"prompt": answer.text, "add_special_tokens": False}
            return replace(answer, tokens=client.post("/tokenize", json=body).json()["count"])

        return {
            place: [
                replace(burst, answers=[tokens(answer) for answer in burst.answers])
                for burst in listed
            ]
            for place, listed in bursts.items()
        }


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


if __name__ == "__main__":
    typer.run(main)
