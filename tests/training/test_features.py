"""The cache of features is what the target computes, is complete or refused, and made only once."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import VOCAB_SIZE, tiny_model
from tests.training.world import computed, cycles, tiny_target
from tokenleap.errors import DataError
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target
from tokenleap.training import features
from tokenleap.training.features import (
    TOP_K,
    FeatureCache,
    bytes_per_token,
    compute_features,
    dequantize,
    noisy,
)

LAYERS = (0, 2)
TALKS = [*cycles(3, length=21), *cycles(2, length=40, seed=3), *cycles(1, length=7)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def passes(target: Target, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Hidden states [n, A, E] and log-probabilities [n, V] of PyTorch's own forward pass."""
    model = tiny_model(head_dim=32)
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
    # Transformers shows the last hidden states after the final norm.
    target.add(INTERNAL_KEY)
    hidden = target.prefill(INTERNAL_KEY, list(tokens), LAYERS)
    target.remove(INTERNAL_KEY)
    torch.testing.assert_close(hidden[0], output.hidden_states[0][0], atol=1e-5, rtol=1e-4)
    return torch.stack([hidden[layer] for layer in LAYERS], 1), output.logits[0].log_softmax(-1)


@pytest.mark.parametrize("chunk", [256, 8])
def test_the_cache_holds_what_the_target_computes(
    chunk: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "_CHUNK", chunk)
    cache = computed(target, TALKS, LAYERS, tmp_path / "cache")
    assert len(cache) == len(TALKS)
    for number, talk in enumerate(TALKS):
        found = cache[number]
        assert tuple(found.tokens.tolist()) == talk.tokens
        assert [tuple(each) for each in found.answers] == list(talk.answers)
        hidden, logprobs = passes(target, talk.tokens)
        groups = hidden.reshape(len(talk.tokens), len(LAYERS), -1, 32)
        error = (
            (dequantize(found.hidden, found.scales) - hidden)
            .reshape(len(talk.tokens), len(LAYERS), -1, 32)
            .abs()
        )
        # Half a step of int8, whose scale is the largest number over 127, rounded to float16.
        bound = groups.abs().amax(-1) / 127 * (0.5 + 2**-10)
        assert (error.amax(-1) <= bound).all()
        values, tokens = logprobs.topk(TOP_K)
        assert torch.equal(found.top_tokens, tokens)
        torch.testing.assert_close(found.top_logprobs, values, atol=2e-3, rtol=2**-10)


def test_few_tokens_are_padded_with_impossible_ones(tmp_path: Path) -> None:
    small = Target(tiny_model(vocab_size=10))
    found = computed(small, cycles(1, tokens=10), (0,), tmp_path / "cache")[0]
    assert (found.top_logprobs[:, 10:].exp() == 0).all()
    torch.testing.assert_close(found.top_logprobs.exp().sum(-1), torch.ones(24), atol=3e-3, rtol=0)


@pytest.mark.parametrize("layers", [(), (0,), LAYERS])
def test_its_size_is_known_beforehand(
    layers: tuple[int, ...], target: Target, tmp_path: Path
) -> None:
    computed(target, TALKS, layers, tmp_path / "cache")
    files = [each for each in (tmp_path / "cache").iterdir() if each.name != features.INDEX]
    tokens = sum(len(each.tokens) for each in TALKS)
    assert sum(each.stat().st_size for each in files) == tokens * bytes_per_token(len(layers), 64)


def test_without_hidden_states(target: Target, tmp_path: Path) -> None:
    """Everything else is as it is with them."""
    found, whole = (
        computed(target, TALKS, layers, tmp_path / str(len(layers))) for layers in ((), LAYERS)
    )
    assert {each.name for each in (tmp_path / "0").iterdir()} == {
        *("tokens", "top_tokens", "top_logprobs", features.INDEX)
    }
    for number, talk in enumerate(TALKS):
        assert found[number].hidden.shape == (len(talk.tokens), 0, 64)
        assert found[number].scales.shape == (len(talk.tokens), 0, 2)
        for name in ("tokens", "top_tokens", "top_logprobs"):
            assert torch.equal(getattr(found[number], name), getattr(whole[number], name))
    assert counted(target, tmp_path / "0", layers=()) == 0


def counted(target: Target, folder: Path, talks: list = TALKS, layers: tuple = LAYERS) -> int:  # type: ignore[type-arg]
    """Passes that it takes to make the cache complete."""
    before = target.num_passes
    list(compute_features(target, talks, layers, folder))
    FeatureCache(folder)
    return target.num_passes - before


def test_a_complete_cache_is_not_computed_again(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert counted(target, folder) > 0
    assert counted(target, folder) == 0
    assert counted(target, folder, layers=(0,)) > 0
    assert counted(target, folder, talks=TALKS[:2]) > 0
    assert counted(target, folder, talks=TALKS[:2]) == 0


def test_one_that_was_interrupted_is_computed_again(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    begun: Any = compute_features(target, TALKS, LAYERS, folder)
    next(begun)
    begun.close()
    with pytest.raises(DataError, match="incomplete"):
        FeatureCache(folder)
    assert counted(target, folder) > 0


@pytest.mark.parametrize("name", ["tokens", "hidden", "scales", "top_tokens", features.INDEX])
@pytest.mark.parametrize("fault", ["truncated", "missing", "empty"])
def test_a_damaged_cache_is_refused_and_made_anew(
    name: str, fault: str, target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    computed(target, TALKS, LAYERS, folder)
    path = folder / name
    if fault == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1 if fault == "truncated" else 0)
    with pytest.raises(DataError, match=r"cache: the features are incomplete") as caught:
        FeatureCache(folder)
    assert "\n" not in str(caught.value)
    assert counted(target, folder) > 0


def test_a_full_disk_is_one_line_and_leaves_nothing(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int, start: int, size: int) -> None:
        if size > 3000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "cache"
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(DataError, match=r"cache: the features take .* No space left") as caught:
            list(compute_features(target, TALKS, LAYERS, folder))
    assert "\n" not in str(caught.value)
    assert not folder.exists()
    assert counted(target, folder) > 0


def test_tokens_of_answers_are_counted(target: Target, tmp_path: Path) -> None:
    counts = computed(target, TALKS, (0,), tmp_path / "cache").counts(VOCAB_SIZE)
    expected = [0] * VOCAB_SIZE
    for talk in TALKS:
        for start, stop in talk.answers:
            for token in talk.tokens[start:stop]:
                expected[token] += 1
    assert counts.tolist() == expected


def test_noise_is_a_share_of_the_size() -> None:
    hidden = torch.randn(50, 2, 4096) * torch.tensor([0.1, 30.0])[:, None]
    assert noisy(hidden, 0) is hidden
    change = noisy(hidden, 0.1) - hidden
    ratios = change.pow(2).mean(-1).sqrt() / hidden.pow(2).mean(-1).sqrt()
    # Standard deviation of the estimate: 0.1 / sqrt(2 * 4096) = 0.0011; six of them.
    assert (ratios - 0.1).abs().max() < 0.007
