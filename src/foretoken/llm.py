"""`LLM`: load a model, generate, stream, chat. A thin face of `LLMEngine`, in vLLM's words."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretoken.config import SpeculativeConfig
from foretoken.core.memory import num_bytes
from foretoken.core.params import SamplingParams
from foretoken.drafters.overlap import VocabularyOverlap
from foretoken.engine.llm_engine import EngineOptions, LLMEngine
from foretoken.engine.prompts import (
    Message,
    Prompt,
    as_list,
    is_conversation,
    one_each,
    token_ids,
)
from foretoken.engine.strategies import Speculative
from foretoken.errors import ConfigError, PromptError
from foretoken.models.loaded import LoadedModel
from foretoken.outputs import RequestOutput, StreamChunk

__all__ = ["LLM", "Message", "Prompt"]


class LLM:
    """A language model with speculative decoding.

    Args:
        model: a Hugging Face folder (safetensors), a GGUF file, an alias (`foretoken models`), or a
            loaded `PreTrainedModel`, which is left unchanged.
        tokenizer: for a loaded model; without one it serves token id prompts only.
        speculative_config: how to guess and check (`SpeculativeConfig` or a dict); None is plain
            decoding.
        dtype: "float32", "bfloat16", "float16" (GPU) or a torch dtype; "auto" is bfloat16 where
            the processor has it. A loaded model keeps its own.
        device: "cpu", "cuda", ...; "auto" takes a GPU if there is one. A loaded model stays
            where it is.
        max_model_len: most tokens of prompt and output together; None takes the model's limit.
        max_num_seqs: most sequences advanced together.
        max_num_batched_tokens: most prompt tokens computed between two steps of the sequences that
            are being generated: the smaller, the less a long prompt holds them up.
        kv_cache_memory: most memory for the KV of the target and of the draft models that
            `speculative_config` names (bytes, or text such as "2GiB"); sequences that find no room
            wait, or are computed again later, or go without drafts. None takes what `max_num_seqs`
            sequences need. Output never depends on it, unless a sequence does not fit by itself. A
            draft model that only a request names gets as many positions as the others, on top.
        enable_prefix_caching: keep the KV of prompts, so that what later ones begin with is not
            computed again.
        prefix_cache_memory: most memory for that.
        quantization: None keeps the weights as they are; "int8" and "int4" (on a CPU) make them a
            half and a third as large, those of a draft model too. Speculation is then lossless with
            respect to the weights that run.
        runtime: "native" computes in this library's C++, compiled on this machine at its first
            use (Llama, Mistral, Qwen2 and Qwen3 on a CPU, in float32 or bfloat16), "torch" in
            PyTorch's operations. On a GPU "cuda" replays CUDA graphs, "compiled" those of passes
            that TorchInductor compiled. "auto" takes "native" or "cuda" where they can be had.

    Attributes:
        tokenizer: the tokenizer, or None.
        model_path: the (converted) Hugging Face folder, or None for a loaded model.
        speculative_config: the default way to speculate.
        eos_token_ids: end-of-sequence tokens.
        engine: the `LLMEngine`: requests that are added, stepped and aborted one by one.

    Raises:
        ModelError: the model cannot be found or read.
        ConfigError: a parameter is out of range or unknown.
        CompatibilityError: model, drafter and rule do not fit together.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        kv_cache_memory: int | str | None = None,
        enable_prefix_caching: bool = True,
        prefix_cache_memory: int | str = "256MiB",
        quantization: str | None = None,
        runtime: str = "auto",
    ) -> None:
        _check_at_least_1(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        kv_bytes = (
            None if kv_cache_memory is None else num_bytes("kv_cache_memory", kv_cache_memory)
        )
        prefix_bytes = num_bytes("prefix_cache_memory", prefix_cache_memory)
        self.speculative_config = SpeculativeConfig.parse(speculative_config)
        loaded = LoadedModel.of(model, tokenizer, dtype, device)
        self.model_path, self.tokenizer = loaded.path, loaded.tokenizer
        options = EngineOptions(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_bytes,
            prefix_cache_bytes=prefix_bytes if enable_prefix_caching else None,
            quantization=quantization,
            runtime=runtime,
        )
        self.engine = LLMEngine(loaded, self.speculative_config, options)
        self.eos_token_ids = loaded.eos_token_ids

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.target.most_tokens

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        return self.engine.target.dtype

    @property
    def runtime(self) -> str:
        """What computes the passes: "native", "lean", "module", "cuda" or "compiled".

        "lean" and "module" are PyTorch's operations, the latter through the Transformers module: on
        a GPU too, where passes cannot be captured in graphs.
        """
        return self.engine.target.network.name

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.engine.target.device

    @property
    def bit_exact(self) -> bool:
        """Whether a position's bits do not depend on how many are computed with it (invariant 7).

        Spot-checked at construction, for this model, dtype and machine; on the native runtime trees
        are included. Where it is False the default controller is `fixed`, because one that reads
        the clock would show in the output.
        """
        return self.engine.target.bit_exact

    @property
    def vocabulary_overlap(self) -> VocabularyOverlap | None:
        """How many tokens a draft model shares with the target, and how it drafts for it.

        None without a draft model or without the tokenizers; of several draft models the last.
        """
        return self.engine.strategies.vocabulary_overlap

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative_config: Speculative | Sequence[Speculative] = None,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
            prompts: a prompt or a sequence of prompts (strings, token id lists, conversations).
            sampling_params: one for all, or one per prompt; None takes the defaults.
            speculative_config: how to speculate, one for all or one per prompt; None as the `LLM`
                does. Without `acceptance` its rule is the `LLM`'s. What a configuration needs is
                loaded at its first use and kept.
            trace: compute p of every drafted token for the trace, also where no rule looked.

        Returns:
            One result per prompt, in order.

        Raises:
            PromptError: a prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: parameters do not fit the model or the number of prompts.
            CompatibilityError: a drafter does not fit the model or the rule.
            RequestError: a request ended with an error while it ran; `outputs` has all results.
        """
        listed = as_list(prompts)
        params = one_each("sampling_params", listed, sampling_params)
        configs = one_each("speculative_config", listed, speculative_config)
        jobs = [
            self.engine.job(*each, trace=trace)
            for each in zip(listed, params, configs, strict=True)
        ]
        return self.engine.run(jobs)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculative_config: Speculative = None,
        trace: bool = False,
    ) -> Generator[StreamChunk, None, None]:
        """Yield tokens as they are committed, one chunk per step; the last has the whole output.

        Closing the iterator, or an exception such as Ctrl-C inside it, ends the request cleanly.

        Args:
            prompt: one prompt.
            sampling_params: as in `generate`; n must be 1.
            speculative_config: as in `generate`.
            trace: as in `generate`.

        Raises:
            ConfigError: n is not 1; and as in `generate`.
            RequestError: the request ended with an error while it ran.
        """
        if sampling_params is not None and sampling_params.n != 1:
            raise ConfigError(f"n: a stream has one output, got {sampling_params.n}.")
        job = self.engine.job(prompt, sampling_params, speculative_config, trace=trace)
        return self.engine.stream(job)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative_config: Speculative | Sequence[Speculative] = None,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation or of many; arguments as in `generate`."""
        for conversation in as_list(messages):
            if not is_conversation(conversation):
                raise PromptError(
                    'messages: a conversation is a list of {"role": ..., "content": ...}.'
                )
        return self.generate(
            messages, sampling_params, speculative_config=speculative_config, trace=trace
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text with special tokens, a conversation by its chat template.

        Raises:
            PromptError: there is no tokenizer or no chat template, or the prompt is malformed.
        """
        return token_ids(prompt, self.tokenizer)

    def reset_drafter_memory(self) -> None:
        """Let drafters forget earlier outputs: `suffix` and `recycle` guess what they learnt there.

        Outputs do not depend on it, speed may: for benchmarks, and between users who are not to
        notice each other.
        """
        self.engine.reset_drafter_memory()


def _check_at_least_1(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name}: must be at least 1, got {value}.")
