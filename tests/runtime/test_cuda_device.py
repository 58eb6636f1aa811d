"""On a GPU: graphs against the same operations launched one by one, bit for bit.

The other tests replace CUDA's capture and replay by a stand-in (`tests/runtime/tape.py`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.runtime.test_cuda_network import random_tree
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.cuda.decoder import decoder_for
from tokenleap.runtime.cuda.graphs import Capture, CudaGraphs, Uncaptured
from tokenleap.runtime.cuda.network import CudaNetwork
from tokenleap.runtime.cuda.slab import StaticSlab
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.network import Need
from tokenleap.runtime.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICE = torch.device("cuda")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "controller": "fixed"}


def model_on_gpu(architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    model = tiny_model(architecture, dtype=dtype, max_position_embeddings=3 * KEY_BLOCK)
    model.to(DEVICE)  # type: ignore[arg-type]
    return model


def target_on_gpu(model: PreTrainedModel, capture: Capture | None) -> Target:
    network = CudaNetwork(decoder_for(model), model.device, capture)
    target = Target(model, runtime="torch").with_network(network)
    target._slab = StaticSlab(rows=1, positions=KEY_BLOCK)
    return target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["lean", "qwen3", "gpt2"])
def test_graphs_have_the_bits_of_their_operations(architecture: str, dtype: torch.dtype) -> None:
    """The slab moves on the way, and graphs are captured anew."""
    model, dice = model_on_gpu(architecture, dtype), random.Random(0)
    targets = [target_on_gpu(model, CudaGraphs(model.device)), target_on_gpu(model, Uncaptured())]
    need = Need(hidden=(0, 2))
    for key in range(4):
        prompt = [dice.randrange(VOCAB_SIZE) for _ in range(dice.choice([3, 20, KEY_BLOCK - 9]))]
        for target in targets:
            target.add(key)
            target.prefill(key, prompt)
    for _ in range(20):
        keys = dice.sample(range(4), dice.randrange(1, 5))
        trees = [random_tree(dice) for _ in keys]
        graphs, eager = (target.verify(keys, trees, need=need) for target in targets)
        for ours, theirs in zip(graphs, eager, strict=True):
            assert torch.equal(ours.scores, theirs.scores)
            assert all(torch.equal(ours.hidden[k], theirs.hidden[k]) for k in need.hidden)
        for key, tree in zip(keys, trees, strict=True):
            path = (0, *tree.path(dice.randrange(len(tree))))
            for target in targets:
                target.commit(key, path)


@pytest.mark.parametrize("architecture", ["lean", "gpt2"])
def test_passes_in_graphs_are_the_modules(architecture: str) -> None:
    model, dice = model_on_gpu(architecture, torch.float32), random.Random(1)
    ours = target_on_gpu(model, CudaGraphs(model.device))
    oracle = Target(model, runtime="torch").with_network(ModuleNetwork.sharing(model))
    for key in range(3):
        for target in (ours, oracle):
            target.add(key)
            target.prefill(key, [1 + key, 2, 3])
    for _ in range(5):
        trees = [random_tree(dice) for _ in range(3)]
        pairs = zip(ours.verify(range(3), trees), oracle.verify(range(3), trees), strict=True)
        assert all(torch.allclose(a.scores, b.scores, atol=1e-3, rtol=1e-3) for a, b in pairs)


def generated(model: PreTrainedModel, runtime: str) -> list[tuple[int, ...]]:
    """Greedy and sampled outputs of a batch under `ngram`."""
    llm = LLM(model, runtime=runtime, speculative_config=NGRAM, max_num_seqs=3)
    prompts = [[1, 2, 3, 1, 2 + index] for index in range(4)]
    params = [
        SamplingParams(temperature=0.3 * index, seed=index, max_tokens=40, ignore_eos=True)
        for index in range(4)
    ]
    return [output.token_ids for output in llm.generate(prompts, params)]


def test_generation_in_graphs_is_that_of_single_operations() -> None:
    """In float32, where another shape of a pass hardly ever changes a token."""
    model = model_on_gpu("lean", torch.float32)
    assert generated(model, "cuda") == generated(model, "torch")


def test_a_capture_that_fails_leaves_the_device_as_it_was() -> None:
    """The function reads a number from the device, which no capture allows."""
    source, graphs = torch.arange(3, device=DEVICE), CudaGraphs(DEVICE)

    def run() -> None:
        source.add_(int(source.sum()) * 0)

    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        graphs.capture(run)
    assert torch.cuda.current_stream() == stream
    assert source.tolist() == [0, 1, 2]


def test_passes_go_on_where_captures_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model, dice = model_on_gpu("gpt2", torch.float32), random.Random(2)
    eager, ours = target_on_gpu(model, None), target_on_gpu(model, CudaGraphs(model.device))
    network = ours.network
    assert isinstance(network, CudaNetwork)
    forward = ModuleNetwork.forward

    def waiting(self: ModuleNetwork, inputs: PassInputs, *rest: Any) -> Any:
        assert int(inputs.tokens.sum()) >= 0
        return forward(self, inputs, *rest)

    monkeypatch.setattr(ModuleNetwork, "forward", waiting)
    for target in (eager, ours):
        target.add(0)
        target.prefill(0, [1, 2, 3])
    tree = random_tree(dice)
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        found = ours.verify([0], [tree])
    assert torch.equal(found[0].scores, eager.verify([0], [tree])[0].scores)
    assert network.name == "module"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchInductor's own
def test_inductor_keeps_the_output() -> None:
    model = model_on_gpu("lean", torch.float32)
    assert generated(model, "compiled") == generated(model, "torch")
