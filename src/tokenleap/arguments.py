"""Arguments and attributes that `LLM` does not have: what to write instead.

The names are those of vLLM, Transformers and llama.cpp. A value that asks for nothing is accepted.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from tokenleap.config import SpeculativeConfig
from tokenleap.core.config import nearest
from tokenleap.core.params import SamplingParams
from tokenleap.errors import ConfigError

REQUIRED: Any = None
"""The default of prompts: without them, an error of ours says what to write."""


def check_at_least_1(**values: int) -> None:
    """Refuse arguments that are too small."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name}: must be at least 1, got {value}.")


def known_options(
    method: str, given: Mapping[str, Any], prompts: object, known: Container[str] = ()
) -> dict[str, Any]:
    """The arguments that a method takes; others must ask for nothing, or are refused."""
    wanted = "a conversation" if method == "chat" else "text, or a list of token ids,"
    takes = f"give {wanted} as its first argument."
    for name, value in given.items():
        if name in known:
            continue
        if name in _CALL:
            if _asks_nothing(value):
                continue
            raise ConfigError(f"{method}() takes no argument {name!r}: {_CALL[name]}")
        if _is_of(SamplingParams, name):
            own = SamplingParams.foreign_names.get(name, f"use SamplingParams({name}=...).")
            raise ConfigError(f"{method}() takes {name} in `sampling_params`: {own}")
        if _is_of(SpeculativeConfig, name):
            raise ConfigError(f"{method}() takes {name} in `speculative_config`: {_drafting(name)}")
        if name in _INPUTS:
            raise ConfigError(f"{method}() takes no argument {name!r}: {takes}")
        raise ConfigError(f"{method}() takes no argument {name!r}.")
    if prompts is REQUIRED:
        raise ConfigError(f"{method}() has no prompt: {takes}")
    return {name: value for name, value in given.items() if name in known}


def refuse_unknown_engine(unknown: Mapping[str, Any], known: Iterable[str]) -> None:
    """Say what to write in place of an argument that `LLM` does not take."""
    for name, value in unknown.items():
        if name in _ENGINE:
            if _asks_nothing(value) or (value is True and name in _ALWAYS):
                continue
            advice = _ENGINE[name]
        elif _is_of(SpeculativeConfig, name):
            advice = f"it belongs in `speculative_config`: {_drafting(name)}"
        elif _is_of(SamplingParams, name):
            advice = "give `SamplingParams` to generate()."
        else:
            advice = nearest(name, list(known))
        raise ConfigError(f"LLM() takes no argument {name!r}: {advice}")


def _asks_nothing(value: Any) -> bool:
    """Whether a value of an argument that is not there changes nothing."""
    if isinstance(value, list | tuple):  # priorities
        return not any(value)
    return value is None or (isinstance(value, str | int | float) and value in ("", "auto", 0))


def _is_of(options: type[SamplingParams] | type[SpeculativeConfig], name: str) -> bool:
    """Whether this is an option of these, or what another library calls one."""
    return name in options.field_names() or name in options.foreign_names


def _drafting(name: str) -> str:
    """The advice on an option of `SpeculativeConfig`."""
    return SpeculativeConfig.foreign_names.get(name, f"write {{'{name}': ...}}.")


_INPUTS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "inputs",
    "inputs_embeds",
    "prompt",
    "prompt_token_ids",
    "text",
)
"""Other libraries' names for a prompt, or for what their tokenizers make of it."""

_LORA = "adapters are not applied while it runs: merge them into the model."
_MEDIA = "models read text, and Whisper audio: {'audio': samples}."
_OFFLOAD = "weights stay in memory: quantization='int4' makes them a third as large."
_ONE_TASK = "an LLM generates text here."
_SPECULATIVE = (
    "use speculative_config={'method': ..., 'model': ..., 'num_speculative_tokens': ...}."
)
_TRAINING = "weights do not change while they serve."

_ENGINE = {
    **dict.fromkeys(
        ("runner", "convert", "task", "pooler_config", "override_pooler_config"), _ONE_TASK
    ),
    **dict.fromkeys(("assistant_model", "spec_method", "spec_model", "spec_tokens"), _SPECULATIVE),
    **dict.fromkeys(("n_ctx", "max_seq_len"), "use 'max_model_len'."),
    **dict.fromkeys(("n_gpu_layers", "device_map"), "use 'device'."),
    **dict.fromkeys(
        ("revision", "tokenizer_revision"), "write it after the id: 'ORG/NAME@REVISION'."
    ),
    **dict.fromkeys(("gpu_memory_utilization", "kv_cache_memory_bytes"), "use 'kv_cache_memory'."),
    **dict.fromkeys(
        (
            *("cpu_offload_gb", "offload_group_size", "offload_num_in_group", "swap_space"),
            *("offload_prefetch_step", "offload_params"),
        ),
        _OFFLOAD,
    ),
    **dict.fromkeys(
        ("allowed_local_media_path", "allowed_media_domains", "mm_processor_kwargs"), _MEDIA
    ),
    **dict.fromkeys(
        ("enforce_eager", "compilation_config", "attention_config", "disable_custom_all_reduce"),
        "use 'runtime'.",
    ),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), _LORA),
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size"),
        "use 'tensor_parallel_size', or `tokenleap serve --replicas`.",
    ),
    **dict.fromkeys(
        ("enable_return_routed_experts", "return_sampling_mask"), "outputs do not have it."
    ),
    "block_size": "the KV is not kept in blocks.",
    "chat_template": "give it to chat().",
    "disable_log_stats": "nothing is logged; set TOKENLEAP_LOG=info to see more.",
    "enable_chunked_prefill": "prompts are always read in chunks: see 'max_num_batched_tokens'.",
    "hf_overrides": "write them into the folder's config.json.",
    "hf_token": "log in with `hf auth login`.",
    "load_in_4bit": "use quantization='int4'.",
    "load_in_8bit": "use quantization='int8'.",
    "logits_processors": "use logit_bias, bad_words or structured_outputs of SamplingParams.",
    "max_logprobs": "any number of log-probabilities is allowed.",
    "n_threads": "call torch.set_num_threads(), or set OMP_NUM_THREADS.",
    "profiler_config": "use `tokenleap trace`, or the trace of each output.",
    "quantization_config": "use 'quantization'.",
    "scheduling_policy": "requests run in the order in which they come.",
    "skip_tokenizer_init": "a model without a tokenizer takes token ids.",
    "structured_outputs_config": "llguidance compiles all forms.",
    "tokenizer_mode": "the tokenizer is as Transformers loads it.",
    "torch_dtype": "use 'dtype'.",
    "trust_remote_code": "code that comes with a model never runs here; leave it out.",
}
"""Arguments of other libraries' constructors, and what to write for `LLM` instead."""

_ALWAYS = ("disable_log_stats", "enable_chunked_prefill")
"""Those of them that need not be asked for."""

_CALL = {
    "chat_template_content_format": "content may be text or a list of parts.",
    "concurrency_limit": "use LLM(max_num_seqs=...).",
    "guided_options_request": "use SamplingParams(structured_outputs=...).",
    "lora_request": _LORA,
    "mm_processor_kwargs": _MEDIA,
    "priority": "requests run in the order in which they come.",
    "prompt_adapter_request": _LORA,
    "request_id": "use LLM.engine.add_request(); closing a stream ends its request.",
    "tokenization_kwargs": "pass {'prompt_token_ids': ...}, tokenized as you wish.",
}
"""Arguments of vLLM's methods, and what to do instead."""

ATTRIBUTES = {
    **dict.fromkeys(("classify", "score", "reward"), _ONE_TASK),
    "embed": "use `engine.embed`.",
    **dict.fromkeys(
        ("enqueue", "enqueue_chat", "wait_for_completion"), "use `stream`, or `engine.add_request`."
    ),
    **dict.fromkeys(("start_profile", "stop_profile"), _ENGINE["profiler_config"]),
    **dict.fromkeys(
        ("sleep", "wake_up", "release_kv_cache_memory"), "close it, and load it again."
    ),
    **dict.fromkeys(
        (
            *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "update_weights"),
            *("start_weight_update", "start_draft_weight_update", "finish_weight_update"),
            *("update_weight_version", "get_weight_version"),
        ),
        _TRAINING,
    ),
    "apply_model": "load the model with Transformers, and give it to LLM.",
    "collective_rpc": "there is one process: call it.",
    "from_engine_args": "give them to LLM(...).",
    "get_metrics": "each output has `metrics`, and the server /metrics.",
    "get_world_size": "use `tensor_parallel_size`.",
    "llm_engine": "use `engine`.",
    "reset_mm_cache": "reset_prefix_cache() forgets what encoders have read, too.",
    "set_tokenizer": "use LLM(tokenizer=...).",
}
"""Attributes of vLLM's `LLM`, and what to use instead."""
