"""Files that say which sublayers `layer_skip` leaves out of a model.

`tokenleap tune-layers` writes them, and the option `layers` reads them. A file is a JSON object,
which can also be written by hand:

    {"format": "tokenleap-layers-1", "skip_attention": [3, 5], "skip_mlp": [5],
     "num_hidden_layers": 30, "num_speculative_tokens": 3, "measured": {...}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from annotated_types import Ge, Le
from pydantic import Field, Strict, model_validator

from tokenleap.core.config import Config
from tokenleap.core.files import read_json
from tokenleap.errors import CompatibilityError, TokenleapError

__all__ = ["LayerIndices", "TunedLayers"]

FORMAT: Final = "tokenleap-layers-1"

LayerIndices = tuple[Annotated[int, Ge(0)], ...]
"""The type of an option that lists layers, counted from 0."""


class TunedLayers(Config):
    """A skip set, and the draft length with which it was fastest.

    Args:
        format: the kind of file and its version.
        skip_attention: layers (from 0) whose attention is left out.
        skip_mlp: layers (from 0) whose MLP is left out.
        num_hidden_layers: layers of the model that it was found for.
        num_speculative_tokens: the draft length, in tokens.
        measured: how it was measured and with which result. It informs people and has no effect.

    Raises:
        ConfigError: a layer does not exist, or the skip set is empty.
    """

    format: Literal["tokenleap-layers-1"] = FORMAT
    skip_attention: LayerIndices
    skip_mlp: LayerIndices
    num_hidden_layers: Annotated[int, Strict(), Ge(1)]
    num_speculative_tokens: Annotated[int, Strict(), Ge(1), Le(256)]
    measured: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        for name in ("skip_attention", "skip_mlp"):
            highest = max(getattr(self, name), default=0)
            if highest >= self.num_hidden_layers:
                raise ValueError(f"{name}: layer {highest} of {self.num_hidden_layers} layers")
        if not (self.skip_attention or self.skip_mlp):
            raise ValueError("it leaves nothing out")
        return self

    @classmethod
    def load(cls, path: str) -> TunedLayers:
        """Read a file.

        Raises:
            TokenleapError: the file cannot be read, is damaged, or is of another kind.
        """
        try:
            value = read_json(Path(path))
        except OSError as error:
            raise TokenleapError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError:
            value = None
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise TokenleapError(
                f"{path} is not a valid layers file: make one with 'tokenleap tune-layers'."
            )
        try:
            return cls(**value)
        except (TokenleapError, TypeError) as error:
            reason = str(error).rstrip(".")
            raise TokenleapError(
                f"{path} is damaged ({reason}): make it again with 'tokenleap tune-layers'."
            ) from error

    def check_fits(self, path: str, num_layers: int) -> None:
        """Check that the file was made for a model with this number of layers.

        Args:
            path: the file, for the message.
            num_layers: layers of the model.

        Raises:
            CompatibilityError: it was made for another number of layers.
        """
        if self.num_hidden_layers != num_layers:
            raise CompatibilityError(
                f"{path} was made for a model of {self.num_hidden_layers} layers and this one has "
                f"{num_layers}: make one for this model with 'tokenleap tune-layers'."
            )
