"""The GPU runtime: a static slab and a CUDA graph per bucket; only `graphs.py` touches CUDA."""

from __future__ import annotations

from transformers import PreTrainedModel

from foretoken.runtime.cuda.decoder import decoder_for
from foretoken.runtime.cuda.graphs import Capture, CudaGraphs
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.runtime.cuda.slab import StaticSlab
from foretoken.runtime.network import Network

__all__ = ["StaticSlab", "cuda_network", "eager_network"]


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
