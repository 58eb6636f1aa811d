"""On a GPU: graphs against the same operations launched one by one, bit for bit.

The one part of the runtime that the other tests stand in for (`tests/runtime/tape.py`).
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foretoken.control import Fixed
from foretoken.core.acceptance.coupled import Coupled
from foretoken.core.noise import Noise, Stream
from foretoken.core.params import SamplingParams
from foretoken.decode import step
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.engine.scheduler import Engine
from foretoken.request import Request
from foretoken.runtime.attention import KEY_BLOCK
from foretoken.runtime.cuda.decoder import decoder_for
from foretoken.runtime.cuda.graphs import Capture, CudaGraphs, Uncaptured
from foretoken.runtime.cuda.network import CudaNetwork
from foretoken.runtime.cuda.philox import block_numbers, signed, uniform
from foretoken.runtime.cuda.slab import StaticSlab
from foretoken.runtime.cuda.step import DeviceStep
from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.module import ModuleNetwork
from foretoken.runtime.target import Target
from tests.runtime.test_cuda_network import random_tree
from tests.tiny import VOCAB_SIZE, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICE = torch.device("cuda")


def model_on_gpu(architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    model = tiny_model(architecture, dtype=dtype, max_position_embeddings=3 * KEY_BLOCK)
    model.to(DEVICE)  # type: ignore[arg-type]
    return model


def target_on_gpu(
    model: PreTrainedModel, capture: Capture | None, compiler: str | None = None
) -> Target:
    network = CudaNetwork(decoder_for(model), model.device, capture, compiler)
    target = Target(model, runtime="torch").with_network(network)
    target._slab = StaticSlab(rows=1, positions=KEY_BLOCK)
    return target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_graphs_have_the_bits_of_their_operations(architecture: str, dtype: torch.dtype) -> None:
    """The slab moves on the way, and graphs are captured anew."""
    model, dice = model_on_gpu(architecture, dtype), random.Random(0)
    targets = [target_on_gpu(model, CudaGraphs(model.device)), target_on_gpu(model, Uncaptured())]
    for key in range(4):
        prompt = [dice.randrange(VOCAB_SIZE) for _ in range(dice.choice([3, 20, KEY_BLOCK - 9]))]
        for target in targets:
            target.add(key)
            target.prefill(key, prompt)
    for _ in range(20):
        keys = dice.sample(range(4), dice.randrange(1, 5))
        trees = [random_tree(dice) for _ in keys]
        graphs, eager = (target.verify(keys, trees) for target in targets)
        assert all(torch.equal(a, b) for a, b in zip(graphs, eager, strict=True))
        for key, tree in zip(keys, trees, strict=True):
            path = (0, *tree.path(dice.randrange(len(tree))))
            for target in targets:
                target.commit(key, path)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
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
        assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in pairs)


def generated(target: Target, *, on_device: bool) -> list[list[int]]:
    """Greedy and sampled outputs of a batch under `ngram`."""
    advance = DeviceStep(target) if on_device else step
    drafter = NgramDrafter(NgramOptions(prompt_lookup_min=1))
    engine = Engine(target, drafter, Coupled(), Fixed(4), max_num_seqs=3, step=advance)
    requests = [
        Request(
            [1, 2, 3, 1, 2 + index],
            SamplingParams(temperature=0.3 * index, seed=index, max_tokens=40, ignore_eos=True),
            vocab_size=VOCAB_SIZE,
            max_model_len=target.most_tokens,
        )
        for index in range(4)
    ]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    if isinstance(advance, DeviceStep):
        assert advance.num_steps > 0
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_in_graphs_are_their_operations(dtype: torch.dtype) -> None:
    model = model_on_gpu("llama", dtype)
    captures = (CudaGraphs(model.device), Uncaptured())
    graphs, eager = (generated(target_on_gpu(model, c), on_device=True) for c in captures)
    assert graphs == eager


def test_steps_on_the_device_are_the_hosts() -> None:
    """In float32, where another shape of a pass hardly ever changes a token."""
    model = model_on_gpu("llama", torch.float32)
    ours = generated(target_on_gpu(model, CudaGraphs(model.device)), on_device=True)
    assert ours == generated(target_on_gpu(model, None), on_device=False)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch's own
def test_a_step_does_not_wait_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that goes on as it is: nothing between the replay and the fetch is synchronous."""
    target = target_on_gpu(model_on_gpu("llama", torch.float32), CudaGraphs(DEVICE))
    device_step = DeviceStep(target)
    show = device_step._rows.show
    replays: list[int] = []

    def strict_show(batch: object) -> None:
        if replays:  # the first step sends the rows
            torch.cuda.set_sync_debug_mode("error")
        show(batch)  # type: ignore[arg-type]
        replays.append(1)

    request = Request(
        [1, 2, 3] * 3,
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        vocab_size=VOCAB_SIZE,
        max_model_len=target.most_tokens,
    )
    engine = Engine(
        target, NgramDrafter(NgramOptions()), Coupled(), Fixed(4), max_num_seqs=1, step=device_step
    )
    engine.add(request)
    engine.step()
    monkeypatch.setattr(device_step._rows, "show", strict_show)
    try:
        for _ in range(4):
            engine.step()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(replays) == 4


def test_a_capture_that_fails_leaves_the_device_as_it_was() -> None:
    """The function looks at the device, which nothing can do that is to be replayed."""
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

    def waiting(self: ModuleNetwork, inputs: PassInputs, *rest: Any, **scored: Any) -> Any:
        assert int(inputs.tokens.sum()) >= 0
        return forward(self, inputs, *rest, **scored)

    monkeypatch.setattr(ModuleNetwork, "forward", waiting)
    for target in (eager, ours):
        target.add(0)
        target.prefill(0, [1, 2, 3])
    tree = random_tree(dice)
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        found = ours.verify([0], [tree])
    assert torch.equal(found[0], eager.verify([0], [tree])[0])
    assert network.name == "module"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchInductor's own
def test_inductor_keeps_passes_and_noise() -> None:
    model = model_on_gpu("llama", torch.float32)
    compiled = target_on_gpu(model, CudaGraphs(model.device), "inductor")
    ours = generated(compiled, on_device=True)
    assert ours == generated(target_on_gpu(model, None), on_device=False)


def test_noise_is_the_hosts() -> None:
    seeds, position = [0, 1, 2**63 + 5], 777
    words = torch.tensor([signed(seed) for seed in seeds], device=DEVICE)
    places = torch.full_like(words, position)
    found = uniform(words, places, block_numbers(101, DEVICE), 101).cpu()
    for row, seed in zip(found, seeds, strict=True):
        assert row.tolist() == Noise(seed, position)._uniform(Stream.TARGET, 0, 101).tolist()
