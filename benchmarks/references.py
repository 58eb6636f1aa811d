"""Outputs that are edits of a text which only drafts may quote (`references`).

The text is the model's own greedy output of a prompt, in which every 20th word is replaced. So the
output is an edit of a text that the prompt does not have, as with a retrieved document that the
model knows, or an earlier answer. Methods with and without the text alternate in one process with
plain decoding; all must give the same tokens.

    python -m benchmarks.references

Prints a Markdown table.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, flags
from benchmarks.loading import load
from benchmarks.report import command_line, machine, markdown_table, one_line_errors, progress_bar
from tokenleap.bench.run import order
from tokenleap.core.params import SamplingParams
from tokenleap.engine.prompts import QUOTING
from tokenleap.llm import LLM

__all__ = ["Run", "edited", "main", "measure"]

PROMPTS = (
    "Explain how bread is made, from the grain to the loaf.",
    "Describe a day in the life of a lighthouse keeper a hundred years ago.",
    "Write a letter to a city council that asks for a new library.",
)

Run = tuple[str, bool]
"""A method, and whether it has the edited text."""

RUNS: tuple[Run, ...] = (("none", False), *((m, has) for m in QUOTING for has in (False, True)))


def main(
    model: flags.TinyModel = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 128,
    every: Annotated[int, typer.Option(min=2, help="One word in so many is replaced.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each method and prompt.")] = 3,
    dtype: flags.Dtype = "auto",
    device: flags.Device = "auto",
) -> None:
    """Measure drafting from an edited text that is no part of the prompt."""
    with one_line_errors():
        loaded = load(model, dtype, device)
        llm = LLM(loaded.module, tokenizer=loaded.tokenizer, speculative_config={"method": "none"})
        ratios = measure(llm, PROMPTS, tokens, every, rounds)
    rows = [
        [method, *(f"{ratios[method, has]:.2f}" for has in (False, True))] for method in QUOTING
    ]
    header = ["method", "without the text", "with the text"]
    print(f"{command_line('benchmarks.references')}\n\n{markdown_table(header, rows)}\n")
    print("Speed over `none`; the median over prompts and rounds.\n")
    facts = machine(llm.device, llm.dtype)
    print("\n".join(f"- {name}: {value}" for name, value in facts.items()))


def measure(
    llm: LLM, prompts: tuple[str, ...], tokens: int, every: int, rounds: int
) -> dict[Run, float]:
    """Speed of every run over plain decoding of the same prompt in the same round.

    Raises:
        BenchmarkError: a run has other tokens than plain decoding.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    chats = bool(llm.tokenizer and llm.tokenizer.chat_template)
    ratios: dict[Run, list[float]] = {run: [] for run in RUNS}
    with progress_bar() as bar:
        for prompt in bar.track(prompts):
            asked: Any = [{"role": "user", "content": prompt}] if chats else prompt
            (plain,) = llm.generate([asked], params)
            text = edited(plain.text, every)
            for number in range(rounds):
                seconds = {}
                for run in order(RUNS, number):
                    llm.reset_drafter_memory()
                    fields: Any = {"references": [text]} if run[1] else {}
                    began = time.perf_counter()
                    (result,) = llm.generate(
                        [asked], params, speculative_config={"method": run[0]}, **fields
                    )
                    seconds[run] = time.perf_counter() - began
                    if result.token_ids != plain.token_ids:
                        raise BenchmarkError(f"{run[0]} has other tokens than none.")
                for run, took in seconds.items():
                    ratios[run].append(seconds["none", False] / took)
    return {run: median(values) for run, values in ratios.items()}


def edited(text: str, every: int) -> str:
    """The text with one word in `every` replaced."""
    words = text.split(" ")
    return " ".join("otherwise" if i % every == every - 1 else w for i, w in enumerate(words))


if __name__ == "__main__":
    typer.run(main)
