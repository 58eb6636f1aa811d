"""Noise and prompt lookup in tensor operations are those of the host."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretoken import SamplingParams
from foretoken.control import Budget
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.law import Law
from foretoken.noise import MAX_SEED, Noise, Stream
from foretoken.request import Request
from foretoken.runtime.cuda.lookup import look_up
from foretoken.runtime.cuda.philox import block_numbers, gumbel, signed, uniform

CPU = torch.device("cpu")
SEEDS = (0, 1, 2**32 - 1, 2**32, MAX_SEED, MAX_SEED + 7)


@pytest.mark.parametrize("size", [1, 4, 96, 101])
def test_the_raw_numbers_are_numpys(size: int) -> None:
    positions = [1, 255, 2**20]
    found = uniform(
        torch.tensor([[signed(seed)] * 3 for seed in SEEDS]),
        torch.tensor([positions] * len(SEEDS)),
        block_numbers(size, CPU),
        size,
    )
    assert found.shape == (len(SEEDS), 3, size)
    for row, seed in zip(found, SEEDS, strict=True):
        for numbers, position in zip(row, positions, strict=True):
            expected = Noise(seed, position)._uniform(Stream.TARGET, 0, size)
            assert numbers.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchInductor's own
def test_compiled_words_wrap_around_too() -> None:
    """TorchInductor takes what it can for indices, which do not; needs a C++ compiler on a CPU."""
    compiled: Callable[..., Tensor] = torch.compile(uniform, fullgraph=True, dynamic=False)
    seeds, positions = torch.tensor([3, 2**62 + 17]), torch.tensor([10, 13])
    arguments = (seeds, positions, block_numbers(96, CPU), 96)
    with torch.inference_mode():
        assert torch.equal(compiled(*arguments), uniform(*arguments))


def test_drawing_with_it_is_drawing_with_the_hosts() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 96, generator=generator)
    seeds = torch.full((200,), 12345)
    noise = gumbel(seeds, torch.arange(200), block_numbers(96, CPU), 96)
    found = (logits.softmax(-1).log() + noise).argmax(-1)
    laws = [Law.of(row.softmax(-1)) for row in logits]
    assert found.tolist() == [Noise(12345, t).draw(law, 0) for t, law in enumerate(laws)]


def test_words_wrap_around() -> None:
    assert [signed(x) for x in (0, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 3)] == [
        0,
        2**63 - 1,
        -(2**63),
        -1,
        3,
    ]


def host(tokens: list[int], length: int, shortest: int, longest: int) -> list[int]:
    options = NgramOptions(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    request = Request(tokens, SamplingParams(), vocab_size=100, max_model_len=10**6)
    (draft,) = NgramDrafter(options).propose([request], [Budget(length, length)])
    return list(draft.tree.tokens[1:])


@pytest.mark.parametrize("seed", range(40))
def test_drafts_are_those_of_the_hosts_drafter(seed: int) -> None:
    dice = random.Random(seed)
    shortest = dice.randrange(1, 4)
    longest = shortest + dice.randrange(4)
    length, alphabet = dice.randrange(1, 9), dice.randrange(1, 7)
    texts = [
        [dice.randrange(alphabet) for _ in range(dice.randrange(1, 30))]
        for _ in range(dice.randrange(1, 6))
    ]
    room = max(len(text) for text in texts) + dice.randrange(4)
    # What is behind a text's end must not matter.
    buffer = torch.tensor(
        [text + [dice.randrange(alphabet) for _ in range(room - len(text))] for text in texts]
    )
    lengths = torch.tensor([len(text) for text in texts])
    drafts, known = look_up(buffer, lengths, length, shortest, longest)
    found = [draft if ok else [] for draft, ok in zip(drafts.tolist(), known.tolist(), strict=True)]
    assert found == [host(text, length, shortest, longest) for text in texts]
