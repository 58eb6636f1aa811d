"""The GPU runtime: passes captured in CUDA graphs, over a slab whose buffers do not move.

Only `graphs.py` needs a CUDA device. Tests run the other files on a CPU.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from tokenleap.runtime.cuda.decoder import decoder_for
from tokenleap.runtime.cuda.graphs import Capture, CudaGraphs
from tokenleap.runtime.cuda.network import CudaNetwork
from tokenleap.runtime.cuda.slab import StaticSlab
from tokenleap.runtime.network import Network

__all__ = ["StaticSlab", "cuda_network", "eager_network"]


def cuda_network(
    model: PreTrainedModel,
    capture: Capture | None = None,
    *,
    compiler: str | None = None,
    required: bool = False,
) -> CudaNetwork:
    """The network for a model on a GPU. The model is not changed."""
    capture = CudaGraphs(model.device) if capture is None else capture
    return CudaNetwork(decoder_for(model), model.device, capture, compiler, required=required)


def eager_network(network: Network) -> Network:
    """The network without graphs, for passes that graphs cannot compute.

    A graph computes on its own slab only, and its nodes see all committed tokens of their row.
    """
    return network.inner if isinstance(network, CudaNetwork) else network
