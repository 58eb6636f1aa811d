"""The GPU runtime: a static slab, a graph per bucket, and whole steps on the device.

A target takes `cuda_network` and the slab that goes with it (`slab_for`); `step.py` runs whole
steps on the device where the requests allow it. Only `graphs.py` touches CUDA itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from foretoken.cache import KVSlab
from foretoken.runtime.cuda.decoder import decoder_for
from foretoken.runtime.cuda.graphs import Capture, CudaGraphs
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.runtime.cuda.slab import StaticSlab

if TYPE_CHECKING:
    from foretoken.runtime.network import Network

__all__ = ["cuda_network", "eager_network", "slab_for"]

_POSITIONS = 2048
"""Of every row to begin with: more than most requests take, since growing costs the graphs."""


def cuda_network(
    model: PreTrainedModel,
    capture: Capture | None = None,
    *,
    compiler: str | None = None,
    required: bool = False,
) -> CudaNetwork:
    """The network of a model on a GPU; the model is left as it is.

    Args:
        model: the Transformers module.
        capture: makes graphs; None makes CUDA graphs on the model's device.
        compiler: a backend of `torch.compile` for what is captured, such as "inductor".
        required: see `CudaNetwork`: True where the user asked for graphs.
    """
    capture = CudaGraphs(model.device) if capture is None else capture
    return CudaNetwork(decoder_for(model), model.device, capture, compiler, required=required)


def eager_network(network: Network) -> Network:
    """The network that computes passes one by one, of whatever nodes on whatever slab.

    Graphs take their own slab only, and nodes that see all of what is committed there.
    """
    return network.inner if isinstance(network, CudaNetwork) else network


def slab_for(network: Network, max_model_len: int) -> KVSlab:
    """The kind of slab that a network wants, for rows of at most so many tokens."""
    if not isinstance(network, CudaNetwork):
        return KVSlab()
    return StaticSlab(positions=min(max_model_len, _POSITIONS))
