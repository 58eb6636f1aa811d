"""`TrainingMethod`: the interface between the trainer and one kind of drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tokenleap.core.config import Config
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.probe import Seen
from tokenleap.training.batches import TrainingSet
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Trainee

__all__ = ["HeadParts", "OnPolicy", "TrainingMethod"]


@dataclass(frozen=True)
class HeadParts:
    """What a drafter is made of.

    Args:
        config: the target's.
        name: the target's, for the drafter's own file.
        embedding: [V, E] the target's.
        output_rows: [V, E] of the target's output layer.
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
        num_layers: the target's decoder layers.
        final_norm: the target's norm before the output layer; None if it is not known.
        reload: loads the target's Transformers model once more; None if that is not possible.
        logits_bias: [V] that the target adds to what its output rows give; None if it adds nothing.
    """

    config: PretrainedConfig
    name: str
    embedding: Tensor
    output_rows: Tensor
    draft_tokens: Tensor
    num_layers: int
    final_norm: nn.Module | None
    reload: Callable[[], PreTrainedModel] | None = None
    logits_bias: Tensor | None = None

    @property
    def verifier(self) -> Verifier:
        """The target, for the drafter's file."""
        architectures = tuple(self.config.architectures or ())
        return Verifier(self.name, architectures, self.num_layers)


@dataclass(frozen=True)
class OnPolicy:
    """Text that the drafter writes while it learns.

    Args:
        share: of the conversations.
        every: steps after which it writes again.
    """

    share: float
    every: int


class TrainingMethod(ABC):
    """How one kind of drafter is made, trained and written.

    Args:
        options: the method's own.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Config]]
    tunes_target: ClassVar[bool] = False
    """Whether it writes a target of its own, for which the drafts are."""
    deeper: ClassVar[str] = "learn for more epochs"
    """What to do if later positions of drafts are much worse than the first."""

    for_sources: ClassVar[bool | None] = False
    """Whether it trains for encoder-decoders, or for decoder-only models; None for both."""

    def __init__(self, options: Config | None = None) -> None:
        self.options = self.Options() if options is None else options

    @property
    @abstractmethod
    def draft_vocab_size(self) -> int:
        """Most tokens of the draft vocabulary."""

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        """The settings as this method needs them; the default keeps them."""
        return settings

    @property
    def on_policy(self) -> OnPolicy | None:
        """What of the text the drafter writes; None for nothing."""
        return None

    @property
    def num_drafters(self) -> int:
        """How many drafters are trained, one after the other."""
        return 1

    @property
    def nodes_per_token(self) -> int:
        """Nodes of a draft for each of its tokens, when chains of four are measured."""
        return self.num_drafters

    def missed(self, folder: Path, parts: HeadParts, data: TrainingSet) -> TrainingSet:
        """What the next drafter is to learn; by default all of it.

        Args:
            folder: of the drafter that was trained last.
            parts: see `trainee`.
            data: what that one was to learn.
        """
        return data

    def finish(self, out: Path, folders: Sequence[Path]) -> None:
        """Write what serving needs beside the folders of several drafters; by default nothing.

        Args:
            out: what `serving` reads.
            folders: inside it, one for each drafter.
        """
        assert list(folders) == [out]

    @property
    def learns_given_answers(self) -> bool:
        """Whether the answers in the user's files are learnt instead of the target's."""
        return False

    @property
    def served_tokens(self) -> int:
        """Tokens of the drafts with which the result is measured."""
        return 4

    @property
    def beam_width(self) -> int:
        """Width of the search by which an encoder-decoder writes what is learnt; 1 is greedy."""
        return 1

    @property
    def reads_encoder(self) -> bool:
        """Whether it reads what the target's encoder makes of the sources."""
        return False

    @abstractmethod
    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Ids of the target's layers whose hidden states it reads."""

    @abstractmethod
    def trainee(self, parts: HeadParts) -> Trainee:
        """A new drafter with random weights, drawn from PyTorch's generator."""

    @abstractmethod
    def write(
        self, trainee: Trainee, parts: HeadParts, folder: Path, notes: Mapping[str, Any]
    ) -> None:
        """Write the drafter as `speculative_config` reads it; each file complete or not at all."""

    def probed(self, trainee: Trainee, seen: Seen) -> Mapping[str, Any]:
        """Notes by which serving tells the target and its layers; see `heads.probe`.

        Args:
            trainee: the drafter.
            seen: what the target does on a text, with the hidden states of `layers`.
        """
        return {}

    def serving(self, folder: Path) -> dict[str, Any]:
        """The `speculative_config` that uses a written drafter."""
        return {"method": self.name, "model": str(folder)}
