"""Checks on real prompts that no drafter changes the output.

In float32 the token ids of every method, `none` included, are compared with those of Transformers'
`generate()` on the unmodified module. In bfloat16 the token ids and log-probabilities of every
method are compared with those of `none`, bit for bit: greedy and sampled with a seed (rule
`coupled`), one prompt at a time and in batches. In batches `none` itself is compared, too.

    python -m benchmarks.identity --prompts FILE --output results.jsonl

Exits with 0 if everything is identical, with 1 if anything differs, with 2 for wrong use. In
bfloat16 invariant 7 covers chains only: differences of runs that drafted trees are listed, but do
not change the exit code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel

from benchmarks import BenchmarkError, flags
from benchmarks.checks import CHECKS, Bench, Check, Explainer, Options, methods_of
from benchmarks.compare import Comparison, ResultsFile, summary
from benchmarks.loading import load
from benchmarks.report import (
    command_line,
    in_one_line,
    machine,
    one_line_errors,
    progress_bar,
)
from tokenleap import ConfigError
from tokenleap.bench.contestants import BASELINE, Contestant, methods
from tokenleap.bench.prompts_file import Prompt, read_prompts, stratified
from tokenleap.drafters.registry import METHODS
from tokenleap.models.support import default_device

__all__ = ["default_methods", "main", "named_methods"]

TIE = 1e-3
"""A mismatch whose two largest float32 logits are closer than this is reported as a tie."""


@dataclass(frozen=True)
class Source:
    """The models."""

    model: str
    draft_model: str | None
    device: str

    def bench(
        self, options: Options, dtype: str, results: ResultsFile, advance: Callable[[], object]
    ) -> Bench:
        """Load them in this dtype."""
        loaded = load(self.model, dtype, self.device)
        models = {self.model: loaded.module}
        if self.draft_model is not None:
            models[self.draft_model] = load(self.draft_model, dtype, self.device).module

        def float32_module() -> PreTrainedModel:
            same = dtype == "float32"
            return loaded.module if same else load(self.model, "float32", self.device).module

        return Bench(options, loaded, models, Explainer(float32_module), results, advance)


def main(
    prompts: flags.Prompts,
    output: Annotated[
        Path | None, typer.Option(help="JSON lines of comparisons; an existing file is continued.")
    ] = None,
    model: flags.Model = "smollm2-135m",
    draft_model: Annotated[
        str | None, typer.Option(help="For methods that take one. Default: the model itself.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method, or a JSON speculative_config (repeatable). Default: all."),
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="A check, by its name (repeatable). Default: all.")
    ] = None,
    kind: flags.Kinds = None,
    per_kind: flags.PerKind = 80,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 64,
    max_prompt_tokens: flags.MaxPromptTokens = 2048,
    batch_size: Annotated[int, typer.Option(min=2, help="Prompts in a batch.")] = 8,
    seed: flags.Seed = 0,
    device: flags.Device = "cpu",
) -> None:
    """Check that no drafter changes the output.

    In float32 every method against generate() of Transformers; in bfloat16 every method against
    plain decoding, bit for bit, greedy and seeded, alone and in batches. Prints a Markdown table
    and every mismatch. Exits with 1 if there is one.
    """
    with one_line_errors():
        options = Options(
            methods=tuple(
                named_methods(method, draft_model or model)
                if method
                else _all_methods(draft_model or model)
            ),
            max_tokens=max_tokens,
            max_prompt_tokens=max_prompt_tokens,
            batch_size=batch_size,
        )
        source = Source(model, draft_model, device)
        checks = _checks_named(check or ())
        sample = stratified(read_prompts(prompts), per_kind, seed, kind or ())
        results = ResultsFile(output, _settings(options, source, prompts, seed))
        wanted = list(_wanted(checks, options, sample))
        _run_all(options, source, checks, sample, results)
    compared = [results.comparisons[key] for key in wanted]
    _print_report(compared, machine(default_device(device)))
    raise typer.Exit(1 if any(comparison.broken for comparison in compared) else 0)


def named_methods(texts: Sequence[str], draft_model: str) -> list[Contestant]:
    """The methods of a command line, without the baseline.

    Args:
        texts: see `tokenleap.bench.contestants.methods`.
        draft_model: for methods that take one and do not name it.

    Raises:
        ConfigError: a configuration is wrong.
        BenchmarkError: only the baseline is named, or one has other weights than the baseline.
    """
    _, *chosen = methods(texts, draft_model, None)
    if not chosen:
        raise BenchmarkError(f"'{BASELINE.label}' is the baseline: name another --method.")
    for method in chosen:
        if method.quantization is not None:
            raise BenchmarkError(f"--method {method.label}: quantized weights change the output.")
    return chosen


def default_methods(draft_model: str) -> tuple[list[Contestant], list[str]]:
    """All registered methods but the baseline, and the names of those left out.

    Left out are methods with required fields of their own, such as a corpus or other drafters.
    """
    ready: list[Contestant] = []
    left_out: list[str] = []
    for name in METHODS:
        if name == BASELINE.label:
            continue
        try:
            ready += named_methods([name], draft_model)
        except ConfigError:
            left_out.append(name)
    return ready, left_out


def _all_methods(draft_model: str) -> list[Contestant]:
    ready, left_out = default_methods(draft_model)
    if left_out:
        names = ", ".join(left_out)
        typer.echo(f"Left out, because they need fields (--method JSON): {names}.", err=True)
    return ready


def _checks_named(names: Sequence[str]) -> list[Check]:
    known = {check.name: check for check in CHECKS}
    for name in names:
        if name not in known:
            raise BenchmarkError(f"no check '{name}'; there are: {'; '.join(known)}.")
    return [check for check in CHECKS if not names or check.name in names]


def _settings(options: Options, source: Source, prompts: Path, seed: int) -> dict[str, Any]:
    """Settings that a comparison depends on, without the number of prompts."""
    return {
        "model": source.model,
        "draft_model": source.draft_model,
        "max_tokens": options.max_tokens,
        "max_prompt_tokens": options.max_prompt_tokens,
        "batch_size": options.batch_size,
        "prompts": f"{prompts.name} {hashlib.sha256(prompts.read_bytes()).hexdigest()[:12]}",
        "seed": seed,
        **machine(default_device(source.device)),
    }


def _wanted(
    checks: Iterable[Check], options: Options, sample: Sequence[Prompt]
) -> Iterable[tuple[str, str, str]]:
    for check in checks:
        for method in methods_of(check, options.methods):
            yield from ((check.name, method.label, prompt.id) for prompt in sample)


def _run_all(
    options: Options,
    source: Source,
    checks: Sequence[Check],
    sample: Sequence[Prompt],
    results: ResultsFile,
) -> None:
    """Run one dtype after the other, so that one model is in memory at a time."""
    size = options.batch_size
    groups = [sample[start : start + size] for start in range(0, len(sample), size)]
    with progress_bar() as bar:
        for dtype in dict.fromkeys(check.dtype for check in checks):
            chosen = [check for check in checks if check.dtype == dtype]
            wanted = list(_wanted(chosen, options, sample))
            done = sum(key in results for key in wanted)
            task = bar.add_task(dtype, total=len(wanted), completed=done)
            if done < len(wanted):
                bench = source.bench(options, dtype, results, partial(bar.advance, task))
                for group in groups:
                    bench.run(chosen, group)
                del bench  # before the next dtype is loaded


def _print_report(compared: Sequence[Comparison], where: dict[str, Any]) -> None:
    print(f"{command_line('benchmarks.identity')}\n\n{in_one_line(where)}\n")
    print(summary(compared))
    different = [comparison for comparison in compared if not comparison.identical]
    for comparison in different:
        print(f"\n{_in_words(comparison)}")
    print(f"\n{len(compared) - len(different)} of {len(compared)} identical.")


def _in_words(comparison: Comparison) -> str:
    """One mismatch in words."""
    difference = comparison.difference
    assert difference is not None
    text = (
        f"{comparison.check}: {comparison.method}, prompt {comparison.prompt} "
        f"({comparison.kind}): at position {difference.position} of "
        f"{comparison.generated_tokens} token {difference.got} instead of {difference.expected}"
    )
    if difference.expected_logprob is not None or difference.got_logprob is not None:
        text += f", logprob {difference.got_logprob} instead of {difference.expected_logprob}"
    assert difference.top2_gap is not None
    verdict = "a tie" if difference.top2_gap < TIE else "no tie"
    text += f"; gap of the two largest float32 logits {difference.top2_gap:.2e}: {verdict}"
    return text if comparison.promised else f"{text}; it drafted trees, which may differ"


if __name__ == "__main__":
    typer.run(main)
