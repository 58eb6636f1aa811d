"""Losses against PyTorch's formulas over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenleap.training.trainee import LOSSES, REST, Teacher

N, V = 12, 20


def kl(logits: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)


def ce(logits: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def tv(logits: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    return 1 - torch.minimum(p, logits.softmax(-1)).sum(-1)


def rkl(logits: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """All tokens with p = 0 are one token with p = REST."""
    q = logits.softmax(-1)
    outside = (q * (p == 0)).sum(-1)
    inside = (q * (q.log() - p.log().masked_fill(p == 0, 0))).masked_fill(p == 0, 0).sum(-1)
    divergence: Tensor = inside + outside * (outside.clamp(min=1e-9) / REST).log()
    return divergence


def jsd(logits: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    q = logits.softmax(-1)
    m = (p + q) / 2
    of_p = torch.special.xlogy(p, p) - p * m.log()
    divergence: Tensor = (of_p + q * (q.log() - m.log())).sum(-1) / 2
    return divergence


PLAIN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "kl": kl,
    "rkl": rkl,
    "jsd": jsd,
    "ce": ce,
    "tv": tv,
}


def test_all_have_an_oracle() -> None:
    assert set(PLAIN) == set(LOSSES)


@pytest.mark.parametrize("kept", [V, 5])
@pytest.mark.parametrize("name", PLAIN)
def test_values_and_gradients(name: str, kept: int) -> None:
    """p is what the known tokens have, normalised."""
    torch.manual_seed(0)
    logits = torch.randn(N, V, requires_grad=True)
    logprobs, tokens = torch.randn(N, V).log_softmax(-1).topk(kept)
    labels = torch.randint(0, V, (N,))
    p = torch.zeros(N, V).scatter(1, tokens, logprobs.exp())
    p = p / p.sum(-1, keepdim=True)
    teacher = Teacher.of(labels, tokens, logprobs, torch.arange(V))
    found, expected = LOSSES[name](logits, teacher), PLAIN[name](logits, p, labels)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.rand(N)
    gradients = [torch.autograd.grad((x * weights).sum(), logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", PLAIN)
def test_over_a_draft_vocabulary(name: str) -> None:
    """Tokens outside of it are as if the target never wrote them."""
    torch.manual_seed(1)
    draft_tokens = torch.arange(0, V, 2)
    places = torch.full((V,), -1)
    places[draft_tokens] = torch.arange(len(draft_tokens))
    logits = torch.randn(N, len(draft_tokens))
    logprobs, tokens = torch.randn(N, V).log_softmax(-1).topk(V)
    labels = draft_tokens[torch.randint(0, len(draft_tokens), (N,))]
    p = torch.zeros(N, V).scatter(1, tokens, logprobs.exp())[:, draft_tokens]
    p = p / p.sum(-1, keepdim=True)
    teacher = Teacher.of(labels, tokens, logprobs, places)
    expected = PLAIN[name](logits, p, places[labels])
    torch.testing.assert_close(LOSSES[name](logits, teacher), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_is_learnt_where_nothing_is_known(name: str) -> None:
    logits = torch.randn(N, 3, requires_grad=True)
    places = torch.full((V,), -1)
    places[:3] = torch.arange(3)
    unknown = torch.randint(3, V, (N, 4))
    teacher = Teacher.of(unknown[:, 0], unknown, torch.randn(N, 4).log_softmax(-1), places)
    losses = LOSSES[name](logits, teacher)
    assert (losses == 0).all()
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("name", ["kl", "rkl", "jsd", "tv"])
def test_the_target_itself_has_no_loss(name: str) -> None:
    logprobs = torch.randn(N, V).log_softmax(-1)
    tokens = torch.arange(V).expand(N, -1)
    teacher = Teacher.of(tokens[:, 0], tokens, logprobs, torch.arange(V))
    # rkl: the rest, 0 but for the rounding of 1 - sum q (2e-7), times its logarithm.
    torch.testing.assert_close(
        LOSSES[name](logprobs + 3, teacher), torch.zeros(N), atol=5e-6, rtol=0
    )
