"""Messages of the library in terms of the command line: flags instead of field names.

`root` translates every error of the library with `in_flags` before it prints it.
"""

from __future__ import annotations

import re

__all__ = ["flag", "in_flags"]

_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "n", "logprobs", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "allowed_token_ids"),
    *("min_tokens", "max_tokens", "stop", "stop_token_ids", "structured_outputs"),
    *("bad_words", "prompt_logprobs"),
    *("beam_width", "length_penalty"),
    *(
        "num_speculative_tokens",
        "acceptance",
        "controller",
        "dtype",
        "device",
        "max_model_len",
        "quantization",
        "runtime",
        "kv_cache_memory",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
        "prefix_cache_memory",
        "tensor_parallel_size",
        "max_body_size",
        "replicas",
        "ray_address",
    ),
)

_PHRASES = {
    "needs a draft model: set 'model'": "needs a draft model: add --draft-model",
    "needs a trained head: set 'model' to its folder": (
        "needs a trained head: add --draft-model with its folder"
    ),
    "takes no draft model: remove 'model'": "takes no draft model: remove --draft-model",
    "or with {'method': 'none'}": "or with --method none",
    "pass text instead of messages": "use --no-chat",
    "pass token ids, or LLM(tokenizer=...)": "the command line needs one",
}

# Where a message names a field: at its start with a colon, before a value, and anywhere if the
# name has an underscore, since no English word has one.
_NAME = "|".join(sorted(_FIELDS, key=len, reverse=True))
_SUBJECT = re.compile(rf"^({_NAME})(?=:)")
_WITH_VALUE = re.compile(rf"\b({_NAME})='?(\w+)'?")
_WORD = re.compile(rf"\b({'|'.join(name for name in _FIELDS if '_' in name)})\b")


def flag(field: str) -> str:
    """The flag that sets a field."""
    return "--" + field.replace("_", "-")


def in_flags(message: str) -> str:
    """A message of the library with every field name replaced by its flag."""
    for phrase, advice in _PHRASES.items():
        message = message.replace(phrase, advice)
    message = _SUBJECT.sub(lambda match: flag(match[1]), message)
    message = _WITH_VALUE.sub(lambda match: f"{flag(match[1])} {match[2]}", message)
    return _WORD.sub(lambda match: flag(match[1]), message)
