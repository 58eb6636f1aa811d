"""One model in memory, and an `LLM` per method on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import BenchmarkError
from foretoken import LLM, ConfigError, SpeculativeConfig, models
from foretoken.drafters.registry import METHODS
from foretoken.models.support import default_device, default_dtype

__all__ = ["BASELINE", "Loaded", "Method", "default_methods", "llm_for", "load", "parse_methods"]


@dataclass(frozen=True)
class Method:
    """A speculative_config with the label it has in results."""

    label: str
    fields: Mapping[str, Any] = field(hash=False)

    def config(self, model: Any, num_speculative_tokens: int | None = None) -> dict[str, Any]:
        """Its fields, with this draft model if it takes one and names none."""
        config = {"num_speculative_tokens": num_speculative_tokens, **self.fields}
        known = METHODS.get(str(self.fields["method"]))
        if known is not None and known.takes_model:
            config.setdefault("model", model)
        return config


BASELINE = Method("none", {"method": "none"})
"""Plain decoding."""


@dataclass(frozen=True)
class Loaded:
    """A module as Transformers made it, and its tokenizer."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def load(model: str, dtype: str, device: str) -> Loaded:
    """Load a folder, a GGUF file or an alias once, for several `LLM`s."""
    place = default_device(device)
    folder = models.resolve(model)
    module = models.load_model(folder, default_dtype(dtype, place), place)
    return Loaded(module, models.load_tokenizer(folder))


def default_methods() -> tuple[list[Method], list[str]]:
    """All registered methods but the baseline, and the names of those that need fields of theirs.

    The latter (a corpus, other drafters) are left out; who wants them writes their configuration.
    """
    ready: list[Method] = []
    left_out: list[str] = []
    for name in METHODS:
        method = Method(name, {"method": name})
        try:
            SpeculativeConfig.parse(method.config("any model"))
        except ConfigError:
            left_out.append(name)
        else:
            ready.append(method)
    return [method for method in ready if method != BASELINE], left_out


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Methods as they stand on a command line.

    Args:
        texts: names, or speculative_configs as JSON: '{"method": "ngram", "prompt_lookup_max": 3}'.
            The baseline and repetitions are dropped.

    Raises:
        ConfigError: a configuration is wrong.
        BenchmarkError: one is not JSON, or none is left.
    """
    methods = list(dict.fromkeys(_parse_method(text) for text in texts))
    if BASELINE in methods:
        methods.remove(BASELINE)
    if not methods:
        raise BenchmarkError(f"'{BASELINE.label}' is the baseline: name another --method.")
    for method in methods:
        SpeculativeConfig.parse(method.config("any model"))
    return methods


def _parse_method(text: str) -> Method:
    if not text.lstrip().startswith("{"):
        return Method(text, {"method": text})
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchmarkError(f"--method {text}: not JSON ({error}).") from error
    if not isinstance(fields.get("method"), str):
        raise BenchmarkError(f'--method {text}: give "method", the name of one.')
    name = fields["method"]
    others = {key: value for key, value in fields.items() if key != "method"}
    return Method(f"{name} {json.dumps(others)}" if others else name, fields)


def llm_for(
    loaded: Loaded,
    method: Method,
    draft: PreTrainedModel | None = None,
    num_speculative_tokens: int | None = None,
    max_num_seqs: int = 16,
) -> LLM:
    """An `LLM` on the loaded module, which is left unchanged.

    Args:
        loaded: the target.
        method: how to draft.
        draft: for methods that take a draft model; None is the target itself.
        num_speculative_tokens: None is the method's default.
        max_num_seqs: most sequences advanced together.
    """
    model = loaded.module if draft is None else draft
    config = method.config(model, num_speculative_tokens)
    return LLM(
        loaded.module,
        tokenizer=loaded.tokenizer,
        speculative_config=config,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,  # another round of a prompt is to read it again
    )
