"""Invariant 7: the same bits, speculation on or off, any drafter, any draft length, any batch.

Bits are compared through `logprobs`, which are computed from the very logits a token was drawn
from: equal floats mean equal logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.matrix import ON_CHAINS, PROMPTS, tiny_llm
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import Noise
from tokenleap.core.params import MAX_SEED
from tokenleap.core.tree import chain
from tokenleap.request import Request
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.network import PassOutput
from tokenleap.runtime.target import Target

TOKENS = 18
"""So that drafts of 16 tokens fit."""
DTYPES = [torch.float32, torch.bfloat16]
BITS: dict[str, Any] = {"max_tokens": TOKENS, "logprobs": 3, "detokenize": False}
"""Without texts, which only some methods have a tokenizer for."""
PARAMS = {
    "greedy": SamplingParams(temperature=0, **BITS),
    "seeded": SamplingParams(temperature=1.2, top_p=0.95, seed=5, **BITS),
    "seeded-all": SamplingParams(
        temperature=0.7,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 1.5},
        min_tokens=4,
        seed=9,
        **BITS,
    ),
}


def bits(llm: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return [(o.token_ids, o.logprobs) for o in llm.generate(prompts, params)]


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model("lean", dtype=request.param)


@pytest.fixture(scope="module")
def plain(model: PreTrainedModel) -> dict[str, list[Any]]:
    llm = tiny_llm(model)
    return {name: bits(llm, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize(
    ("method", "gamma"),
    [
        # `test_batch_equals_single` has 4.
        pytest.param(*(method, gamma), marks=[] if gamma == 16 else pytest.mark.slow)
        for method in ON_CHAINS
        for gamma in range(1, 17)
    ],
)
def test_any_drafter_any_draft_length(
    model: PreTrainedModel, plain: dict[str, list[Any]], method: str, gamma: int
) -> None:
    llm = tiny_llm(model, method, gamma=gamma)
    assert llm.bit_exact
    for name in ("greedy", "seeded-all"):
        assert bits(llm, PARAMS[name], PROMPTS[:3]) == plain[name][:3]


@pytest.mark.parametrize(
    ("method", "controller"),
    # `test_controllers.py` has the other methods with `cost_model`.
    [
        *((method, "fixed") for method in ("none", *ON_CHAINS)),
        *((method, None) for method in ("ngram", "eagle", "hybrid")),
    ],
)
@pytest.mark.parametrize(
    "name",
    # The test above has the others in a smaller batch than theirs, and `test_any_batch_size` alone.
    [
        "seeded",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("greedy", "seeded-all")),
    ],
)
def test_batch_equals_single(
    model: PreTrainedModel,
    plain: dict[str, list[Any]],
    method: str,
    controller: str | None,
    name: str,
) -> None:
    llm = tiny_llm(model, method, controller=controller)
    for prompt, expected in list(zip(PROMPTS, plain[name], strict=True))[:3]:
        assert bits(llm, PARAMS[name], [prompt]) == [expected]


@pytest.mark.parametrize("controller", ["fixed", None])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 16])
def test_any_batch_size(
    model: PreTrainedModel, plain: dict[str, list[Any]], max_num_seqs: int, controller: str | None
) -> None:
    config = {"method": "ngram", "prompt_lookup_min": 1, "controller": controller}
    llm = LLM(model, speculative_config=config, max_num_seqs=max_num_seqs)
    for name, params in PARAMS.items():
        assert bits(llm, params) == plain[name]


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_every_architecture(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture, dtype=dtype)
    expected = bits(tiny_llm(model), PARAMS["seeded"])
    for gamma in (1, 5):
        assert bits(tiny_llm(model, "ngram", gamma=gamma), PARAMS["seeded"]) == expected


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_every_width(dtype: torch.dtype, threads: int) -> None:
    """Logits of a position for widths 1 to 128, across the border of a key block."""
    model = tiny_model("lean", dtype=dtype, max_position_embeddings=2 * KEY_BLOCK)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_every_width(Target(model))
    finally:
        torch.set_num_threads(before)


def check_every_width(target: Target) -> None:
    tokens = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(KEY_BLOCK + 140)]
    start = KEY_BLOCK - 60
    target.add(0)
    target.prefill(0, tokens[:start])
    (output,) = target.verify([0], [chain(tokens[start : start + 128])])
    widest = output.scores.clone()
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127):
        (output,) = target.verify([0], [chain(tokens[start : start + width])])
        assert torch.equal(output.scores, widest[:width]), width


def test_step_by_step_equals_prefill() -> None:
    """The KV of a position has the same bits, in whatever chunks it was computed."""
    model = tiny_model("lean", dtype=torch.bfloat16)
    target = Target(model)
    tokens = [(5 * i * i + i) % VOCAB_SIZE for i in range(100)]
    scores = []
    for key, chunks in enumerate(([99], [1] * 99, [50, 49], [7] * 14 + [1])):
        target.add(key)
        done = 0
        for size in chunks:
            target.prefill(key, tokens[done : done + size])
            done += size
        scores.append(target.verify([key], [chain(tokens[99:])])[0].scores.clone())
        target.remove(key)
    assert all(torch.equal(scores[0], other) for other in scores[1:])


def test_n_outputs_are_those_of_consecutive_seeds(model: PreTrainedModel) -> None:
    llm = tiny_llm(model, "ngram")
    (three,) = llm.generate([PROMPTS[0]], SamplingParams(n=3, seed=4, max_tokens=8))
    ones = [
        llm.generate([PROMPTS[0]], SamplingParams(seed=4 + i, max_tokens=8))[0] for i in range(3)
    ]
    assert [o.token_ids for o in three.outputs] == [o.token_ids for o in ones]
    assert len({o.token_ids for o in three.outputs}) == 3


def test_the_noise_of_a_position_does_not_depend_on_where_the_step_began() -> None:
    distribution = Distribution.of(torch.full((50,), 1 / 50))
    direct = [Noise(3, position=t).draw(distribution, 0) for t in range(20)]
    assert [Noise(3, position=4).draw(distribution, t - 4) for t in range(4, 20)] == direct[4:]
    assert [Noise(4, position=t).draw(distribution, 0) for t in range(20)] != direct


def test_requests_without_a_seed_differ(model: PreTrainedModel) -> None:
    outputs = tiny_llm(model).generate([PROMPTS[0]] * 4, SamplingParams(max_tokens=12))
    assert len({o.token_ids for o in outputs}) > 1


def test_seeds_belong_to_requests_not_to_the_batch(model: PreTrainedModel) -> None:
    llm = tiny_llm(model, "ngram_table")
    params = [SamplingParams(seed=i, max_tokens=10) for i in range(5)]
    together = [o.token_ids for o in llm.generate([PROMPTS[0]] * 5, params)]
    alone = [llm.generate([PROMPTS[0]], p)[0].token_ids for p in reversed(params)]
    assert together == alone[::-1]


def test_bit_exact_is_measured_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime whose bits depend on the width says so."""
    original = Target.verify

    def wobbly(self: Target, keys: Any, trees: Any) -> list[PassOutput]:
        scores = [output.scores for output in original(self, keys, trees)]
        return [PassOutput(logits * (1 + 1e-6 * (len(logits) > 4))) for logits in scores]

    monkeypatch.setattr(Target, "verify", wobbly)
    assert not Target(tiny_model("lean")).bit_exact


def test_a_request_never_reads_global_randomness(model: PreTrainedModel) -> None:
    llm = tiny_llm(model, "draft_model", "rejection")
    params = SamplingParams(seed=1, max_tokens=12)
    torch.manual_seed(0)
    first = llm.generate([PROMPTS[0]], params)[0].token_ids
    torch.manual_seed(1)
    assert llm.generate([PROMPTS[0]], params)[0].token_ids == first


def test_request_seed_plus_index_never_overflows() -> None:
    request = Request([1], SamplingParams(seed=MAX_SEED), vocab_size=8, max_model_len=9, index=3)
    assert 0 <= request.noise.draw(Distribution.of(torch.full((8,), 1 / 8)), 0) < 8
