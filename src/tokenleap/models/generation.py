"""The generation config of a model: which one is read, and its defaults of sampling.

`LLM(generation_config=...)` says which one: "auto" is the model's own, and a folder has another
`generation_config.json`. Under "none", which vLLM calls "vllm", it sets neither sampling nor rules;
its special tokens are still read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenleap.core.params import SamplingParams
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.models.load import guarded, load_config
from tokenleap.models.resolver import gguf_file, resolve

if TYPE_CHECKING:
    from transformers import GenerationConfig


_FILE = "generation_config.json"

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Transformers' names of the fields that vLLM takes as defaults, and those of `SamplingParams`."""


def is_obeyed(choice: str | Path) -> bool:
    """Whether the generation config sets defaults and rules."""
    return choice not in ("none", "vllm")


def generation_config_of(model: Any, choice: str | Path) -> GenerationConfig | None:
    """The generation config of a model; None if it has none, as without an output layer."""
    if choice == "auto" or not is_obeyed(choice):
        own: GenerationConfig | None = getattr(model, "generation_config", None)
        return own
    return _read(choice)


def generation_config_in(folder: Path) -> GenerationConfig:
    """The generation config that a folder's model would have."""
    from transformers import GenerationConfig

    if (folder / _FILE).is_file():
        return _read(folder)
    with guarded(f"cannot load the model in {folder}"):
        return GenerationConfig.from_model_config(load_config(folder))


def sampling_defaults(config: GenerationConfig | None) -> dict[str, Any]:
    """The fields of `SamplingParams` that a generation config sets; `do_sample` does not matter."""
    values = {own: getattr(config, name, None) for name, own in _SAMPLING.items()}
    found = {name: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**found)
    except ConfigError as error:
        raise CompatibilityError(f"the model's generation config: {error}") from None
    return found


def defaults_of(model: str, choice: str | Path) -> dict[str, Any]:
    """`sampling_defaults` of a model that is not loaded."""
    if not is_obeyed(choice):
        return {}
    if choice != "auto":
        return sampling_defaults(_read(choice))
    if (path := gguf_file(model)) is not None:
        from transformers import GenerationConfig

        from tokenleap.models.gguf import GgufFile, sampling_of

        made: Any = GenerationConfig
        return sampling_defaults(made(**sampling_of(GgufFile.open(path))))
    return sampling_defaults(generation_config_in(resolve(model)))


def _read(choice: str | Path) -> GenerationConfig:
    from transformers import GenerationConfig

    folder = Path(choice).expanduser()
    if not (folder / _FILE).is_file():
        raise ConfigError(
            "generation_config: must be 'auto', 'none' (vLLM's 'vllm'), or a folder with a "
            f"{_FILE}, got '{choice}'."
        )
    with guarded(f"cannot read the generation config in {folder}"):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
