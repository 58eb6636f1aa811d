"""From options to a loaded model, with what a person at a terminal wants to see meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.console import errors, plain, working
from foretoken.cli.options import ModelOptions
from foretoken.cli.root import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.config import SpeculativeConfig
    from foretoken.llm import LLM, Prompt

__all__ = ["open_llm", "open_tokenizer", "resolve", "shaped"]


def open_llm(
    options: ModelOptions, config: SpeculativeConfig, *, quiet: bool = False, **engine: Any
) -> LLM:
    """Load the target, and the draft model if the configuration names one.

    Args:
        options: the target.
        config: how to guess.
        quiet: show no progress.
        engine: further arguments of `LLM`.
    """
    for name in (options.model, config.model):
        if name is not None:
            resolve(name)
    with working(f"Loading {options.model}", quiet=quiet):
        from foretoken.llm import LLM

        llm = LLM(
            options.model,
            speculative_config=config,
            dtype=options.dtype,
            device=options.device,
            max_model_len=options.max_model_len,
            quantization=options.quantization,
            runtime=options.runtime,
            **engine,
        )
    overlap = llm.vocabulary_overlap
    if overlap is not None and overlap.way != "same" and not quiet:
        errors().print(plain(str(overlap), "note"), soft_wrap=True)
    on_cpu = llm.device.type == "cpu"
    if on_cpu and llm.runtime == "lean" and options.runtime == "auto" and not quiet:
        _say_if_only_a_compiler_is_missing()
    return llm


def _say_if_only_a_compiler_is_missing() -> None:
    """A model runs several times slower on PyTorch's operations: who can help that should know."""
    from foretoken.runtime.native.build import NativeLibraryError, library

    try:
        library()
    except NativeLibraryError as error:
        note = f"Running without this library's C++, more slowly: {error}."
        errors().print(plain(note, "note"), soft_wrap=True)


def open_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer alone.

    Raises:
        UsageError: no model is called this, or it has none.
        ModelError: it cannot be fetched, read or converted.
    """
    folder = resolve(model)
    with working(f"Loading the tokenizer of {model}"):
        from foretoken.models import load_tokenizer

        tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UsageError(f"{model} has no tokenizer")
    return tokenizer


def resolve(name: str) -> Path:
    """A model's folder, fetched or converted first if need be, under its own progress bar.

    Raises:
        UsageError: no model is called this.
        ModelError: it cannot be fetched, read or converted.
    """
    from foretoken import models
    from foretoken.errors import ModelError

    try:
        return models.resolve(name)
    except ModelError as error:
        if name in models.aliases() or _exists(name):
            raise
        raise UsageError(str(error)) from error


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().exists()
    except (OSError, RuntimeError):  # a name no file can have, or no home of that name
        return False


def shaped(llm: LLM, text: str, chat: bool | None = None) -> Prompt:
    """Text as a conversation's first message, or as it is.

    Args:
        llm: the model.
        text: the prompt.
        chat: whether to; None does where the model has a chat template.
    """
    if chat is None:
        chat = llm.tokenizer is not None and bool(llm.tokenizer.chat_template)
    return [{"role": "user", "content": text}] if chat else text
