"""Tokenleap itself as a contestant."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch

from tokenleap import models
from tokenleap.bench.contestants import Contestant, Runner, Setting
from tokenleap.bench.machine import BYTES, kv_bytes, weight_bytes
from tokenleap.bench.prompts_file import cut_middle
from tokenleap.control import Budget
from tokenleap.core.acceptance.base import AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.noise import StepNoise
from tokenleap.core.params import SamplingParams
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.errors import ConfigError
from tokenleap.llm import LLM
from tokenleap.outputs import RequestOutput
from tokenleap.request import Request
from tokenleap.runtime.packed import open_packed
from tokenleap.trace import StepTrace

CHUNK = 32
"""Tokens per pass."""


class _GivenOutput(Drafter):
    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._draft(*each) for each in zip(batch, budgets, strict=True)]

    def _draft(self, request: Request, budget: Budget) -> Draft:
        begin = len(request.output_ids)
        drafted = self._token_ids[begin : begin + budget.chain]
        return Draft.deterministic(chain([request.root, *drafted]))


class _KeepAll(AcceptanceRule):
    """Keeps every drafted token; the last of them is the token after the path."""

    name: ClassVar[str] = "keep_all"
    lossless: ClassVar[bool] = False
    takes_trees: ClassVar[bool] = False

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        drafted = draft.tree.num_drafted
        if not drafted:  # no room for a draft before the last token
            return Accepted((), self._last)
        return Accepted(tuple(range(1, drafted)), draft.tree.tokens[drafted])


def mean_logprob(llm: LLM, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
    """Mean log-probability of an output's tokens, in nats, at temperature 1 without truncation."""
    params = SamplingParams(temperature=0, max_tokens=len(token_ids), logprobs=0, ignore_eos=True)
    config = {
        "method": _GivenOutput(token_ids),
        "acceptance": _KeepAll(token_ids[-1]),
        "controller": "fixed",
        "num_speculative_tokens": CHUNK,
    }
    (output,) = llm.generate([list(prompt)], params, speculative_config=config)
    assert output.token_ids == tuple(token_ids)
    assert output.logprobs is not None
    pairs = zip(output.logprobs, token_ids, strict=True)
    return fmean(each[token].logprob for each, token in pairs)


CONTROL_TOKENS = 128
"""Length of a random prompt, if the context has room for it."""


class OwnRunner(Runner):
    """An `LLM` with one speculative_config."""

    def __init__(self, contestant: Contestant, setting: Setting) -> None:
        torch.set_num_threads(setting.threads)
        self._contestant = contestant
        self._setting = setting
        self._llm = LLM(
            setting.model,
            speculative_config=contestant.config,
            dtype=setting.dtype,
            device=setting.device,
            quantization=contestant.quantization,
            runtime=setting.runtime,
            max_model_len=setting.max_model_len,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            kv_cache_memory=setting.kv_cache_memory,
            enable_prefix_caching=False,  # every round repeats every prompt
        )
        self.device = str(self._llm.device)

    def facts(self) -> dict[str, Any]:
        """Facts of the run: model, context, guarantee of the rule, bytes of both models."""
        llm, draft = self._llm, self._llm.speculative_config.model
        rule = llm.speculative_config.rule
        itemsize = llm.dtype.itemsize
        quantization = llm.engine.target.quantization
        rounded = quantization if quantization in BYTES else None
        assert llm.model_path is not None, "loaded by its name"
        return {
            "batches": True,
            "dtype": str(llm.dtype).removeprefix("torch."),
            "runtime": llm.runtime,
            "threads": torch.get_num_threads(),
            "bit_exact": llm.bit_exact,
            "quantization": quantization,
            "rule": rule.name,
            "controller": llm.controller,
            "max_model_len": llm.max_model_len,
            "lossless": rule.lossless,
            "same_samples": rule.lossless and rule.ignores_draft_lengths,
            "weight_bytes": weight_bytes(llm.model_path, itemsize, rounded),
            "kv_bytes": kv_bytes(llm.model_path, itemsize),
            "draft_bytes": 0 if draft is None else self._draft_bytes(draft, itemsize, rounded),
        }

    def _draft_bytes(self, model: str, itemsize: int, rounded: str | None) -> int:
        """Bytes that a pass of the draft model reads."""
        quantization, runtime = self._contestant.quantization, self._setting.runtime
        packed = open_packed(
            model, self._llm.dtype, self._llm.device, quantization=quantization, runtime=runtime
        )
        if packed is not None:
            return weight_bytes(packed.folder, itemsize, rounded)
        is_head = self._llm.speculative_config.takes_head
        return weight_bytes(Path(model) if is_head else models.resolve(model), itemsize, rounded)

    def encode(self, texts: Sequence[str], max_model_len: int) -> list[list[int]]:
        """Prompts as tokens, cut so that the output has room."""
        limit = self._limit(max_model_len, self._setting.max_prompt_tokens)
        return [encode(self._llm, text, limit) for text in texts]

    def control(self, seeds: Sequence[int], max_model_len: int) -> list[list[int]]:
        """A prompt of random tokens for each seed."""
        limit = self._limit(max_model_len, CONTROL_TOKENS)
        return [random_ids(self._llm, seed, limit) for seed in seeds]

    def _limit(self, max_model_len: int, wanted: int) -> int:
        return prompt_limit(max_model_len, wanted, self._setting.max_tokens)

    def forget(self) -> None:
        self._llm.reset_drafter_memory()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=True,
            repetition_penalty=1,  # as for the peers, whatever the model's generation config says
        )
        each = [params.model_copy(update={"seed": seed}) for seed in seeds]
        outputs = self._llm.generate(list(prompts), each or params, use_tqdm=False)
        return [_counts(output) for output in outputs]

    def judge(self, prompt: Sequence[int], token_ids: Sequence[int]) -> dict[str, Any]:
        """Text and mean log-probability of an output."""
        assert self._llm.tokenizer is not None
        text = self._llm.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return {"text": text, "logprob": mean_logprob(self._llm, prompt, token_ids)}


def _counts(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    drafting = [step for step in output.trace if step.drafted]
    lengths: dict[str, int] = {}
    verify: dict[str, list[float]] = {}
    for step in drafting:
        length = str(len(step.accepted))
        lengths[length] = lengths.get(length, 0) + 1
    for step in output.trace:
        seconds = verify.setdefault(str(1 + len(step.drafted)), [])
        seconds.append(round(step.verify_seconds, 7))
    return {
        "token_ids": list(output.token_ids),
        "cached_prompt_tokens": metrics.cached_prompt_tokens,
        "drafter_failure": metrics.drafter_failure,
        "prefill_seconds": metrics.prefill_seconds,
        "first_token_seconds": metrics.prefill_seconds + next(iter(output.trace)).seconds,
        "draft_seconds": [round(step.draft_seconds, 7) for step in drafting],
        "passes": metrics.target_passes,
        "drafts": metrics.num_drafts,
        "cut": metrics.num_cut_drafts,
        "accepted": metrics.num_accepted_tokens,
        "accepted_lengths": lengths,
        "verify_seconds": verify,
        "branched": any(drafts_a_tree(step) for step in drafting),
    }


def drafts_a_tree(step: StepTrace) -> bool:
    return list(step.parents) != list(range(-1, len(step.parents) - 1))


# Prompts as token ids of a loaded model.


_SHORTEST_PROMPT = 2
"""Tokens: the first and the last one."""


def prompt_limit(max_model_len: int, wanted: int, max_tokens: int) -> int:
    """Most tokens of a prompt: `wanted`, or fewer if the context leaves less beside the output."""
    room = max_model_len - max_tokens
    if room < _SHORTEST_PROMPT:
        raise ConfigError(
            f"max_tokens {max_tokens} leaves no room for a prompt in a context of "
            f"{max_model_len}: lower it, or raise max_model_len."
        )
    return min(wanted, room)


def encode(llm: LLM, text: str, limit: int) -> list[int]:
    """Token ids of a text, as the first message of a chat if the model has a chat template.

    Args:
        limit: most tokens. The middle of a longer prompt is cut out, so that what the template
            puts around the message stays.
    """
    templated = llm.tokenizer is not None and llm.tokenizer.chat_template
    ids = llm.encode([{"role": "user", "content": text}] if templated else text)
    return cut_middle(ids, limit)


def random_ids(llm: LLM, seed: int, length: int) -> list[int]:
    """A prompt of distinct random tokens, none of them special."""
    assert llm.tokenizer is not None
    ordinary = np.setdiff1d(np.arange(len(llm.tokenizer)), llm.tokenizer.all_special_ids)
    dice = np.random.default_rng(seed)
    chosen: list[int] = dice.choice(ordinary, min(length, len(ordinary)), replace=False).tolist()
    return chosen


# The time to stream the weights once: no step of plain decoding can be shorter.
#
# Decoding is bound by memory bandwidth (Leviathan et al., 2023, section 4.1): a step reads every
# weight and little else. Bytes over bandwidth is therefore the lower bound of its time.


LARGEST = 1 << 30
"""Bytes that are read at most: far more than any cache, and less than a second large model."""

REPEATS = 5


def stream_seconds(size: int, device: str = "cpu") -> float:
    """Seconds to read this many bytes once with torch's threads: the best of several runs."""
    read = min(size, LARGEST)
    values = torch.ones(max(1, read // 4), dtype=torch.float32, device=device)
    best = min(_sum(values, device) for _ in range(REPEATS))
    return best * size / (values.numel() * 4)


def _sum(values: torch.Tensor, device: str) -> float:
    began = time.perf_counter()
    values.sum()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
