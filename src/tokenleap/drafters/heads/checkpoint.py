"""Folders of trained EAGLE-3 and P-EAGLE heads, in the `speculators` format.

A folder holds `config.json` (see `config_file.py`) and `model.safetensors`; vLLM reads the same
format. The embedding and the output rows are mostly the target's own, so a folder need not hold
them. If it does, they count: EAGLE's authors trained output rows of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tokenleap.drafters.heads.config_file import Description, read_description
from tokenleap.drafters.heads.eagle_layer import EagleConfig
from tokenleap.drafters.heads.eagle_net import EagleNet, default_layers
from tokenleap.drafters.heads.feature_net import FeatureConfig, FeatureNet
from tokenleap.drafters.heads.folder import (
    CONFIG,
    WEIGHTS,
    check_sizes,
    check_tensors,
    draft_tokens,
    existing_folder,
    read_json,
    read_tensors,
    write_folder,
)
from tokenleap.drafters.heads.parallel_net import ParallelConfig, ParallelNet
from tokenleap.drafters.heads.published import fields_of, read_published
from tokenleap.models.folder import check_sizes as check_model_sizes

__all__ = [
    "EMBEDDING",
    "OUTPUT_ROWS",
    "Checkpoint",
    "file_tensors",
    "new_net",
    "read_checkpoint",
    "write_checkpoint",
]

EMBEDDING, OUTPUT_ROWS = "embed_tokens.weight", "lm_head.weight"
_NOT_READ = "verifier_lm_head.weight"  # the target's output rows, beside the head's own


def new_net(
    config: EagleConfig,
    embedding: Tensor,
    head: Tensor,
    draft_tokens: Tensor,
    final_norm: nn.Module | None = None,
) -> EagleNet:
    """The network of a configuration; its weights are undefined. See `EagleNet`, `FeatureNet`."""
    if isinstance(config, ParallelConfig):
        return ParallelNet(config, embedding, head, draft_tokens)
    if isinstance(config, FeatureConfig):
        return FeatureNet(config, embedding, head, draft_tokens, final_norm)
    return EagleNet(config, embedding, head, draft_tokens)


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds.

    Args:
        path: the folder.
        weights: the file of the weights in it.
        description: its `config.json`.
        tensors: the weights by their names in the file, without those of `vocabulary`.
        vocabulary: the embedding and the output rows, as far as the file holds them.
    """

    path: Path
    weights: Path
    description: Description
    tensors: Mapping[str, Tensor]
    vocabulary: Mapping[str, Tensor]

    def draft_tokens(self) -> Tensor:
        """[Vd] the target's ids of the draft vocabulary, ascending.

        Raises:
            ModelError: the file's map does not say that.
        """
        config = self.description.config
        sizes = (config.draft_vocab_size, config.vocab_size)
        return draft_tokens(self.weights, self.tensors.get("d2t"), *sizes)

    def for_target(self, num_layers: int) -> Checkpoint:
        """The same with the ids of the layers that it reads, if the folder does not say them.

        Args:
            num_layers: of the target.
        """
        config = self.description.config
        if config.aux_layers:
            return self
        last = isinstance(config, FeatureConfig)
        layers = (num_layers,) if last else default_layers(num_layers)
        named = replace(self.description, config=replace(config, aux_layers=layers))
        return replace(self, description=named)

    def net(
        self, embedding: Tensor, output_rows: Tensor, final_norm: nn.Module | None = None
    ) -> EagleNet:
        """The head over the target's embedding [V, E] and output rows [V, E].

        In place of these it has the file's own, where they differ. An EAGLE-1 head also reads
        hidden states with the target's final norm.

        Raises:
            CompatibilityError: the target has other sizes.
            ModelError: tensors are missing, damaged, or do not have the shapes that `config.json`
                says.
        """
        config = self.description.config
        sizes = (config.vocab_size, config.hidden_size)
        for found in (tuple(embedding.shape), tuple(output_rows.shape)):
            check_sizes(self.path, self.description.verifier, sizes, found)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        here = {**shapes, EMBEDDING: tuple(embedding.shape)}
        check_model_sizes(self.path / CONFIG, asdict(config), here)
        tokens = self.draft_tokens()
        rows = self._own(OUTPUT_ROWS, output_rows[tokens.to(output_rows.device)])
        net = new_net(config, self._own(EMBEDDING, embedding), rows, tokens, final_norm)
        wanted = net.state_dict()
        tensors = {**self.tensors, "d2t": wanted["d2t"], "t2d": wanted["t2d"]}
        check_tensors(self.weights, tensors, wanted, net.KIND)
        net.load_state_dict(tensors)
        net.train(False)
        return net

    def _own(self, name: str, shared: Tensor) -> Tensor:
        """The file's own tensor, or the target's if that is the same or the file has none."""
        own = self.vocabulary.get(name)
        if own is None:
            return shared
        check_tensors(self.weights, {name: own}, {name: shared}, EagleNet.KIND)
        return shared if torch.equal(own, shared.to("cpu", own.dtype)) else own.to(shared)


def read_checkpoint(path: str | Path, kinds: Sequence[str] = ("eagle3",)) -> Checkpoint:
    """Read a folder.

    Args:
        path: the folder.
        kinds: what the head may be (see `config_file.KINDS`).

    Raises:
        ModelError: it does not exist, is damaged, or is of another kind.
    """
    folder = existing_folder(path)
    published = read_published(folder, read_json(folder / CONFIG)) if "eagle3" in kinds else None
    if published is None:
        weights, description = folder / WEIGHTS, read_description(folder / CONFIG, kinds)
        tensors = read_tensors(weights)
    else:
        weights, description, tensors = published
    tensors.pop(_NOT_READ, None)
    names = tensors.keys() & {EMBEDDING, OUTPUT_ROWS}
    vocabulary = {name: tensors.pop(name) for name in names}
    return Checkpoint(folder, weights, description, tensors, vocabulary)


def file_tensors(net: EagleNet) -> dict[str, Tensor]:
    """What a file holds; EAGLE-1's layout has no maps where all tokens can be drafted."""
    tensors = net.state_dict()
    if isinstance(net, FeatureNet) and net.config.draft_vocab_size == net.config.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return tensors


def write_checkpoint(folder: Path, net: EagleNet, description: Description) -> None:
    """Write a head in bfloat16; each file appears complete or not at all.

    Args:
        folder: made if it does not exist.
        net: the head.
        description: what `config.json` is to say.

    Raises:
        ModelError: the folder cannot be written.
    """
    write_folder(folder, file_tensors(net), fields_of(description))
