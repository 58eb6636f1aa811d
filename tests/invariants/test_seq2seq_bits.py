"""Invariant 7 for encoder-decoders: bits do not depend on drafts, the batch or others' sources."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.tiny_seq2seq import NATIVE, SEQ2SEQ, tiny_seq2seq, wide_fields
from tests.tiny_seq2seq import tiny_source as source_of
from tokenleap.core.references import Source
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.attention import (
    SHORT_SPAN,
    attend_by_head,
    attend_grouped,
    padded_rows,
)
from tokenleap.runtime.network import Need
from tokenleap.runtime.target import Target

TEXT_TOKENS = [(7 * i + 3) % 90 for i in range(40)]
START, DRAFT = TEXT_TOKENS[:9], TEXT_TOKENS[9:35]
NARROW = 4
_IN_CPP = " in C++"
FORMATS: dict[str, tuple[torch.dtype, str | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, "int8"),
    "int4": (torch.bfloat16, "int4"),
}


def tiny_source(name: str = "bart", length: int = 9, seed: int = 1) -> Source:
    return source_of(name.removesuffix(_IN_CPP), length, seed)


_LEAN = [(name, form) for name in SEQ2SEQ for form in ("float32", "bfloat16")]
_NATIVE = [(name + _IN_CPP, form) for name in NATIVE for form in ("float32", "bfloat16")]
_QUANTIZED = [(name + _IN_CPP, form) for name in ("bart", "t5") for form in ("int8", "int4")]


@pytest.fixture(
    scope="module",
    params=[*_LEAN, *_NATIVE, *_QUANTIZED],
    ids=lambda found: "-".join(found),
)
def whole(request: pytest.FixtureRequest) -> tuple[str, Target]:
    name, form = request.param
    dtype, quantization = FORMATS[form]
    runtime = "native" if name.endswith(_IN_CPP) else "lean"
    base = name.removesuffix(_IN_CPP)
    sizes = wide_fields(base) if runtime == "native" else {}
    model = tiny_seq2seq(base, dtype=dtype, **sizes)
    target = Target(model, quantization=quantization, runtime=runtime)
    assert target.bit_exact
    return name, target


@pytest.fixture
def name(whole: tuple[str, Target]) -> str:
    return whole[0]


@pytest.fixture
def target(whole: tuple[str, Target]) -> Iterator[Target]:
    target = whole[1]
    yield target
    for key in range(3):
        if key in target:
            target.remove(key)


def open_row(target: Target, key: int, source: Source, tokens: list[int] = START) -> None:
    target.add(key)
    target.encode(key, source)
    target.prefill(key, tokens)


def logits(target: Target, tokens: list[int], key: int = 0, need: Need | None = None) -> Tensor:
    """[n, V] of these tokens after the row's committed ones, in a pass of its own."""
    (output,) = target.verify([key], [chain(tokens)], need=need or Need())
    return output.scores.clone()


def test_passes_over_any_number_of_nodes(name: str, target: Target) -> None:
    open_row(target, 0, tiny_source(name))
    wide = logits(target, DRAFT)
    assert torch.equal(logits(target, DRAFT[:NARROW]), wide[:NARROW])
    assert torch.equal(logits(target, DRAFT[:1]), wide[:1])
    assert torch.equal(logits(target, DRAFT, need=Need(last=1)), wide[-1:])
    target.verify([0], [chain(DRAFT[:NARROW])])
    target.commit(0, range(NARROW))
    assert torch.equal(logits(target, DRAFT[NARROW:]), wide[NARROW:])
    target.rollback(0, 0)
    assert torch.equal(logits(target, [*START, *DRAFT])[len(START) :], wide)


def test_passes_that_read_more_keys(name: str, target: Target) -> None:
    """The nodes of a short text read 128 slots, and those of a longer one 512."""
    open_row(target, 0, tiny_source(name), (TEXT_TOKENS * 3)[:110])
    wide = logits(target, DRAFT)
    assert torch.equal(logits(target, DRAFT[:NARROW]), wide[:NARROW])


def test_beside_other_rows(name: str, target: Target) -> None:
    """Whose texts and sources are padded to the same number of keys, and to a larger one."""
    open_row(target, 0, tiny_source(name))
    alone = logits(target, DRAFT[:NARROW])
    for key, length in ((1, 60), (2, 200)):
        open_row(target, key, tiny_source(name, length, seed=key), (TEXT_TOKENS * 5)[:length])
        keys = list(range(key + 1))
        outputs = target.verify(keys, [chain(DRAFT[:NARROW]), *[chain([5])] * key])
        assert torch.equal(outputs[0].scores, alone)


def test_a_long_source_beside_a_short_one(name: str, target: Target) -> None:
    open_row(target, 0, tiny_source(name, length=130))
    alone = logits(target, DRAFT[:1])
    open_row(target, 1, tiny_source(name, length=3))
    assert torch.equal(target.verify([0, 1], [chain(DRAFT[:1])] * 2)[0].scores, alone)


def test_a_source_that_is_read_again(name: str, target: Target) -> None:
    open_row(target, 0, tiny_source(name))
    open_row(target, 1, tiny_source(name))
    pairs = zip(target.row_state(0), target.row_state(1), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    alone = logits(target, DRAFT[:1])
    target.remove(0)
    assert torch.equal(logits(target, DRAFT[:1], key=1), alone)


def test_trees_in_cpp_have_the_bits_of_chains(name: str, target: Target) -> None:
    if not target.exact_trees:
        assert not name.endswith(_IN_CPP)
        return
    open_row(target, 0, tiny_source(name))
    tree = TokenTree((7, 8, 9, 10, 11, 12), (-1, 0, 0, 2, 1, 3))
    (output,) = target.verify([0], [tree])
    found = output.scores.clone()
    for leaf in (4, 5):
        nodes = [0, *tree.path(leaf)]
        assert torch.equal(found[nodes], logits(target, [tree.tokens[node] for node in nodes]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nodes", [1, 4, 7])
def test_attention_by_head_and_grouped(nodes: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, nodes, 4, 16, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, 4, SHORT_SPAN, 16, generator=generator).to(dtype)
    mask = torch.zeros(2, 1, padded_rows(nodes), SHORT_SPAN, dtype=dtype)
    mask[..., 50:] = -torch.inf
    by_head = attend_by_head(query, keys, values, mask, 0.25)
    assert torch.equal(by_head, attend_grouped(query, keys, values, mask, 0.25))
