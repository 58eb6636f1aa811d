"""One step of the `ngram` method under the `coupled` rule, from draft to commit on the device.

`decode.step` in tensor operations, for chains and plain laws: what it reads and what it leaves is
on the device, so that it can be captured as one graph. It leaves what it did in a buffer, for the
host to fetch once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.config import GREEDY_BELOW
from foretoken.runtime.attention import padded_rows
from foretoken.runtime.cuda.graphs import Staging
from foretoken.runtime.cuda.inputs import additive_mask, device_pass
from foretoken.runtime.cuda.lookup import look_up
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.runtime.cuda.philox import block_numbers, gumbel
from foretoken.runtime.cuda.rows import DeviceRows
from foretoken.runtime.cuda.slab import StaticSlab

__all__ = ["ChainStep", "Drafting", "Report"]


@dataclass(frozen=True)
class Drafting:
    """How to draft: the options of `ngram`, and how much.

    Args:
        length: most tokens, whatever a row's limit; 0 drafts nothing.
        shortest, longest: `prompt_lookup_min` and `prompt_lookup_max`.
    """

    length: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class Report:
    """What a step did to one row.

    Args:
        drafted: the drafted tokens.
        accepted: how many of them were kept.
        drawn: the target's token after the root and after each of them.
    """

    drafted: tuple[int, ...]
    accepted: int
    drawn: tuple[int, ...]


class ChainStep:
    """A step over the first rows of the slab.

    Args:
        network: computes a pass, and keeps the logits of whichever graph ran last.
        slab: its KV.
        rows: the requests.
        num_rows: B.
        span: S, key positions attended to; no row's draft may end behind them.
        drafting: how to draft.
        sampled: whether any request is not greedy.
        dtype: of the model.
    """

    def __init__(
        self,
        network: CudaNetwork,
        slab: StaticSlab,
        rows: DeviceRows,
        num_rows: int,
        span: int,
        drafting: Drafting,
        *,
        sampled: bool,
        dtype: torch.dtype,
    ) -> None:
        self._network, self._slab, self._rows = network, slab, rows
        self._num_rows, self._span = num_rows, span
        self._drafting, self._sampled, self._dtype = drafting, sampled, dtype
        self._nodes = drafting.length + 1  # N
        self._device = network.device
        self._logits: Tensor | None = None
        self._blocks: Tensor | None = None
        self._width = 2 + drafting.length + self._nodes
        self._done = Staging(num_rows * self._width, self._device)

    @property
    def logits(self) -> Tensor:
        """[B, N, V] after every node of the last run, until another graph runs."""
        assert self._logits is not None, "there was a run"
        return self._logits

    def fetch(self) -> list[Report]:
        """What the last run did to each row: the only transfer of a step."""
        lines: list[list[int]] = self._done.fetch().view(self._num_rows, self._width).tolist()
        reports = []
        for count, accepted, *tokens in lines:
            drawn = tokens[self._drafting.length :]
            # A row that takes no part has a count of -1.
            reports.append(
                Report(tuple(tokens[: max(count, 0)]), accepted, tuple(drawn[: count + 1]))
            )
        return reports

    def run(self) -> None:
        """Draft, verify, accept, commit."""
        rows = self._rows
        limits = rows.limits(self._num_rows)
        # A row that takes no part may be longer than what the others need.
        lengths = rows.lengths(self._num_rows).clamp(max=self._span)
        drafted, counts = self._draft(lengths, limits)
        logits = self._verify(drafted, counts, lengths)  # [B, N, V]
        drawn = self._draw(logits, lengths)  # [B, N]
        depths = torch.arange(self._drafting.length, device=self._device)
        agrees = (drafted == drawn[:, :-1]) & (depths < counts[:, None])
        accepted = agrees.long().cumprod(1).sum(1)  # [B]
        rows.extend(drawn, (accepted + 1).masked_fill(limits < 0, 0))
        done = torch.cat([counts[:, None], accepted[:, None], drafted, drawn], dim=1)
        self._done.device.copy_(done.flatten())

    def _draft(self, lengths: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
        """[B, N - 1] tokens, and [B] how many of them are meant; -1 where a row takes no part."""
        how = self._drafting
        tokens = self._rows.tokens(self._num_rows, self._span)
        if not how.length:
            return tokens[:, :0], limits.clamp(max=0)
        drafted, known = look_up(tokens, lengths, how.length, how.shortest, how.longest)
        return drafted, limits.where(known, limits.clamp(max=0))

    def _verify(self, drafted: Tensor, counts: Tensor, lengths: Tensor) -> Tensor:
        """[B, N, V] logits after root and draft; their KV is written behind the committed."""
        depths = torch.arange(self._nodes, device=self._device)
        cached = (lengths - 1).clamp(min=0)  # law 1; a row that was never used has no token
        roots = self._rows.tokens(self._num_rows, self._span).gather(1, cached[:, None])
        behind = cached[:, None] + depths  # [B, N]
        padding = depths > counts[:, None]
        slots = behind.masked_fill(padding, self._slab.scratch)
        self._slab.begin_static(slots, self._span)
        queries = torch.arange(padded_rows(self._nodes), device=self._device)
        below = (queries[:, None] >= depths).expand(self._num_rows, -1, -1)
        mask = additive_mask(cached, below, self._span, self._dtype)
        tokens = torch.cat([roots, drafted], dim=1)
        inputs = device_pass(tokens, behind.masked_fill(padding, 0), mask)
        logits = self._network.inner.forward(inputs, self._slab, scored=True)
        assert logits is not None
        shape = (self._num_rows, self._nodes, -1)
        if self._logits is None:  # the first run is neither captured nor compiled
            self._logits = self._network.output(logits).view(shape)
            self._blocks = block_numbers(logits.shape[1], self._device)
        return self._logits.copy_(logits.view(shape))

    def _draw(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """[B, N] what the target takes after each node: `Sampler.law` and `Noise.draw`."""
        greedy = logits.max(-1).indices
        if not self._sampled:
            return greedy
        temperatures = self._rows.temperatures(self._num_rows)[:, None]  # [B, 1]
        is_greedy = temperatures < GREEDY_BELOW
        wide = logits if logits.dtype == torch.float64 else logits.float()
        probs = (wide / temperatures.masked_fill(is_greedy, 1.0)[..., None]).softmax(-1)
        depths = torch.arange(self._nodes, device=self._device)
        seeds = self._rows.seeds(self._num_rows)[:, None].expand(-1, self._nodes)
        assert self._blocks is not None
        noise = gumbel(seeds, lengths[:, None] + depths, self._blocks, logits.shape[2])
        return greedy.where(is_greedy, (probs.log() + noise).argmax(-1))
