"""Tokenleap: speculative decoding for Hugging Face models. The same output, faster.

    from tokenleap import LLM, SamplingParams

    llm = LLM("smollm2-135m", speculative_config={"method": "ngram"})
    print(llm.generate("Hello", SamplingParams(temperature=0, max_tokens=64))[0].text)

The public names are loaded when they are first used, so that `tokenleap --help` does not wait for
PyTorch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from tokenleap.core.garbage import collected_later
from tokenleap.runtime.cores import bound_spinning

if TYPE_CHECKING:
    from tokenleap.async_llm import AsyncLLM
    from tokenleap.config import SpeculativeConfig
    from tokenleap.core.acceptance.base import Origin
    from tokenleap.core.distribution import Logprob
    from tokenleap.core.params import SamplingParams
    from tokenleap.core.structured import StructuredOutputsParams
    from tokenleap.drafters.base import VocabularyOverlap
    from tokenleap.engine.llm_engine import LLMEngine
    from tokenleap.engine.prompts import TextPrompt, TokensPrompt
    from tokenleap.errors import (
        CompatibilityError,
        ConfigError,
        DataError,
        ModelError,
        PromptError,
        RequestError,
        TokenleapError,
        TrainingError,
    )
    from tokenleap.llm import LLM
    from tokenleap.outputs import (
        BeamOutput,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        Metrics,
        RequestOutput,
        StreamChunk,
        StreamedToken,
    )
    from tokenleap.trace import StepTrace, Trace

    __version__: str

bound_spinning()  # before PyTorch is loaded

if "ipykernel" in sys.modules:  # the bar of `LLM` and Transformers, which asks for ipywidgets
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        importlib.import_module("tqdm.auto")

_MODULES = {
    "tokenleap.async_llm": ["AsyncLLM"],
    "tokenleap.core.acceptance.base": ["Origin"],
    "tokenleap.core.distribution": ["Logprob"],
    "tokenleap.core.params": ["SamplingParams"],
    "tokenleap.core.structured": ["StructuredOutputsParams"],
    "tokenleap.drafters.online": ["OnlineReport"],
    "tokenleap.drafters.base": ["VocabularyOverlap"],
    "tokenleap.errors": [
        "CompatibilityError",
        "ConfigError",
        "DataError",
        "TokenleapError",
        "ModelError",
        "PromptError",
        "RequestError",
        "TrainingError",
    ],
    "tokenleap.llm": ["LLM"],
    "tokenleap.engine.llm_engine": ["LLMEngine"],
    "tokenleap.engine.prompts": ["TextPrompt", "TokensPrompt"],
    "tokenleap.outputs": [
        "BeamOutput",
        "BeamSearchOutput",
        "BeamSearchParams",
        "BeamSearchSequence",
        "CompletionOutput",
        "Metrics",
        "RequestOutput",
        "StreamChunk",
        "StreamedToken",
    ],
    "tokenleap.config": ["SpeculativeConfig"],
    "tokenleap.trace": ["StepTrace", "Trace"],
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
    "StructuredOutputsParams",
    "TextPrompt",
    "TokenleapError",
    "TokensPrompt",
    "Trace",
    "TrainingError",
    "VocabularyOverlap",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name not in _HOME:
        raise AttributeError(f"module 'tokenleap' has no attribute '{name}'")
    with collected_later():
        value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
