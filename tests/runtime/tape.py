"""A stand-in for CUDA graphs that runs on a CPU and is as strict as they are.

At capture it records every operation with the tensors and numbers it was called with, and at replay
it runs just those again: no Python of the captured function. What a graph would do wrong comes out
wrong here, too: a number that was read from a buffer at capture stays what it was, a buffer that
has moved is written in vain, a result that was not copied out is gone. Where a capture would fail
because the host waits for the device, or builds a tensor, `Tape` fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {
    "item",
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "unique",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "lift_fresh",
    "lift_fresh_copy",
    "lift",
}
JUNK = 10**15
"""Out of range as an index, and absurd as anything else."""


class CaptureError(AssertionError):
    """An operation that a capture on a device would refuse."""


@dataclass
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[tuple[int, Tensor]] = field(default_factory=list)
    """Outputs with memory of their own, and which of the outputs they are."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check(func, args)
        output = func(*args, **kwargs)
        held = {storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        outputs = enumerate(tree_leaves(output))
        fresh = [(i, x) for i, x in outputs if isinstance(x, Tensor) and storage(x) not in held]
        self.operations.append(_Operation(func, args, kwargs, fresh))
        return output


class Tape:
    """See `Capture`.

    Attributes:
        num_captures: functions captured so far.
        num_replays: runs of what was captured.
    """

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run once to warm up, run once to record."""
        function()
        with _Recorder() as recorder:
            function()
        self.num_captures += 1
        operations: list[_Operation] = recorder.operations
        _spoil(operations)

        def replay() -> None:
            self.num_replays += 1
            with torch.inference_mode():
                for operation in operations:
                    outputs = tree_leaves(operation.function(*operation.args, **operation.kwargs))
                    for index, kept in operation.fresh:
                        kept.copy_(outputs[index])
                _spoil(operations)

        return replay


def storage(tensor: Tensor) -> int:
    """Which memory a tensor is in."""
    return int(tensor.untyped_storage()._cdata)


def _check(function: Any, args: Any) -> None:
    name = function.overloadpacket.__name__
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    by_mask = any(isinstance(x, Tensor) and x.dtype == torch.bool for x in indices)
    if name in WAITS or by_mask:
        raise CaptureError(f"{name} makes the host wait for the device, or build a tensor")


def _spoil(operations: list[_Operation]) -> None:
    """Overwrite the memory that belongs to the graph: another one may use it next."""
    with torch.inference_mode():
        for operation in operations:
            for _, tensor in operation.fresh:
                if tensor.dtype == torch.bool:
                    tensor.fill_(True)
                else:
                    tensor.fill_(torch.nan if tensor.is_floating_point() else JUNK % 2**31)
