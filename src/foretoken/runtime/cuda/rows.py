"""The requests of a batch as the device knows them: texts, lengths, seeds, and who takes part.

A step on the device extends them there. The host keeps account of what the device has, and sends a
row again where that is not what the row's request is: it joined, moved, or was advanced by other
means. How much each row may draft is sent when it changes. In a batch that goes on as it is,
nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from foretoken.request import Request
from foretoken.runtime.cuda.graphs import Staging
from foretoken.runtime.cuda.philox import signed

__all__ = ["DeviceRows"]

LENGTH, SEED, TOKENS = range(3)
"""Columns of the table; those of the tokens are the last."""

_IDLE = -1
"""The limit of a row that takes no part."""

_SPARE = 2
"""Tokens a row has room for beyond its KV: the last one has none yet, and one that none reads."""


class DeviceRows:
    """A table on the device, a row for each row of the slab.

    Args:
        rows: of the slab.
        positions: of each row of the slab.
        device: where the table is.
    """

    def __init__(self, rows: int, positions: int, device: torch.device) -> None:
        width = TOKENS + positions + _SPARE
        self._table = torch.zeros(rows, width, dtype=torch.long, device=device)
        self._temperatures = torch.zeros(rows, device=device)
        self._limits = Staging(rows, device)
        self._sent: list[int] = []  # limits
        self._shown: list[tuple[int, int] | None] = [None] * rows  # key, number of tokens

    def show(self, batch: Mapping[int, tuple[Request, int]]) -> None:
        """Let these rows take part in a step that follows, and no others.

        Args:
            batch: by row its request and how many tokens it may draft.
        """
        for row, (request, _) in batch.items():
            if self._shown[row] != _state(request):
                self._send(row, request)
            self._shown[row] = None  # not known until `extended` says so: steps may be interrupted
        limits = [batch[row][1] if row in batch else _IDLE for row in range(len(self._shown))]
        if limits != self._sent:
            self._limits.wait()
            self._limits.host.copy_(torch.tensor(limits))
            self._limits.send()
            self._sent = limits

    def extended(self, row: int, request: Request) -> None:
        """The device has extended this row as the host its request.

        One that has ended may have dropped tokens behind its end, but nobody asks for it again.
        """
        self._shown[row] = _state(request)

    def _send(self, row: int, request: Request) -> None:
        tokens = request.token_ids
        line = torch.tensor([len(tokens), signed(request.noise.seed), *tokens])
        self._table[row, : len(line)] = line.to(self._table.device)
        self._temperatures[row] = request.params.temperature

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Nobody takes part, so that running a step changes nothing."""
        self._limits.device.fill_(_IDLE)
        self._sent = []
        yield

    # On the device; B is the number of rows asked for

    def lengths(self, rows: int) -> Tensor:
        """[B] tokens of each."""
        return self._table[:rows, LENGTH]

    def limits(self, rows: int) -> Tensor:
        """[B] how many tokens each may draft; negative where a row takes no part."""
        return self._limits.device[:rows]

    def seeds(self, rows: int) -> Tensor:
        """[B] `signed` seeds."""
        return self._table[:rows, SEED]

    def temperatures(self, rows: int) -> Tensor:
        """[B] float32."""
        return self._temperatures[:rows]

    def tokens(self, rows: int, count: int) -> Tensor:
        """[B, count] tokens; what is behind a row's length is not its text."""
        return self._table[:rows, TOKENS : TOKENS + count]

    def extend(self, tokens: Tensor, counts: Tensor) -> None:
        """Append the first so many of these tokens to each row.

        Args:
            tokens: [B, N].
            counts: [B], 0 where a row does not take part.
        """
        rows = len(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        columns = TOKENS + self.lengths(rows)[:, None] + places  # [B, N]
        # Those that are not appended are behind the text, or where nobody reads.
        columns = columns.clamp(max=self._table.shape[1] - 1)
        self._table[:rows].scatter_(1, columns, tokens)
        self.lengths(rows).add_(counts)


def _state(request: Request) -> tuple[int, int]:
    return request.key, len(request.token_ids)
