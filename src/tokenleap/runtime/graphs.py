"""CUDA graphs of passes of one shape (`Bucket`): kernels are launched once, and then replayed.

On a GPU, launching the kernels of a small pass takes longer than running them. A graph fixes the
addresses of everything it reads. So each recorded pass has inputs of its own, into which those of
later passes are copied; and when the KV slab has new buffers, passes are recorded again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenleap.errors import in_one_line
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.network import Need, Network, PassOutput

_log = logging.getLogger(__name__)

Pass = Callable[[], PassOutput]


def replays(device: torch.device) -> bool:
    """Whether a device has such graphs."""
    return device.type == "cuda"


def recorded(compute: Pass) -> Pass:
    """Record a pass; what this returns replays it, with the same tensors as its output."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries allocate their workspaces in a first pass
        compute()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = compute()

    def replay() -> PassOutput:
        graph.replay()
        return output

    return replay


@dataclass(frozen=True)
class _Recording:
    inputs: tuple[Tensor, ...]
    replay: Pass


class Graphs:
    """The recorded passes of one network, by their first row and what they compute."""

    def __init__(self) -> None:
        self._recordings: dict[tuple[int, Need], _Recording] = {}
        self._addresses: object = None
        self._failed = False

    def forward(
        self, network: Network, inputs: PassInputs, slab: KVSlab, need: Need
    ) -> PassOutput:
        """As `network.forward`. The first pass of a kind, and those of buffers, are recorded."""
        if self._failed or not slab.addresses:  # no buffers yet
            return network.forward(inputs, slab, need)
        if slab.addresses is not self._addresses:
            self._recordings.clear()
            self._addresses = slab.addresses
        key = inputs.first, need
        if key not in self._recordings:
            try:
                self._recordings[key] = _record(network, inputs, slab, need)
            except RuntimeError as error:
                self._failed = True
                _log.warning("Passes run without CUDA graphs: %s", in_one_line(error))
                return network.forward(inputs, slab, need)
        recording = self._recordings[key]
        for own, given in zip(recording.inputs, _tensors(inputs, slab), strict=True):
            own.copy_(given)
        output = recording.replay()
        hidden = {layer: states.clone() for layer, states in output.hidden.items()}
        logits = None if output.logits is None else output.logits.clone()
        return PassOutput(logits, hidden=hidden)


def _record(network: Network, inputs: PassInputs, slab: KVSlab, need: Need) -> _Recording:
    own = tuple(tensor.clone() for tensor in _tensors(inputs, slab))

    def compute() -> PassOutput:
        rows, slots, tokens, positions, mask = own
        slab.write_to(rows, slots)
        made = replace(inputs)  # what a network derives from these is a part of the pass
        vars(made).update(tokens=tokens, positions=positions, mask=mask)
        return network.forward(made, slab, need)

    return _Recording(own, recorded(compute))


def _tensors(inputs: PassInputs, slab: KVSlab) -> tuple[Tensor, ...]:
    return *slab.places(padded=True), inputs.tokens, inputs.positions, inputs.mask
