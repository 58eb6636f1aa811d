"""Features are what the target computes, complete or refused; batches hold what follows."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tiny import VOCAB_SIZE, tiny_model
from tests.training.world import computed, cycles, random_features, refused, tiny_target
from tokenleap.errors import DataError
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target
from tokenleap.training import features
from tokenleap.training.conversations import Conversation
from tokenleap.training.features import (
    TOP_K,
    BatchSampler,
    FeatureCache,
    Features,
    TrainingSet,
    bytes_per_token,
    collate,
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


def test_tokens_of_another_model_are_refused(target: Target, tmp_path: Path) -> None:
    """Native code would read outside its tables."""
    for token in (VOCAB_SIZE, 999_999_999, -1):
        talk = Conversation((1, token, 2), ((1, 3),), seed=0)
        with pytest.raises(DataError, match="token ids outside the vocabulary"):
            list(compute_features(target, [talk], LAYERS, tmp_path / "cache"))


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
    with refused(DataError, match=r"cache: the features are incomplete"):
        FeatureCache(folder)
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


LEVELS = 3


@st.composite
def conversations(draw: Any) -> Features:
    length = draw(st.integers(3, 14))
    marks = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    marks[draw(st.integers(2, length - 1))] = True  # something to learn
    answers, start = [], None
    for at, marked in enumerate([*marks, False]):
        if marked and start is None:
            start = at
        elif not marked and start is not None:
            answers.append((start, at))
            start = None
    return random_features(length, answers, seed=draw(st.integers(0, 99)))


@given(st.lists(conversations(), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_every_root_learns_what_follows_it(given_: list[Features]) -> None:
    batch = collate(given_, LEVELS)
    assert batch.num_tokens == sum(len(each.tokens) - 1 for each in given_)
    for row, each in enumerate(given_):
        learnt = {at for start, stop in each.answers for at in range(start, stop)}
        pairs = len(each.tokens) - 1
        assert batch.lengths[row] == pairs
        assert torch.equal(batch.tokens[row, : pairs + 1], each.tokens)
        assert torch.equal(batch.next_tokens[row, :pairs], each.tokens[1:])
        assert torch.equal(batch.hidden[row, :pairs], each.hidden[:-1])
        assert torch.equal(batch.scales[row, :pairs], each.scales[:-1])
        roots = [at for at in range(pairs) if at + 2 in learnt]
        assert batch.roots[row, : len(roots)].tolist() == roots
        assert batch.levels.valid[row, 0].sum() == len(roots)
        for place, root in enumerate(roots):
            for level in range(LEVELS):
                at = root + 2 + level
                valid = bool(batch.levels.valid[row, level, place])
                assert valid == all(each in learnt for each in range(root + 2, at + 1))
                if not valid:
                    continue
                assert batch.levels.labels[row, level, place] == each.tokens[at]
                assert batch.levels.inputs[row, level, place] == each.tokens[at - 1]
                for found, expected in (
                    (batch.levels.teacher_tokens, each.top_tokens),
                    (batch.levels.teacher_logprobs, each.top_logprobs),
                ):
                    assert torch.equal(found[row, level, place], expected[at - 1])
        assert not batch.levels.valid[row, :, len(roots) :].any()


sizes = st.lists(st.integers(3, 60), min_size=1, max_size=60)


@given(sizes, st.integers(16, 300), st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_conversation_once(
    lengths: list[int], batch_tokens: int, seed: int, epoch: int
) -> None:
    sampler = BatchSampler(lengths, batch_tokens, seed)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert Counter(number for batch in batches for number in batch) == Counter(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[number] for number in batch)
        assert padded <= batch_tokens or len(batch) == 1
    again = BatchSampler(lengths, batch_tokens, seed)
    again.set_epoch(epoch)
    assert list(again) == batches


def test_the_order_follows_from_seed_and_epoch() -> None:
    lengths = [5 + n % 7 for n in range(90)]
    orders = set()
    for seed in range(3):
        sampler = BatchSampler(lengths, 40, seed)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders.add(str(list(sampler)))
    assert len(orders) == 9
    in_order = BatchSampler(lengths, 40)
    flat = [lengths[number] for batch in in_order for number in batch]
    assert flat == sorted(flat)


@given(sizes, st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_as_many_batches_for_every_process(lengths: list[int], processes: int) -> None:
    whole, cut = (list(BatchSampler(lengths, 64, 1, multiple_of=n)) for n in (1, processes))
    assert len(cut) % processes == 0
    assert len(whole) - len(cut) < processes
    assert cut == whole[: len(cut)]


@pytest.mark.parametrize("length", [8, 12, 30])
def test_long_conversations_are_cut(length: int, tmp_path: Path) -> None:
    """Those without anything to learn in their first tokens are left out."""
    talks = [
        Conversation(tuple(range(20)), ((4, 7), (11, 20))),
        Conversation(tuple(range(20)), ((10, 20),)),
        Conversation(tuple(range(3)), ((0, 3),)),
        Conversation(tuple(range(6)), ((0, 2),)),  # drafts begin after the second token
    ]
    cache = computed(Target(tiny_model()), talks, (0,), tmp_path / "cache")
    data = TrainingSet(cache, length)
    kept = [0, 1, 2] if length > 10 else [0, 2]
    assert data.sizes == [min(length, len(talks[number].tokens)) for number in kept]
    first = data[0]
    assert len(first.tokens) == len(first.hidden) == len(first.top_tokens) == data.sizes[0]
    assert first.tokens.tolist() == list(range(20))[:length]
    assert first.answers[0] == (4, 7)
    if length == 12:
        assert first.answers[1] == (11, 12)
    assert collate([data[n] for n in range(len(data))], LEVELS).levels.valid[:, 0].any(-1).all()
