"""`TrainingMethod`: the interface between the trainer and one kind of head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig

from foretoken.core.config import Config
from foretoken.drafters.heads.folder import Verifier
from foretoken.training.settings import TrainingSettings
from foretoken.training.trainee import Trainee

__all__ = ["HeadParts", "TrainingMethod"]


@dataclass(frozen=True)
class HeadParts:
    """What a head is made of.

    Args:
        config: the target's.
        name: the target's, for the head's own file.
        embedding: [V, E] the target's.
        output_rows: [V, E] of the target's output layer.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        num_layers: the target's decoder layers.
        final_norm: the target's norm before the output layer; None if it is not known.
    """

    config: PretrainedConfig
    name: str
    embedding: Tensor
    output_rows: Tensor
    draft_tokens: Tensor
    num_layers: int
    final_norm: nn.Module | None

    @property
    def verifier(self) -> Verifier:
        """The target, for the head's file."""
        architectures = tuple(self.config.architectures or ())
        return Verifier(self.name, architectures, self.num_layers)


class TrainingMethod(ABC):
    """How one kind of head is made, trained and written.

    Args:
        options: the method's own.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Config]]

    def __init__(self, options: Config | None = None) -> None:
        self.options = self.Options() if options is None else options

    @property
    @abstractmethod
    def draft_vocab_size(self) -> int:
        """Most tokens of the draft vocabulary."""

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """The settings as this method needs them; the default keeps them."""
        return settings

    @abstractmethod
    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Ids of the target's layers whose hidden states it reads."""

    @abstractmethod
    def trainee(self, parts: HeadParts) -> Trainee:
        """A new head with random weights, drawn from PyTorch's generator."""

    @abstractmethod
    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """Write the head as `speculative_config` reads it; each file complete or not at all."""

    def serving(self, folder: Path) -> dict[str, Any]:
        """The `speculative_config` that uses a written head."""
        return {"method": self.name, "model": str(folder)}
