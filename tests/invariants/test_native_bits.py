"""Invariant 7 on the native runtime: chains and trees of every drafter, int4 weights, batches.

There a node has the bits of the same tokens in a row wherever it stands in a tree, so what
`test_bits.py` asks of chains is asked of every method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.invariants.test_bits import PARAMS, bits, check_every_width
from tests.matrix import PROMPTS, SPECULATIVE, WITH_TOKENIZER, speculative_config
from tests.tiny import tiny_model, tiny_tokenizer
from tokenleap import LLM
from tokenleap.core.tree import chain
from tokenleap.drafters.registry import METHODS
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.target import Target

pytestmark = pytest.mark.usefixtures("native_library")

TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "top-k": ("draft_model", {"tree": [3, 2, 1]}),
    "sampled": ("draft_model", {"tree": [2, 2], "expansion": "sample"}),
    "sampled with replacement": (
        "draft_model",
        {"tree": [2, 2], "expansion": "sample_with_replacement"},
    ),
    "dynamic": ("draft_model", {"tree": "dynamic"}),
    "early exit": ("early_exit", {"tree": [3, 2], "exit_layer": 1}),
}
KINDS: list[tuple[torch.dtype, str | None]] = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, "int4"),
]
Maker = Callable[..., LLM]


@pytest.fixture(scope="module", params=KINDS, ids=["float32", "bfloat16", "int4"])
def make(request: pytest.FixtureRequest) -> Maker:
    """Makes an LLM on a model that runs natively."""
    dtype, quantization = request.param
    model, draft = (tiny_model(dtype=dtype, head_dim=32, seed=seed) for seed in (0, 1))
    assert network_for(model, quantization).name == "native"

    def made(method: str, **fields: Any) -> LLM:
        own: dict[str, Any] = {"model": draft} if METHODS[method].takes_model else {}
        config = speculative_config(method, **own, **fields)
        tokenizer = tiny_tokenizer() if method in WITH_TOKENIZER else None
        return LLM(model, tokenizer=tokenizer, speculative_config=config, quantization=quantization)

    return made


@pytest.fixture(scope="module")
def plain(make: Maker) -> dict[str, list[Any]]:
    llm = make("none")
    return {name: bits(llm, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize(
    "gamma", [*(pytest.param(gamma, marks=pytest.mark.slow) for gamma in (1, 2, 13)), 5]
)
@pytest.mark.parametrize("method", SPECULATIVE)
def test_every_method(make: Maker, plain: dict[str, list[Any]], method: str, gamma: int) -> None:
    llm = make(method, num_speculative_tokens=gamma)
    assert llm.bit_exact
    for name in ("greedy", "seeded-all"):
        assert bits(llm, PARAMS[name]) == plain[name]


@pytest.mark.parametrize(
    ("names", "num_alone"),
    [(("greedy", "seeded-all"), 3), pytest.param(tuple(PARAMS), 5, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
@pytest.mark.parametrize("name", TREES)
def test_trees(
    make: Maker, plain: dict[str, list[Any]], name: str, names: tuple[str, ...], num_alone: int
) -> None:
    """In a batch and alone."""
    method, fields = TREES[name]
    llm = make(method, **fields)
    for params in names:
        assert bits(llm, PARAMS[params]) == plain[params]
        alone = [bits(llm, PARAMS[params], [prompt])[0] for prompt in PROMPTS[:num_alone]]
        assert alone == plain[params][:num_alone]


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "quantization"), KINDS, ids=["float32", "bfloat16", "int4"])
def test_every_width(dtype: torch.dtype, quantization: str | None, head_dim: int) -> None:
    """As in `test_bits.py`: kernels cut rows into blocks of 4, 6, 12, 16 or 32."""
    model = tiny_model(dtype=dtype, head_dim=head_dim, max_position_embeddings=2 * KEY_BLOCK)
    target = Target(model, quantization=quantization)
    assert target.network.name == "native"
    check_every_width(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_number_stays_where_it_is(dtype: torch.dtype) -> None:
    """A drafted token whose values are NaN changes no logits of the nodes before it."""
    model = tiny_model(dtype=dtype, head_dim=32)
    target = Target(model)
    assert target.network.name == "native"
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    with torch.no_grad():
        embedding.weight[7] = torch.nan
    target.add(0)
    target.prefill(0, [1, 2, 3])
    tokens = [token for token in range(8, 68) for _ in range(2)]  # several to a task of attention
    (whole,) = target.verify([0], [chain([*tokens, 7, 8])])
    found = whole.scores.clone()
    (sound,) = target.verify([0], [chain(tokens)])
    assert torch.equal(found[:-2], sound.scores)
    assert found[-2:].isnan().all()
