"""The checks of `benchmarks.identity`: which generations are compared, on one loaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.compare import Comparison, Difference, Generation, ResultsFile, first_difference
from benchmarks.loading import Loaded, llm_for
from tokenleap import LLM, SamplingParams
from tokenleap.bench.contestants import BASELINE, Contestant
from tokenleap.bench.own import drafts_a_tree, encode, prompt_limit
from tokenleap.bench.prompts_file import Prompt

__all__ = ["CHECKS", "Bench", "Check", "Explainer", "Options", "methods_of"]


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
        if sampled:
            return SamplingParams(
                temperature=0.8,
                top_p=0.95,
                seed=prompt.seed,
                max_tokens=self.max_tokens,
                logprobs=0,
            )
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, logprobs=0)


class Explainer:
    """Says how close the logits were where outputs differ, by the unmodified module in float32.

    Args:
        load_module: called at the first difference.
    """

    def __init__(self, load_module: Callable[[], PreTrainedModel]) -> None:
        self._load_module = cache(load_module)

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
    """The checks of one dtype on one loaded model.

    Args:
        options: see `Options`.
        loaded: the target in the checks' dtype.
        models: draft models in the same dtype, by the names that methods give them.
        explainer: explains differences.
        results: has earlier comparisons, and gets the new ones.
        advance: called after every comparison.
    """

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
                missing = [
                    p for p in group if (check.name, method.label, p.id) not in self._results
                ]
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
        outputs = self._llm(method).generate(ids, params)
        return [
            Generation(
                output.token_ids,
                tuple(entry.logprob for entry in output.logprobs or ()),
                any(drafts_a_tree(step) for step in output.trace),
            )
            for output in outputs
        ]

    def _transformers(self, prompt: Prompt) -> Generation:
        ids = self._encode(prompt)
        eos = list(self._llm(BASELINE).eos_token_ids)
        module = self._loaded.module
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=self._options.max_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
        )
        inputs = torch.tensor([ids], device=module.device)
        output = module.generate(  # type: ignore[operator]
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config
        )
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


def methods_of(check: Check, methods: Sequence[Contestant]) -> list[Contestant]:
    """The methods that a check compares: with `none` as well, unless it is the reference."""
    is_reference = check.dtype != "float32" and not check.batched
    return [*methods] if is_reference else [BASELINE, *methods]
