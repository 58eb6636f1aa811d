"""TreeDistributions on their support behave like dense vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenleap.core.distribution import Distribution, OneHots, Truncation, truncate

V = 6
weights = st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]), min_size=V, max_size=V).filter(any)


def dense_of(values: list[float]) -> Tensor:
    dense = torch.tensor(values, dtype=torch.float64)
    return dense / dense.sum()


@given(weights)
def test_round_trip(values: list[float]) -> None:
    dense = dense_of(values)
    distribution = Distribution.of(dense)
    torch.testing.assert_close(distribution.dense(V), dense)
    assert [distribution.prob(token) for token in range(V)] == pytest.approx(dense.tolist())
    torch.testing.assert_close(distribution.at(torch.arange(V)), dense)
    assert (distribution.certain is not None) == (sum(v > 0 for v in values) == 1)


@given(weights, weights, st.sampled_from([0.1, 0.3, 1.0]))
def test_overlap(p: list[float], q: list[float], scale: float) -> None:
    expected = float(torch.minimum(dense_of(p), scale * dense_of(q)).sum())
    found = Distribution.of(dense_of(p)).overlap(Distribution.of(dense_of(q)), scale)
    assert found == pytest.approx(expected)
    assert found <= scale


@given(weights, weights, st.sampled_from([0.3, 1.0]), st.sampled_from([0.4, 1.0]))
def test_residual(p: list[float], q: list[float], scale: float, weight: float) -> None:
    """norm(max(weight * p - scale * q, 0)), and p itself where nothing is left."""
    difference = (weight * dense_of(p) - scale * dense_of(q)).clamp(min=0)
    residual = (
        Distribution.of(dense_of(p)).residual(Distribution.of(dense_of(q)), scale, weight).dense(V)
    )
    if difference.sum() > 1e-12:
        torch.testing.assert_close(residual, difference / difference.sum())
    else:
        assert float(residual.sum()) == pytest.approx(1)


def test_one_hot() -> None:
    distribution = Distribution.one_hot(4)
    assert distribution.certain == 4
    assert (distribution.prob(4), distribution.prob(3)) == (1.0, 0.0)
    assert distribution.dense(V).tolist() == [0, 0, 0, 0, 1, 0]
    other = Distribution.of(torch.full((V,), 1 / V))
    assert other.residual(distribution).prob(4) == 0
    assert other.residual(distribution).prob(3) == pytest.approx(1 / (V - 1))


def test_certain_distributions_are_made_once_and_only_where_they_are_looked_at() -> None:
    distributions = OneHots((4, 2, 4))
    assert distributions[1] is distributions[1]
    assert [distribution.certain for distribution in distributions] == [4, 2, 4]
    assert [distribution.certain for distribution in distributions[1:]] == [2, 4]
    assert len(distributions) == 3
    with pytest.raises(IndexError):
        distributions[3]


@given(
    st.integers(2, 3000),
    st.integers(0, 2**32),
    st.sampled_from([0.1, 3.0, 30.0]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.sampled_from([0, 1, 7, 2000]),
    st.sampled_from([1e-9, 0.5, 0.99, 1.0]),
)
def test_truncation_by_definition(
    size: int, seed: int, spread: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Short cuts for likely tokens keep what looking at all tokens keeps."""
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits = (spread * drawn).index_fill(0, torch.arange(0, size, 5), -torch.inf)
    probs = logits.softmax(-1)
    kept = probs >= min_p * probs.max()
    if top_k:
        kept &= probs >= torch.where(kept, probs, 0).sort(descending=True).values[:top_k][-1]
    probs = torch.where(kept, probs, 0) / probs[kept].sum()
    order = probs.argsort(descending=True, stable=True)
    outside = order[1:][probs[order].cumsum(-1)[:-1] >= top_p] if top_p < 1 else order[:0]
    probs = probs.index_fill(0, outside, 0)
    found = truncate(logits, Truncation(min_p, top_k, top_p)).dense(size)
    torch.testing.assert_close(found, probs / probs.sum())
