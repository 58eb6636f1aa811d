"""`tokenleap demo`: one model without and with speculation, measured while you watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenleap.cli.console import (
    display,
    legend,
    plain,
    show,
    stream,
    summary,
    table_of,
    working,
)
from tokenleap.cli.options import ModelOptions, SpeculationOptions, few, find_draft, flat, resolve
from tokenleap.cli.root import UsageError, examples
from tokenleap.lines import shaped

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig
    from tokenleap.core.params import SamplingParams
    from tokenleap.llm import LLM
    from tokenleap.outputs import CompletionOutput

EXAMPLES = examples(
    "tokenleap demo",
    "tokenleap demo --method ngram_table --num-speculative-tokens 7",
    "tokenleap demo --dtype float32 --rounds 5",
)

DEFAULT_NUM_SPECULATIVE_TOKENS = 8
"""A CPU verifies 8 tokens almost as fast as 5, and the copied passages are long."""

_LINES_SHOWN = 5
"""Lines of a long prompt that are shown."""


@few(
    "model quantization device threads method num_speculative_tokens draft_model max_tokens rounds"
)
@flat
def demo(
    target: ModelOptions,
    speculation: SpeculationOptions,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.", min=1)] = 160,
    rounds: Annotated[
        int,
        typer.Option(help="Measured runs with and without speculation, after a warm-up.", min=1),
    ] = 3,
) -> None:
    """Watch the same model without and with speculation.

    There are three prompts. Every figure is measured while you wait, in
    turn, on the same weights. Exits with 1 if any outputs differ.
    """
    with working("Starting"):
        from tokenleap.core.params import SamplingParams

        config = _config(speculation, target.model)
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
    without, speculative = _load(target, config)
    _show_setting(target, speculative)
    comparisons = []
    for prompt in SENTENCES if without.engine.target.reads_source else PROMPTS:
        comparison = Comparison(prompt.title)
        _stream(comparison, prompt, without, speculative, params)
        _measure(comparison, prompt, without, speculative, params, rounds)
        comparisons.append(comparison)
    _show_table(comparisons, rounds)
    if not all(comparison.identical for comparison in comparisons):
        raise typer.Exit(1)


def _config(speculation: SpeculationOptions, model: str) -> SpeculativeConfig:
    """How to draft; the default is the head that comes with the package, else short lookups."""
    from tokenleap.drafters.heads.shipped import shipped_head

    if speculation == SpeculationOptions():
        if shipped_head(model) is not None:
            speculation = SpeculationOptions(method="hybrid")
        else:
            speculation = SpeculationOptions(num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS)
    return speculation.config(model)


def _load(target: ModelOptions, config: SpeculativeConfig) -> tuple[LLM, LLM]:
    """Two `LLM`s on one model in memory: without and with speculation."""
    from tokenleap.models.resolver import gguf_file

    packed = target.quantization != "none" and gguf_file(target.model) is not None
    folder = None if packed else resolve(target.model)
    find_draft(config)
    with working(f"Loading {target.model}"):
        from tokenleap import LLM

        target.set_threads()
        # Every run computes its whole prompt: prefill is part of the comparison.
        open_with = partial(
            LLM,
            max_model_len=target.max_model_len,
            quantization=target.quantization,
            runtime=target.runtime,
            enable_prefix_caching=False,
        )
        if folder is None:  # the packed weights of a GGUF file are mapped by both
            open_with = partial(open_with, target.model, dtype=target.dtype, device=target.device)
        else:
            open_with = partial(open_with, **_loaded(target, folder))
        without = open_with()
        if without.tokenizer is None:
            raise UsageError(f"{target.model} has no tokenizer to read the prompts with")
        return without, open_with(speculative_config=config)


def _loaded(target: ModelOptions, folder: Path) -> dict[str, Any]:
    from tokenleap.models import load_model, load_tokenizer
    from tokenleap.models.support import default_device, default_dtype

    device = default_device(target.device)
    model = load_model(folder, default_dtype(target.dtype, device), device)
    return {"model": model, "tokenizer": load_tokenizer(folder)}


def _stream(
    comparison: Comparison,
    prompt: DemoPrompt,
    without: LLM,
    speculative: LLM,
    params: SamplingParams,
) -> None:
    """Show both answers as they are generated; these runs are the warm-up."""
    _show_title(prompt.title)
    display().print(plain(_clipped(prompt.text), "note"))
    for title, llm, runs in (
        ("without speculation", without, comparison.without),
        ("with speculation", speculative, comparison.speculative),
    ):
        display().print(plain(f"\n{title}", "head"))
        runs.outputs.append(_stream_one(llm, prompt, params))


def _stream_one(llm: LLM, prompt: DemoPrompt, params: SamplingParams) -> CompletionOutput:
    output, writer = stream(llm, shaped(llm, prompt.text), params)
    if llm.speculative_config.gamma:
        display().print(legend(writer.origins))
    display().print(plain(summary(output.metrics, output.finish_reason), "note"))
    return output


def _measure(
    comparison: Comparison,
    prompt: DemoPrompt,
    without: LLM,
    speculative: LLM,
    params: SamplingParams,
    rounds: int,
) -> None:
    """Run both in turn, so that other load on the machine slows both alike."""
    for number in range(1, rounds + 1):
        with working(f"Measuring, round {number} of {rounds}"):
            for llm, runs in ((without, comparison.without), (speculative, comparison.speculative)):
                llm.reset_drafter_memory()  # or lookups would find the output of the last round
                result = llm.generate([shaped(llm, prompt.text)], params)[0]
                runs.outputs.append(result.outputs[0])


def _clipped(text: str) -> str:
    """The first lines of a prompt, as wide as the terminal."""
    lines = list(plain(text).wrap(display(), display().width))
    more = ["..."] if len(lines) > _LINES_SHOWN else []
    return "\n".join([*(line.plain.rstrip() for line in lines[:_LINES_SHOWN]), *more])


def _show_setting(target: ModelOptions, llm: LLM) -> None:
    config = llm.speculative_config
    dtype = str(llm.dtype).removeprefix("torch.")
    display().print(
        plain(
            f"{target.model} in {dtype} on {llm.device}, greedy; {config.method} drafts up to "
            f"{config.gamma} tokens per step, and the target verifies them in one pass."
        )
    )


def _show_table(comparisons: list[Comparison], rounds: int) -> None:
    headings = ("tokens/s\nwithout", "\nwith", "\nratio", "passes\nwithout", "\nwith")
    rows = (
        (
            row.title,
            _speed(row.without),
            _speed(row.speculative),
            plain(f"{row.ratio:.2f}x", "head"),
            str(row.without.target_passes),
            str(row.speculative.target_passes),
            f"{row.speculative.mean_acceptance_length:.2f}",
            plain("yes", "draft") if row.identical else plain("no", "error"),
        )
        for row in comparisons
    )
    table = table_of(("", *headings, "mean\nlength", "\nidentical"), rows, left=1)
    remarks = (
        f"{rounds} rounds, in turn. tokens/s: median \u00b1 half the range, prompt included. "
        "passes: forward passes of the target. mean length: tokens per pass that had a draft. "
        "identical: the same token ids in all runs."
    )
    _show_title("Measured just now")
    show(table, plain(remarks, "note"))


def _show_title(title: str) -> None:
    display().print()
    display().rule(plain(title, "head"), align="left", style="note")


def _speed(runs: Runs) -> str:
    return f"{runs.tokens_per_second:.1f} \u00b1{runs.spread:.1f}"


# The demo's prompts: one with nothing to copy, two whose answers repeat the prompt.
#
# `tokenleap demo` runs them. Commands that measure use them where no file of prompts is given.


@dataclass(frozen=True)
class DemoPrompt:
    """A prompt and the kind of task it stands for."""

    title: str
    text: str


_CLASS = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
"""

_PASSAGE = (
    "Bread was one of the first foods that people made together. In many villages there was only "
    "one oven, and each family brought its dough there on a fixed day. The baker kept the fire, "
    "told the families when to come, and took a small loaf from each of them as payment. To tell "
    "the loaves apart, every family pressed its own sign into the dough before it was baked. Some "
    "of these signs are still known today, because they were carved into wooden stamps that were "
    "handed down from mother to daughter. When iron stoves became cheap, people began to bake at "
    "home, and most of the village ovens fell out of use."
)

SENTENCES = (
    DemoPrompt("Sentence", "The weather is nice today, so we will walk to the lake."),
    DemoPrompt(
        "Two sentences",
        "The train to the city leaves at nine in the morning. It arrives two hours later.",
    ),
    DemoPrompt("Paragraph", _PASSAGE),
)
"""Sources for encoder-decoders: a translator takes an instruction for a part of the text."""

PROMPTS = (
    DemoPrompt("Question", "What is photosynthesis?"),
    DemoPrompt(
        "Code edit",
        f"Let `withdraw` check the amount. Write out the whole class.\n\n```python\n{_CLASS}```",
    ),
    DemoPrompt("Summary", f"Write a short summary of this passage.\n\n{_PASSAGE}"),
)


# The results of `tokenleap demo`: runs without and with speculation, and their statistics.


@dataclass
class Runs:
    """Outputs of one `LLM` for one prompt. The first is streamed, as a warm-up."""

    outputs: list[CompletionOutput] = field(default_factory=list)

    @property
    def measured(self) -> Sequence[CompletionOutput]:
        return self.outputs[1:]

    @property
    def tokens_per_second(self) -> float:
        """Median over the measured runs, prefill included."""
        return median(output.metrics.tokens_per_second for output in self.measured)

    @property
    def spread(self) -> float:
        """Half the range of the measured tokens per second."""
        speeds = [output.metrics.tokens_per_second for output in self.measured]
        return (max(speeds) - min(speeds)) / 2

    @property
    def target_passes(self) -> int:
        return self.outputs[0].metrics.target_passes

    @property
    def mean_acceptance_length(self) -> float:
        return self.outputs[0].metrics.mean_acceptance_length


@dataclass
class Comparison:
    """One prompt without and with speculation."""

    title: str
    without: Runs = field(default_factory=Runs)
    speculative: Runs = field(default_factory=Runs)

    @property
    def ratio(self) -> float:
        return self.speculative.tokens_per_second / self.without.tokens_per_second

    @property
    def identical(self) -> bool:
        outputs = [*self.without.outputs, *self.speculative.outputs]
        return all(output.token_ids == outputs[0].token_ids for output in outputs)
