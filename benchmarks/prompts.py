"""The prompts of `foretoken.bench.prompts_file` as token ids of a loaded model."""

from __future__ import annotations

from benchmarks import BenchmarkError
from foretoken import LLM
from foretoken.bench.prompts_file import MULTI_TURN, Prompt, cut_middle, read_prompts, stratified

__all__ = ["MULTI_TURN", "Prompt", "encode", "prompt_limit", "read_prompts", "stratified"]


def prompt_limit(llm: LLM, wanted: int, max_tokens: int) -> int:
    """Most tokens of a prompt: as many as wanted, or what the context leaves.

    Raises:
        BenchmarkError: it leaves none.
    """
    room = llm.max_model_len - max_tokens
    if room < 2:
        raise BenchmarkError(
            f"--max-tokens {max_tokens} leaves no room for a prompt in the context of "
            f"{llm.max_model_len}."
        )
    return min(wanted, room)


def encode(llm: LLM, prompt: Prompt, limit: int) -> list[int]:
    """Token ids of a prompt as the first message of a chat, or as text without a chat template.

    Args:
        llm: its tokenizer and chat template are used.
        prompt: the prompt.
        limit: most tokens; of a longer prompt the middle is cut out, so that what the template
            puts around the message stays.
    """
    templated = llm.tokenizer is not None and llm.tokenizer.chat_template
    ids = llm.encode([{"role": "user", "content": prompt.text}] if templated else prompt.text)
    return cut_middle(ids, limit)
