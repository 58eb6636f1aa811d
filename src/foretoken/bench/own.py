"""This library as a contestant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken import models
from foretoken.bench.contestants import Contestant, Setting
from foretoken.bench.memory import kv_bytes, weight_bytes
from foretoken.bench.prompts_file import cut_middle
from foretoken.core.params import SamplingParams
from foretoken.errors import ConfigError
from foretoken.llm import LLM
from foretoken.outputs import RequestOutput
from foretoken.trace import StepTrace

__all__ = ["OwnRunner"]

_SHORTEST_PROMPT = 2
"""Tokens: its first and its last."""


class OwnRunner:
    """An `LLM` with one speculative_config.

    Args:
        contestant: one of the kind `OWN`.
        setting: the model and how it runs.
    """

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
            enable_prefix_caching=False,  # the rounds repeat every prompt
        )

    @property
    def device(self) -> str:
        """Where the model is."""
        return str(self._llm.device)

    def facts(self) -> dict[str, Any]:
        """What the baseline is needed for, too: the context, and bytes of model and draft model."""
        llm, draft = self._llm, self._llm.speculative_config.model
        itemsize = llm.dtype.itemsize
        quantization = self._contestant.quantization
        assert llm.model_path is not None, "loaded by its name"
        return {
            "batches": True,
            "dtype": str(llm.dtype).removeprefix("torch."),
            "runtime": llm.runtime,
            "max_model_len": llm.max_model_len,
            "lossless": llm.speculative_config.rule.lossless,
            "weight_bytes": weight_bytes(llm.model_path, itemsize, quantization),
            "kv_bytes": kv_bytes(llm.model_path, itemsize),
            "draft_bytes": _draft_bytes(draft, itemsize, quantization),
        }

    def encode(self, text: str, max_model_len: int) -> list[int]:
        """A prompt's tokens, as the first message of a chat where the model has a template.

        Args:
            text: the prompt; of a long one the middle is cut out.
            max_model_len: the least of all contestants.

        Raises:
            ConfigError: nothing of that is left for a prompt.
        """
        llm, max_tokens = self._llm, self._setting.max_tokens
        room = max_model_len - max_tokens
        if room < _SHORTEST_PROMPT:
            raise ConfigError(
                f"max_tokens {max_tokens} leaves no room for a prompt in a context of "
                f"{max_model_len}: lower it, or raise max_model_len."
            )
        templated = llm.tokenizer is not None and llm.tokenizer.chat_template
        ids = llm.encode([{"role": "user", "content": text}] if templated else text)
        return cut_middle(ids, min(self._setting.max_prompt_tokens, room))

    def forget(self) -> None:
        """Let go of what earlier outputs taught the drafter."""
        self._llm.reset_drafter_memory()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Tokens, and what the drafts came to."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [_counts(output) for output in self._llm.generate(list(prompts), params)]


def _draft_bytes(model: str | None, itemsize: int, quantization: str | None) -> int:
    return 0 if model is None else weight_bytes(Path(models.resolve(model)), itemsize, quantization)


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
        "draft_seconds": metrics.draft_seconds,
        "passes": metrics.target_passes,
        "drafts": metrics.num_drafts,
        "accepted": metrics.num_accepted_tokens,
        "accepted_lengths": lengths,
        "verify_seconds": verify,
        "branched": any(_branches(step) for step in drafting),
    }


def _branches(step: StepTrace) -> bool:
    """Whether the draft is more than a chain."""
    return list(step.parents) != list(range(-1, len(step.parents) - 1))
