"""Outputs that are edits of a text which only drafts may quote (`references`).

The text is the model's own greedy output of a prompt, in which every 20th word is replaced. So the
output is an edit of a text that the prompt does not have, as with a retrieved document that the
model knows, or an earlier answer. Methods with and without the text alternate in one process with
plain decoding; all must give the same tokens.

    python -m benchmarks.references

Prints a Markdown table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from benchmarks import BenchmarkError, harness
from tokenleap.bench.summary import Interval
from tokenleap.core.params import SamplingParams
from tokenleap.engine.prompts import QUOTING
from tokenleap.llm import LLM

PROMPTS = (
    "Explain how bread is made, from the grain to the loaf.",
    "Describe a day in the life of a lighthouse keeper a hundred years ago.",
    "Write a letter to a city council that asks for a new library.",
)

Run = tuple[str, bool]
"""A method, and whether it has the edited text."""

PLAIN: Run = ("none", False)
RUNS: tuple[Run, ...] = (PLAIN, *((m, has) for m in QUOTING for has in (False, True)))


@harness.one_line_errors()
def main(
    model: harness.TinyModel = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 128,
    every: Annotated[int, typer.Option(min=2, help="One word in so many is replaced.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each method and prompt.")] = 3,
    dtype: harness.Dtype = "auto",
    device: harness.Device = "auto",
) -> None:
    """Measure drafting from an edited text that is no part of the prompt."""
    loaded = harness.load(model, dtype, device)
    llm = LLM(loaded.module, tokenizer=loaded.tokenizer, speculative_config={"method": "none"})
    ratios = measure(llm, PROMPTS, tokens, every, rounds)
    found = harness.table(
        list(QUOTING),
        {
            "method": str,
            "without the text": lambda method: ratios[method, False],
            "with the text": lambda method: ratios[method, True],
        },
    )
    remark = "Speed over `none`, with 95 % intervals over prompts and rounds."
    print(harness.report("references", harness.machine(llm.device, llm.dtype), found, remark))


def measure(
    llm: LLM, prompts: Sequence[str], tokens: int, every: int, rounds: int
) -> dict[Run, Interval]:
    """Speed of every run over plain decoding of the same prompt in the same round."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    plain = {prompt: llm.generate([harness.message(llm, prompt)], params)[0] for prompt in prompts}

    def run(one: Run, prompt: str) -> float:
        method, has_text = one
        llm.reset_drafter_memory()
        fields: Any = {"references": [edited(plain[prompt].text, every)]} if has_text else {}
        asked, config = [harness.message(llm, prompt)], {"method": method}
        seconds, (result,) = harness.timed(
            lambda: llm.generate(asked, params, speculative_config=config, **fields)
        )
        if result.token_ids != plain[prompt].token_ids:
            raise BenchmarkError(f"{method} has other tokens than none.")
        return seconds

    return harness.speeds_over(
        PLAIN, harness.flat(harness.in_turn(RUNS, prompts, rounds, run, doing="prompts"))
    )


def edited(text: str, every: int) -> str:
    """The text with one word in `every` replaced."""
    words = text.split(" ")
    return " ".join("otherwise" if i % every == every - 1 else w for i, w in enumerate(words))


if __name__ == "__main__":
    typer.run(main)
