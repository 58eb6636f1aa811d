"""Models whose weights are spread over several processes: what is checked, and how they are loaded.

Transformers shards them by the plan of their architecture while it reads the files, so that no
process ever holds a whole model. `torchrun` starts the processes. PyTorch is imported inside the
functions, as in `load.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenleap.core.peers import num_processes
from tokenleap.errors import CompatibilityError, ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["check_processes", "check_sharded", "sharded"]


def check_processes(size: int, model: object, device: str | torch.device) -> None:
    """Refuse before anything is loaded what cannot be spread over so many processes.

    Args:
        size: `tensor_parallel_size`.
        model: as `LLM` takes it.
        device: as `LLM` takes it.

    Raises:
        ConfigError: there are more or fewer processes, the loaded model is not spread over them, or
            the device cannot be used.
    """
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
    """Refuse a model that cannot be spread over so many processes.

    Args:
        config: its Transformers configuration.
        size: the number of processes.

    Raises:
        CompatibilityError: it has no plan, or its heads cannot be shared out.
    """
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
    """Arguments of `from_pretrained` that load a shard in each of so many processes."""
    if size == 1:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}
