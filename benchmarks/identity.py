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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
import typer
from transformers import GenerationConfig

from benchmarks import BenchmarkError, harness
from benchmarks.harness import Loaded, flat, in_turn, llm_for, load, machine, report
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.bench.contestants import BASELINE, Contestant, methods
from tokenleap.bench.own import drafts_a_tree, encode, prompt_limit
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.report import markdown_table
from tokenleap.bench.run import Journal
from tokenleap.core.files import validated
from tokenleap.drafters.registry import METHODS
from tokenleap.models.support import default_device

FORMAT = "tokenleap-identity-2"

TIE = 1e-3
"""A mismatch whose two largest float32 logits are closer than this is reported as a tie."""


@dataclass(frozen=True)
class Check:
    """One way to compare: dtype, greedy or sampled, one prompt at a time or a batch."""

    name: str
    dtype: str
    sampled: bool = False
    batched: bool = False

    @property
    def bits(self) -> bool:
        """Whether `none`, one prompt at a time, is the reference, and log-probabilities count."""
        return self.dtype != "float32"


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

    model: str
    draft_model: str
    max_tokens: int
    max_prompt_tokens: int
    batch_size: int
    device: str = "cpu"

    def params(self, prompt: Prompt, *, sampled: bool) -> SamplingParams:
        """Greedy, or sampled at usual settings with the prompt's own seed."""
        fields: dict[str, Any] = {"temperature": 0}
        if sampled:
            fields = {"temperature": 0.8, "top_p": 0.95, "seed": prompt.seed}
        return SamplingParams(**fields, max_tokens=self.max_tokens, logprobs=0)


@harness.one_line_errors()
def main(
    prompts: harness.Prompts,
    output: harness.Output = None,
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
    options = Options(model, draft, max_tokens, max_prompt_tokens, batch_size, device)
    checks, sample = _checks_named(check or ()), harness.sample_of(prompts, per_kind, seed, kind)
    facts = machine(default_device(device))
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()[:12]
    settings = {**asdict(options), "prompts": f"{prompts.name} {digest}", "seed": seed, **facts}
    compared = comparisons(options, chosen, checks, sample, Journal(output, FORMAT, settings))
    different = [comparison for comparison in compared if not comparison.identical]
    print(
        report(
            "identity",
            facts,
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


def methods_of(check: Check, methods: Sequence[Contestant]) -> list[Contestant]:
    """The methods that a check compares: with `none` as well, unless it is the reference."""
    is_reference = check.bits and not check.batched
    return [*methods] if is_reference else [BASELINE, *methods]


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


# Comparisons of two generations of a prompt


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
    def identical(self) -> bool:
        return self.difference is None

    @property
    def broken(self) -> bool:
        """Whether it differs although it must not."""
        return self.promised and not self.identical


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


# The checks


def comparisons(
    options: Options,
    chosen: Sequence[Contestant],
    checks: Sequence[Check],
    sample: Sequence[Prompt],
    journal: Journal,
) -> list[Comparison]:
    """Compare; checks of one dtype follow one another, so that one is in memory at a time."""
    found: list[Comparison] = []
    for dtype in dict.fromkeys(check.dtype for check in checks):
        bench = _Bench(options, dtype)
        for check in [check for check in checks if check.dtype == dtype]:
            found += bench.compared(check, methods_of(check, chosen), sample, journal)
    return found


class _Bench:
    """The models in one dtype, each loaded when it is needed first."""

    def __init__(self, options: Options, dtype: str) -> None:
        self._options, self._dtype = options, dtype
        self._loaded: dict[tuple[str, str], Loaded] = {}
        self._llms: dict[str, LLM] = {}
        self._references: dict[tuple[bool, str], Generation] = {}

    def compared(
        self,
        check: Check,
        methods: Sequence[Contestant],
        sample: Sequence[Prompt],
        journal: Journal,
    ) -> list[Comparison]:
        """Compare the methods on all prompts, but not what the journal has."""
        size = self._options.batch_size if check.batched else 1
        groups = [sample[start : start + size] for start in range(0, len(sample), size)]
        by_label = {method.label: method for method in methods}

        def run(label: str, group: Sequence[Prompt]) -> dict[str, Any]:
            found = self._generations(by_label[label], group, sampled=check.sampled)
            pairs = zip(group, found, strict=True)
            return {"found": [asdict(self._comparison(check, label, *pair)) for pair in pairs]}

        names = [" ".join(prompt.id for prompt in group) for group in groups]
        made = in_turn(
            list(by_label), groups, 1, run, doing=check.name, journal=journal, numbers=names
        )
        records = [record for runs in flat(made).values() for record in runs]
        return [validated(Comparison, each) for record in records for each in record["found"]]

    def _comparison(self, check: Check, label: str, prompt: Prompt, got: Generation) -> Comparison:
        expected = self._reference(check, prompt)
        ids = self._encode(prompt)
        difference = first_difference(expected, got)
        if difference is not None:
            context = [*ids, *expected.token_ids[: difference.position]]
            difference = self._explained(difference, context)
        return Comparison(
            check=check.name,
            method=label,
            prompt=prompt.id,
            kind=prompt.kind,
            prompt_tokens=len(ids),
            generated_tokens=len(expected.token_ids),
            promised=not (check.bits and got.branched),
            difference=difference,
        )

    def _reference(self, check: Check, prompt: Prompt) -> Generation:
        key = check.sampled, prompt.id
        if key not in self._references:
            self._references[key] = (
                self._generations(BASELINE, [prompt], sampled=check.sampled)[0]
                if check.bits
                else self._transformers(prompt)
            )
        return self._references[key]

    def _generations(
        self, method: Contestant, prompts: Sequence[Prompt], *, sampled: bool
    ) -> list[Generation]:
        ids = [self._encode(prompt) for prompt in prompts]
        params = [self._options.params(prompt, sampled=sampled) for prompt in prompts]
        return [
            Generation(
                output.token_ids,
                tuple(
                    entry[token].logprob
                    for entry, token in zip(output.logprobs or (), output.token_ids, strict=False)
                ),
                any(drafts_a_tree(step) for step in output.trace),
            )
            for output in self._llm(method).generate(ids, params)
        ]

    def _transformers(self, prompt: Prompt) -> Generation:
        ids = self._encode(prompt)
        eos = list(self._llm(BASELINE).eos_token_ids)
        module: Any = self._load(self._options.model, self._dtype).module
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

    @torch.inference_mode()
    def _explained(self, difference: Difference, context: Sequence[int]) -> Difference:
        """The difference, with gaps of the unmodified module's float32 logits after the context."""
        module = self._load(self._options.model, "float32").module
        logits = module(input_ids=torch.tensor([context], device=module.device)).logits[
            0, -1
        ]  # [V]
        first, second = logits.topk(2).values.tolist()
        gap = None
        if difference.expected is not None and difference.got is not None:
            gap = float(logits[difference.expected] - logits[difference.got])
        return replace(difference, top2_gap=first - second, token_gap=gap)

    def _encode(self, prompt: Prompt) -> list[int]:
        llm, options = self._llm(BASELINE), self._options
        limit = prompt_limit(llm.max_model_len, options.max_prompt_tokens, options.max_tokens)
        return encode(llm, prompt.text, limit)

    def _llm(self, method: Contestant) -> LLM:
        if method.label not in self._llms:
            options, config = self._options, dict(method.config)
            if (model := config.get("model")) in (options.model, options.draft_model):
                config["model"] = self._load(model, self._dtype).module  # once for all methods
            loaded = self._load(options.model, self._dtype)
            self._llms[method.label] = llm_for(loaded, config)
        return self._llms[method.label]

    def _load(self, model: str, dtype: str) -> Loaded:
        if (model, dtype) not in self._loaded:
            self._loaded[model, dtype] = load(model, dtype, self._options.device)
        return self._loaded[model, dtype]


if __name__ == "__main__":
    typer.run(main)
