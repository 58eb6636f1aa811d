"""`LLM`: load a model, generate, stream, chat. A thin face over the engine, in vLLM's words."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretoken import models
from foretoken.acceptance import rule_class
from foretoken.cache import SlabFull, is_out_of_memory
from foretoken.config import SamplingParams
from foretoken.control import Controller, CostCurve, Fixed, controller_class
from foretoken.decode import step
from foretoken.drafters.base import Drafter
from foretoken.drafters.registry import DrafterParts
from foretoken.drafters.vocabulary import DraftModel, VocabularyOverlap
from foretoken.engine import Engine, Speculation
from foretoken.errors import ConfigError, PromptError
from foretoken.grammar import Grammars
from foretoken.kv_budget import KVBudget
from foretoken.llm_engine import LLMEngine, Speculative, result
from foretoken.loading import LoadedModel
from foretoken.memory import num_bytes
from foretoken.outputs import RequestOutput, StreamChunk
from foretoken.prefix_cache import PrefixCache
from foretoken.prompts import Message, Prompt, as_list, is_conversation, one_each, token_ids
from foretoken.request import Request
from foretoken.request_maker import RequestMaker
from foretoken.runtime.cuda.step import step_for
from foretoken.speculative import SpeculativeConfig
from foretoken.target import Target

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
        bit_exact: whether, on this machine and in this dtype, the bits of a position do not depend
            on how many are computed with it (law 7); spot-checked at construction. On the native
            runtime that includes trees. Where it is False a controller that is not named is
            `fixed`: what goes by the clock must not show in the output.
        engine: the same by hand: requests that are added, stepped and aborted one by one.
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
        max_num_batched_tokens: int = 512,
        kv_cache_memory: int | str | None = None,
        enable_prefix_caching: bool = True,
        prefix_cache_memory: int | str = "256MiB",
        quantization: str | None = None,
        runtime: str = "auto",
    ) -> None:
        _check_at_least_1(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self._kv_budget = KVBudget(
            None if kv_cache_memory is None else num_bytes("kv_cache_memory", kv_cache_memory)
        )
        prefix_bytes = num_bytes("prefix_cache_memory", prefix_cache_memory)
        self.speculative_config = SpeculativeConfig.parse(speculative_config)
        loaded = LoadedModel.of(model, tokenizer, dtype, device)
        self.model_path, self.tokenizer = loaded.path, loaded.tokenizer
        self._quantization, self._runtime = quantization, runtime
        self._target = Target(loaded.module, max_model_len, quantization, runtime)
        self._kv_budget.add(self._target)
        self.eos_token_ids = loaded.eos_token_ids
        self._grammars = Grammars(self.tokenizer, self._target.vocab_size, self.eos_token_ids)
        self._maker = RequestMaker(self._target, self.eos_token_ids, self._grammars)
        self.vocabulary_overlap: VocabularyOverlap | None = None
        self._costs = CostCurve()
        self._others: list[tuple[SpeculativeConfig, Speculation]] = []
        self._step = step_for(self._target) or step
        drafter = self._drafter_of(self.speculative_config)
        controller = self._controller(self.speculative_config, drafter)
        self._kv_budget.share()
        self._engine = Engine(
            self._target,
            drafter,
            rule_class(self.speculative_config.rule_name)(self.speculative_config.rule_options),
            controller,
            max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_cache=PrefixCache(self._target, prefix_bytes) if enable_prefix_caching else None,
            step=self._step,
        )
        self.engine = LLMEngine(self._engine, self._requests, self._speculation)
        self._max_num_seqs = max_num_seqs
        self._measure_costs(controller)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self._target.most_tokens

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        return self._target.dtype

    @property
    def runtime(self) -> str:
        """What computes the passes: "native", "lean", "module", "cuda" or "compiled".

        "lean" and "module" are PyTorch's operations, the latter through the Transformers module: on
        a GPU too, where passes cannot be captured in graphs.
        """
        return self._target.network.name

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
        speculative_config: Speculative | Sequence[Speculative] = None,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many.

        Args:
            prompts: a prompt or a sequence of prompts (strings, token id lists, conversations).
            sampling_params: one for all, or one per prompt; None takes the defaults.
            speculative_config: how to guess, one for all or one per prompt; None as the `LLM` does.
                The acceptance rule is the `LLM`'s. What a configuration needs is made at its first
                use and kept.
            trace: compute p of every drafted token for the trace, also where no rule looked.

        Returns:
            One result per prompt, in order.

        Raises:
            PromptError: a prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: parameters do not fit the model or the number of prompts.
            CompatibilityError: a drafter does not fit the model or the rule.
        """
        listed = as_list(prompts)
        params = one_each("sampling_params", listed, sampling_params)
        configs = one_each("speculative_config", listed, speculative_config)
        groups = [
            self._requests(prompt, one or SamplingParams(), trace)
            for prompt, one in zip(listed, params, strict=True)
        ]
        speculations = [self._speculation(config) for config in configs]
        requests = [request for group in groups for request in group]
        try:
            for group, speculation in zip(groups, speculations, strict=True):
                for request in group:
                    self._engine.add(request, speculation)
            while not all(request.finished for request in requests):
                self._engine.step()
        finally:
            self._engine.abort(requests)
        return [result(*pair) for pair in zip(listed, groups, strict=True)]

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
        """
        return self.engine.stream(prompt, sampling_params, speculative_config, trace=trace)

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
        for drafter in (self._engine.drafter, *(other.drafter for _, other in self._others)):
            drafter.forget()

    # Inside

    def _requests(self, prompt: Prompt, params: SamplingParams, trace: bool) -> list[Request]:
        return self._maker.make(prompt, self.tokenizer, params, trace=trace)

    def _controller(self, config: SpeculativeConfig, drafter: Drafter) -> Controller:
        name = config.controller_under(self.speculative_config.rule_name)
        exact = self._target.exact_trees if drafter.makes_branches else self._target.bit_exact
        if config.controller is None and not exact:
            name = Fixed.name  # draft lengths go by the clock, and here they would show
        # A step on the device drafts and verifies in one, so that nothing can be cut in between.
        kind = controller_class(name, looks_up=drafter.looks_up and self._step is step)
        options = None if config.controller is None else config.controller_options
        # What passes cost is the target's affair: one curve for all controllers.
        return kind(config.gamma, options, self._costs, drafter.level_sizes(config.gamma))

    def _measure_costs(self, controller: Controller) -> None:
        """Time passes for controllers that choose by their costs, once for all of them."""
        if not controller.needs_costs or not controller.num_speculative_tokens:
            return
        if self._costs.measured:
            return
        try:
            self._costs.start_from(self._target.measure_costs(self._max_num_seqs))
        except (SlabFull, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # Costs are then learnt from the steps.

    def _speculation(self, given: Speculative) -> Speculation | None:
        """Drafter and controller of a request's own configuration; None for the `LLM`'s own."""
        if given is None:
            return None
        config = SpeculativeConfig.parse(given)
        self._check_rule(config)
        for known, speculation in self._others:
            if known == config:
                return speculation
        drafter = self._drafter_of(config)
        controller = self._controller(config, drafter)
        self._measure_costs(controller)
        self._others.append((config, Speculation(drafter, controller)))
        return self._others[-1][1]

    def _check_rule(self, config: SpeculativeConfig) -> None:
        own = self.speculative_config
        ours, theirs = ((c.rule_name, c.rule_options) for c in (own, config))
        if "acceptance" in config.model_fields_set and ours != theirs:
            raise ConfigError(
                f"acceptance: requests share the LLM's rule, '{own.rule_name}' as it was set up "
                "there; leave it out of a request's speculative_config."
            )

    def _drafter_of(self, config: SpeculativeConfig) -> Drafter:
        """For the target, under the `LLM`'s rule."""
        couples = rule_class(self.speculative_config.rule_name).couples_draft
        return self._drafter(config, self._target, couples)

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
        target = Target(model, quantization=self._quantization, runtime=self._runtime)
        self._kv_budget.add(target)
        return DraftModel(target, tokenizer)


def _inner_config(fields: Mapping[str, Any]) -> SpeculativeConfig:
    """A drafter inside another one; the outer configuration decides about everything else."""
    for name in ("num_speculative_tokens", "acceptance", "controller"):
        if name in fields:
            raise ConfigError(f"{name} belongs to the outer speculative_config, not to {fields}.")
    return SpeculativeConfig.parse(fields)


def _check_at_least_1(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name}: must be at least 1, got {value}.")
