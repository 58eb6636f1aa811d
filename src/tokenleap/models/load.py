"""From a Hugging Face folder to a model and a tokenizer in memory.

Transformers is imported inside the functions, so that commands which only list or delete cached
models start fast. `loaded` and the command line call them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenleap.core.peers import num_processes
from tokenleap.errors import (
    CompatibilityError,
    ConfigError,
    ModelError,
    TokenleapError,
    is_failure,
)
from tokenleap.models.folder import (
    check_sizes,
    check_tokenizer,
    header_of,
    read_config,
    weight_files,
)
from tokenleap.models.store import full_disk, tells_of_full_disk

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# A folder with any of these has a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    tensor_parallel_size: int = 1,
    *,
    fills_masks: bool = False,
) -> PreTrainedModel:
    """Load a decoder-only language model, or an encoder-decoder, for inference.

    It reads only safetensors, runs no code from the folder, and uses no network. With
    `tensor_parallel_size`, so many processes must call this, and each loads its shard.
    """
    config = checked_config(folder)
    written = config.get("tokenleap")
    if not fills_masks and isinstance(written, dict) and "spec_drafter" in written:
        raise ModelError(
            f"{folder} holds a Spec-Drafter, which fills masks and writes no text: it is the model "
            "of the method 'spec_drafter', beside the one that it was trained for."
        )
    with guarded(f"cannot load the model in {folder}"):
        kind = _kind(folder, config, tensor_parallel_size)
        # `output_loading_info` makes it return a pair, which its type hints do not say.
        model, report = kind.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            # `_check_loaded` reports them by name: Transformers' error points to a table it logs.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **sharded(tensor_parallel_size),
        )
        _check_loaded(folder, model, config, report)
    model = model.eval().requires_grad_(False)
    return model if tensor_parallel_size > 1 else _on_device(folder, model, device)


def checked_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's `config.json`, compared with its weights."""
    config = read_config(folder)
    check_sizes(folder / "config.json", config, _weight_shapes(folder))
    return config


def load_config(folder: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    with guarded(f"cannot load the model in {folder}"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return config


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    check_tokenizer(folder)
    with guarded(f"cannot load the tokenizer in {folder}"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        tokenizer.decode([*tokenizer("")["input_ids"], 0])  # what is damaged may only show now
        with suppress(Exception):  # it may not know these letters
            tokenizer("a b")
    return tokenizer


def _weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    headers = map(header_of, weight_files(folder))
    return {name: tuple(each["shape"]) for header in headers for name, each in header.items()}


def _kind(folder: Path, config: dict[str, Any], tensor_parallel_size: int) -> Any:
    """The class that loads models of this kind, chosen before any weight is read."""
    import transformers

    from tokenleap.models.support import check_encoder_decoder

    if "auto_map" in config and config.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"the model in {folder} needs Python code of its own (auto_map in config.json), which "
            f"is never run; use a model that Transformers knows"
        )
    parsed = load_config(folder)
    if tensor_parallel_size > 1:
        check_sharded(parsed, tensor_parallel_size)
    if not parsed.is_encoder_decoder:
        return transformers.AutoModelForCausalLM
    check_encoder_decoder((parsed.architectures or [parsed.model_type])[0], parsed)
    if parsed.model_type == "whisper":
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForSeq2SeqLM


def _on_device(folder: Path, model: Any, device: torch.device) -> PreTrainedModel:
    try:
        moved: PreTrainedModel = model.to(device)
    # AssertionError: torch is built without the device. RuntimeError: it does not exist or is full.
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"cannot put the model in {folder} on {device}: {reason}") from error
    return moved


def _check_loaded(
    folder: Path, model: PreTrainedModel, config: dict[str, Any], report: dict[str, Any]
) -> None:
    """Check that the checkpoint is of this class and has every parameter, in the right shape."""
    # Transformers would load BERT or a classifier as a language model, with random new weights.
    architectures = config.get("architectures") or [type(model).__name__]
    if type(model).__name__ not in architectures:
        raise ModelError(
            f"the model in {folder} is a {architectures[0]}, not {_wanted(model)} "
            f"({type(model).__name__})"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{folder} lacks {len(missing)} weights of its model, {missing[0]} first; get it again"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ModelError(
            f"the weights in {folder} do not fit its config.json: {name} is {tuple(found)}, "
            f"expected {tuple(expected)}"
        )


def _wanted(model: PreTrainedModel) -> str:
    if model.config.is_encoder_decoder:
        return "an encoder-decoder with a language-model head"
    return "a causal language model"


@contextmanager
def silent() -> Iterator[None]:
    """Suppress Transformers' messages and progress bars; restore its own settings afterwards."""
    from transformers.utils import logging as messages

    verbosity, bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity(logging.ERROR)
    messages.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        if bars:
            messages.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def guarded(failure: str) -> Iterator[None]:
    """Suppress Transformers' messages, and turn its exceptions into `ModelError`.

    The caller checks what matters of what Transformers would warn about.
    """
    try:
        with silent():
            yield
    except (TokenleapError, AssertionError):
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        if tells_of_full_disk(str(error)):
            raise full_disk() from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{failure}: {lines[0]}") from error


# Models whose weights are spread over several processes: what is checked, and how they are loaded.
#
# Transformers shards them by the plan of their architecture while it reads the files, so that no
# process ever holds a whole model. `torchrun` starts the processes.


def check_processes(size: int, model: object, device: str | torch.device) -> None:
    """Refuse before anything is loaded what cannot be spread over so many processes."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"tensor_parallel_size: must be at least 1, got {size!r}.")
    loaded = getattr(model, "tp_size", None) or 1
    if loaded != size and not isinstance(model, str | Path):
        spread = f"{loaded} processes" if loaded > 1 else "one process"
        raise ConfigError(
            f"tensor_parallel_size: the loaded model is in {spread}, got {size}: give the name of "
            "its folder, or the number that it was loaded with."
        )
    if size == 1:
        return
    import torch

    _check_started(size)
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    if str(device) not in ("auto", accelerator.type):
        raise ConfigError(
            f"device: with tensor_parallel_size {size}, each process takes its own "
            f"{accelerator.type}, got '{device}': leave it out."
        )


def _check_started(size: int) -> None:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        processes = distributed.get_world_size()
    else:
        processes = num_processes()
    if processes == size:
        return
    how = f"start it with torchrun --nproc-per-node {size}."
    if processes == 1:
        raise ConfigError(f"tensor_parallel_size: {size} needs {size} processes: {how}")
    raise ConfigError(
        f"tensor_parallel_size: there are {processes} processes, got {size}: take {processes}, or "
        f"{how}"
    )


def check_sharded(config: Any, size: int) -> None:
    """Refuse a model that cannot be spread over so many processes."""
    text, name = config.get_text_config(), config.model_type
    if config.is_encoder_decoder:
        raise CompatibilityError(
            f"tensor_parallel_size: a model of the type '{name}' is an encoder-decoder, which runs "
            "in one process: leave it out."
        )
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise CompatibilityError(
            f"tensor_parallel_size: Transformers has no plan (tp_plan) for models of the type "
            f"'{name}': leave it out."
        )
    if not any(kind == "colwise" and "att" in name for name, kind in plan.items()):
        return  # all processes have all heads
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    for count, what in ((heads, "attention heads"), (key_heads, "key-value heads")):
        if count % size:
            raise CompatibilityError(
                f"tensor_parallel_size: this model has {count} {what}, which {size} processes "
                f"cannot share out evenly: take a number that divides {count}."
            )


def sharded(size: int) -> dict[str, Any]:
    if size == 1:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}
