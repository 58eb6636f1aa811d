"""Self-drafting: what is left out is left out, on the target's own KV."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretoken import ConfigError, SamplingParams
from foretoken.control import Budget
from foretoken.request import Request
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model


def first_draft(method: str, **fields: Any) -> tuple[int, ...]:
    """Greedy draft of four tokens after the first prompt."""
    llm = tiny_llm(tiny_model(num_hidden_layers=4), method, **fields)
    request = Request(
        PROMPTS[0], SamplingParams(temperature=0), vocab_size=VOCAB_SIZE, max_model_len=CONTEXT
    )
    llm._target.add(request.key)
    llm._target.prefill(request.key, request.token_ids[:-1])
    (draft,) = llm._engine._drafter.propose([request], [Budget(4, 4)])
    return draft.tree.tokens[1:]


def greedy_of_the_first(layers: int) -> tuple[int, ...]:
    """The same from a model cut by hand, token by token and without a cache."""
    model = tiny_model(num_hidden_layers=4)
    del model.model.layers[layers:]
    tokens = list(PROMPTS[0])
    for _ in range(4):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[len(PROMPTS[0]) :])


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_exit_is_the_first_layers_with_norm_and_head(layers: int) -> None:
    assert first_draft("early_exit", exit_layer=layers) == greedy_of_the_first(layers)


def test_half_of_the_layers_by_default() -> None:
    assert first_draft("early_exit") == first_draft("early_exit", exit_layer=2)


def test_skipping_the_last_layers_whole_is_an_exit() -> None:
    skipped = first_draft("layer_skip", skip_attention=[2, 3], skip_mlp=[2, 3])
    assert skipped == first_draft("early_exit", exit_layer=2)


def test_every_second_layer_by_default() -> None:
    skipped = first_draft("layer_skip", skip_attention=[1], skip_mlp=[1])
    assert first_draft("layer_skip") == skipped


def test_drafting_leaves_the_target_as_it_was() -> None:
    """The same bits after any number of drafts."""
    llm = tiny_llm(tiny_model(dtype=torch.bfloat16), "early_exit")
    plain = tiny_llm(tiny_model(dtype=torch.bfloat16))
    params = SamplingParams(seed=1, max_tokens=30, logprobs=2)
    ours, expected = llm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [(o.token_ids, o.logprobs) for o in ours] == [
        (o.token_ids, o.logprobs) for o in expected
    ]


def test_weights_and_cache_are_there_once() -> None:
    llm = tiny_llm(tiny_model(), "early_exit")
    llm.generate(PROMPTS, SamplingParams(max_tokens=8))
    scorer = llm._engine._drafter._scorer  # type: ignore[attr-defined]
    assert scorer._target._slab is llm._target._slab
    ours = {id(p) for p in scorer._target._model.parameters()}
    assert ours <= {id(p) for p in llm._target._model.parameters()}


def test_it_drafts_trees_too() -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    plain = tiny_llm(tiny_model()).generate(PROMPTS, params)
    trees = tiny_llm(tiny_model(), "early_exit", gamma=None, tree=[3, 2], exit_layer=1)
    assert [o.token_ids for o in trees.generate(PROMPTS, params)] == [o.token_ids for o in plain]


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("early_exit", {"exit_layer": 2}, "exit_layer: must be 1 to 1 for this model of 2 layers"),
        ("early_exit", {"exit_layer": 0}, "exit_layer"),
        ("layer_skip", {"skip_mlp": [2]}, "skip_mlp: must be 0 to 1 for this model of 2 layers"),
        ("layer_skip", {"skip_attention": [-1]}, "skip_attention"),
    ],
)
def test_layers_out_of_range(method: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_llm(tiny_model(), method, **fields)
    assert message in str(caught.value)
