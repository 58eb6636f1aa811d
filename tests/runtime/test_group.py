"""Messages between processes of one model, in threads: `tests/test_tensor_parallel.py` has the
processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenleap.core.peers import ALONE, OutOfStepError, num_processes, own_rank
from tokenleap.errors import TokenleapError
from tokenleap.runtime.inputs import RowNodes
from tokenleap.runtime.network import Need
from tokenleap.runtime.sharded import ADDED, JOINED, Group, ShardedLinear, _digest

SIZE = 3


class Threads:
    """Groups whose processes are threads."""

    def __init__(self, size: int = SIZE) -> None:
        self.barrier, self.parts = Barrier(size, timeout=60), dict[int, Tensor]()
        self.groups = [self.group(rank, size) for rank in range(size)]

    def group(self, rank: int, size: int) -> Group:
        """One of them."""
        both = self

        class Thread(Group):
            def __init__(self) -> None:
                self.rank, self.size = rank, size

            def _gathered(self, part: Tensor) -> Tensor:
                both.parts[rank] = part
                both.barrier.wait()
                found = torch.stack([both.parts[each] for each in range(size)])
                both.barrier.wait()
                return found

        return Thread()

    def run(self, act: Callable[[Group], Any]) -> list[Any]:
        """The results of all."""
        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(act, self.groups))


def test_sums_have_the_order_of_ranks() -> None:
    """In float32, (1e8 - 1e8) + 1 is 1, and 1e8 + (1 - 1e8) is 0."""
    parts = torch.tensor([[[1e8, 1.0]], [[-1e8, 1e8]], [[1.0, -1e8]]])
    for total in Threads().run(lambda group: group.total(parts[group.rank])):
        assert torch.equal(total, torch.tensor([[1.0, 0.0]]))
    for joined in Threads().run(lambda group: group.joined(parts[group.rank])):
        assert torch.equal(joined, torch.tensor([[1e8, 1.0, -1e8, 1e8, 1.0, -1e8]]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_sum_or_the_join_of_its_parts(packed: bool, bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(12, 10, bias=bias), torch.randn(1, 4, 12)
    expected = linear(x)

    def part(rank: int, kind: str) -> nn.Linear:
        own = copy.deepcopy(linear)
        dim = 1 if kind.startswith("row") else 0
        own.weight = nn.Parameter(linear.weight.chunk(SIZE, dim)[rank])
        if bias and not dim:
            own.bias = nn.Parameter(linear.bias.chunk(SIZE)[rank])
        return own

    def run(group: Group, kind: str) -> Tensor:
        layer = ShardedLinear(part(group.rank, kind), kind, group, packed=packed)
        own = x.chunk(SIZE, -1)[group.rank].contiguous() if kind == "rowwise" else x
        with torch.inference_mode():
            y = layer(own)
        assert isinstance(y, Tensor)
        return y

    split = Threads().run(lambda group: run(group, "colwise"))
    assert [each.shape[-1] for each in split] == [4, 4, 2]
    torch.testing.assert_close(torch.cat(split, -1), expected)
    for kind in (*JOINED, *ADDED):
        for each in Threads().run(lambda group, kind=kind: run(group, kind)):  # type: ignore[misc]
            torch.testing.assert_close(each, expected)


def test_different_passes_are_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = Threads(1).groups
    group._host, group.size = None, 2
    others = [7]

    def gather(found: Tensor, own: Tensor, group: object) -> None:
        found[:] = torch.tensor([*own.tolist(), *others])

    monkeypatch.setattr(dist, "all_gather_single", gather)
    group.check(7)
    with pytest.raises(OutOfStepError, match="2 processes of this model are out of step"):
        group.check(8)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "all_gather_single", fail)
    with pytest.raises(OutOfStepError, match="has ended, or has computed nothing for 10 minutes"):
        group.check(7)


def test_a_digest_tells_passes_apart() -> None:
    row = RowNodes(5, (1, 2), (5, 6), (6, 7))
    passes = [
        ([row], 0, Need()),
        ([row, RowNodes(3)], 0, Need()),
        ([row], 1, Need()),
        ([row], 0, Need(hidden=(1,))),
        ([RowNodes(5, (1, 3), (5, 6), (6, 7))], 0, Need()),
        ([RowNodes(5, (1, 2), (5, 6), (6, 6), ((), (6,)))], 0, Need()),
    ]
    digests = [_digest(*each) for each in passes]
    assert len(set(digests)) == len(passes)
    assert digests[0] == _digest([RowNodes(5, [1, 2], range(5, 7), range(6, 8))], 0, Need())


def test_the_error_of_the_first_process_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def broadcast(box: list[Any], **_: object) -> None:
        if sent:
            box[:] = sent
        else:
            sent[:] = box

    def fail() -> int:
        raise TokenleapError("no such file.")

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    for group in Threads(2).groups:
        group._host = None
        with pytest.raises(TokenleapError, match="no such file"):
            group.from_first(fail)
    sent.clear()
    for rank, group in enumerate(Threads(2).groups):
        group._host = None
        assert group.from_first(lambda rank=rank: rank) == 0  # type: ignore[misc]


def test_alone() -> None:
    assert (ALONE.rank, ALONE.size, ALONE.is_first) == (0, 1, True)
    assert ALONE.agreed(0.5) == 0.5
    assert ALONE.from_first(lambda: "x") == "x"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, 0)),
        ({"WORLD_SIZE": "4"}, (1, 0)),  # set by other tools than torchrun
        ({"RANK": "1", "WORLD_SIZE": "4"}, (4, 1)),
        ({"RANK": "x", "WORLD_SIZE": "y"}, (1, 0)),
    ],
)
def test_what_torchrun_says(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert (num_processes(environment), own_rank(environment)) == expected
