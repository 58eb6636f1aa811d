"""From a model's name to a model in memory: folders, GGUF files, aliases and their cache.

`LLMEngine` loads its models with it, and `foretoken models` manages the cache.
"""

from __future__ import annotations

from foretoken.models.alias import Alias, aliases
from foretoken.models.load import load_model, load_tokenizer
from foretoken.models.resolver import gguf_of, resolve
from foretoken.models.store import CachedModel, cache_dir, cached, check, remove
from foretoken.models.tokenizers import find_tokenizer

__all__ = [
    "Alias",
    "CachedModel",
    "aliases",
    "cache_dir",
    "cached",
    "check",
    "find_tokenizer",
    "gguf_of",
    "load_model",
    "load_tokenizer",
    "remove",
    "resolve",
]
