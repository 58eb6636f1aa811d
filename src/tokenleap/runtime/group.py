"""`Group`: the processes that hold a model's shards, and what they tell each other.

The shards exchange tensors in the process group that Transformers loaded them with (nccl between
GPUs, gloo between CPUs). Numbers and objects of the host go through a group of their own, over
gloo, so that no pass waits for a GPU because of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tokenleap.core.peers import ALONE, OutOfStepError, Peers
from tokenleap.errors import TokenleapError

__all__ = ["Group", "peers_of", "whole"]

T = TypeVar("T")

WAIT = timedelta(minutes=10)
"""How long a process waits for what another one has to say, before it ends with an error."""


class Group(Peers):
    """All processes of a model; each of them must call the same methods in the same order.

    Args:
        devices: the process group of the shards.
        host: a group of the same processes for what is not on a device.
    """

    def __init__(self, devices: Any, host: Any) -> None:
        self.rank, self.size = dist.get_rank(devices), dist.get_world_size(devices)
        self._devices, self._host = devices, host

    def __deepcopy__(self, _: object) -> Group:
        return self  # copies of a network belong to the same group

    def agreed(self, number: float) -> float:
        """See `Peers.agreed`."""
        box = torch.tensor([number], dtype=torch.float64)
        with _answers(self.size):
            dist.broadcast(box, group_src=0, group=self._host)
        return box.item()

    def from_first(self, make: Callable[[], T]) -> T:
        """See `Peers.from_first`.

        Raises:
            Exception: the first process failed to make it.
        """
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
        """Compare what the processes are about to compute, so that none waits for others in vain.

        Args:
            digest: of it, below 2^63.

        Raises:
            OutOfStepError: it is not the same in all processes, or one of them does not answer.
        """
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
        """[size, ...]."""
        first, *others = part.shape
        parts, own = part.new_empty((self.size * first, *others)), part.contiguous()
        with _answers(self.size):
            dist.all_gather_single(parts, own, group=self._devices)
        return parts.view(self.size, *part.shape)


@contextmanager
def _answers(size: int) -> Iterator[None]:
    """Turn what gloo or nccl says of a process that does not answer into a line that helps.

    Raises:
        OutOfStepError: one of the `size` processes does not answer.
    """
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
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
