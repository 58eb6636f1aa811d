"""`CudaNetwork`: a CUDA graph per bucket over a static slab; other passes run without a graph.

A small pass on a GPU takes as long as the host needs to launch its kernels, and speculative
decoding makes many small passes. A graph launches all kernels at once. Prefill, and passes of more
than `Buckets.most_places` nodes, keep the device busy without graphs.

A capture may fail, because the module reads from the device in the middle of a pass (as some expert
routing does) or because memory is short. With the runtime "auto", all later passes then run without
graphs. If the user asked for graphs, the failure is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenleap.errors import CompatibilityError, TokenleapError, in_one_line
from tokenleap.runtime.cuda.buckets import Bucket, Buckets
from tokenleap.runtime.cuda.graphs import Capture
from tokenleap.runtime.cuda.inputs import StaticInputs
from tokenleap.runtime.cuda.slab import StaticSlab
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.network import Need, Network, PassOutput, WindowedNetwork

__all__ = ["CudaNetwork"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Graph:
    """A captured pass and the buffers it reads."""

    inputs: StaticInputs
    hidden: Mapping[int, Tensor]  # layer id -> [B N, E]
    replay: Callable[[], None]


class CudaNetwork:
    """Runs another network in CUDA graphs (see `Network`); its slab is a `StaticSlab`.

    Args:
        inner: the network that computes passes, without transfers to the host.
        compiler: a backend of `torch.compile` for captured passes, such as "inductor"; None does
            not compile them.
        required: whether a failed capture is an error. If not, passes run without graphs from then
            on.
    """

    exact_trees = False
    """See `Network.exact_trees`: libraries choose kernels by shape, and kernels differ in bits."""

    def __init__(
        self,
        inner: Network,
        device: torch.device,
        capture: Capture | None,
        compiler: str | None = None,
        buckets: Buckets | None = None,
        *,
        required: bool = False,
    ) -> None:
        assert capture is not None or compiler is None, "only captured passes are compiled"
        self.inner = inner
        self.device = device
        self.capture = capture
        self.failure: str | None = None
        self._compiler, self._required = compiler, required
        self._buckets = Buckets() if buckets is None else buckets
        self._graphs: dict[tuple[Bucket, tuple[int, ...]], _Graph] = {}
        self._owner: tuple[StaticSlab, int] | None = None
        self._output: Tensor | None = None  # [most places, V], written by every replay

    @property
    def name(self) -> str:
        """See `Network.name`: "cuda", "compiled", or the name of `inner` without graphs."""
        if self.capture is None:
            return self.inner.name
        return "cuda" if self._compiler is None else "compiled"

    @property
    def least_nodes(self) -> int:
        return self.inner.least_nodes

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.inner.num_layers

    @property
    def num_graphs(self) -> int:
        """Graphs captured since the slab last moved."""
        return len(self._graphs)

    def extend(self, rows: Tensor) -> int:
        """See `Network.extend`; graphs that were captured before do not know the rows."""
        self._graphs.clear()
        return self.inner.extend(rows)

    def first_layers(self, count: int) -> CudaNetwork:
        """See `Network.first_layers`; it has graphs of its own."""
        return self._around(self.inner.first_layers(count))

    def without(self, attention: Collection[int], mlp: Collection[int]) -> CudaNetwork:
        """See `Network.without`; it has graphs of its own."""
        return self._around(self.inner.without(attention, mlp))

    def narrowed(self, size: int) -> CudaNetwork:
        """See `WindowedNetwork.narrowed`; without graphs, because it is for a few passes."""
        assert isinstance(self.inner, WindowedNetwork)
        return CudaNetwork(self.inner.narrowed(size), self.device, None)

    def _around(self, inner: Network) -> CudaNetwork:
        compiler = None if self.capture is None else self._compiler
        return CudaNetwork(
            inner, self.device, self.capture, compiler, self._buckets, required=self._required
        )

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        assert isinstance(slab, StaticSlab), "graphs need buffers that do not move"
        lengths = slab.lengths[inputs.first : inputs.first + len(inputs.rows)]
        bucket = self._bucket(inputs, slab, lengths) if need.logits else None
        all_logits = replace(need, last=None)  # so that one graph serves more passes
        graph = None if bucket is None else self._graph(bucket, all_logits, slab, inputs)
        if graph is None:
            return self.inner.forward(inputs, slab, need)
        graph.inputs.load(inputs, lengths)
        graph.replay()
        assert self._output is not None
        nodes = sum(len(row) for row in inputs.rows)
        places = graph.inputs.places[:nodes]
        # Copies: the next replay writes over the output.
        hidden = {layer: states.index_select(0, places) for layer, states in graph.hidden.items()}
        scored = places if need.last is None else places[inputs.last_nodes(need.last)]
        return PassOutput(self._output.index_select(0, scored), hidden=hidden)

    def attempt(self, prepare: Callable[[], T]) -> T | None:
        """Call `prepare`, which captures, and return its result; None if it fails.

        After a failure all graphs and their memory are freed, and all passes run without graphs.
        """
        try:
            return prepare()
        except (AssertionError, TokenleapError):  # our own bugs; the model's own refusals
            raise
        except Exception as error:
            self.failure = in_one_line(error)
            if self._required:
                raise CompatibilityError(
                    f"runtime: {self.name} needs CUDA graphs, and capturing a pass failed "
                    f"({self.failure}): take 'auto' or 'torch'."
                ) from error
        self.capture = self._output = None
        self._graphs.clear()
        warnings.warn(
            f"passes cannot be captured in CUDA graphs here ({self.failure}): they run without "
            "graphs, which is slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None

    def _bucket(
        self, inputs: PassInputs, slab: StaticSlab, lengths: Sequence[int]
    ) -> Bucket | None:
        if self.capture is None or not slab.allocated:
            return None
        rows, nodes = inputs.first + len(inputs.rows), inputs.nodes
        skipped = max(row.start - length for row, length in zip(inputs.rows, lengths, strict=True))
        needed = Bucket(rows, nodes, skipped + nodes, inputs.span)
        return self._buckets.fit(needed, replace(needed, rows=slab.rows, span=slab.positions))

    def _graph(
        self, bucket: Bucket, need: Need, slab: StaticSlab, inputs: PassInputs
    ) -> _Graph | None:
        """The graph for a pass that `slab.begin` has prepared; None if it cannot be captured."""
        if self._owner != (slab, slab.version):  # the graphs' buffers have moved
            self._graphs.clear()
            self._owner = (slab, slab.version)
        shape = (bucket, need.hidden)
        if shape not in self._graphs:
            graph = self.attempt(lambda: self._captured(bucket, need, slab, inputs.dtype))
            if graph is None:  # the attempt prepared the slab for another pass
                starts, counts = [r.start for r in inputs.rows], [len(r) for r in inputs.rows]
                slab.begin(inputs.first, starts, counts, inputs.nodes)
                return None
            self._graphs[shape] = graph
        return self._graphs[shape]

    def _captured(self, bucket: Bucket, need: Need, slab: StaticSlab, dtype: torch.dtype) -> _Graph:
        """Capture a graph, while its inputs are nothing but padding."""
        assert self.capture is not None
        inputs = StaticInputs(bucket, self.device, slab.scratch, dtype)

        def compute() -> tuple[Tensor, ...]:
            slab.begin_static(inputs.slots, bucket.span)
            found = self.inner.forward(inputs.as_pass(), slab, need)
            return (found.scores, *(found.hidden[layer] for layer in need.hidden))  # [B N, ...]

        if not need.hidden:  # hidden states need hooks, which cannot be traced
            compute = self.compiled(compute)
        logits, *hidden = compute()
        outputs = (self.output(logits), *(torch.zeros_like(states) for states in hidden))

        def run() -> None:
            for output, found in zip(outputs, compute(), strict=True):
                output.copy_(found)

        states = dict(zip(need.hidden, outputs[1:], strict=True))
        return _Graph(inputs, states, self.capture.capture(run))

    def output(self, logits: Tensor) -> Tensor:
        """A buffer for logits [B N, V] like these; all graphs share the same memory."""
        if self._output is None:
            self._output = logits.new_zeros(self._buckets.most_places, logits.shape[1])
        assert len(logits) <= len(self._output)
        return self._output[: len(logits)]

    def compiled(self, function: Callable[[], T]) -> Callable[[], T]:
        """The function under `torch.compile`, if a backend was given."""
        if self._compiler is None:
            return function
        # The functions of all buckets have the same source, but each is compiled by itself.
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True}
        faster: Callable[[], T] = torch.compile(function, backend=self._compiler, **options)
        return faster
