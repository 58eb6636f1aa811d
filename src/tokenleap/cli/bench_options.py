"""What `tokenleap bench` compares, and how much it measures: its options in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tokenleap.cli.flat import in_panel
from tokenleap.cli.options import DEFAULT_METHOD, EngineOptions, MaxNumSeqs
from tokenleap.cli.root import UsageError

if TYPE_CHECKING:
    from tokenleap.bench.prompts_file import Prompt

__all__ = ["Amount", "BenchEngine", "Contenders", "Emissions"]

_DEFAULT_PEERS = "transformers-plain"
_DEFAULT_PER_KIND = 5


@dataclass(frozen=True)
class Contenders:
    """The methods and peers that are compared with plain decoding."""

    method: Annotated[
        list[str] | None,
        in_panel(
            "Contestants",
            "A method, or a JSON speculative_config (quantization allowed). Repeatable.",
            show_default=f"{DEFAULT_METHOD}; hybrid where a head comes with the package",
        ),
    ] = None
    peers: Annotated[
        str,
        in_panel(
            "Contestants",
            "transformers, llama.cpp, openvino, or none. For one mode, add -plain, -lookup or "
            "-assistant.",
            metavar="PEER,...",
        ),
    ] = _DEFAULT_PEERS
    gguf: Annotated[
        Path | None,
        in_panel(
            "Contestants",
            "GGUF file of the model, for llama.cpp and openvino.",
            metavar="FILE",
            show_default="--model, if it is one",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        in_panel(
            "Contestants", "Draft model, for methods that take one and transformers-assistant."
        ),
    ] = None


@dataclass(frozen=True)
class BenchEngine(EngineOptions):
    """Engine options of this library's contestants.

    There is no option for prefix caching: it is off, because the rounds repeat every prompt.
    """

    max_num_seqs: MaxNumSeqs = None


@dataclass(frozen=True)
class Emissions:
    """How measured energy is turned into emissions; see `bench.rows.Footprint`."""

    pue: Annotated[
        float,
        in_panel("Output", "Power usage effectiveness, where energy can be measured.", min=1),
    ] = 1.1
    co2: Annotated[float, in_panel("Output", "Grams of CO2 per Wh.", min=0)] = 0.385


@dataclass(frozen=True)
class Amount:
    """How much to measure."""

    per_kind: Annotated[
        int | None,
        in_panel("Amount", "Prompts of each kind.", min=1, show_default=str(_DEFAULT_PER_KIND)),
    ] = None
    everything: Annotated[bool, in_panel("Amount", "Use all prompts of the file.", "--all")] = False
    rounds: Annotated[int, in_panel("Amount", "Runs of every prompt.", min=1)] = 3
    max_tokens: Annotated[int, in_panel("Amount", "Tokens to generate per prompt.", min=2)] = 128
    temperature: Annotated[
        float,
        in_panel(
            "Amount",
            "Sampling; a prompt has the same seed for all contestants. 0 is greedy.",
            min=0,
        ),
    ] = 0.0
    max_prompt_tokens: Annotated[
        int, in_panel("Amount", "Limit of prompt tokens; longer prompts lose their middle.", min=2)
    ] = 2048
    batch_sizes: Annotated[
        str | None,
        in_panel(
            "Amount",
            "Also run batches of these sizes, where supported.",
            metavar="N,N,...",
            show_default="1",
        ),
    ] = None
    control: Annotated[
        int,
        in_panel("Amount", "Also run prompts of random tokens, which drafts cannot copy.", min=0),
    ] = 0
    seed: Annotated[int, in_panel("Amount", "Seed of the sample of prompts.", min=0)] = 0

    def sample(self, file: Path) -> tuple[Prompt, ...]:
        """The prompts to run: a sample of each kind, or all of them."""
        from tokenleap.bench.prompts_file import read_prompts, stratified

        prompts = read_prompts(file)
        if self.everything:
            if self.per_kind is not None:
                raise UsageError(f"--all takes every prompt: leave out --per-kind {self.per_kind}")
            return tuple(prompts)
        return tuple(stratified(prompts, self.per_kind or _DEFAULT_PER_KIND, self.seed))

    def batches(self) -> tuple[int, ...]:
        """Batch sizes other than 1, in ascending order."""
        try:
            sizes = {int(part) for part in (self.batch_sizes or "1").split(",")}
        except ValueError:
            sizes = {0}
        if min(sizes) < 1:
            raise UsageError(f"--batch-sizes takes numbers, as in 1,4,16, got {self.batch_sizes}")
        return tuple(sorted(sizes - {1}))
