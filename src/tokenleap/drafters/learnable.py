"""The drafting models that can learn while they serve (see `online.py`).

What learns is a copy in float32, read from where the drafter was loaded. The embedding and output
rows that belong to the target are shared, and do not change. What drafts is a copy of that copy,
packed for the runtime.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from tokenleap import models
from tokenleap.drafters.heads.checkpoint import fields_of, file_tensors, read_checkpoint
from tokenleap.drafters.heads.eagle import EagleHead, Fusion, head_net, network_of
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.folder import write_folder
from tokenleap.drafters.heads.state import StateFile, StateHead, load_net, write_state_file
from tokenleap.drafters.heads.state_net import StateNet
from tokenleap.drafters.models import OwnModel
from tokenleap.drafters.online import Learnable
from tokenleap.runtime.choices import OWN
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.native.network import NativeDecoder
from tokenleap.runtime.target import Target

__all__ = ["LearnableEagle", "LearnableHead", "LearnableModel", "LearnableState"]

_Net = TypeVar("_Net", bound=nn.Module)


class LearnableHead(Learnable):
    """A trained head."""

    @abstractmethod
    def write(self, net: nn.Module, folder: Path) -> None:
        """Write these weights as a folder that `speculative_config` takes."""


class LearnableEagle(LearnableHead):
    """An EAGLE head."""

    def __init__(
        self,
        head: EagleHead,
        path: Path,
        target: Target,
        quantization: str | None,
    ) -> None:
        self._head, self._path, self._target = head, path, target
        self._quantization = quantization
        self.layers = head.layers

    def net(self) -> EagleNet:
        return head_net(read_checkpoint(self._path), self._target).to(self._target.device)

    def use(self, net: nn.Module) -> None:
        assert isinstance(net, EagleNet)
        target, net = self._target, _frozen(net)
        network = network_of(net, target, self._quantization)
        native = isinstance(network, NativeDecoder)
        fusion = Fusion(net, target.dtype, target.device, native=native)
        self._head.use_head(network, fusion)

    def write(self, net: nn.Module, folder: Path) -> None:
        assert isinstance(net, EagleNet)
        checkpoint = read_checkpoint(self._path).for_target(self._target.network.num_layers)
        tensors = {**file_tensors(net), **checkpoint.vocabulary}
        write_folder(folder, tensors, fields_of(checkpoint.description))


class LearnableState(LearnableHead):
    """A head without attention."""

    def __init__(
        self, head: StateHead, read: Callable[[], StateFile], kind: type[StateNet], target: Target
    ) -> None:
        self._head, self._read, self._kind, self._target = head, read, kind, target
        self.layers = head.layers

    def net(self) -> StateNet:
        net = load_net(self._read(), self._kind, self._target)
        for weight in net.parameters():
            weight.data = weight.data.to(self._target.device, torch.float32)
            weight.requires_grad_(True)
        return net.to(self._target.device)

    def use(self, net: nn.Module) -> None:
        assert isinstance(net, StateNet)
        self._head.use(_frozen(net))

    def write(self, net: nn.Module, folder: Path) -> None:
        """See `LearnableHead.write`: in our own form, whatever the layout that was read."""
        assert isinstance(net, StateNet)
        file = self._read()
        write_state_file(folder, net, file.verifier, file.notes)


class LearnableModel(Learnable):
    """A draft model with the target's vocabulary.

    Args:
        given: what it was loaded from: a name, or a module, which is not changed.
        target: the target. What has the same bits in both is in memory once, here too.
    """

    def __init__(
        self,
        scorer: OwnModel,
        given: str | Path | PreTrainedModel,
        model: Target,
        target: Target,
    ) -> None:
        self._scorer, self._given, self._target = scorer, given, target
        self._dtype, self._device = model.dtype, model.device
        # Weights that were learnt are no longer the numbers of a GGUF file. int8 is near them.
        self._quantization = "int8" if model.quantization == OWN else model.quantization
        self._runtime = model.runtime

    @property
    def name(self) -> str:
        """The name that it was loaded by; empty for a module."""
        return "" if isinstance(self._given, PreTrainedModel) else str(self._given)

    def net(self) -> PreTrainedModel:
        if isinstance(self._given, PreTrainedModel):
            given: Any = deepcopy(self._given)
            net = given.float()
        else:
            net = models.load_model(models.resolve(self._given), torch.float32, self._device)
        net.train(False)
        lm: PreTrainedModel = net.requires_grad_(True)
        return lm

    def use(self, net: nn.Module) -> None:
        lm: Any = _frozen(net)
        network = network_for(
            lm.to(self._dtype), self._quantization, self._runtime, self._target.network
        )
        self._scorer.use(network)


def _frozen(net: _Net) -> _Net:
    """A copy that will not change, over the same buffers."""
    shared = {id(buffer): buffer for buffer in net.buffers()}
    copy: _Net = deepcopy(net, shared)
    copy.requires_grad_(False)
    return copy
