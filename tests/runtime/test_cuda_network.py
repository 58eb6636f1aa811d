"""Passes through graphs are the passes without: whatever the bucket, the rows and the slab do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from tests.runtime.on_device import graphs_of, use_cuda_runtime
from tests.runtime.tape import Tape
from tests.runtime.test_lean import FAMILY, model_of
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.cuda import cuda_network
from tokenleap.runtime.cuda.buckets import Bucket, Buckets, doubled
from tokenleap.runtime.cuda.decoder import decoder_for
from tokenleap.runtime.cuda.graphs import Uncaptured
from tokenleap.runtime.cuda.network import CudaNetwork
from tokenleap.runtime.cuda.slab import StaticSlab
from tokenleap.runtime.kv_slab import SlabFull
from tokenleap.runtime.lean import LeanDecoder
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.network import Need, PassOutput
from tokenleap.runtime.target import Target

TREE = TokenTree((5, 3, 5, 8, 9, 7), (-1, 0, 0, 1, 3, 2))


def close(found: list[PassOutput], expected: list[PassOutput]) -> bool:
    return all(
        torch.allclose(a.scores, b.scores, atol=2e-4, rtol=1e-4)
        for a, b in zip(found, expected, strict=True)
    )


def targets(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, **slab: int
) -> tuple[Target, Target]:
    """One on graphs, and the oracle: the Transformers module."""
    plain = Target(model).with_network(ModuleNetwork.sharing(model))
    use_cuda_runtime(monkeypatch, **slab)
    return Target(model), plain


def both(ours: Target, oracle: Target, *work: tuple[int, TokenTree]) -> None:
    keys, trees = [key for key, _ in work], [tree for _, tree in work]
    assert close(ours.verify(keys, trees), oracle.verify(keys, trees))


# Passes


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in (*FAMILY, "lean")])
def test_modules_run_in_graphs(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    ours, oracle = targets(monkeypatch, tiny_model(architecture))
    check_a_life(ours, oracle)


@pytest.mark.parametrize("name", FAMILY)
def test_lean_decoders_run_in_graphs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = model_of(name)
    ours, oracle = targets(monkeypatch, model)
    assert isinstance(ours.network, CudaNetwork)
    assert isinstance(ours.network.inner, LeanDecoder)
    check_a_life(ours, oracle)


def check_a_life(ours: Target, oracle: Target) -> None:
    """Rows join, advance by trees and chains, alone and together, and leave."""
    for key, prompt in enumerate([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8], [9, 7, 9]]):
        for target in (ours, oracle):
            target.add(key)
            target.prefill(key, prompt)
    both(ours, oracle, (0, TREE), (1, chain([4, 4])), (2, chain([6])))
    for target in (ours, oracle):
        target.commit(0, [0, 1, 3])
        target.commit(1, [0, 1])
        target.commit(2, [0])
    both(ours, oracle, (1, TREE))  # one row, and not the first
    both(ours, oracle, (2, chain([7, 1, 2])), (0, TREE))  # a row between them has nothing to do
    for target in (ours, oracle):
        target.commit(2, [0, 1])
        target.remove(0)  # the last row takes its place
    both(ours, oracle, (2, chain([8])), (1, chain([3, 3, 3, 3])))
    assert graphs_of(ours) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_16_bits_graphs_have_the_bits_of_their_operations(dtype: torch.dtype) -> None:
    model = tiny_model("lean", dtype=dtype)
    targets = []
    for capture in (Tape(), Uncaptured()):
        target = Target(model, runtime="torch").with_network(cuda_network(model, capture))
        target._slab = StaticSlab()
        target.add(0)
        target.prefill(0, [3, 1, 4, 1, 5])
        targets.append(target)
    for tree in (TREE, chain([1, 2]), TREE):
        graphs, eager = (target.verify([0], [tree])[0].scores for target in targets)
        assert graphs.dtype == dtype
        assert torch.equal(graphs, eager)
        for target in targets:
            target.commit(0, [0, 1])


def test_a_tree_grown_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, oracle = targets(monkeypatch, tiny_model("lean"))
    for target in (ours, oracle):
        for key in range(2):
            target.add(key)
            target.prefill(key, [3, 1, 4, 1, 5][: 2 + 3 * key])
    grown = [[chain([5]), chain([6])], [TREE, TokenTree((6, 1, 2, 3), (-1, 0, 0, 2))]]
    for trees, computed in zip(grown, ([0, 0], [1, 1]), strict=True):
        assert close(ours.verify([0, 1], trees, computed), oracle.verify([0, 1], trees, computed))


@pytest.mark.parametrize("seed", range(4))
def test_random_passes(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    dice = random.Random(seed)
    ours, oracle = targets(monkeypatch, tiny_model("lean"), rows=1, positions=KEY_BLOCK)
    for key in range(5):
        prompt = [dice.randrange(VOCAB_SIZE) for _ in range(dice.randrange(1, 20))]
        for target in (ours, oracle):
            target.add(key)
            target.prefill(key, prompt)
    for _ in range(12):
        keys = dice.sample(range(5), dice.randrange(1, 6))
        trees = [random_tree(dice) for _ in keys]
        both(ours, oracle, *zip(keys, trees, strict=True))
        for key, tree in zip(keys, trees, strict=True):
            path = (0, *tree.path(dice.randrange(len(tree))))
            ours.commit(key, path)
            oracle.commit(key, path)


def random_tree(dice: random.Random) -> TokenTree:
    size = dice.randrange(1, 8)
    tokens = tuple(dice.randrange(VOCAB_SIZE) for _ in range(size))
    return TokenTree(tokens, (-1, *(dice.randrange(node) for node in range(1, size))))


def test_equal_shapes_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lean")
    tape = use_cuda_runtime(monkeypatch)
    target = Target(model)
    target.add(0)
    target.prefill(0, [1, 2, 3])
    before = tape.num_captures
    for nodes in (13, 16, 14):  # one bucket
        target.verify([0], [chain([7] * nodes)])
    assert tape.num_captures == before + 1


def test_more_places_than_a_graph_may_have_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, oracle = targets(monkeypatch, tiny_model("lean"))
    for target in (ours, oracle):
        target.add(0)
    before = graphs_of(ours)
    both(ours, oracle, (0, chain([7] * 100)))
    assert graphs_of(ours) == before


def test_a_slab_that_moves_takes_its_graphs_along(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lean", max_position_embeddings=4 * KEY_BLOCK)
    ours, oracle = targets(monkeypatch, model, rows=1, positions=KEY_BLOCK)
    for target in (ours, oracle):
        target.add(0)
        target.prefill(0, [i % 90 for i in range(KEY_BLOCK - 8)])
    for _ in range(4):  # across the border of the first block
        both(ours, oracle, (0, chain([1, 2, 3, 4, 5])))
        for target in (ours, oracle):
            target.commit(0, range(4))
    for target in (ours, oracle):
        target.add(1)  # rows, too
    both(ours, oracle, (1, TREE), (0, TREE))


def test_parts_of_a_network_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lean")
    ours, oracle = targets(monkeypatch, model)
    parts = [
        (ours.network.first_layers(1), oracle.network.first_layers(1)),
        (ours.network.without([0], [1]), oracle.network.without([0], [1])),
    ]
    for target in (ours, oracle):
        target.add(0)
        target.prefill(0, [3, 1, 4])
    for part, other in parts:
        both(ours.with_network(part), oracle.with_network(other), (0, TREE))
    both(ours, oracle, (0, TREE))
    assert ours.network.num_layers == 2


# Whole generations


CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix", "branching": True},
    "lookahead": {"method": "lookahead"},
    "early_exit": {"method": "early_exit", "exit_layer": 1},
    "layer_skip": {"method": "layer_skip"},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("method", CONFIGS)
def test_outputs_are_those_of_the_cpu_runtime(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    model = tiny_model("lean")
    config = dict(CONFIGS[method])
    if method == "draft_model":
        config["model"] = tiny_model("lean", seed=1)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8]]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.3, seed=4, max_tokens=17, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, top_k=5, max_tokens=20, ignore_eos=True),
    ]
    expected = LLM(model).generate(prompts, params)
    tape = use_cuda_runtime(monkeypatch, rows=1, positions=KEY_BLOCK)
    llm = LLM(model, speculative_config=config, max_num_seqs=2)
    found = llm.generate(prompts, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert tape.num_replays > 0


def test_torch_compile_takes_a_pass_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that only traces; a break in the graph would raise."""
    model = tiny_model("lean")
    oracle = Target(model).with_network(ModuleNetwork.sharing(model))
    use_cuda_runtime(monkeypatch)
    ours = Target(model).with_network(cuda_network(model, Uncaptured(), compiler="eager"))
    for target in (ours, oracle):
        for key in range(2):
            target.add(key)
            target.prefill(key, [3, 1, 4, 1, 5][key:])
    both(ours, oracle, (0, TREE), (1, chain([1, 2])))


# Parts


@pytest.mark.parametrize("architecture", ["lean", "gpt2", "phi"])
def test_captured_functions_leave_the_host_alone(architecture: str) -> None:
    """On the meta device, where an operation that takes a tensor of the host stands out."""
    device = torch.device("meta")
    model: Any = tiny_model(architecture).to(device)  # type: ignore[arg-type]
    slab, watch = StaticSlab(rows=2, positions=KEY_BLOCK), _Watch()
    with torch.inference_mode():
        network = CudaNetwork(decoder_for(model), device, watch)
        network._captured(Bucket(2, 3, 3, KEY_BLOCK), Need(hidden=(0, 2)), slab, torch.float32)
    assert watch.operations > 50


class _Watch:
    """Runs a function and looks where its tensors are."""

    operations = 0

    def capture(self, function: Any) -> Any:
        function()
        with _OnDevice() as mode:  # type: ignore[no-untyped-call]
            function()
        self.operations += mode.operations
        return function


class _OnDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, output)):
            on_host = isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.dim() > 0
            assert not on_host, f"{func} has a tensor on the host"
        self.operations += 1
        return output


def test_buckets_are_the_next_sizes() -> None:
    most = Bucket(6, 0, 0, 1536)
    buckets = Buckets()
    assert buckets.fit(Bucket(1, 1, 1, 512), most) == Bucket(1, 1, 1, 512)
    assert buckets.fit(Bucket(3, 5, 5, 1024), most) == Bucket(4, 6, 6, 1024)
    assert buckets.fit(Bucket(5, 2, 9, 1536), most) == Bucket(6, 2, 12, 1536)  # what there is
    assert buckets.fit(Bucket(4, 64, 64, 512), most) == Bucket(4, 64, 64, 512)
    assert buckets.fit(Bucket(16, 64, 64, 512), Bucket(16, 0, 0, 512)) is None  # 1024 places
    assert buckets.fit(Bucket(1, 65, 65, 512), most) is None
    assert buckets.fit(Bucket(1, 2, 65, 512), most) is None
    assert buckets.fit(Bucket(65, 1, 1, 512), Bucket(128, 0, 0, 512)) is None
    assert [doubled(n) for n in (1, 512, 513, 1500)] == [512, 512, 1024, 2048]


def test_a_slab_within_its_limit_grows_by_what_is_needed() -> None:
    slab = StaticSlab(rows=1, positions=KEY_BLOCK)
    slab.add_row()
    slab.limit = 3 * KEY_BLOCK
    slab.begin(0, [2 * KEY_BLOCK], [1], 1)  # four blocks would be over the limit
    assert slab.positions == slab.scratch == 3 * KEY_BLOCK
    version = slab.version
    with pytest.raises(SlabFull):
        slab.begin(0, [3 * KEY_BLOCK], [1], 1)
    slab.begin(0, [3 * KEY_BLOCK - 1], [1], 1)
    slab.shrink()
    assert slab.version == version
    slab.limit = KEY_BLOCK
    slab.shrink()
    assert slab.positions == KEY_BLOCK


def test_scratch_is_behind_all_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_runtime(monkeypatch, rows=2, positions=KEY_BLOCK)
    target = Target(tiny_model("lean"))
    slab = target._slab
    for key in range(2):
        target.add(key)
        target.prefill(key, [1, 2, 3])
    with torch.inference_mode():
        for buffer in slab._keys.values():
            buffer[:, :, KEY_BLOCK] = 0  # the construction-time check wrote there, too
    before = [buffer.clone() for buffer in slab._keys.values()]
    target.verify([0], [chain([4, 5, 6, 7, 8])])  # six places, five nodes
    for old, new in zip(before, slab._keys.values(), strict=True):
        changed = (old != new).any(dim=(1, 3)).nonzero().tolist()
        assert changed == [[0, slot] for slot in (3, 4, 5, 6, 7, KEY_BLOCK)]
