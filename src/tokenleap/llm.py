"""`LLM`: load a model, generate, stream, chat. A thin layer over `LLMEngine`, with vLLM's names."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from tokenleap.arguments import (
    ATTRIBUTES,
    REQUIRED,
    check_at_least_1,
    known_options,
    refuse_unknown_engine,
)
from tokenleap.config import SpeculativeConfig
from tokenleap.core.config import num_bytes, return_freed
from tokenleap.core.params import Sampling, SamplingParams
from tokenleap.drafters.base import VocabularyOverlap
from tokenleap.drafters.heads.shipped import with_shipped
from tokenleap.drafters.online import OnlineReport
from tokenleap.drafters.vocabulary import DraftModel
from tokenleap.engine.jobs import CallOptions, Job, specs_of
from tokenleap.engine.llm_engine import AfterStep, EngineOptions, LLMEngine
from tokenleap.engine.prompts import (
    NO_CONVERSATION,
    GivenPrediction,
    GivenReferences,
    Message,
    Prompt,
    as_list,
    is_conversation,
    needed,
)
from tokenleap.engine.strategies import Speculative
from tokenleap.errors import ConfigError, PromptError, TokenleapError
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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LLM", "Message", "Prompt", "UseTqdm", "progress_of"]

UseTqdm: TypeAlias = bool | Callable[..., Any] | None
"""Whether there is a bar, or what makes it (a class with tqdm's interface); see `LLM.generate`."""


class LLM:
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
            which `tokenleap models` lists. `smollm2-135m` stands for dequantized weights.
        runtime: "native" computes in C++ that is compiled on this machine at its first use (Llama
            and its relatives on a CPU, in float32 or bfloat16). "torch" computes with PyTorch's
            operations: those of "lean", for Llama, Mistral and Qwen, or of "module", the
            Transformers module; "compiled" is that module with its MLPs under `torch.compile`.
            "auto" takes "native" where it is available.
        batch_invariant: compute in a way that makes a position's bits independent of the batch and
            of drafts (invariant 7), where kernels are chosen by shape, as on GPUs: all passes get
            one shape (`docs/gpu.md` says at what cost). What cannot be made so is refused. The
            native runtime needs no such way. vLLM's name is the variable `VLLM_BATCH_INVARIANT`.
        generation_config: where the model's defaults of sampling and its rules come from: "auto"
            is its own `generation_config.json`, and a folder has another. "none" (vLLM's "vllm")
            reads only special tokens from it. Defaults hold for sampling parameters that are not
            given; rules, such as `no_repeat_ngram_size`, hold for all outputs.
        seed: seed of the requests that have none of their own, so that a script repeats its
            outputs; None draws new ones in every run.
        tensor_parallel_size: number of processes that `torchrun` has started, over which the
            model's weights are spread, for models too large for one device. All of them run the
            same script and get the same outputs. It takes "torch" as the runtime.
        **unknown: refused, with what to write instead, unless the value asks for nothing (None).

    The weights' memory is freed by `close`, or at the end of `with LLM(...) as llm:`.

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
        batch_invariant: bool = False,
        generation_config: str | Path = "auto",
        seed: int | None = None,
        tensor_parallel_size: int = 1,
        **unknown: Any,
    ) -> None:
        refuse_unknown_engine(unknown, LLM.__init__.__kwdefaults__ or ())
        check_at_least_1(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        if seed is not None:
            seed = SamplingParams(seed=seed).seed  # checks it
        kv_bytes = (
            None if kv_cache_memory is None else num_bytes("kv_cache_memory", kv_cache_memory)
        )
        prefix_bytes = num_bytes("prefix_cache_memory", prefix_cache_memory)
        if isinstance(speculative_config, Mapping):
            speculative_config = with_shipped(speculative_config, model)
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
            batch_invariant=batch_invariant,
            seed=seed,
        )
        self.model_path, self.tokenizer = loaded.path, loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self._name = loaded.title
        self._source = loaded.name if loaded.packed else loaded.path
        self.engine = LLMEngine(loaded, given, options)  # it lets go of the module
        self.speculative_config = self.engine.strategies.config

    def __del__(self) -> None:
        """Give the model's memory back to the system, unless its engine is still in use."""
        if vars(self).pop("engine", None) is not None:
            return_freed()

    # What was loaded

    def __repr__(self) -> str:
        """One line about what runs."""
        if "engine" not in vars(self):
            return f"LLM({self._name!r}, closed)"
        shown = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.engine.target.quantization,
            "device": str(self.device),
            "runtime": self.runtime,
            "tensor_parallel_size": shards if (shards := self.tensor_parallel_size) > 1 else None,
            "method": self.speculative_config.method_name,
        }
        fields = [f"{name}={value!r}" for name, value in shown.items() if value is not None]
        return f"LLM({', '.join([repr(self._name), *fields])})"

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
        """The runtime of the passes: "native", "lean", "module" or "compiled".

        "lean" and "module" use PyTorch's operations; "module" runs the Transformers module, and
        "compiled" the same with its MLPs under `torch.compile`.
        """
        return self.engine.target.network.name

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes over which the model's weights are spread."""
        return self.engine.target.peers.size

    @property
    def device(self) -> torch.device:
        """Where the model runs; the device of this process, if there are several."""
        return self.engine.target.device

    @property
    def bit_exact(self) -> bool:
        """Whether a position's bits are the same however many are computed with it (invariant 7).

        It is spot-checked at construction, for this model, dtype and machine. On the native runtime
        the check includes trees. If it is False, the default controller is `fixed`: a controller
        that reads the clock would change the output.
        """
        return self.engine.target.bit_exact

    @property
    def controller(self) -> str:
        """The name of the controller that runs by default.

        If `speculative_config` names none, it is `fixed` where draft lengths may change the output.
        """
        return self.engine.controller

    @property
    def vocabulary_overlap(self) -> VocabularyOverlap | None:
        """How many tokens the draft model shares with the target, and how it drafts for it.

        None without a draft model, or if one of the tokenizers is missing. If there are several
        draft models, it describes the one that was loaded last.
        """
        return self.engine.strategies.vocabulary_overlap

    def as_draft_model(self) -> DraftModel:
        """This model as the draft model of another `LLM`; its weights are in memory once.

        `LLM(other, speculative_config={"model": this})` calls it. The draft model has KV rows of
        its own, and this model's dtype, quantization and runtime.
        """
        return DraftModel(self.engine.lend(), self.tokenizer, self._source)

    @property
    def online_report(self) -> OnlineReport | None:
        """Report on what the drafter has learnt while serving; None without `online`.

        It is that of the `LLM`'s own `speculative_config`.
        """
        return self.engine.online_report

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
        known_options("generate", unknown, prompts)
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
        **options: Unpack[CallOptions],
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
        known = known_options("stream", options, prompts, CallOptions.__annotations__)
        jobs = self.engine.jobs(specs_of(prompts, sampling_params, **known))
        return self.engine.stream(jobs)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]] = REQUIRED,
        sampling_params: Sampling | Sequence[Sampling] = None,
        *,
        use_tqdm: UseTqdm = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation or of many.

        `RequestOutput.prompt` is the text that the chat template made.

        Args:
            messages: a conversation, which is a list of messages, or a list of conversations.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            chat_template: a Jinja template to use instead of the model's.
            add_generation_prompt: end the prompt with the beginning of the assistant's turn; None
                does so unless the final message is continued.
            continue_final_message: let the output continue the final message.
            tools: functions that the model may call, as in OpenAI's API. A template without tools
                gets them in a system message. A call is part of the output's text.
            chat_template_kwargs: variables of the chat template, such as `enable_thinking`.
            **options: as in `generate`.
        """
        known = known_options("chat", options, messages, CallOptions.__annotations__)
        template = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        asked = {name: value for name, value in template.items() if value is not None}
        prompts: list[Prompt] = as_list(messages)
        for index, conversation in enumerate(prompts):
            if not is_conversation(conversation):
                raise PromptError(NO_CONVERSATION)
            if asked:
                prompts[index] = {"messages": conversation, **asked}
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **known)

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
        known_options("beam_search", unknown, prompts)
        if isinstance(params, Mapping):
            params = BeamSearchParams(**params)
        if not isinstance(params, BeamSearchParams):
            raise ConfigError(
                "beam_search() takes BeamSearchParams(beam_width=..., max_tokens=...); generate() "
                "takes SamplingParams(beam_width=...)."
            )
        given, config = params.sampling_params, speculative_config
        found = self.generate(prompts, given, speculative_config=config, use_tqdm=use_tqdm)
        return [sequences_of(each, params, self.tokenizer, self.eos_token_ids) for each in found]

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling parameters, as its generation config has them.

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

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            PromptError: the model has none.
        """
        return needed(self.tokenizer)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of earlier prompts, and what encoders have read; returns True, as in vLLM.

        This changes speed, and never outputs.
        """
        self.engine.reset_prefix_cache()
        return True

    def reset_drafter_memory(self) -> None:
        """Make drafters forget what they learnt from earlier outputs.

        These are `suffix`, `recycle`, and all that learn while they serve (`online`).
        This changes speed, and never outputs. Call it before a measurement, or between users who
        must not notice each other by the speed.
        """
        self.engine.reset_drafter_memory()

    # The end

    def close(self) -> None:
        """End all requests with a `RequestError`, and free the memory of the model.

        Results stay. What other objects hold of the model stays in memory as long as they do, such
        as another `LLM` that drafts with it. Closing twice does nothing.
        """
        engine: LLMEngine | None = vars(self).pop("engine", None)
        if engine is None:
            return
        engine.close()
        on_gpu = engine.target.device.type == "cuda"
        del engine
        _forget_last_error()
        gc.collect()  # requests that failed, and drafters of the user's, may hold it in cycles
        return_freed()
        if on_gpu:
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        """The `LLM` itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to write for vLLM's attributes that are not there."""
            if name == "engine":
                raise TokenleapError("this LLM was closed: make a new one.")
            hint = f": {ATTRIBUTES[name]}" if name in ATTRIBUTES else "."
            raise AttributeError(f"LLM has no attribute {name!r}{hint}")


def _forget_last_error() -> None:
    """Clear our frames, and those called from them, of the last error, which notebooks keep."""
    error, seen = getattr(sys, "last_value", None), list[BaseException]()
    while error is not None and error not in seen:  # `raise error from error` is a cycle
        seen.append(error)
        called = [frame for frame, _ in walk_tb(error.__traceback__)]
        callers = [frame for first in called[:1] for frame, _ in walk_stack(first)]
        frames = [*filter(_is_ours, callers), *dropwhile(lambda each: not _is_ours(each), called)]
        for frame in frames:
            with suppress(RuntimeError):  # it still runs
                frame.clear()
        error = error.__cause__ or error.__context__


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("tokenleap.")


# The progress bar of `LLM.generate`.

AFTER_SECONDS = 1.0
"""A bar that was not asked for comes so late, so that short calls show none."""

EVERY_SECONDS = 0.1
"""Between two updates."""


@contextmanager
def progress_of(jobs: Sequence[Job], wanted: UseTqdm) -> Iterator[AfterStep | None]:
    """Show the progress of jobs on stderr."""
    if wanted is None:
        shown = sum(len(job.requests) for job in jobs) > 1 and _somebody_looks()
    else:
        shown = wanted is not False and bool(jobs)
    if not shown:
        yield None
        return
    bar = _Bar(jobs, wanted if callable(wanted) else None, 0 if wanted else AFTER_SECONDS)
    try:
        yield bar.update
    finally:
        bar.close()


_Tally: TypeAlias = tuple[int, int, int]
"""Tokens of prompts that have been read, tokens of outputs, and jobs that have ended."""


def _tally(job: Job) -> _Tally:
    begun = [r for r in job.requests if r.metrics.generated_tokens or r.finished]
    read = sum(len(request.input_ids) for request in begun)
    return read, sum(r.metrics.generated_tokens for r in begun), int(job.finished)


class _Bar:
    """A bar over the jobs of one call.

    Args:
        make: makes the bar; None takes tqdm's own, for terminals or notebooks.
    """

    def __init__(self, jobs: Sequence[Job], make: Callable[..., Any] | None, delay: float) -> None:
        self._total = len(jobs)
        self._make = make
        self._bar: Any = None
        self._changed: dict[int, Job] = {}  # since the last look at them
        self._known: dict[int, _Tally] = {}  # of each job that has begun
        self._read = self._written = self._ended = 0
        self._done = 0
        self._began = time.perf_counter()
        self._next = self._began + delay
        if not delay:
            self._bar = self._made()

    def update(self, changed: Sequence[Job]) -> None:
        """Show where the jobs are, unless that was shown just now."""
        self._changed.update((id(job), job) for job in changed)
        if time.perf_counter() >= self._next:
            self._show()
            self._next = time.perf_counter() + EVERY_SECONDS

    def close(self) -> None:
        """Show the end, and leave the bar where it is."""
        if self._bar is not None:
            self._show()
            self._bar.close()

    def _show(self) -> None:
        if self._bar is None:
            self._bar = self._made()
        self._count()
        self._bar.set_postfix_str(self._speeds(), refresh=False)
        self._bar.update(self._ended - self._done)
        self._bar.refresh()
        self._done = self._ended

    def _count(self) -> None:
        """Bring the sum over all jobs up to date; those that have not changed cost nothing."""
        for key, job in self._changed.items():
            before, now = self._known.get(key, (0, 0, 0)), _tally(job)
            self._known[key] = now
            read, written, ended = (y - x for x, y in zip(before, now, strict=True))
            self._read, self._written = self._read + read, self._written + written
            self._ended += ended
        self._changed = {}

    def _made(self) -> Any:
        if self._make is None:
            from tqdm.auto import tqdm

            self._make = tqdm
        return self._make(
            total=self._total,
            desc="Processed prompts",
            unit=" prompts",
            dynamic_ncols=True,
            mininterval=math.inf,  # drawn by `refresh` alone
        )

    def _speeds(self) -> str:
        """Tokens of prompts that have been read, and of outputs, per second."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        read, written = self._read / seconds, self._written / seconds
        return f"input: {read:.1f} tokens/s, output: {written:.1f} tokens/s"


def _somebody_looks() -> bool:
    """Whether stderr is a terminal, or Python runs in a notebook."""
    interactive = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    if type(shell).__name__ == "ZMQInteractiveShell":
        return True
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
