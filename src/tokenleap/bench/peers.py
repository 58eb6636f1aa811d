"""Peers as contestants, each in the configuration that its documentation recommends.

Draft lengths of prompt lookup (Saxena, 2023) are the recommended ones, too. No peer may keep the KV
of a prompt, because the rounds repeat every prompt. Imports are local: a module that a peer does
not need would count as its memory.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tokenleap.bench.contestants import Contestant, Runner, Setting, gguf_path
from tokenleap.bench.machine import package_version

LOOKUP_TOKENS = 10
"""Draft length of prompt lookup where none is recommended: the one its author used."""


def runner(contestant: Contestant, setting: Setting) -> Runner:
    family, _, mode = contestant.kind.rpartition("-")
    if not family:
        from tokenleap.bench.own import OwnRunner

        return OwnRunner(contestant, setting)
    kinds: dict[str, Callable[[Setting, str], Runner]] = {
        "transformers": TransformersRunner,
        "llama.cpp": LlamaCppRunner,
        "openvino": OpenVinoRunner,
    }
    return kinds[family](setting, mode)


class TransformersRunner(Runner):
    """`generate()` of Transformers: plain, with prompt lookup, or with an assistant model."""

    def __init__(self, setting: Setting, mode: str) -> None:
        import torch

        from tokenleap import models
        from tokenleap.bench.machine import kv_bytes, weight_bytes
        from tokenleap.models.support import default_device, default_dtype

        torch.set_num_threads(setting.threads)
        place = default_device(setting.device)
        dtype = default_dtype(setting.dtype, place)
        folder = models.resolve(setting.model)
        self.device = str(place)
        self._model: Any = models.load_model(folder, dtype, place)
        self._options: dict[str, Any] = {}
        draft_bytes = 0
        if mode == "lookup":
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        elif mode == "assistant":
            assert setting.draft_model is not None, "`peers` has refused it"
            draft = models.resolve(setting.draft_model)
            self._options["assistant_model"] = models.load_model(draft, dtype, place)
            draft_bytes = weight_bytes(draft, dtype.itemsize)
        self._facts = {
            "version": package_version("transformers"),
            "batches": mode == "plain",
            "no_batches": None if mode == "plain" else "its assisted generation takes one prompt",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "weight_bytes": weight_bytes(folder, dtype.itemsize),
            "kv_bytes": kv_bytes(folder, dtype.itemsize),
            "draft_bytes": draft_bytes,
        }

    def facts(self) -> dict[str, Any]:
        return self._facts

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """Tokens; prompts of a batch are padded on the left, sources of an encoder on the right.

        A batch is sampled with its first seed.
        """
        import torch
        from transformers import GenerationConfig

        length = max(map(len, prompts))
        has_encoder = bool(self._model.config.is_encoder_decoder)
        padded, masks = [], []
        for ids in prompts:
            pad, seen = [0] * (length - len(ids)), [1] * len(ids)
            padded.append([*ids, *pad] if has_encoder else [*pad, *ids])
            masks.append([*seen, *pad] if has_encoder else [*pad, *seen])
        assistant = {k: v for k, v in self._options.items() if k == "assistant_model"}
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            **_transformers_sampling(temperature),
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **{k: v for k, v in self._options.items() if k not in assistant},
        )
        if seeds:
            torch.manual_seed(seeds[0])
        output = self._model.generate(
            torch.tensor(padded, device=self.device),
            attention_mask=torch.tensor(masks, device=self.device),
            generation_config=config,
            **assistant,
        )
        first = 1 if has_encoder else length  # after the token that a decoder starts with
        return [{"token_ids": row[first:].tolist()} for row in output]


def _transformers_sampling(temperature: float) -> dict[str, Any]:
    """Sampling from the whole vocabulary, or none; Transformers would take the 50 best tokens."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


class _GgufRunner(Runner):
    """A peer that continues one prompt at a time, in greedy decoding, with the GGUF file."""

    package: ClassVar[str]
    no_batches: ClassVar[str]
    device = "cpu"

    def __init__(self, setting: Setting) -> None:
        self._path = gguf_path(setting)
        self._threads = setting.threads

    def facts(self) -> dict[str, Any]:
        return {
            "version": package_version(self.package),
            "batches": False,
            "no_batches": self.no_batches,
            "dtype": "as in the GGUF file",
            "threads": self._threads,
            "weight_bytes": self._path.stat().st_size,
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
    ) -> list[dict[str, Any]]:
        """The prefill's time includes the first token; Tokenleap's does not."""
        assert not temperature, "`peers` has refused it"
        (ids,) = prompts
        tokens, first = self._continued(list(ids), max_tokens)
        return [
            {
                "token_ids": tokens,
                "prefill_seconds": first,
                "first_token_seconds": first,
                "decode_tokens": len(tokens) - 1,
            }
        ]

    def _continued(self, ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        """The tokens after a prompt, and the seconds until the first of them."""
        raise NotImplementedError


class LlamaCppRunner(_GgufRunner):
    """llama.cpp through llama-cpp-python: plain, or with its prompt lookup."""

    package = "llama-cpp-python"
    no_batches = "llama-cpp-python generates for one prompt at a time"

    def __init__(self, setting: Setting, mode: str) -> None:
        super().__init__(setting)
        library = importlib.import_module("llama_cpp")
        draft = None
        if mode == "lookup":
            speculative = importlib.import_module("llama_cpp.llama_speculative")
            # Its documentation recommends 10 with a GPU and 2 without one.
            draft = speculative.LlamaPromptLookupDecoding(num_pred_tokens=2)
        self._llama = library.Llama(
            model_path=str(self._path),
            n_ctx=setting.longest + LOOKUP_TOKENS,
            n_threads=setting.threads,
            n_threads_batch=setting.threads,
            n_gpu_layers=0,
            draft_model=draft,
            logits_all=draft is not None,  # else there is no room for the logits of a draft
            verbose=False,
        )

    def _continued(self, ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        self._llama.reset()  # else it keeps the KV of an equal prompt
        began, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        for token in self._llama.generate(ids, temp=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter() - began
            tokens.append(int(token))
            if len(tokens) == max_tokens:
                break
        return tokens, first


class OpenVinoRunner(_GgufRunner):
    """OpenVINO GenAI on a GGUF file: plain, or with its prompt lookup."""

    package = "openvino-genai"
    no_batches = "its pipeline is given one prompt's tokens at a time here"

    def __init__(self, setting: Setting, mode: str) -> None:
        super().__init__(setting)
        self._genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._lookup = mode == "lookup"
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # the default keeps the KV of equal prompts
        options: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": setting.threads,
            "scheduler_config": scheduler,
            **({"prompt_lookup": True} if self._lookup else {}),
        }
        self._pipeline = self._genai.LLMPipeline(os.fspath(self._path), "CPU", **options)

    def _continued(self, ids: list[int], max_tokens: int) -> tuple[list[int], float]:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3  # as in its sample
        inputs = self._openvino.Tensor(np.array([ids], dtype=np.int64))  # [1, N]
        result = self._pipeline.generate(inputs, config)
        first = result.perf_metrics.get_ttft().mean / 1000  # from milliseconds
        return list(result.tokens[0]), first
