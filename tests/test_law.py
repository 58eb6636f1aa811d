"""Laws on their support behave like dense vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretoken.law import Law, OneHots

V = 6
weights = st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]), min_size=V, max_size=V).filter(any)


def dense_of(values: list[float]) -> Tensor:
    dense = torch.tensor(values, dtype=torch.float64)
    return dense / dense.sum()


@given(weights)
def test_round_trip(values: list[float]) -> None:
    dense = dense_of(values)
    law = Law.of(dense)
    torch.testing.assert_close(law.dense(V), dense)
    assert [law.prob(token) for token in range(V)] == pytest.approx(dense.tolist())
    torch.testing.assert_close(law.at(torch.arange(V)), dense)
    assert (law.certain is not None) == (sum(v > 0 for v in values) == 1)


@given(weights, weights, st.sampled_from([0.3, 1.0]), st.sampled_from([0.4, 1.0]))
def test_residual(p: list[float], q: list[float], scale: float, weight: float) -> None:
    """norm(max(weight * p - scale * q, 0)), and p itself where nothing is left."""
    difference = (weight * dense_of(p) - scale * dense_of(q)).clamp(min=0)
    residual = Law.of(dense_of(p)).residual(Law.of(dense_of(q)), scale, weight).dense(V)
    if difference.sum() > 1e-12:
        torch.testing.assert_close(residual, difference / difference.sum())
    else:
        assert float(residual.sum()) == pytest.approx(1)


def test_one_hot() -> None:
    law = Law.one_hot(4)
    assert law.certain == 4
    assert (law.prob(4), law.prob(3)) == (1.0, 0.0)
    assert law.dense(V).tolist() == [0, 0, 0, 0, 1, 0]
    other = Law.of(torch.full((V,), 1 / V))
    assert other.residual(law).prob(4) == 0
    assert other.residual(law).prob(3) == pytest.approx(1 / (V - 1))


def test_certain_laws_are_made_once_and_only_where_they_are_looked_at() -> None:
    laws = OneHots((4, 2, 4))
    assert laws[1] is laws[1]
    assert [law.certain for law in laws] == [4, 2, 4]
    assert [law.certain for law in laws[1:]] == [2, 4]
    assert len(laws) == 3
    with pytest.raises(IndexError):
        laws[3]
