"""PyTorch's networks on a GPU against those on the CPU, and compiled ones against others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.core.tree import TokenTree
from tokenleap.runtime.cpu import decoder_layers
from tokenleap.runtime.target import Target

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TREE = TokenTree((3, 5, 7, 9, 5), (-1, 0, 0, 1, 2))


def target_on(device: str, architecture: str, runtime: str) -> Target:
    model = tiny_model(architecture)
    model.to(torch.device(device))  # type: ignore[arg-type]
    made = Target(model, runtime=runtime)
    for key in range(3):
        made.add(key)
        made.prefill(key, [1 + key, *range(2, 3 + key)])
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchInductor
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # which would have other bits
@pytest.mark.parametrize(
    ("device", "runtime"),
    [
        *(pytest.param("cuda", each, marks=on_gpu) for each in ("lean", "module", "compiled")),
        pytest.param("cpu", "compiled", marks=pytest.mark.slow),
    ],
)
def test_trees_have_the_logits_of_the_cpu(device: str, runtime: str) -> None:
    """Also after a commit that moves KV, in rows of different lengths."""
    expected, found = (target_on(d, "lean", r) for d, r in (("cpu", "module"), (device, runtime)))
    for path in ((0, 2, 4), (0, 1)):
        pairs = zip(
            *(target.verify(range(3), [TREE] * 3) for target in (expected, found)), strict=True
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.scores, theirs.scores.cpu(), atol=1e-3, rtol=1e-3)
        for target in (expected, found):
            for key in range(3):
                target.commit(key, path)


def test_the_mlps_of_every_layer_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that changes nothing; the slow test has TorchInductor."""
    compiled: list[nn.Module] = []

    def note(module: nn.Module, **_: Any) -> None:
        compiled.append(module)

    monkeypatch.setattr(nn.Module, "compile", note)
    model = tiny_model("gpt2")
    target = Target(model, runtime="compiled")
    assert target.network.name == "compiled"
    assert [type(each) for each in compiled] == [type(layer.mlp) for layer in decoder_layers(model)]


@pytest.mark.gpu
@on_gpu[1]
@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("architecture", ["lean", "gpt2"])
def test_generation_is_that_of_the_cpu(architecture: str, method: str) -> None:
    """In float32, where another shape of a pass hardly ever changes a token."""
    config = {"method": method, "controller": "fixed"}
    prompts = [[1, 2, 3, 1, 2 + index] for index in range(4)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = []
    for device in ("cpu", "cuda"):
        model = tiny_model(architecture)
        model.to(torch.device(device))  # type: ignore[arg-type]
        llm = LLM(model, runtime="torch", speculative_config=config, max_num_seqs=3)
        outputs.append([output.token_ids for output in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_of_one_shape_have_equal_bits(device: str, dtype: torch.dtype) -> None:
    """Also beside other sequences, and whatever is drafted."""
    model = tiny_model("gpt2", dtype=dtype)
    model.to(torch.device(device))  # type: ignore[arg-type]
    llm = LLM(model, runtime="module", batch_invariant=True, max_model_len=200, max_num_seqs=3)
    assert llm.bit_exact
    params = SamplingParams(temperature=1, seed=5, max_tokens=40, ignore_eos=True, logprobs=2)
    prompts = [[1, 2, 3, 1, 2 + index] for index in range(4)]
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    config = {"method": "ngram", "controller": "fixed", "num_speculative_tokens": 6}
    together = llm.generate(prompts, params, speculative_config=config)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.outputs[0].logprobs for one in together] == [
        one.outputs[0].logprobs for one in alone
    ]
