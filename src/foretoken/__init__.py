"""Foretoken: speculative decoding for Hugging Face models. The same output, faster.

    from foretoken import LLM, SamplingParams

    llm = LLM("smollm2-135m", speculative_config={"method": "ngram"})
    print(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=64))[0].text)

The public names are loaded when they are first used, so that `foretoken --help` does not wait for
PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from foretoken.runtime.spinning import bound_spinning

if TYPE_CHECKING:
    from foretoken.async_llm import AsyncLLM
    from foretoken.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from foretoken.config import SpeculativeConfig
    from foretoken.core.acceptance.base import Origin
    from foretoken.core.logprobs import Logprob, TokenLogprobs
    from foretoken.core.params import SamplingParams
    from foretoken.core.structured import StructuredOutputs
    from foretoken.drafters.overlap import VocabularyOverlap
    from foretoken.engine.llm_engine import LLMEngine
    from foretoken.errors import (
        CompatibilityError,
        ConfigError,
        DataError,
        ForetokenError,
        ModelError,
        PromptError,
        RequestError,
        TrainingError,
    )
    from foretoken.llm import LLM
    from foretoken.metrics import Metrics
    from foretoken.outputs import (
        BeamOutput,
        CompletionOutput,
        RequestOutput,
        StreamChunk,
        StreamedToken,
    )
    from foretoken.trace import StepTrace, Trace

bound_spinning()  # before PyTorch is loaded

__version__ = "0.1.0"

_MODULES = {
    "foretoken.async_llm": ["AsyncLLM"],
    "foretoken.beam_search": ["BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"],
    "foretoken.core.acceptance.base": ["Origin"],
    "foretoken.core.logprobs": ["Logprob", "TokenLogprobs"],
    "foretoken.core.params": ["SamplingParams"],
    "foretoken.core.structured": ["StructuredOutputs"],
    "foretoken.drafters.online": ["OnlineReport"],
    "foretoken.drafters.overlap": ["VocabularyOverlap"],
    "foretoken.errors": [
        "CompatibilityError",
        "ConfigError",
        "DataError",
        "ForetokenError",
        "ModelError",
        "PromptError",
        "RequestError",
        "TrainingError",
    ],
    "foretoken.llm": ["LLM"],
    "foretoken.engine.llm_engine": ["LLMEngine"],
    "foretoken.metrics": ["Metrics"],
    "foretoken.outputs": [
        "BeamOutput",
        "CompletionOutput",
        "RequestOutput",
        "StreamChunk",
        "StreamedToken",
    ],
    "foretoken.config": ["SpeculativeConfig"],
    "foretoken.trace": ["StepTrace", "Trace"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamOutput",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompatibilityError",
    "CompletionOutput",
    "ConfigError",
    "DataError",
    "ForetokenError",
    "LLMEngine",
    "Logprob",
    "Metrics",
    "ModelError",
    "OnlineReport",
    "Origin",
    "PromptError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StepTrace",
    "StreamChunk",
    "StreamedToken",
    "StructuredOutputs",
    "TokenLogprobs",
    "Trace",
    "TrainingError",
    "VocabularyOverlap",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'foretoken' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
