"""The stand-in for CUDA graphs refuses and shows what they would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.runtime.tape import CaptureError, Tape
from tokenleap.runtime.cuda.graphs import Staging, Uncaptured

CPU = torch.device("cpu")


def test_what_was_captured_reads_its_buffers_anew() -> None:
    source, result = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def run() -> None:
        result.copy_(source.mul(2).add(1))

    replay = Tape().capture(run)
    source.copy_(torch.tensor([5.0, 6.0]))
    replay()
    assert result.tolist() == [11.0, 13.0]


def test_a_number_read_in_python_is_baked_in() -> None:
    numbers, result = [1], torch.zeros(3)

    def run() -> None:
        result.zero_()
        result[: numbers[0]].fill_(1)

    replay = Tape().capture(run)
    numbers[0] = 3
    replay()
    assert result.tolist() == [1.0, 0.0, 0.0]


def test_a_buffer_that_has_moved_is_written_in_vain() -> None:
    holder = {"buffer": torch.zeros(1)}
    old = holder["buffer"]

    def run() -> None:
        holder["buffer"].add_(1)

    replay = Tape().capture(run)
    holder["buffer"] = torch.zeros(1)
    replay()
    assert holder["buffer"].tolist() == [0.0]
    assert old.tolist() == [3.0]  # warm-up, capture, replay


def test_what_is_not_copied_out_is_gone() -> None:
    source, kept = torch.ones(2), list[Tensor]()
    replay = Tape().capture(lambda: kept.append(source + 1))
    replay()
    assert all(tensor.isnan().all() for tensor in kept[1:])


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: int(x.max()),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x + torch.tensor([1]),
    ],
    ids=["int", "bool", "nonzero", "mask", "equal", "tensor"],
)
def test_waiting_for_the_device_is_refused(wait: Callable[[Tensor], object]) -> None:
    source = torch.arange(3)

    def run() -> None:
        wait(source)

    with torch.inference_mode(), pytest.raises(CaptureError):
        Tape().capture(run)


def test_uncaptured_is_the_function_itself() -> None:
    def run() -> None:
        pass

    assert Uncaptured().capture(run) is run


def test_staging_copies_to_the_device() -> None:
    staging = Staging(3, CPU)
    staging.host.copy_(torch.tensor([1, 2, 3]))
    staging.send()
    staging.wait()
    assert staging.device.tolist() == [1, 2, 3]
