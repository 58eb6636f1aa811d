"""Batches hold what a draft from each place has to guess; checked against a search by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import tiny_model
from tests.training.world import computed, random_features
from tokenleap.runtime.target import Target
from tokenleap.training.batches import BatchSampler, TrainingSet, collate
from tokenleap.training.conversations import Conversation
from tokenleap.training.features import Features

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
