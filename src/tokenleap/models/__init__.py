"""From a model's name to a model in memory: folders, GGUF files, aliases and their cache.

`LLMEngine` loads its models with it, and `tokenleap models` manages the cache.
"""

from __future__ import annotations

from tokenleap.models.load import load_model, load_tokenizer
from tokenleap.models.resolver import Alias, aliases, find_tokenizer, gguf_of, resolve, short_names
from tokenleap.models.store import CachedModel, cache_dir, cached, check, remove

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
    "short_names",
]
