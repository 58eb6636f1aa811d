"""Attention with capped scores and sinks: against its definition, and its bits (invariant 7)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap import CompatibilityError
from tokenleap.runtime.attention import KEY_BLOCK, attend_scored, slab_attention

HEADS, GROUPS, WIDTH, ROWS = 6, 2, 32, 24
KINDS = [(2.0, False), (None, True), (3.0, True)]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of 2 rows, keys and values of two blocks, and a causal mask that hides the rest."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator).to(dtype)

    query, key = normal(HEADS, ROWS, WIDTH), normal(GROUPS, 2 * KEY_BLOCK, WIDTH)
    hidden = torch.arange(2 * KEY_BLOCK) > 100 + torch.arange(ROWS)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return query, key, normal(GROUPS, 2 * KEY_BLOCK, WIDTH), mask.expand(2, 1, -1, -1)


def sinks(wanted: bool) -> Tensor | None:
    return torch.linspace(-1, 4, HEADS) if wanted else None


@pytest.mark.parametrize(("softcap", "with_sinks"), KINDS)
def test_the_definition(softcap: float | None, with_sinks: bool) -> None:
    query, key, value, mask = inputs(torch.float32)
    found = attend_scored(query, key, value, mask, 0.4, softcap, sinks(with_sinks))
    scores = query @ key.repeat_interleave(HEADS // GROUPS, 1).transpose(2, 3) * 0.4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if (sink := sinks(with_sinks)) is not None:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(2, -1, ROWS, 1)], dim=3)
    weights = F.softmax(scores, dim=3)[..., : key.shape[2]]
    expected = weights @ value.repeat_interleave(HEADS // GROUPS, 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("softcap", "with_sinks"), KINDS)
def test_bits(softcap: float | None, with_sinks: bool, dtype: torch.dtype) -> None:
    """Of a query: whatever the other queries, the other rows and the keys that are not seen."""
    query, key, value, mask = inputs(dtype)
    whole = attend_scored(query, key, value, mask, 0.4, softcap, sinks(with_sinks))
    assert whole.dtype == dtype
    for first, last, rows, span in ((0, 4, 2, 2), (4, 16, 1, 2), (8, 24, 2, 1), (20, 24, 1, 1)):
        keys, values = (part[:rows, :, : span * KEY_BLOCK] for part in (key, value))
        part = attend_scored(
            query[:rows, :, first:last],
            keys,
            values,
            mask[:rows, :, first:last, : span * KEY_BLOCK],
            0.4,
            softcap,
            sinks(with_sinks),
        )
        assert torch.equal(part, whole[:rows, :, first:last])


def test_arguments_that_change_attention_are_not_ignored() -> None:
    query, key, value, mask = inputs(torch.float32)
    with pytest.raises(CompatibilityError, match="'position_bias' is not supported"):
        slab_attention(nn.Module(), query, key, value, mask, position_bias=torch.zeros(1))
