"""`LLM`: load a model, generate, stream, chat. A thin face over the engine, in vLLM's words."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretoken import models
from foretoken.acceptance import rule_class
from foretoken.config import SamplingParams
from foretoken.control import Controller, controller_class
from foretoken.drafters.base import Drafter
from foretoken.drafters.registry import DrafterParts
from foretoken.drafters.vocabulary import DraftModel, VocabularyOverlap
from foretoken.engine import Engine
from foretoken.errors import ConfigError, PromptError
from foretoken.grammar import Grammar, Grammars
from foretoken.outputs import RequestOutput, StreamChunk
from foretoken.request import Request
from foretoken.speculative import SpeculativeConfig
from foretoken.support import default_device, default_dtype
from foretoken.target import Target

__all__ = ["LLM", "Message", "Prompt"]

Message: TypeAlias = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation."""


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
        quantization: None keeps the weights as they are; "int8" (on a CPU) halves them, those of a
            draft model too. Speculation is then lossless with respect to the weights that run.

    Attributes:
        tokenizer: the tokenizer, or None.
        model_path: the (converted) Hugging Face folder, or None for a loaded model.
        bit_exact: whether, on this machine and in this dtype, the bits of a position do not depend
            on how many are computed with it (law 7); spot-checked at construction.
        vocabulary_overlap: how many tokens a draft model shares with the target, and how it drafts
            for it; None without a draft model or without the tokenizers. Of several the last.

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
        quantization: str | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs: must be at least 1, got {max_num_seqs}.")
        self.speculative_config = SpeculativeConfig.parse(speculative_config)
        self.model_path: Path | None = None
        if isinstance(model, PreTrainedModel):
            _check_loaded(model, dtype, device)
            loaded = model
        else:
            place = default_device(device)
            self.model_path = models.resolve(model)
            loaded = models.load_model(self.model_path, default_dtype(dtype, place), place)
            tokenizer = tokenizer or models.load_tokenizer(self.model_path)
        self.tokenizer = tokenizer
        self._quantization = quantization
        self._target = Target(loaded, max_model_len, quantization)
        self.eos_token_ids = _eos_token_ids(loaded, tokenizer)
        self._grammars = Grammars(tokenizer, self._target.vocab_size, self.eos_token_ids)
        self.vocabulary_overlap: VocabularyOverlap | None = None
        self._engine = Engine(
            self._target,
            self._own_drafter(),
            rule_class(self.speculative_config.rule_name)(self.speculative_config.rule_options),
            self._controller(),
            max_num_seqs,
        )

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._target.max_model_len

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        return self._target.dtype

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._target.device

    @property
    def bit_exact(self) -> bool:
        """Whether law 7 was found to hold for this model on this machine."""
        return self._target.bit_exact

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
            prompts: a prompt or a sequence of prompts (strings, token id lists, conversations).
            sampling_params: one for all, or one per prompt; None takes the defaults.
            trace: compute p of every drafted token for the trace, also where no rule looked.

        Returns:
            One result per prompt, in order.

        Raises:
            PromptError: a prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: parameters do not fit the model or the number of prompts.
        """
        listed = _as_list(prompts)
        params = _params_for(listed, sampling_params)
        groups = [self._requests(*pair, trace) for pair in zip(listed, params, strict=True)]
        requests = [request for group in groups for request in group]
        try:
            for request in requests:
                self._engine.add(request)
            while not all(request.finished for request in requests):
                self._engine.step()
        finally:
            self._engine.abort(requests)
        return [self._result(*pair) for pair in zip(listed, groups, strict=True)]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        trace: bool = False,
    ) -> Generator[StreamChunk, None, None]:
        """Yield tokens as they are committed, one chunk per step; the last has the whole output.

        Closing the iterator, or an exception such as Ctrl-C inside it, ends the request cleanly.

        Args:
            prompt: one prompt.
            sampling_params: as in `generate`; n must be 1.
            trace: as in `generate`.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ConfigError(f"n: a stream has one output, got {params.n}.")
        (request,) = self._requests(prompt, params, trace)
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[StreamChunk, None, None]:
        try:
            self._engine.add(request)
            # Another stream's step, or a call of `generate`, may have advanced this request.
            while (tokens := request.take()) or not request.finished:
                if tokens:
                    yield StreamChunk(tokens, request.output() if request.finished else None)
                else:
                    self._engine.step()
        finally:
            self._engine.abort([request])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation or of many; arguments as in `generate`."""
        for conversation in _as_list(messages):
            if not _is_conversation(conversation):
                raise PromptError(
                    'messages: a conversation is a list of {"role": ..., "content": ...}.'
                )
        return self.generate(messages, sampling_params, trace=trace)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text with special tokens, a conversation by its chat template.

        Raises:
            PromptError: there is no tokenizer or no chat template, or the prompt is malformed.
        """
        if not isinstance(prompt, str) and not _is_conversation(prompt):
            return _checked_ids(prompt)
        if self.tokenizer is None:
            raise PromptError("this model has no tokenizer: pass token ids, or LLM(tokenizer=...).")
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if not self.tokenizer.chat_template:
            raise PromptError("this model has no chat template: pass text instead of messages.")
        try:
            ids = self.tokenizer.apply_chat_template(
                [dict(message) for message in prompt],  # type: ignore[arg-type]
                add_generation_prompt=True,
                return_dict=False,
            )
        except TemplateError as error:  # a template may refuse roles or their order
            raise PromptError(f"the model's chat template refuses this: {error}") from error
        return list(ids)

    # Inside

    def _requests(self, prompt: Prompt, params: SamplingParams, trace: bool) -> list[Request]:
        if params.stop_strings and self.tokenizer is None:
            raise ConfigError("stop: stop strings need a tokenizer, and this model has none.")
        token_ids = self.encode(prompt)
        self._check_prompt(token_ids)
        return [
            Request(
                token_ids,
                params,
                vocab_size=self._target.vocab_size,
                eos_token_ids=self.eos_token_ids,
                max_model_len=self.max_model_len,
                tokenizer=self.tokenizer,
                index=index,
                trace_all=trace,
                grammar=self._grammar(params),
            )
            for index in range(params.n)
        ]

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.form is None:
            return None
        if not self.eos_token_ids:
            raise ConfigError(
                "structured_outputs need a model with an end-of-sequence token, to end with."
            )
        return self._grammars.compile(params.form)

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise PromptError("the prompt is empty: give at least one token to continue.")
        if len(token_ids) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room in the context of "
                f"{self.max_model_len}: shorten it."
            )
        highest = self._target.vocab_size - 1
        for token in token_ids:
            if not 0 <= token <= highest:
                raise PromptError(f"token id {token} is outside the vocabulary (0 to {highest}).")

    def _result(self, prompt: Prompt, requests: Sequence[Request]) -> RequestOutput:
        return RequestOutput(
            prompt if isinstance(prompt, str) else None,
            requests[0].prompt_ids,
            [request.output() for request in requests],
        )

    def _controller(self) -> Controller:
        config = self.speculative_config
        kind = controller_class(config.controller_name)
        costs = self._target.measure_costs() if kind.needs_costs else None
        return kind(config.gamma, config.controller_options, costs)

    def _own_drafter(self) -> Drafter:
        couples = rule_class(self.speculative_config.rule_name).couples_draft
        return self._drafter(self.speculative_config, self._target, couples)

    def _drafter(self, config: SpeculativeConfig, target: Target, coupled: bool) -> Drafter:
        parts = DrafterParts(
            options=config.options,
            coupled=coupled,
            target=target,
            tokenizer=self.tokenizer,
            grammars=self._grammars,
            load_model=lambda: self._load_draft_model(config.model),
            build=lambda inner, *rest: self._drafter(_inner_config(inner), *rest),
        )
        drafter = config.drafter_spec.build(parts)
        self.vocabulary_overlap = drafter.vocabulary_overlap or self.vocabulary_overlap
        return drafter

    def _load_draft_model(self, model: Any) -> DraftModel:
        tokenizer = None
        if not isinstance(model, PreTrainedModel):
            folder = models.resolve(model)
            tokenizer = models.load_tokenizer(folder)
            model = models.load_model(folder, self.dtype, self.device)
        return DraftModel(Target(model, quantization=self._quantization), tokenizer)


def _inner_config(fields: Mapping[str, Any]) -> SpeculativeConfig:
    """A drafter inside another one; the outer configuration decides about everything else."""
    for name in ("num_speculative_tokens", "acceptance", "controller"):
        if name in fields:
            raise ConfigError(f"{name} belongs to the outer speculative_config, not to {fields}.")
    return SpeculativeConfig.parse(fields)


def _is_conversation(prompt: Any) -> bool:
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return listed and all(isinstance(m, Mapping) and "role" in m for m in prompt)


def _as_list(prompts: Any) -> list[Any]:
    """The prompts as a list; one string, one conversation or one list of ids is one prompt."""
    if isinstance(prompts, str) or _is_conversation(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise PromptError(f"prompts: expected text or a list, got {type(prompts).__name__}.")
    if len(prompts) > 0 and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def _checked_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, Sequence) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    ):
        raise PromptError("a prompt is text, a list of token ids, or a list of chat messages.")
    return list(prompt)


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(
            f"sampling_params: {len(params)} given for {len(prompts)} prompts; give one for all, "
            "or one per prompt."
        )
    return list(params)


def _check_loaded(
    model: PreTrainedModel, dtype: str | torch.dtype, device: str | torch.device
) -> None:
    if dtype != "auto" and default_dtype(dtype, model.device) != model.dtype:
        raise ConfigError(f"dtype: the loaded model is in {model.dtype}; convert it with .to().")
    if device != "auto" and torch.device(device) != model.device:
        raise ConfigError(f"device: the loaded model is on {model.device}; move it with .to().")


def _eos_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """End-of-sequence tokens of the model's generation settings, and the tokenizer's own."""
    ids: set[int] = set()
    configured = model.generation_config.eos_token_id if model.generation_config else None
    if configured is not None:
        ids.update([configured] if isinstance(configured, int) else configured)
    if tokenizer is not None and isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))
