"""Targets and `LLM`s on the GPU runtime, with the stand-in for graphs."""

from __future__ import annotations

import pytest

from foretoken import target as target_module
from foretoken.runtime.cuda import cuda_network
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.runtime.cuda.slab import StaticSlab
from foretoken.target import Target
from tests.runtime.tape import Tape


def use_cuda_runtime(monkeypatch: pytest.MonkeyPatch, **slab: int) -> Tape:
    """Every target made from now on runs on graphs; they are recorded on this tape."""
    tape = Tape()
    monkeypatch.setattr(target_module, "network_for", lambda model, *_: cuda_network(model, tape))
    for name in ("KVSlab", "slab_for"):  # whichever a target asks for its slab
        monkeypatch.setattr(target_module, name, lambda *_: StaticSlab(**slab), raising=False)
    return tape


def graphs_of(target: Target) -> int:
    """How many graphs a target's network has."""
    assert isinstance(target.network, CudaNetwork)
    return target.network.num_graphs
