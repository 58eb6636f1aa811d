"""The drafting models that can learn while they serve (see `online.py`).

What learns is a copy in float32, read from where the drafter was loaded. The embedding and output
rows that belong to the target are shared, and do not change. What drafts is a copy of that copy,
packed for the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from tokenleap import models
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.layouts import EagleFolder, HeadFolder, write_head
from tokenleap.drafters.heads.state_net import StateNet
from tokenleap.drafters.models import OwnModel
from tokenleap.drafters.online import Learnable
from tokenleap.runtime.choices import OWN
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Net = TypeVar("_Net", bound=nn.Module)


class LearnableHead(Learnable):
    """A trained head.

    Args:
        read: reads its folder.
        draft: drafts with these weights from now on.
        layers: ids of the target's layers whose hidden states it reads.
    """

    def __init__(
        self,
        read: Callable[[], HeadFolder],
        draft: Callable[[Any], None],
        layers: tuple[int, ...],
        target: Target,
    ) -> None:
        self._read, self._draft, self._target = read, draft, target
        self.layers = layers

    def net(self) -> nn.Module:
        net = self._read().load(self._target)
        for weight in net.parameters():
            weight.data = weight.data.to(self._target.device, torch.float32)
            weight.requires_grad_(True)
        return net.to(self._target.device)

    def use(self, net: nn.Module) -> None:
        self._draft(_frozen(net))

    def write(self, net: nn.Module, folder: Path) -> None:
        """Write these weights as a folder that `speculative_config` takes."""
        assert isinstance(net, EagleNet | StateNet)
        file = self._read()
        vocabulary = file.vocabulary if isinstance(file, EagleFolder) else {}
        write_head(folder, net, file.verifier, file.notes, vocabulary)


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
        return str(self._given) if isinstance(self._given, str | Path) else ""

    def net(self) -> PreTrainedModel:
        if isinstance(self._given, str | Path):
            net = models.load_model(models.resolve(self._given), torch.float32, self._device)
        else:
            given: Any = deepcopy(self._given)
            net = given.float()
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
