"""The default controller against fixed draft lengths, on recorded texts of two models.

A live comparison of few percent takes an hour on a quiet machine. So this records once what the
target writes, where the draft model agrees with it and how sure it is (one pass over the finished
text tells both), and how long passes of the two take. It then replays the texts in seconds. The
controller is the real one. Time passes as recorded, so every replay gives the same figures.

    python -m benchmarks.draft_replay --model TARGET --draft-model DRAFT --recorded pair.json

Records if the file does not exist. The last kind of text has pieces of all others and of a text of
which the draft model knows nothing, 32 tokens each, so it changes its nature all the time. What the
draft model would draft after a wrong token is not known. It counts as drafted with the probability
of the token that really came.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, TypeAlias

import torch
import typer

from benchmarks import harness
from benchmarks.harness import machine, one_line_errors, report, sample_of, table
from benchmarks.step_cost import pass_seconds
from tokenleap import LLM, SamplingParams
from tokenleap.bench.own import encode
from tokenleap.control import Budget, Controller, CostCurve, Fixed, controller_class
from tokenleap.core.acceptance import Accepted
from tokenleap.core.sampler import TreeDistributions
from tokenleap.core.tree import Draft, chain
from tokenleap.decode import Outcome
from tokenleap.drafters.growth import coupled_draws, most_probable
from tokenleap.request import Request
from tokenleap.runtime.choices import DRAFTING
from tokenleap.runtime.network import PassOutput

CODE_PROMPTS = Path(__file__).with_name("code_prompts.jsonl")
LENGTHS = (0, 2, 3, 4, 5, 8)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)
MIXED, NOISE, PIECE = "changing", "noise", 32

Text: TypeAlias = tuple[Sequence[bool], Sequence[float]]
"""For each token of an output whether the draft model drafts it after those before it, and the
probability of what it drafts, or of drawn tokens their clarity (`Draft.path_probs`)."""


@one_line_errors()
def main(
    recorded: Annotated[Path, typer.Option(help="JSON file; recorded if it does not exist.")],
    prompts: Annotated[Path, typer.Option(help="Prompts to record.")] = CODE_PROMPTS,
    model: harness.Model = "smollm2-135m",
    draft_model: Annotated[str, typer.Option(help="Draft model.")] = "smollm2-135m",
    draft_quantization: Annotated[str, typer.Option(help="Of the draft model.")] = "int4",
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 4,
    max_tokens: harness.MaxTokens = 128,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    most: Annotated[int, typer.Option(min=1, help="num_speculative_tokens of the default.")] = 8,
    draft_cost: Annotated[
        float | None, typer.Option(help="Of a draft token, in plain passes, as if it was recorded.")
    ] = None,
    seed: harness.Seed = 0,
) -> None:
    """Replay the recording and print a Markdown table of speeds over plain decoding."""
    if not recorded.exists():
        sample = sample_of(prompts, per_kind, seed)
        target = LLM(model, max_num_seqs=1, speculative_config={"method": "none"})
        form = DRAFTING if draft_quantization == "int4" else draft_quantization
        draft = LLM(draft_model, max_num_seqs=1, quantization=form)
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True
        )
        written = dict[str, list[Text]]()
        for prompt in sample:
            ids = encode(target, prompt.text, 1024)
            (output,) = target.generate([ids], params)
            text = _agreement(draft, ids, output.token_ids, params)
            written.setdefault(prompt.kind, []).append(text)
        data = {"texts": written, "passes": _passes(target), "level": _passes(draft)[1]}
        recorded.write_text(json.dumps(data))
    data = json.loads(recorded.read_text())
    passes = {int(nodes): seconds for nodes, seconds in data["passes"].items()}
    level = data["level"] if draft_cost is None else draft_cost * passes[1]
    speeds = replay(with_changes(data["texts"], seed), passes, level, most)
    columns: dict[str, Callable[[str], object]] = {"text": str}
    for name in ("default", *LENGTHS):
        columns[str(name)] = lambda kind, name=name: f"{speeds[kind][name]:.3f}"  # type: ignore[misc]
    columns["default over the best"] = lambda kind: f"{_share(speeds[kind]):.3f}"
    remark = "Speed over plain decoding."
    print(report("draft_replay", machine("cpu"), table(list(speeds), columns), remark))


# Recording


def _agreement(
    draft: LLM, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Text:
    """Read a finished text with the draft model, in one pass over the output."""
    model, key = draft.engine.target, -(10**9)
    model.add(key)
    model.prefill(key, prompt[:-1])
    (computed,) = model.verify([key], [chain([prompt[-1], *output[:-1]])])
    model.remove(key)
    request = Request(
        prompt, params, vocab_size=model.vocab_size, max_model_len=model.max_model_len
    )
    noise = request.noise.at(len(prompt)).drafting(coupled=True)
    agrees, sure = list[bool](), list[float]()
    for place, token in enumerate(output):
        logits = computed.scores[place]
        if params.greedy:
            drawn = most_probable(request.sampler.untempered(logits, output[:place]), 1)
        else:
            q = request.sampler.distribution(logits, output[:place])
            drawn = coupled_draws(q, noise, place, 1)
        ((drafted, _, probability),) = drawn
        agrees.append(drafted == token)
        sure.append(probability)
    return agrees, sure


def _passes(llm: LLM) -> dict[int, float]:
    """Median seconds of passes over so many nodes."""
    taken = pass_seconds(llm.engine.target, [(128, size) for size in SIZES], 9)
    return {size: seconds for (_, size), seconds in taken.items()}


# Replaying


def with_changes(texts: Mapping[str, Sequence[Any]], seed: int) -> dict[str, list[Text]]:
    """The texts of each kind, and one more kind of pieces of all."""
    dice = random.Random(seed)
    found: dict[str, list[Text]] = {kind: list(each) for kind, each in texts.items()}
    every = [text for each in found.values() for text in each]
    noise = [dice.random() < 0.1 for _ in every[0][0]], [0.3 * dice.random() for _ in every[0][0]]
    found[MIXED] = []
    for _ in range(4):
        pieces = [noise if n % 2 else dice.choice(every) for n in range(8)]
        starts = [dice.randrange(max(1, len(piece[0]) - PIECE)) for piece in pieces]
        parts = [
            (agrees[at : at + PIECE], sure[at : at + PIECE])
            for (agrees, sure), at in zip(pieces, starts, strict=True)
        ]
        found[MIXED].append(([a for p, _ in parts for a in p], [s for _, p in parts for s in p]))
    return found


def replay(
    texts: Mapping[str, Sequence[Text]], passes: Mapping[int, float], level: float, most: int
) -> dict[str, dict[str | int, float]]:
    """Speeds over plain decoding: by kind of text, of the default and of fixed lengths.

    A pass of the target takes `passes[nodes]` seconds, and one of the draft model `level`.
    """

    def seconds(nodes: int) -> float:
        below = max(size for size in passes if size <= nodes)
        above = min((size for size in passes if size >= nodes), default=below)
        share = (nodes - below) / (above - below) if above > below else 0.0
        return passes[below] + share * (passes[above] - passes[below])

    speeds: dict[str, dict[str | int, float]] = {}
    costs = CostCurve({size: passes[size] for size in (1, 2, 4, 6, 8, 12) if size in passes})
    default = controller_class("cost_model")(most, None, costs, stops_early=True)
    for kind, of_kind in texts.items():
        # The first text warms the controller up, as earlier requests of the same kind would.
        _run(default, of_kind[0], seconds, level)
        speeds[kind] = {"default": _speed(default, of_kind, seconds, level)}
        for length in LENGTHS:
            speeds[kind][length] = _speed(Fixed(length), of_kind, seconds, level)
    speeds["all"] = {
        name: geometric_mean(row[name] for row in speeds.values()) for name in ("default", *LENGTHS)
    }
    return speeds


def _share(row: Mapping[str | int, float]) -> float:
    return row["default"] / max(row[length] for length in LENGTHS)


def _speed(
    controller: Controller,
    texts: Sequence[Text],
    seconds: Callable[[int], float],
    level: float,
) -> float:
    taken = sum(_run(controller, text, seconds, level) for text in texts)
    return sum(len(agrees) for agrees, _ in texts) * seconds(1) / taken


def _run(
    controller: Controller, text: Text, seconds: Callable[[int], float], level: float
) -> float:
    agrees, sure = text
    request, taken = _Replayed(len(agrees)), 0.0
    while request.remaining:
        done = len(request.output_ids)
        (budget,) = controller.budgets([request], 1)
        probs = _drafted(budget, sure[done:])
        passed = next((n for n in range(len(probs)) if not agrees[done + n]), len(probs))
        verifying = seconds(1 + len(probs))
        taken += len(probs) * level + verifying
        controller.costs.observe(1 + len(probs), verifying, 1)
        controller.observe([_outcome(request, probs, passed)], len(probs) * level)
        request.token_ids += [0] * (passed + 1)
    controller.release(request)
    return taken


class _Replayed(Request):
    """A request whose output has a known length."""

    def __init__(self, length: int) -> None:
        super().__init__([1, 2], SamplingParams(temperature=0), vocab_size=9, max_model_len=2**17)
        self._length = length

    @property
    def remaining(self) -> int:
        return self._length - len(self.output_ids)


def _drafted(budget: Budget, sure: Sequence[float]) -> list[float]:
    """The path probabilities of a draft."""
    probs, path = list[float](), 1.0
    for token in sure[: budget.chain]:
        path *= token
        probs.append(path)
        if budget.stops_below(token, path):
            break
    return probs


def _outcome(request: Request, probs: Sequence[float], passed: int) -> Outcome:
    tree = chain([0] * (1 + len(probs)))
    rejected = (passed + 1,) if passed < len(probs) else ()
    accepted = Accepted(tuple(range(1, passed + 1)), 0, rejected, "rejected" if rejected else "")
    one_hot = Draft.deterministic(tree)
    draft = Draft(tree, one_hot.q, path_probs=tuple(probs))
    logits = torch.zeros(1, 9).expand(len(tree), 9)
    p = TreeDistributions(logits, tree, request.sampler, ())
    return Outcome(request, draft, accepted, (), PassOutput(logits), p)


if __name__ == "__main__":
    typer.run(main)
