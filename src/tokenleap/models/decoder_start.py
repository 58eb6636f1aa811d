"""The token that an encoder-decoder's output begins behind. `LLMEngine` asks for it."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from tokenleap.errors import CompatibilityError

__all__ = ["decoder_start"]


def decoder_start(model: PreTrainedModel, config: GenerationConfig | None = None) -> int:
    """The first token of the decoder's text, chosen as `generate()` does.

    Args:
        model: an encoder-decoder.
        config: a generation config in place of its own.

    Raises:
        CompatibilityError: neither the generation config nor the config names one.
    """
    settings: tuple[Any, ...] = (config or model.generation_config, model.config)
    for name in ("decoder_start_token_id", "bos_token_id"):
        for each in settings:
            token = getattr(each, name, None)
            if isinstance(token, int):
                return token
    raise CompatibilityError(
        f"{type(model).__name__} has no decoder_start_token_id: set it in generation_config.json, "
        "or in the model's generation_config."
    )
