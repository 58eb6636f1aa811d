"""`ShardedNetwork`: a Transformers module whose weights are spread over several processes.

Transformers has loaded each process's shards by the model's plan (`tp_plan`). Column-wise layers
compute some of the outputs, row-wise layers a part of every output, which are then added up; the
residual stream, and so hidden states and logits, are whole in every process. Transformers' own
layers do this, too. Those of the kinds below are replaced, for three reasons: sums in a fixed order
(`Group.total`), weights that are packed on a CPU (`cpu.py`), and no distributed tensors, whose
bookkeeping takes longer than a small layer's computing. Layers of other kinds stay as they are.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenleap.core.peers import ALONE, OutOfStepError, Peers
from tokenleap.errors import TokenleapError
from tokenleap.runtime.cpu import PackedLinear, is_plain_linear, linear_layer, share
from tokenleap.runtime.inputs import PassInputs, RowNodes
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.network import Need, PassOutput

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel

# `Group`: the processes that hold a model's shards, and what they tell each other.
#
# The shards exchange tensors in the process group that Transformers loaded them with (nccl between
# GPUs, gloo between CPUs). Numbers and objects of the host go through a group of their own, over
# gloo, so that no pass waits for a GPU because of them.


T = TypeVar("T")

WAIT = timedelta(minutes=10)
"""How long a process waits for what another one has to say, before it ends with an error."""


class Group(Peers):
    """All processes of a model; each of them must call the same methods in the same order.

    `host` is a group of the same processes for what is not on a device.
    """

    def __init__(self, devices: Any, host: Any) -> None:
        self.rank, self.size = dist.get_rank(devices), dist.get_world_size(devices)
        self._devices, self._host = devices, host

    def __deepcopy__(self, _: object) -> Group:
        return self  # copies of a network belong to the same group

    def agreed(self, number: float) -> float:
        box = torch.tensor([number], dtype=torch.float64)
        with _answers(self.size):
            dist.broadcast(box, group_src=0, group=self._host)
        return box.item()

    def from_first(self, make: Callable[[], T]) -> T:
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box[0] = make()
            except (TokenleapError, OSError) as error:
                box[1] = error
        with _answers(self.size):
            dist.broadcast_object_list(box, group_src=0, group=self._host)
        made, failure = box
        if failure is not None:
            raise failure
        return made  # type: ignore[no-any-return]

    def check(self, digest: int) -> None:
        """Compare what the processes are about to compute, so that none waits in vain."""
        digests = torch.empty(self.size, dtype=torch.int64)
        with _answers(self.size):
            dist.all_gather_single(digests, torch.tensor([digest]), group=self._host)
        if bool((digests != digest).any()):
            raise OutOfStepError(
                f"the {self.size} processes of this model are out of step: they were about to "
                "compute different tokens. All of them must make the same calls with the same "
                "arguments, from one thread, on processors or GPUs of one kind."
            )

    def total(self, part: Tensor) -> Tensor:
        """The sum of the processes' tensors, in the order of their ranks.

        An all-reduce adds in an order that depends on the size of the tensor and on the place in
        it. Here a position gets the same bits in every pass (invariant 7), and in every process.
        """
        parts = self._gathered(part)
        total = parts[0] + parts[1]
        for other in parts[2:]:
            total += other
        return total

    def joined(self, part: Tensor) -> Tensor:
        """[..., n] of each process -> [..., size * n], in the order of their ranks."""
        return torch.cat(self._gathered(part).unbind(), dim=-1)

    def _gathered(self, part: Tensor) -> Tensor:
        first, *others = part.shape
        parts, own = part.new_empty((self.size * first, *others)), part.contiguous()
        with _answers(self.size):
            dist.all_gather_single(parts, own, group=self._devices)
        return parts.view(self.size, *part.shape)


@contextmanager
def _answers(size: int) -> Iterator[None]:
    """Turn what gloo or nccl says of a process that does not answer into a line that helps."""
    try:
        yield
    except RuntimeError as error:
        raise OutOfStepError(
            f"one of the {size} processes of this model has ended, or has computed nothing for "
            f"{WAIT.seconds // 60} minutes: its own messages say why."
        ) from error


def peers_of(model: Any) -> Peers:
    """The processes that hold a module's shards, as Transformers has loaded them.

    All of them must call this together.
    """
    size = getattr(model, "tp_size", None) or 1
    if size == 1:
        return ALONE
    devices = model._device_mesh["tp"].get_group()
    ranks = dist.get_process_group_ranks(devices)
    dist.barrier(devices)  # one may load for much longer than others, and longer than `WAIT`
    return Group(devices, dist.new_group(ranks, timeout=WAIT, backend="gloo"))


def whole(weight: Tensor) -> Tensor:
    """A weight of which this process may have only a shard; all processes must ask together."""
    return weight.full_tensor() if is_sharded(weight) else weight


def is_sharded(weight: Tensor) -> TypeGuard[DTensor]:
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


SPLIT = ("colwise",)
JOINED = ("colwise_gather_output", "colwise_rep")
ADDED = ("rowwise", "rowwise_split_input", "rowwise_rep")
SLICED = ADDED[1:]
"""Kinds of layers in plans. Each process keeps its outputs; all get all outputs; all get the sum of
what comes of each process's inputs, which the last ones have to take from all inputs."""


class ShardedNetwork(ModuleNetwork):
    """A `ModuleNetwork` on the shards of this process."""

    def __init__(self, model: PreTrainedModel, least_nodes: int, group: Group) -> None:
        super().__init__(model, least_nodes)
        self._group = group

    @classmethod
    def of(cls, model: PreTrainedModel, group: Group) -> ShardedNetwork:
        linear = linear_layer(model.dtype, model.device, None)
        assert linear in (PackedLinear, None), "without quantization"
        local = share(model)
        plan: dict[str, str] = dict(model.tp_plan)
        _localise(local, plan, group, packed=linear is not None)
        return cls(local, 1 if linear is None else linear.LEAST_ROWS, group)

    def _like(self, model: PreTrainedModel) -> Self:
        return type(self)(model, self.least_nodes, self._group)

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        self._group.check(_digest(inputs.rows, inputs.first, need))
        return super().forward(inputs, slab, need)


class ShardedLinear(nn.Module):
    """`y = x W^T + b` on the rows or columns of W that this process has."""

    weight: None = None  # see `PackedLinear.weight`

    def __init__(self, linear: nn.Linear, kind: str, group: Group, *, packed: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self._kind, self._group = kind, group
        weight = _local(linear.weight)
        bias: Tensor | None = None if linear.bias is None else _local(linear.bias)
        if kind in JOINED:  # the last process may have fewer rows, and all send as many
            missing = -(-self.out_features // group.size) - len(weight)
            weight = nn.functional.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else nn.functional.pad(bias, (0, missing))
        self._added = bias if kind in ADDED else None  # once, after the sum
        kept = None if kind in ADDED else bias
        self.inner = PackedLinear(weight, kept) if packed else _dense(weight, kept)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; with a kind that splits, this process's part of either."""
        if self._kind in SLICED:
            size = -(-self.in_features // self._group.size)
            first = self._group.rank * size
            x = x[..., first : first + size].contiguous()
        y: Tensor = self.inner(x)
        if self._kind in JOINED:
            return self._group.joined(y)[..., : self.out_features]
        if self._kind in ADDED:
            y = self._group.total(y)
        return y if self._added is None else y + self._added


def _localise(
    module: nn.Module, plan: dict[str, str], group: Group, *, packed: bool, path: str = ""
) -> None:
    """Replace linear layers by those of this process, in place."""
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        kind = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", place))
        if not is_plain_linear(child):
            _localise(child, plan, group, packed=packed, path=place)
        elif kind in (*SPLIT, *JOINED, *ADDED) and is_sharded(child.weight):
            setattr(module, name, ShardedLinear(child, kind, group, packed=packed))
        elif kind is None and packed and not is_sharded(child.weight):
            setattr(module, name, PackedLinear(child.weight, child.bias))


def _local(weight: Tensor) -> Tensor:
    return (weight.to_local() if is_sharded(weight) else weight).detach()


def _dense(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return linear


def _digest(rows: Sequence[RowNodes], first: int, need: Need) -> int:
    parts: Any = [
        (row.start, *row.tokens, -1, *row.positions, -1, *row.prefixes, -1, *map(tuple, row.tails))
        for row in rows
    ]
    return zlib.crc32(repr((first, need.logits, need.last, need.hidden, parts)).encode())
