"""Passes of one shape: equal bits also where kernels are chosen by shape."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix import PROMPTS, speculative_config
from tests.tiny import tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.kv_slab import whole_blocks
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.network import Need
from tokenleap.runtime.passes import Bucket
from tokenleap.runtime.target import Target

LENGTH = 200
BUCKET = Bucket(rows=2, nodes=8)


@pytest.fixture(autouse=True)
def kernels_chosen_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers that sum in another order for another number of nodes, as on a GPU.

    The runtime "compiled" leaves linear layers to PyTorch; its compiler is left out.
    """

    def by_shape(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        nodes = x.numel() // x.shape[-1]
        order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(nodes))
        parts = zip(
            torch.split(x[..., order], 7, -1), torch.split(weight[:, order], 7, -1), strict=True
        )
        # Each row alone, so that its bits do not depend on its place: the kernel of one shape.
        total = sum((part[..., None, :] * own).sum(-1) for part, own in parts)
        assert isinstance(total, Tensor)
        return total if bias is None else total + bias

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        return by_shape(x, layer.weight, layer.bias)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)


Shapes = dict[ModuleNetwork, set[tuple[int, ...]]]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """By network, the shapes of its passes: rows, nodes and slots, and nodes that are computed."""
    found: Shapes = defaultdict(set)
    own = ModuleNetwork.forward

    def forward(network: ModuleNetwork, inputs: Any, slab: Any, need: Any) -> Any:
        computed = len(inputs.flat(inputs.tokens))
        found[network].add((*inputs.tokens.shape, inputs.mask.shape[-1], computed))
        return own(network, inputs, slab, need)

    monkeypatch.setattr(ModuleNetwork, "forward", forward)
    return found


def test_all_passes_have_one_shape_and_tokens_are_those_of_plain_decoding(
    shapes: Shapes,
) -> None:
    """Prompts, plain and speculative steps, of one sequence and of more than a bucket has rows."""
    llm = LLM(
        tiny_model(),
        runtime="compiled",
        batch_invariant=True,
        max_model_len=LENGTH,
        max_num_seqs=6,
        speculative_config={"method": "none"},
    )
    assert llm.bit_exact
    params = SamplingParams(temperature=1, seed=3, max_tokens=30, ignore_eos=True, logprobs=2)
    plain = [llm.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS]
    for method in ("ngram", "draft_model", "suffix"):
        config = speculative_config(method, num_speculative_tokens=9)
        outputs = llm.generate(PROMPTS, params, speculative_config=config)
        assert [output.token_ids for output in outputs] == [one.token_ids for one in plain]
        assert [output.logprobs for output in outputs] == [one.logprobs for one in plain]
    network = llm.engine.target.network
    assert isinstance(network, ModuleNetwork)
    assert shapes[network] == {(4, 32, whole_blocks(LENGTH + 32), 128)}


def test_without_it_these_kernels_are_not_bit_exact() -> None:
    assert not Target(tiny_model(), LENGTH, runtime="compiled").bit_exact


def bucket_target() -> Target:
    return Target(tiny_model(), LENGTH, runtime="compiled", bucket=BUCKET)


def test_long_trees_and_hidden_states_are_computed_in_parts() -> None:
    """They are those of a target whose passes have any shape, but for rounding."""
    branching = TokenTree(tuple(range(3, 17)), (-1, 0, 0, *range(1, 12)))
    trees = [chain(range(3, 24)), chain([5]), branching]
    outputs = []
    for target in (Target(tiny_model(), LENGTH, runtime="compiled"), bucket_target()):
        for key in range(3):
            target.add(key)
        states = target.prefill(1, list(range(1, 20)), hidden_layers=(1,))[1]
        found = target.verify([2, 0, 1], trees)
        scores = [each.scores for each in found]
        target.commit(2, range(9))
        target.commit(1, (0, 2, 4))
        after = target.verify([1, 2], [chain([7, 8]), chain([9])], need=Need(last=1))
        outputs.append([states, *scores, *(each.scores for each in after)])
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_memory_is_that_of_whole_buckets() -> None:
    target = bucket_target()
    positions = whole_blocks(LENGTH + BUCKET.nodes)
    target.add(0)
    target.prefill(0, [1, 2, 3])
    target.shrink()
    assert target.slab.cells == BUCKET.rows * positions
    target.limit_memory(3 * positions * target.cell_bytes)
    assert target.has_room(2, LENGTH)
    assert not target.has_room(3, 1)
    with pytest.raises(ConfigError, match="at least"):
        target.limit_memory(positions * target.cell_bytes)


def test_what_cannot_be_made_so_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompatibilityError, match="decoder-only"):
        LLM(tiny_seq2seq("bart"), batch_invariant=True, runtime="torch")
    monkeypatch.setattr("tokenleap.runtime.target.probe", lambda *_, **__: False)
    with pytest.raises(CompatibilityError, match="also in passes of one shape"):
        bucket_target()


def test_the_native_runtime_needs_no_bucket() -> None:
    llm = LLM(tiny_model(), batch_invariant=True)
    assert llm.engine.target.bucket is None
    assert llm.bit_exact
