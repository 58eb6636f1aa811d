"""Prompts as token ids of a loaded model."""

from __future__ import annotations

import numpy as np

from tokenleap.bench.prompts_file import cut_middle
from tokenleap.errors import ConfigError
from tokenleap.llm import LLM

__all__ = ["encode", "prompt_limit", "random_ids"]

_SHORTEST_PROMPT = 2
"""Tokens: the first and the last one."""


def prompt_limit(max_model_len: int, wanted: int, max_tokens: int) -> int:
    """Most tokens of a prompt: `wanted`, or fewer if the context leaves less beside the output.

    Args:
        max_model_len: most tokens of prompt and output together.
        wanted: what the user asked for.
        max_tokens: of the output.

    Raises:
        ConfigError: no room is left for a prompt.
    """
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
        llm: its tokenizer and chat template are used.
        text: the prompt.
        limit: most tokens. The middle of a longer prompt is cut out, so that what the template
            puts around the message stays.
    """
    templated = llm.tokenizer is not None and llm.tokenizer.chat_template
    ids = llm.encode([{"role": "user", "content": text}] if templated else text)
    return cut_middle(ids, limit)


def random_ids(llm: LLM, seed: int, length: int) -> list[int]:
    """A prompt of distinct random tokens, none of them special.

    Args:
        llm: its tokenizer says which tokens are special.
        seed: another seed gives another prompt.
        length: tokens; fewer if the vocabulary has fewer ordinary ones.
    """
    assert llm.tokenizer is not None
    ordinary = np.setdiff1d(np.arange(len(llm.tokenizer)), llm.tokenizer.all_special_ids)
    dice = np.random.default_rng(seed)
    chosen: list[int] = dice.choice(ordinary, min(length, len(ordinary)), replace=False).tolist()
    return chosen
