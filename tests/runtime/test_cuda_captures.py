"""Captures that fail change no token; passes that no graph can serve run without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.on_device import use_capture, use_cuda_runtime
from tests.runtime.tape import Tape
from tests.runtime.test_cuda_network import TREE, both
from tests.tiny import tiny_model
from tokenleap import LLM, CompatibilityError, SamplingParams
from tokenleap.core.tree import chain
from tokenleap.errors import in_one_line
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.cuda import cuda_network, eager_network
from tokenleap.runtime.cuda.buckets import Bucket
from tokenleap.runtime.cuda.decoder import decoder_for
from tokenleap.runtime.cuda.inputs import StaticInputs
from tokenleap.runtime.cuda.network import CudaNetwork
from tokenleap.runtime.inputs import PassInputs, RowNodes
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.target import Target
from tokenleap.tuning.tune_layers import LayerLaboratory, Sublayer

CPU = torch.device("cpu")
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "controller": "fixed"}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.3, seed=4, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.1, seed=5, max_tokens=20, ignore_eos=True),
]
ERRORS = {
    "waits": RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors"),
    "memory": torch.OutOfMemoryError("CUDA out of memory."),
}


class Failing(Tape):
    """Fails once it has captured `left` more functions, after what a capture runs first."""

    def __init__(self, error: Exception, left: int = 0) -> None:
        super().__init__()
        self.left, self.failures = left, 0
        self._error = error

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.left -= 1
        if self.left >= 0:
            return super().capture(function)
        function()
        self.failures += 1
        raise self._error


# Captures that fail


@pytest.mark.parametrize("architecture", ["lean", "gpt2"])
@pytest.mark.parametrize("reason", ERRORS)
def test_what_cannot_be_captured_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, architecture: str, reason: str
) -> None:
    model = tiny_model(architecture)
    oracle = Target(model).with_network(ModuleNetwork.sharing(model))
    use_capture(monkeypatch, tape := Failing(ERRORS[reason]))
    with pytest.warns(RuntimeWarning, match="not permitted when|out of memory") as told:
        ours = Target(model)
    assert len(told) == 1
    network = ours.network
    assert isinstance(network, CudaNetwork)
    assert network.failure == in_one_line(ERRORS[reason])
    assert network.name == network.inner.name == {"lean": "lean", "gpt2": "module"}[architecture]
    for part in (network, network.first_layers(1), network.without([0], [])):
        assert part.capture is None
    for target in (ours, oracle):
        for key in range(2):
            target.add(key)
            target.prefill(key, [3, 1, 4][: key + 1])
    both(ours, oracle, (0, TREE), (1, chain([2, 2])))
    assert tape.failures == 1


def test_the_pass_that_was_to_be_captured_is_computed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two rows, after the first, with graphs that had been captured before."""
    model = tiny_model("lean")
    oracle = Target(model).with_network(ModuleNetwork.sharing(model))
    use_capture(monkeypatch, tape := Failing(ERRORS["memory"], left=99))
    ours = Target(model)
    for target in (ours, oracle):
        for key in range(3):
            target.add(key)
            target.prefill(key, [3, 1, 4, 1][: key + 1])
    tape.left = 1
    both(ours, oracle, (1, chain([7] * 9)), (2, TREE))
    with pytest.warns(RuntimeWarning, match="out of memory"):
        both(ours, oracle, (1, chain([7] * 13)), (2, TREE))
    for target in (ours, oracle):
        target.commit(1, [0, 1])
        target.commit(2, [0, 1, 3])
    both(ours, oracle, (1, TREE), (0, chain([2])), (2, chain([5, 5])))
    assert tape.failures == 1
    assert isinstance(ours.network, CudaNetwork)
    assert ours.network.num_graphs == 0


@pytest.mark.parametrize("reason", ERRORS)
def test_graphs_that_were_asked_for_are_an_error_without(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    use_capture(monkeypatch, Failing(ERRORS[reason]), required=True)
    with pytest.raises(CompatibilityError, match=r"runtime: cuda needs .* take 'auto' or 'torch'"):
        LLM(tiny_model("lean"))


def test_faults_of_the_module_are_not_taken_for_failed_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tape = Failing(CompatibilityError("attention with 'softcap' is not supported."))
    use_capture(monkeypatch, tape)
    with pytest.raises(CompatibilityError, match="softcap"):
        Target(tiny_model("lean"))


@pytest.mark.parametrize("captures", [0, 1, 2, 4])
def test_generation_goes_on_without_graphs(monkeypatch: pytest.MonkeyPatch, captures: int) -> None:
    expected = LLM(tiny_model("lean")).generate(PROMPTS, PARAMS)
    tape = Failing(ERRORS["memory"], left=99)
    use_capture(monkeypatch, tape)
    llm = LLM(tiny_model("lean"), speculative_config=NGRAM, max_num_seqs=2)
    assert llm.runtime == "cuda"
    tape.left = captures
    with pytest.warns(RuntimeWarning, match="out of memory"):
        found = llm.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert llm.runtime == "lean"
    again = llm.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]
    assert tape.failures == 1


def test_names_are_those_of_runtimes() -> None:
    model = tiny_model("lean")
    assert cuda_network(model, Tape()).name == "cuda"
    assert cuda_network(model, Tape(), compiler="eager").name == "compiled"
    assert CudaNetwork(decoder_for(model), CPU, None).name == "lean"
    part = cuda_network(model, Tape(), compiler="eager", required=True).first_layers(1)
    assert part.name == "compiled"


def test_parts_of_a_network_without_graphs_have_none_either() -> None:
    network = cuda_network(tiny_model("lean"), Tape(), compiler="eager")

    def fail() -> None:
        raise ERRORS["waits"]

    with pytest.warns(RuntimeWarning, match="not permitted"):
        network.attempt(fail)
    assert network.first_layers(1).name == network.name == "lean"


# Passes that are no graphs'


def test_graphs_refuse_nodes_that_do_not_see_all_that_is_committed() -> None:
    nodes = RowNodes(start=5, tokens=[1, 2], positions=[3, 4], prefixes=[3, 4], tails=[[5], [6]])
    inputs = PassInputs([nodes], 0, 2, KEY_BLOCK, torch.float32, CPU)
    static = StaticInputs(Bucket(1, 2, 4, KEY_BLOCK), CPU, KEY_BLOCK, torch.float32)
    static.load(inputs, [3])
    with pytest.raises(AssertionError, match="all nodes see what is committed"):
        static.load(inputs, [5])


def test_skip_sets_are_measured_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts have slabs of their own, and positions that see a part of them."""
    model = tiny_model("lean", num_hidden_layers=4, initializer_range=0.12)
    params = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=12)
    skip = frozenset([Sublayer("attention", 1), Sublayer("mlp", 2)])
    expected = LayerLaboratory(LLM(model))
    expected.calibrate(PROMPTS[:2], params)
    tape = use_cuda_runtime(monkeypatch)
    laboratory = LayerLaboratory(LLM(model))
    laboratory.calibrate(PROMPTS[:2], params)
    assert laboratory.positions == expected.positions
    assert laboratory.alpha(skip) == pytest.approx(expected.alpha(skip), abs=1e-4)
    assert laboratory.cost(skip) > 0
    captures: list[int] = []
    proceed = laboratory._continue

    def watched(*arguments: Any) -> Any:
        before = tape.num_captures
        request = proceed(*arguments)
        captures.append(tape.num_captures - before)
        return request

    monkeypatch.setattr(laboratory, "_continue", watched)
    laboratory.measure(skip, 2)
    assert captures[0] > 0  # before anything is measured
    assert captures[1:] == [0] * 4


def test_a_network_without_graphs_is_its_own() -> None:
    model = tiny_model("lean")
    plain = ModuleNetwork.sharing(model)
    assert eager_network(plain) is plain
    graphs = cuda_network(model, Tape())
    assert eager_network(graphs) is graphs.inner
