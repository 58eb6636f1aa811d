"""`LLM`: load a model, generate, stream, chat. A thin layer over `LLMEngine`, with vLLM's names."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokenleap.config import SpeculativeConfig
from tokenleap.core.config import num_bytes
from tokenleap.core.params import Sampling, SamplingParams
from tokenleap.engine.jobs import specs_of
from tokenleap.engine.lines import UseTqdm, progress_of
from tokenleap.engine.llm_engine import EngineOptions
from tokenleap.engine.loaded_llm import (
    REQUIRED,
    LoadedLLM,
    check_at_least_1,
    refuse_unknown,
    refuse_unknown_engine,
)
from tokenleap.engine.prompts import (
    GivenPrediction,
    GivenReferences,
    Message,
    Prompt,
    as_list,
    is_conversation,
)
from tokenleap.engine.strategies import Speculative
from tokenleap.errors import PromptError
from tokenleap.models.loaded import LoadedModel
from tokenleap.models.resolver import as_packed
from tokenleap.outputs import (
    BeamSearchOutput,
    BeamSearchParams,
    RequestOutput,
    StreamChunk,
    sequences_of,
)
from tokenleap.runtime.choose import check_sharding
from tokenleap.runtime.packed import open_packed

__all__ = ["LLM", "Message", "Prompt"]


class LLM(LoadedLLM):
    """A language model with speculative decoding: decoder-only, or an encoder-decoder.

    An encoder-decoder reads each prompt as its source, once, and writes the output. A prompt may be
    text or token ids. It may also be a mapping: `encoder_prompt` or `audio` is the source,
    `decoder_prompt` begins the output, and `source_language` and `target_language` are those of a
    translation. Greedy outputs in float32 are those of Transformers' `generate()`.

    Args:
        model: a Hugging Face folder (safetensors), a GGUF file, a name from `tokenleap models`, the
            id of a model on the Hugging Face Hub ("ORG/NAME" or "ORG/NAME@REVISION"), or a loaded
            `PreTrainedModel`, which is left unchanged.
        tokenizer: a tokenizer, or the folder of one; None takes that of `model`. Without one,
            prompts must be token ids.
        speculative_config: how to draft and what to accept (`SpeculativeConfig` or a dict);
            {"method": "none"} is plain decoding. None takes the head that comes with the package
            for a model with an alias, if the model runs on a CPU; others do not speculate.
        dtype: "float32", "bfloat16", "float16" (GPU only) or a torch dtype; "auto" is bfloat16 if
            the processor supports it. A loaded model keeps its dtype.
        device: "cpu", "cuda", ...; "auto" takes a GPU if there is one. A loaded model stays
            where it is.
        max_model_len: most tokens of prompt and output together; None takes the model's limit.
            The source of an encoder-decoder does not count.
        max_num_seqs: most sequences advanced together.
        max_num_batched_tokens: most prompt tokens computed between two steps of the running
            sequences. With a smaller value, a long prompt delays them less. A source is read whole.
        kv_cache_memory: most memory for the KV of the target and of the draft models that
            `speculative_config` names, and for what a decoder keeps of each source: bytes, or text
            such as "2GiB". None takes what
            `max_num_seqs` sequences need. If there is no room, sequences wait, are preempted and
            computed again, or run without drafts. Outputs do not depend on it, except that a
            sequence that does not fit even alone is an error: it is refused if `max_tokens` tell,
            and else it ends with an error where the memory does. A draft model that only a
            request names gets as many positions as the others, in addition to this limit.
        enable_prefix_caching: keep the KV of prompts, for later prompts that begin with the same
            tokens, and what a decoder keeps of a source, for later prompts with the same source.
        prefix_cache_memory: most memory for the prefix cache: bytes, or text.
        quantization: "auto" keeps a GGUF file's quantization where the native runtime can, and
            other weights as they are. "none" or None keeps the latter, too, and dequantizes GGUF
            files. "int8" and "int4" (CPU only) make the weights a half and a third as large. Draft
            models have the target's. Speculation is lossless with respect to the weights that run,
            which `tokenleap models` lists. An alias stands for dequantized weights.
        runtime: "native" computes in C++ that is compiled on this machine at its first use (Llama
            and its relatives on a CPU, in float32 or bfloat16). "torch" computes with PyTorch's
            operations: those of "lean", for Llama, Mistral and Qwen, or of "module", the
            Transformers module; "compiled" is that module with its MLPs under `torch.compile`.
            "auto" takes "native" where it is available.
        generation_config: where the model's defaults of sampling and its rules come from: "auto"
            is its own `generation_config.json`, and a folder has another. "none" (vLLM's "vllm")
            reads only special tokens from it. Defaults hold for sampling parameters that are not
            given; rules, such as `no_repeat_ngram_size`, hold for all outputs.
        tensor_parallel_size: number of processes that `torchrun` has started, over which the
            model's weights are spread, for models too large for one device. All of them run the
            same script and get the same outputs. It takes "torch" as the runtime.
        **unknown: refused, with what to write instead.

    Attributes:
        tokenizer: the tokenizer, or None.
        model_path: the Hugging Face folder, or None for a loaded model. That of a GGUF file is in
            the cache, and has no weights if they are packed.
        speculative_config: the default way to speculate.
        eos_token_ids: end-of-sequence tokens.
        engine: the `LLMEngine`, for adding, stepping and aborting requests one by one.

    Raises:
        ModelError: the model cannot be found or read.
        ConfigError: a parameter is out of range or unknown.
        CompatibilityError: model, drafter and rule do not fit together.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        kv_cache_memory: int | str | None = None,
        enable_prefix_caching: bool = True,
        prefix_cache_memory: int | str = "256MiB",
        quantization: str | None = "auto",
        runtime: str = "auto",
        generation_config: str | Path = "auto",
        tensor_parallel_size: int = 1,
        **unknown: Any,
    ) -> None:
        refuse_unknown_engine(unknown, LLM.__init__.__kwdefaults__ or ())
        check_at_least_1(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        kv_bytes = (
            None if kv_cache_memory is None else num_bytes("kv_cache_memory", kv_cache_memory)
        )
        prefix_bytes = num_bytes("prefix_cache_memory", prefix_cache_memory)
        given = None if speculative_config is None else SpeculativeConfig.parse(speculative_config)
        model, quantization, dtype = as_packed(model, quantization, dtype)
        packed = partial(open_packed, quantization=quantization, runtime=runtime)
        check_sharding(quantization, runtime, tensor_parallel_size)
        loaded = LoadedModel.of(
            model, tokenizer, dtype, device, packed, tensor_parallel_size, generation_config
        )
        options = EngineOptions(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_bytes,
            prefix_cache_bytes=prefix_bytes if enable_prefix_caching else None,
            quantization=quantization,
            runtime=runtime,
        )
        super().__init__(loaded, given, options)

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] = REQUIRED,
        sampling_params: Sampling | Sequence[Sampling] = None,
        *,
        speculative_config: Speculative | Sequence[Speculative] = None,
        references: GivenReferences | Sequence[GivenReferences] = None,
        prediction: GivenPrediction | Sequence[GivenPrediction] = None,
        trace: bool = False,
        use_tqdm: UseTqdm = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
            prompts: a prompt or a sequence of prompts (strings, token id lists, conversations, or
                mappings for encoder-decoders). In a mapping, `cache_salt` keeps a prompt apart from
                those with others: they share neither cached prefixes nor what drafters remember.
            sampling_params: `SamplingParams`, or a dict of them, one for all or one per prompt.
                Fields that a dict lacks are the model's own (`get_default_sampling_params`), and
                None is an empty dict.
            speculative_config: one for all, or one per prompt; None takes the `LLM`'s. One without
                `acceptance` uses the `LLM`'s rule. Draft models and files are loaded at the first
                use of a configuration and kept.
            references: texts (or lists of token ids) that the output may quote although its prompt
                does not have them, such as retrieved documents: one list for all prompts, or a list
                with one such list (or None) per prompt. The model does not read them. The methods
                `copy`, `ngram` and `suffix`, and combinations of them with others, draft from them.
            prediction: a text (or token ids) that the output will mostly repeat, such as the file
                before an edit: one for all prompts, or a list with one (or None) per prompt. Drafts
                come from it as long as that pays, and otherwise from the usual drafter. The model
                does not read it. `Metrics` count its accepted and rejected tokens.
            trace: compute p of every drafted token for the trace, also of those that the rule did
                not reach.
            use_tqdm: a progress bar on stderr: True always, False never; or a class with tqdm's
                interface, which makes it. None shows it where it does not disturb: for several
                outputs, after a second, if stderr is a terminal or Python runs in a notebook.
            **unknown: refused, with the place where they belong.

        Returns:
            One result per prompt, in order.

        Raises:
            PromptError: a prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: parameters do not fit the model or the number of prompts.
            CompatibilityError: a drafter does not fit the model or the rule, or quotes no
                references.
            RequestError: a request ended with an error while it ran; `outputs` has all results.
        """
        refuse_unknown("generate", unknown, prompts)
        specs = specs_of(
            prompts,
            sampling_params,
            speculative_config=speculative_config,
            references=references,
            prediction=prediction,
            trace=trace,
        )
        jobs = self.engine.jobs(specs)
        if use_tqdm is None and not self.engine.target.peers.is_first:
            use_tqdm = False  # the first process has the bar
        with progress_of(jobs, use_tqdm) as after_step:
            return self.engine.run(jobs, after_step)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] = REQUIRED,
        sampling_params: Sampling | Sequence[Sampling] = None,
        *,
        speculative_config: Speculative | Sequence[Speculative] = None,
        references: GivenReferences | Sequence[GivenReferences] = None,
        prediction: GivenPrediction | Sequence[GivenPrediction] = None,
        trace: bool = False,
        **unknown: Any,
    ) -> Generator[StreamChunk, None, None]:
        """Yield tokens as they are committed, for one prompt or many; arguments as in `generate`.

        After each step there is a chunk for every output that has new tokens: the prompts in order
        (`StreamChunk.prompt_index`), and the n outputs of each in order (`index`). An output's last
        chunk has the whole output, which is the same as that of `generate`. Prompts beyond
        `max_num_seqs` begin when others end.

        Closing the iterator, or an exception such as Ctrl-C inside it, ends all its requests and
        frees their memory.

        Raises:
            PromptError, ConfigError, CompatibilityError: as in `generate`, before the first chunk.
            RequestError: a request ended with an error while it ran. The others go on to their
                ends first; `outputs` has all results.
        """
        refuse_unknown("stream", unknown, prompts)
        specs = specs_of(
            prompts,
            sampling_params,
            speculative_config=speculative_config,
            references=references,
            prediction=prediction,
            trace=trace,
        )
        jobs = self.engine.jobs(specs)
        return self.engine.stream(jobs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]] = REQUIRED,
        sampling_params: Sampling | Sequence[Sampling] = None,
        *,
        speculative_config: Speculative | Sequence[Speculative] = None,
        references: GivenReferences | Sequence[GivenReferences] = None,
        prediction: GivenPrediction | Sequence[GivenPrediction] = None,
        trace: bool = False,
        use_tqdm: UseTqdm = None,
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation or of many; arguments as in `generate`."""
        refuse_unknown("chat", unknown, messages)
        for conversation in as_list(messages):
            if not is_conversation(conversation):
                raise PromptError(
                    'messages: a conversation is a list of {"role": ..., "content": ...}.'
                )
        return self.generate(
            messages,
            sampling_params,
            speculative_config=speculative_config,
            references=references,
            prediction=prediction,
            trace=trace,
            use_tqdm=use_tqdm,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Mapping[str, Any],
        *,
        speculative_config: Speculative | Sequence[Speculative] = None,
        use_tqdm: UseTqdm = None,
        **unknown: Any,
    ) -> list[BeamSearchOutput]:
        """Search for the most probable outputs, with vLLM's parameters and results.

        It is `generate` with `SamplingParams(beam_width=...)`. Arguments and errors are the same,
        except that all prompts have the same `params`. The sequences begin with the prompt.
        """
        refuse_unknown("beam_search", unknown, prompts)
        if isinstance(params, Mapping):
            params = BeamSearchParams(**params)
        given, config = params.sampling_params, speculative_config
        found = self.generate(prompts, given, speculative_config=config, use_tqdm=use_tqdm)
        return [sequences_of(each, params, self.tokenizer, self.eos_token_ids) for each in found]

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling parameters, as its generation config has them (vLLM's method).

        These are temperature, top_p, top_k, min_p, repetition_penalty and max_tokens, if set there.
        """
        return SamplingParams.parse(None, self.engine.sampling_defaults)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, including special tokens; the chat template formats conversations.

        Those of an encoder-decoder are the source's.

        Raises:
            PromptError: there is no tokenizer or no chat template, or the prompt is malformed.
        """
        return self.engine.encode(prompt)

    def reset_drafter_memory(self) -> None:
        """Make drafters forget what they learnt from earlier outputs.

        These are `suffix`, `recycle`, and all that learn while they serve (`online`).
        This changes speed, and never outputs. Call it before a measurement, or between users who
        must not notice each other by the speed.
        """
        self.engine.reset_drafter_memory()
