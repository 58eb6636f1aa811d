"""`early_exit` with `exit_layers`: where a node stops, and that nothing else changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.drafting import drafter_of
from tests.matrix import LOSSLESS, PROMPTS, takes_any_tree, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.tree import Draft
from tokenleap.request import Request

LAYERS = (1, 2, 4)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12)
RUNTIMES = pytest.mark.parametrize("runtime", ["auto", "torch"])


def exit_llm(runtime: str = "auto", **fields: Any) -> LLM:
    config = {"method": "early_exit", "controller": "fixed", "exit_layers": LAYERS, **fields}
    return LLM(tiny_model(num_hidden_layers=6), runtime=runtime, speculative_config=config)


def drafts_of(llm: LLM, prompts: list[list[int]], temperature: float, nodes: int) -> list[Draft]:
    """The drafts of a batch, after these prompts."""
    params = SamplingParams(temperature=temperature, seed=5)
    batch = [Request(p, params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT) for p in prompts]
    for request in batch:
        llm.engine.target.add(request.key)
        llm.engine.target.prefill(request.key, request.token_ids[:-1])
    return drafter_of(llm).propose(batch, [Budget(nodes, nodes)] * len(batch))


@cache
def cut_model(layers: int) -> PreTrainedModel:
    model = tiny_model(num_hidden_layers=6)
    del model.model.layers[layers:]
    return model


def logits_at(layers: int, tokens: list[int]) -> Tensor:
    """[V] of a model cut by hand, without a cache."""
    with torch.inference_mode():
        logits: Tensor = cut_model(layers)(
            input_ids=torch.tensor([tokens]), use_cache=False
        ).logits[0, -1]
    return logits


def expected_logits(tokens: list[int], confidence: float | None = None) -> tuple[Tensor, int]:
    """By the definition: the logits where a node stops, and at which layer."""
    before = -1
    for layer in LAYERS:
        logits = logits_at(layer, tokens)
        token = int(logits.argmax())
        if token == before:
            break
        if confidence is not None and float(logits.softmax(-1).max()) >= confidence:
            break
        before = token
    return logits, layer


@RUNTIMES
@pytest.mark.parametrize("confidence", [None, 0.2])
def test_q_is_that_of_the_layer_where_it_stops(runtime: str, confidence: float | None) -> None:
    """In a batch of sampled trees whose nodes stop at different layers."""
    fields: dict[str, Any] = {"tree": [2, 2, 1], "expansion": "sample_with_replacement"}
    llm = exit_llm(runtime, exit_confidence=confidence, acceptance="rejection", **fields)
    prompts, stopped = PROMPTS[:3], set[int]()
    for prompt, draft in zip(prompts, drafts_of(llm, prompts, 0.8, 10), strict=True):
        assert max(draft.tree.depths) == 3
        for node in range(1, len(draft.tree)):
            path = draft.tree.path_tokens(draft.tree.parents[node])
            logits, layer = expected_logits([*prompt, *path], confidence)
            q = draft.q_of(node).dense(VOCAB_SIZE)
            assert torch.allclose(q, (logits.float() / 0.8).softmax(-1), atol=2e-4)
            stopped.add(layer)
    assert len(stopped) > 1
    assert (1 in stopped) == (confidence is not None)


@RUNTIMES
def test_a_greedy_chain_is_that_of_the_definition(runtime: str) -> None:
    tokens = list(PROMPTS[0])
    for _ in range(6):
        tokens.append(int(expected_logits(tokens)[0].argmax()))
    (draft,) = drafts_of(exit_llm(runtime), PROMPTS[:1], 0, 6)
    assert list(draft.tree.tokens[1:]) == tokens[len(PROMPTS[0]) :]


@RUNTIMES
def test_fewer_layers_run_where_nodes_stop(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node runs each of the layers at most once, and not all nodes run all of them."""
    llm = exit_llm(runtime, exit_confidence=0.15)
    scorer: Any = drafter_of(llm).scorer  # type: ignore[attr-defined]
    computed: dict[int, int] = {}
    for network in (scorer._first.network, *scorer._later):
        original = network.forward

        def forward(inputs: Any, *rest: Any, of: Any = network, run: Any = original) -> Any:
            computed[id(of)] = computed.get(id(of), 0) + sum(map(len, inputs.rows))
            return run(inputs, *rest)

        monkeypatch.setattr(network, "forward", forward)
    (draft,) = drafts_of(llm, PROMPTS[:1], 0, 12)
    counts = [computed.get(id(n), 0) for n in (scorer._first.network, *scorer._later)]
    assert counts[0] == draft.tree.num_drafted == 12
    assert 0 < counts[1] <= 12
    assert 0 < counts[2] < 12


@RUNTIMES
def test_what_runs_for_its_kv_alone_gets_no_logits(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chain, a pass of later layers judges one node, however many went on before it."""
    llm = exit_llm(runtime, exit_confidence=0.2)
    scorer: Any = drafter_of(llm).scorer  # type: ignore[attr-defined]
    passes = list[tuple[int, int]]()  # nodes, and rows of logits
    for network in scorer._later:
        original = network.forward

        def forward(inputs: Any, *rest: Any, run: Any = original) -> Any:
            output = run(inputs, *rest)
            passes.append((sum(map(len, inputs.rows)), len(output.scores)))
            return output

        monkeypatch.setattr(network, "forward", forward)
    drafts_of(llm, PROMPTS[:1], 0, 12)
    assert max(nodes for nodes, _ in passes) > 2
    assert max(scores for _, scores in passes) <= 2  # PyTorch never computes a single row


@pytest.mark.parametrize("fields", [{}, {"tree": [3, 2]}, {"tree": "dynamic"}])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_lossless(rule: str, fields: dict[str, Any]) -> None:
    if fields and not takes_any_tree(rule):
        pytest.skip("this rule does not take these trees")
    model = tiny_model(num_hidden_layers=6)
    plain = LLM(model)
    llm = exit_llm(acceptance=rule, **fields)
    for params in (GREEDY, SAMPLED)[: 1 + (rule == "coupled")]:
        expected = [output.token_ids for output in plain.generate(PROMPTS, params)]
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exit_layers": (1, 6)}, "exit_layers: must be 1 to 5 for this model of 6 layers, got 6"),
        ({"exit_layers": (2, 2)}, "exit_layers: list them in ascending order"),
        ({"exit_layers": (2,)}, "exit_layers"),
        ({"exit_layer": 3}, "exit_layer fixes the layer"),
        ({"exit_layers": None, "exit_confidence": 0.5}, "exit_confidence is for exit_layers"),
    ],
)
def test_wrong_options(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        exit_llm(**fields)


def test_a_runtime_that_cannot_go_on_says_so() -> None:
    with pytest.raises(CompatibilityError, match="exit_layers: runtime 'module'"):
        tiny_llm(tiny_model("gpt2", n_layer=4), "early_exit", exit_layers=(1, 2))
