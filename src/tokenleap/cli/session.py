"""From options to a loaded model, with progress on stderr; for every command that needs one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenleap.cli.console import errors, plain, working
from tokenleap.cli.options import ModelOptions
from tokenleap.cli.root import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tokenleap.config import SpeculativeConfig
    from tokenleap.llm import LLM

__all__ = ["find_draft", "llm_arguments", "open_llm", "open_tokenizer", "resolve"]


def open_llm(
    options: ModelOptions, config: SpeculativeConfig | None, *, quiet: bool = False, **engine: Any
) -> LLM:
    """Load the target, and the draft model if the configuration names one; see `llm_arguments`."""
    arguments = llm_arguments(options, config, **engine)
    with working(f"Loading {options.model}", quiet=quiet):
        from tokenleap.llm import LLM

        options.set_threads()
        llm = LLM(**arguments)
    overlap = llm.vocabulary_overlap
    if overlap is not None and overlap.way != "same" and not quiet:
        errors().print(plain(str(overlap), "note"), soft_wrap=True)
    return llm


def llm_arguments(
    options: ModelOptions, config: SpeculativeConfig | None, **engine: Any
) -> dict[str, Any]:
    """Arguments of `LLM`, for models that are there.

    Models that have to be fetched or converted are, with a progress bar.

    Args:
        options: the target.
        config: how to draft; None takes `LLM`'s default.
        engine: further arguments of `LLM`.

    Raises:
        UsageError: no model has this name.
        ModelError: it cannot be fetched, read or converted.
    """
    from tokenleap.models.resolver import gguf_file

    if gguf_file(options.model) is None:  # `LLM` converts those in its own way
        resolve(options.model)
    if config is not None:
        find_draft(config)
    return {
        "model": options.model,
        "speculative_config": config,
        "dtype": options.dtype,
        "device": options.device,
        "max_model_len": options.max_model_len,
        "quantization": options.quantization,
        "runtime": options.runtime,
        **engine,
    }


def find_draft(config: SpeculativeConfig) -> None:
    """Fetch or convert the draft model if needed; a trained head has to be there.

    Raises:
        UsageError: there is no such model or folder.
        ModelError: the model cannot be fetched, read or converted.
    """
    from tokenleap.drafters.heads.folder import existing_folder
    from tokenleap.errors import ModelError
    from tokenleap.models.resolver import gguf_file

    if config.takes_head:
        try:
            existing_folder(config.model)
        except ModelError as error:
            raise UsageError(str(error)) from error
    elif config.model is not None and gguf_file(config.model) is None:
        resolve(config.model)


def open_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer without the model.

    Raises:
        UsageError: no model has this name, or it has no tokenizer.
        ModelError: it cannot be fetched, read or converted.
    """
    folder = resolve(model)
    with working(f"Loading the tokenizer of {model}"):
        from tokenleap.models import load_tokenizer

        tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UsageError(f"{model} has no tokenizer")
    return tokenizer


def resolve(name: str) -> Path:
    """A model's folder; fetches or converts the model first if needed, with a progress bar.

    Raises:
        UsageError: no model has this name.
        ModelError: it cannot be fetched, read or converted.
    """
    from tokenleap import models
    from tokenleap.errors import ModelError
    from tokenleap.models.hub import is_hub_id

    try:
        return models.resolve(name)
    except ModelError as error:
        if name in models.aliases() or _exists(name) or is_hub_id(name):
            raise
        raise UsageError(str(error)) from error


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().exists()
    except (OSError, RuntimeError):  # no valid file name, or no such user in `~user`
        return False
