"""`CudaNetwork`: one graph per bucket over a static slab; what fits no bucket runs as it is.

Small passes on a GPU take as long as the host needs to launch their kernels, and speculation makes
passes of a few nodes its business. A captured pass is launched at once. Prompts, and passes of more
than `Buckets.most_places` nodes, keep the device busy anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from foretoken.cache import KVSlab
from foretoken.runtime.cuda.buckets import Bucket, Buckets
from foretoken.runtime.cuda.graphs import Capture
from foretoken.runtime.cuda.inputs import StaticInputs
from foretoken.runtime.cuda.slab import StaticSlab
from foretoken.runtime.inputs import PassInputs

if TYPE_CHECKING:
    from foretoken.runtime.network import Network

__all__ = ["CudaNetwork", "compiled"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Graph:
    """A captured pass and the buffers it reads."""

    inputs: StaticInputs
    replay: Callable[[], None]


class CudaNetwork:
    """A network behind graphs (see `Network`); its slab is a `StaticSlab`.

    Args:
        inner: computes a pass, without a look at the host.
        device: where it does.
        capture: makes graphs; None runs every pass as it is.
        compiler: a backend of `torch.compile` for what is captured, such as "inductor"; None
            leaves it as it is.
        buckets: the sizes of graphs.
    """

    def __init__(
        self,
        inner: Network,
        device: torch.device,
        capture: Capture | None,
        compiler: str | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        assert capture is not None or compiler is None, "only what is captured is compiled"
        self.inner = inner
        self.device = device
        self.capture = capture
        self.compiler = compiler
        self._buckets = Buckets() if buckets is None else buckets
        self._graphs: dict[Bucket, _Graph] = {}
        self._owner: tuple[StaticSlab, int] | None = None
        self._output: Tensor | None = None  # [most places, V], of whichever graph ran last

    @property
    def name(self) -> str:
        """See `Network.name`."""
        way = "as it is" if self.capture is None else "in graphs"
        compiled = "" if self.compiler is None else f", compiled by {self.compiler}"
        return f"{self.inner.name} {way}{compiled}"

    @property
    def least_nodes(self) -> int:
        """See `Network.least_nodes`."""
        return self.inner.least_nodes

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.inner.num_layers

    @property
    def num_graphs(self) -> int:
        """Graphs captured since the slab last moved."""
        return len(self._graphs)

    def first_layers(self, count: int) -> CudaNetwork:
        """See `Network.first_layers`; it has graphs of its own."""
        return self._around(self.inner.first_layers(count))

    def without(self, attention: Collection[int], mlp: Collection[int]) -> CudaNetwork:
        """See `Network.without`; it has graphs of its own."""
        return self._around(self.inner.without(attention, mlp))

    def _around(self, inner: Network) -> CudaNetwork:
        return CudaNetwork(inner, self.device, self.capture, self.compiler, self._buckets)

    def forward(self, inputs: PassInputs, slab: KVSlab, *, scored: bool) -> Tensor | None:
        """See `Network.forward`."""
        assert isinstance(slab, StaticSlab), "graphs need buffers that stay where they are"
        lengths = slab.lengths[inputs.first : inputs.first + len(inputs.rows)]
        bucket = self._bucket(inputs, slab, lengths) if scored else None
        if bucket is None:
            return self.inner.forward(inputs, slab, scored=scored)
        graph = self._graph(bucket, slab, inputs.dtype)
        graph.inputs.load(inputs, lengths)
        graph.replay()
        assert self._output is not None
        nodes = sum(len(row) for row in inputs.rows)
        # A copy: the next replay writes over the output.
        return self._output.index_select(0, graph.inputs.places[:nodes])

    def _bucket(
        self, inputs: PassInputs, slab: StaticSlab, lengths: Sequence[int]
    ) -> Bucket | None:
        if self.capture is None or not slab.allocated:
            return None
        rows, nodes = inputs.first + len(inputs.rows), inputs.nodes
        known = max(row.start - length for row, length in zip(inputs.rows, lengths, strict=True))
        needed = Bucket(rows, nodes, known + nodes, inputs.span)
        return self._buckets.fit(needed, replace(needed, rows=slab.rows, span=slab.positions))

    def _graph(self, bucket: Bucket, slab: StaticSlab, dtype: torch.dtype) -> _Graph:
        if self._owner != (slab, slab.version):  # graphs of buffers that are gone
            self._graphs.clear()
            self._owner = (slab, slab.version)
        if bucket not in self._graphs:
            self._graphs[bucket] = self._captured(bucket, slab, dtype)
        return self._graphs[bucket]

    def _captured(self, bucket: Bucket, slab: StaticSlab, dtype: torch.dtype) -> _Graph:
        """A graph, captured while its inputs are padding alone."""
        assert self.capture is not None
        inputs = StaticInputs(bucket, self.device, slab.scratch, dtype)

        def scores() -> Tensor:
            slab.begin_static(inputs.slots, bucket.span)
            logits = self.inner.forward(inputs.as_pass(), slab, scored=True)  # [B N, V]
            assert logits is not None
            return logits

        scores = compiled(scores, self.compiler)
        output = self._output_like(scores())[: bucket.places]

        def run() -> None:
            output.copy_(scores())

        return _Graph(inputs, self.capture.capture(run))

    def _output_like(self, logits: Tensor) -> Tensor:
        if self._output is None:
            self._output = logits.new_zeros(self._buckets.most_places, logits.shape[1])
        return self._output


def compiled(function: Callable[[], T], compiler: str | None) -> Callable[[], T]:
    """The function under `torch.compile` with this backend; None leaves it as it is."""
    if compiler is None:
        return function
    # Every bucket is a function of its own, although all of them have one source.
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True}
    faster: Callable[[], T] = torch.compile(function, backend=compiler, **options)
    return faster
