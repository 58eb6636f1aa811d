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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from transformers import GenerationConfig, PreTrainedModel

from benchmarks import BenchmarkError, harness
from benchmarks.harness import Loaded, llm_for, load, machine, one_line_errors, progress_bar, report
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.bench.contestants import BASELINE, Contestant, methods
from tokenleap.bench.own import drafts_a_tree, encode, prompt_limit
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.report import markdown_table
from tokenleap.bench.run import Journal
from tokenleap.drafters.registry import METHODS
from tokenleap.models.support import default_device

FORMAT = "tokenleap-identity-1"

TIE = 1e-3
"""A mismatch whose two largest float32 logits are closer than this is reported as a tie."""

Key: TypeAlias = tuple[str, str, str]
"""Check, method, prompt id."""


@dataclass(frozen=True)
class Check:
    """One way to compare: dtype, greedy or sampled, one prompt at a time or a batch."""

    name: str
    dtype: str
    sampled: bool = False
    batched: bool = False


CHECKS = (
    Check("float32 generate()", "float32"),
    Check("bfloat16 greedy", "bfloat16"),
    Check("bfloat16 greedy, batch", "bfloat16", batched=True),
    Check("bfloat16 sampled", "bfloat16", sampled=True),
    Check("bfloat16 sampled, batch", "bfloat16", sampled=True, batched=True),
)


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    methods: tuple[Contestant, ...]
    max_tokens: int
    max_prompt_tokens: int
    batch_size: int

    def params(self, prompt: Prompt, *, sampled: bool) -> SamplingParams:
        """Greedy, or sampled at usual settings with the prompt's own seed."""
        fields: dict[str, Any] = {"temperature": 0}
        if sampled:
            fields = {"temperature": 0.8, "top_p": 0.95, "seed": prompt.seed}
        return SamplingParams(**fields, max_tokens=self.max_tokens, logprobs=0)


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


@one_line_errors()
def main(
    prompts: harness.Prompts,
    output: Annotated[
        Path | None, typer.Option(help="JSON lines of comparisons; an existing file is continued.")
    ] = None,
    model: harness.Model = "smollm2-135m",
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
    kind: harness.Kinds = None,
    per_kind: harness.PerKind = 80,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 64,
    max_prompt_tokens: harness.MaxPromptTokens = 2048,
    batch_size: Annotated[int, typer.Option(min=2, help="Prompts in a batch.")] = 8,
    seed: harness.Seed = 0,
    device: harness.Device = "cpu",
) -> None:
    """Check that no drafter changes the output.

    In float32 every method against generate() of Transformers; in bfloat16 every method against
    plain decoding, bit for bit, greedy and seeded, alone and in batches. Prints a Markdown table
    and every mismatch. Exits with 1 if there is one.
    """
    draft = draft_model or model
    chosen = named_methods(method, draft) if method else _all_methods(draft)
    options = Options(tuple(chosen), max_tokens, max_prompt_tokens, batch_size)
    source, checks = Source(model, draft_model, device), _checks_named(check or ())
    sample = harness.sample_of(prompts, per_kind, seed, kind)
    results = ResultsFile(output, _settings(options, source, prompts, seed))
    _run_all(options, source, checks, sample, results)
    compared = [results.comparisons[key] for key in _wanted(checks, options, sample)]
    different = [comparison for comparison in compared if not comparison.identical]
    print(
        report(
            "identity",
            machine(default_device(device)),
            summary(compared),
            *map(_in_words, different),
            f"{len(compared) - len(different)} of {len(compared)} identical.",
        )
    )
    raise typer.Exit(1 if any(comparison.broken for comparison in compared) else 0)


def named_methods(texts: Sequence[str], draft_model: str) -> list[Contestant]:
    """The methods of a command line (`bench.contestants.methods`), without the baseline."""
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
    """What a comparison depends on, which does not include the number of prompts."""
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
) -> Iterator[tuple[str, str, str]]:
    for check in checks:
        for method in methods_of(check, options.methods):
            yield from ((check.name, method.label, prompt.id) for prompt in sample)


def methods_of(check: Check, methods: Sequence[Contestant]) -> list[Contestant]:
    """The methods that a check compares: with `none` as well, unless it is the reference."""
    is_reference = check.dtype != "float32" and not check.batched
    return [*methods] if is_reference else [BASELINE, *methods]


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
            done = sum(key in results.comparisons for key in wanted)
            task = bar.add_task(dtype, total=len(wanted), completed=done)
            if done < len(wanted):
                bench = source.bench(options, dtype, results, partial(bar.advance, task))
                for group in groups:
                    bench.run(chosen, group)
                del bench  # before the next dtype is loaded


def _in_words(comparison: Comparison) -> str:
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


# Comparisons of two generations of a prompt, and the file that keeps them


@dataclass(frozen=True)
class Generation:
    """An output, and whether any of its drafts was a tree and not a chain."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    branched: bool = False


@dataclass(frozen=True)
class Difference:
    """The first position, from 0, at which two generations differ in a token or in its logprob.

    A token is None where one generation has ended. `top2_gap` is the difference of the two largest
    float32 logits there: where it is tiny, rounding decides between the two tokens. `token_gap` is
    the float32 logit of the expected token less that of the other.
    """

    position: int
    expected: int | None
    got: int | None
    expected_logprob: float | None = None
    got_logprob: float | None = None
    top2_gap: float | None = None
    token_gap: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One method on one prompt, compared with its reference.

    `promised` says whether they must be identical. In 16 bits invariant 7 covers chains only, so a
    run that drafted trees may differ.
    """

    check: str
    method: str
    prompt: str
    kind: str
    prompt_tokens: int
    generated_tokens: int
    promised: bool
    difference: Difference | None

    @property
    def key(self) -> Key:
        return self.check, self.method, self.prompt

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def broken(self) -> bool:
        """Whether it differs although it must not."""
        return self.promised and not self.identical

    @staticmethod
    def from_dict(value: dict[str, Any]) -> Comparison:
        found = value["difference"]
        return Comparison(**{**value, "difference": None if found is None else Difference(**found)})


def first_difference(expected: Generation, got: Generation) -> Difference | None:
    """The first difference; None if tokens and, where both have them, logprobs are identical."""
    for position in range(max(len(expected.token_ids), len(got.token_ids))):
        tokens = _at(expected.token_ids, position), _at(got.token_ids, position)
        logprobs: tuple[float | None, float | None] = (None, None)
        if expected.logprobs is not None and got.logprobs is not None:
            logprobs = _at(expected.logprobs, position), _at(got.logprobs, position)
        if tokens[0] != tokens[1] or logprobs[0] != logprobs[1]:
            return Difference(position, *tokens, *logprobs)
    return None


def _at(values: Sequence[Any], position: int) -> Any:
    return values[position] if position < len(values) else None


class ResultsFile:
    """Comparisons in a journal, from which an interrupted run continues."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._journal = Journal(path, FORMAT, settings)
        try:
            comparisons = [Comparison.from_dict(line) for line in self._journal.records]
        except (LookupError, TypeError) as error:
            raise BenchmarkError(f"{path} is not a results file: {error}.") from error
        self.comparisons: dict[Key, Comparison] = {c.key: c for c in comparisons}

    def add(self, comparison: Comparison) -> None:
        """Add a comparison; it is on disk before this returns."""
        self.comparisons[comparison.key] = comparison
        self._journal.add(asdict(comparison))


def summary(comparisons: Iterable[Comparison]) -> str:
    """A Markdown table of identical / compared per check, method and kind of prompt."""
    groups: dict[str, list[Comparison]] = {}
    kinds: dict[str, None] = {}
    for comparison in comparisons:
        groups.setdefault(f"{comparison.check}: {comparison.method}", []).append(comparison)
        kinds[comparison.kind] = None
    rows = [
        [name, *(_share([c for c in members if c.kind == k]) for k in kinds), _share(members)]
        for name, members in sorted(groups.items())
    ]
    return markdown_table(["check: method", *kinds, "all"], rows)


def _share(comparisons: Sequence[Comparison]) -> str:
    return f"{sum(c.identical for c in comparisons)}/{len(comparisons)}"


class Explainer:
    """Says how close the logits were where outputs differ, by the unmodified module in float32."""

    def __init__(self, load_module: Callable[[], PreTrainedModel]) -> None:
        self._load_module = cache(load_module)  # at the first difference

    @torch.inference_mode()
    def explain(
        self, difference: Difference, prompt_ids: Sequence[int], expected: Generation
    ) -> Difference:
        """The difference, with the gaps between logits at its position."""
        module = self._load_module()
        context = [*prompt_ids, *expected.token_ids[: difference.position]]
        ids = torch.tensor([context], device=module.device)  # [1, N]
        logits = module(input_ids=ids).logits[0, -1]  # [V]
        first, second = logits.topk(2).values.tolist()
        gap = None
        if difference.expected is not None and difference.got is not None:
            gap = float(logits[difference.expected] - logits[difference.got])
        return replace(difference, top2_gap=first - second, token_gap=gap)


class Bench:
    """The checks of one dtype on one loaded model; `models` are draft models in this dtype."""

    def __init__(
        self,
        options: Options,
        loaded: Loaded,
        models: Mapping[str, PreTrainedModel],
        explainer: Explainer,
        results: ResultsFile,
        advance: Callable[[], object],
    ) -> None:
        self._options = options
        self._loaded = loaded
        self._models = models
        self._explainer = explainer
        self._results = results
        self._advance = advance
        self._llms: dict[str, LLM] = {}

    def run(self, checks: Sequence[Check], group: Sequence[Prompt]) -> None:
        """Make the comparisons of a group of prompts that the results lack."""
        references: dict[tuple[bool, str], Generation] = {}  # (sampled, prompt) -> expected
        for check in checks:
            for method in methods_of(check, self._options.methods):
                made = self._results.comparisons
                missing = [p for p in group if (check.name, method.label, p.id) not in made]
                for prompt, got in self._generations(check, method, group, missing):
                    key = check.sampled, prompt.id
                    if key not in references:
                        references[key] = self._reference(check, prompt)
                    self._record(check, method, prompt, references[key], got)

    def _generations(
        self, check: Check, method: Contestant, group: Sequence[Prompt], missing: Sequence[Prompt]
    ) -> Iterator[tuple[Prompt, Generation]]:
        """Generate for the missing prompts: one by one, or in one batch of the whole group."""
        if not check.batched:
            for prompt in missing:
                yield prompt, self._generate(method, [prompt], sampled=check.sampled)[0]
        elif missing:
            outputs = self._generate(method, group, sampled=check.sampled)
            yield from (pair for pair in zip(group, outputs, strict=True) if pair[0] in missing)

    def _reference(self, check: Check, prompt: Prompt) -> Generation:
        if check.dtype == "float32":
            return self._transformers(prompt)
        return self._generate(BASELINE, [prompt], sampled=check.sampled)[0]

    def _generate(
        self, method: Contestant, prompts: Sequence[Prompt], *, sampled: bool
    ) -> list[Generation]:
        ids = [self._encode(prompt) for prompt in prompts]
        params = [self._options.params(prompt, sampled=sampled) for prompt in prompts]
        return [
            Generation(
                output.token_ids,
                tuple(entry.logprob for entry in output.logprobs or ()),
                any(drafts_a_tree(step) for step in output.trace),
            )
            for output in self._llm(method).generate(ids, params)
        ]

    def _transformers(self, prompt: Prompt) -> Generation:
        ids = self._encode(prompt)
        eos = list(self._llm(BASELINE).eos_token_ids)
        module: Any = self._loaded.module
        make: Any = GenerationConfig
        config = make(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=self._options.max_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
        )
        inputs = torch.tensor([ids], device=module.device)
        mask = torch.ones_like(inputs)
        output = module.generate(inputs, attention_mask=mask, generation_config=config)
        return Generation(tuple(output[0, len(ids) :].tolist()))

    def _record(
        self,
        check: Check,
        method: Contestant,
        prompt: Prompt,
        expected: Generation,
        got: Generation,
    ) -> None:
        ids = self._encode(prompt)
        difference = first_difference(expected, got)
        if difference is not None:
            difference = self._explainer.explain(difference, ids, expected)
        self._results.add(
            Comparison(
                check=check.name,
                method=method.label,
                prompt=prompt.id,
                kind=prompt.kind,
                prompt_tokens=len(ids),
                generated_tokens=len(expected.token_ids),
                promised=check.dtype == "float32" or not got.branched,
                difference=difference,
            )
        )
        self._advance()

    def _encode(self, prompt: Prompt) -> list[int]:
        llm, options = self._llm(BASELINE), self._options
        limit = prompt_limit(llm.max_model_len, options.max_prompt_tokens, options.max_tokens)
        return encode(llm, prompt.text, limit)

    def _llm(self, method: Contestant) -> LLM:
        if method.label not in self._llms:
            config = dict(method.config)
            if config.get("model") in self._models:  # loaded once for all methods
                config["model"] = self._models[config["model"]]
            self._llms[method.label] = llm_for(self._loaded, config)
        return self._llms[method.label]


if __name__ == "__main__":
    typer.run(main)
