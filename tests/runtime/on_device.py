"""Targets and `LLM`s on the GPU runtime, with the stand-in for graphs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.runtime.tape import Tape
from tokenleap.runtime import passes as passes_module
from tokenleap.runtime import target as target_module
from tokenleap.runtime.cuda import cuda_network
from tokenleap.runtime.cuda.graphs import Capture
from tokenleap.runtime.cuda.network import CudaNetwork
from tokenleap.runtime.cuda.slab import StaticSlab
from tokenleap.runtime.target import Target


def use_cuda_runtime(monkeypatch: pytest.MonkeyPatch, **slab: int) -> Tape:
    """Every target made from now on runs on graphs; they are recorded on this tape."""
    tape = Tape()
    use_capture(monkeypatch, tape)
    monkeypatch.setattr(passes_module, "slab_for", lambda *_: StaticSlab(**slab))
    return tape


def use_capture(
    monkeypatch: pytest.MonkeyPatch, capture: Capture, *, required: bool = False
) -> None:
    """Every target made from now on runs on graphs that are made so."""

    def network_for(model: PreTrainedModel, *_: Any) -> CudaNetwork:
        return cuda_network(model, capture, required=required)

    monkeypatch.setattr(target_module, "network_for", network_for)


def graphs_of(target: Target) -> int:
    """How many graphs a target's network has."""
    assert isinstance(target.network, CudaNetwork)
    return target.network.num_graphs
