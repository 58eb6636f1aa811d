"""Trees that the native runtime grows in one call are those that are grown level by level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.drafting import drafter_of
from tests.heads import feature_config, random_head, tiny_config
from tests.matrix import PROMPTS
from tests.tiny import tiny_model
from tokenleap import LLM, RequestOutput, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.sampler import Sampler
from tokenleap.core.tree import Draft
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.request import Request
from tokenleap.runtime.native.network import NativeDecoder
from tokenleap.runtime.passes import Passes

pytestmark = pytest.mark.usefixtures("native_library")

VOCAB_SIZE = 101  # no multiple of the vectors' width
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "widths": {"tree": [3, 2, 1]},
    "cut widths": {"tree": [3, 2, 2], "num_speculative_tokens": 5},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 10, "tree_depth": 4},
    "narrow": {"tree": "dynamic", "num_speculative_tokens": 9, "tree_top_k": 2},
}
SAMPLED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=2**63 - 1, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=3, top_k=7, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, top_p=0.7, min_p=0.02, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, min_p=0.2, top_k=20, max_tokens=7, ignore_eos=True),
]
DRAWN: dict[str, dict[str, Any]] = {
    **SHAPES,
    "drawn chain": {"num_speculative_tokens": 5, "expansion": "sample"},
    "drawn widths": {"tree": [3, 2, 1], "expansion": "sample"},
    "rejection": {"num_speculative_tokens": 5, "acceptance": "rejection"},
    "rejected widths": {"tree": [3, 2, 1], "acceptance": "rejection"},
    "own q": {
        "num_speculative_tokens": 5,
        "draft_temperature": 0.9,
        "draft_top_p": 0.8,
        "acceptance": "rejection",
    },
}
METHODS = ["eagle", "eagle of few tokens", "eagle of features", "draft_model", "early_exit"]
ROUNDED: list[tuple[torch.dtype, str | None]] = [(torch.bfloat16, None), (torch.float32, "int8")]
CASES = [  # shapes decide about nodes, and formats about logits: not every product
    *((method, shape, torch.float32, None) for method in METHODS for shape in SHAPES),
    *((method, "dynamic", *kind) for method in METHODS for kind in ROUNDED),
]


def made(
    method: str, dtype: torch.dtype = torch.float32, quantization: str | None = None, **fields: Any
) -> LLM:
    size: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "head_dim": 32,
        "max_position_embeddings": 128,
    }
    own: dict[str, Any] = {}
    if method.startswith("eagle"):
        vocabulary = 50 if method == "eagle of few tokens" else VOCAB_SIZE
        sizes = feature_config if method == "eagle of features" else tiny_config
        own["model"] = random_head(sizes(VOCAB_SIZE, draft_vocab_size=vocabulary))
    elif method == "draft_model":
        own["model"] = tiny_model(seed=1, dtype=dtype, **size)
    config = {"method": method.split()[0], "controller": "fixed", **own, **fields}
    model = tiny_model(dtype=dtype, **size)
    return LLM(model, speculative_config=config, quantization=quantization, runtime="native")


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of trees of each call that has grown some."""
    calls: list[int] = []
    grow = NativeDecoder.grow

    def counted(self: NativeDecoder, *args: Any) -> Any:
        trees = grow(self, *args)
        calls.append(len(trees))
        return trees

    monkeypatch.setattr(NativeDecoder, "grow", counted)
    return calls


def level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Passes, "grow", lambda *_, **__: None)


def drawn_in_one_call(
    llm: LLM, params: SamplingParams, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The proposal for one request, which must equal the one made level by level."""
    with monkeypatch.context() as patch:
        patch.setattr(ModelDrafter, "_expand", None)  # no level is drawn by itself
        (draft,) = proposed(llm, requests(params), [budget])
    with monkeypatch.context() as patch:
        level_by_level(patch)
        (same,) = proposed(llm, requests(params), [budget])
    assert draft.tree == same.tree
    return draft


def drafts(output: RequestOutput) -> list[Any]:
    return [(step.drafted, step.parents) for step in output.trace]


def both_ways(
    llm: LLM, params: list[SamplingParams], grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """The outputs with trees that are grown in one call, and level by level."""
    at_once = llm.generate(PROMPTS, params)
    assert max(grown) == len(PROMPTS)
    calls = len(grown)
    level_by_level(monkeypatch)
    by_levels = llm.generate(PROMPTS, params)
    assert len(grown) == calls
    assert all(output.metrics.drafter_failure is None for output in at_once)
    return at_once, by_levels


@pytest.mark.parametrize(("method", "shape", "dtype", "quantization"), CASES)
def test_grown_trees_are_those_of_the_levels(
    method: str,
    shape: str,
    dtype: torch.dtype,
    quantization: str | None,
    grown: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a batch, with many accepted tokens and with few, up to the end of the context."""
    llm = made(method, dtype, quantization, **SHAPES[shape])
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for length in (12, 9, 12, 300, 7)
    ]
    for one, other in zip(*both_ways(llm, params, grown, monkeypatch), strict=True):
        assert one.metrics.num_draft_tokens > 0
        assert drafts(one) == drafts(other)


def requests(*params: SamplingParams) -> list[Request]:
    return [
        Request(prompt, each, vocab_size=VOCAB_SIZE, max_model_len=256)
        for prompt, each in zip(PROMPTS[2:], params, strict=False)
    ]


GREEDY = SamplingParams(temperature=0)


def proposed(llm: LLM, batch: list[Request], budgets: list[Budget]) -> list[Draft]:
    drafter = drafter_of(llm)
    assert isinstance(drafter, ModelDrafter)
    with torch.inference_mode():
        found = drafter.propose(batch, budgets)
    for request in batch:
        drafter.release(request)
    return found


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("shape", [*SHAPES, "rejection"])
def test_budgets_end_the_growth(
    shape: str, temperature: float, grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depth, nodes, and probabilities of tokens and of paths; of each tree its own."""
    llm = made("draft_model", **DRAWN[shape])
    budgets = [
        [Budget(9, 9, threshold), Budget(9, 3), Budget(4, 9, 0.0, threshold)]
        for threshold in (0.02, 0.2, 0.5)
    ]
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    batch = requests(*params)
    at_once = [proposed(llm, batch, each) for each in budgets]
    assert grown == [3, 3, 3]
    assert len({len(draft.tree) for three in at_once for draft in three}) > 1
    level_by_level(monkeypatch)
    by_levels = [proposed(llm, batch, each) for each in budgets]
    for some, others in zip(at_once, by_levels, strict=True):
        assert [draft.tree for draft in some] == [draft.tree for draft in others]


def test_masked_requests_are_drafted_level_by_level(grown: list[int]) -> None:
    """And the greedy and the sampled ones beside them in one call of each kind."""
    llm = made("draft_model", num_speculative_tokens=4)
    batch = requests(GREEDY, SamplingParams(seed=1), SamplingParams(temperature=0, min_tokens=3))
    together = proposed(llm, batch, [Budget(4, 4)] * 3)
    assert grown == [1, 1]
    alone = [proposed(llm, [request], [Budget(4, 4)])[0] for request in batch]
    assert grown == [1, 1, 1, 1]
    assert [draft.tree for draft in together] == [draft.tree for draft in alone]


# Drawn tokens


@pytest.mark.parametrize(
    ("method", "shape", "dtype"),
    [
        *(("eagle of few tokens", shape, torch.float32) for shape in DRAWN),
        ("draft_model", "chain", torch.float32),
        ("draft_model", "rejected widths", torch.bfloat16),
        ("early_exit", "dynamic", torch.float32),
    ],
)
def test_drawn_trees_are_those_of_the_levels(
    method: str,
    shape: str,
    dtype: torch.dtype,
    grown: list[int],
    all_drafts: list[Draft],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same tokens, and the same q to the last bit."""
    llm = made(method, dtype, **DRAWN[shape])
    for one, other in zip(*both_ways(llm, SAMPLED, grown, monkeypatch), strict=True):
        assert one.token_ids == other.token_ids
    half = len(all_drafts) // 2
    assert sum(draft.tree.num_drafted for draft in all_drafts[:half]) > 100
    for draft, same in zip(all_drafts[:half], all_drafts[half:], strict=True):
        assert draft.tree == same.tree
        for q, others in zip(draft.q, same.q, strict=True):
            assert q.tokens.tolist() == others.tokens.tolist()
            assert q.probs.tolist() == others.probs.tolist()


@pytest.mark.parametrize("shape", ["chain", "widths"])
def test_no_q_is_computed_that_nobody_reads(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`coupled` reads none, not even of truncated draws or of siblings; `trace=True` reads all."""
    llm = made("draft_model", **SHAPES[shape])
    calls: list[int] = []
    distribution, draw = Sampler.distribution, ModelDrafter._draw

    def counted(self: Sampler, logits: torch.Tensor, *args: Any) -> Any:
        if len(args) == 3:  # p has no parameters but the output; q has its own
            calls.append(1)
        return distribution(self, logits, *args)

    def drawn(self: ModelDrafter, *args: Any) -> Any:
        calls.append(-1)  # where rounding might decide, the levels are drawn from q
        return draw(self, *args)

    monkeypatch.setattr(Sampler, "distribution", counted)
    monkeypatch.setattr(ModelDrafter, "_draw", drawn)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=20, ignore_eos=True)
    (plain,) = llm.generate([PROMPTS[0]], params)
    assert sum(calls) == 0
    assert any(step.drafted and set(step.q) == {None} for step in plain.trace)
    (traced,) = llm.generate([PROMPTS[0]], params, trace=True)
    assert sum(calls) > 20
    assert drafts(plain) == drafts(traced)
    assert all(None not in step.q for step in traced.trace)


def flat_model() -> PreTrainedModel:
    """A model that gives the same probability to all tokens but ten."""
    model = tiny_model(vocab_size=VOCAB_SIZE, head_dim=32, max_position_embeddings=128)
    head: Any = model.lm_head
    head.weight.data[10:] = head.weight.data[10]
    return model


@pytest.mark.parametrize("limits", [{"top_p": 0.5}, {"top_k": 9}, {}], ids=str)
def test_where_rounding_might_decide_the_levels_draw(
    limits: dict[str, Any], grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of equal probabilities are in the nucleus, for example."""
    target = tiny_model(vocab_size=VOCAB_SIZE, head_dim=32, max_position_embeddings=128)
    config = {"method": "draft_model", "model": flat_model(), "num_speculative_tokens": 3}
    llm = LLM(target, speculative_config=config, runtime="native")
    undecided: list[bool] = []
    given_up: list[int] = []  # passes made for a tree that is undecided
    grow = Passes.grow

    def watched(self: Passes, *args: Any) -> Any:
        trees = grow(self, *args)
        assert trees is not None
        undecided.extend(tree.undecided for tree in trees)
        given_up.extend(tree.levels for tree in trees if tree.undecided)
        return trees

    monkeypatch.setattr(Passes, "grow", watched)
    batch = requests(SamplingParams(seed=1, **limits), SamplingParams(seed=2, **limits))
    drafter: Any = drafter_of(llm)
    before = drafter._scorer._model.num_passes
    at_once = proposed(llm, batch, [Budget(3, 3)] * 2)
    # The prompts' and three levels'; those that are undecided have made some before these.
    assert drafter._scorer._model.num_passes - before == 4 + max(given_up, default=0)
    assert grown == [2]
    assert undecided == [("top_p" in limits)] * 2
    level_by_level(monkeypatch)
    by_levels = proposed(llm, batch, [Budget(3, 3)] * 2)
    assert [draft.tree for draft in at_once] == [draft.tree for draft in by_levels]
    assert all(draft.tree.num_drafted == 3 for draft in at_once)


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}], ids=str)
def test_min_p_is_only_in_doubt_for_tokens_that_might_be_drawn(
    limits: dict[str, Any], grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ninety tokens have nearly the least probability that it leaves, and ten are far above."""
    model: Any = flat_model()
    hidden = torch.zeros(())

    def kept(module: Any, args: Any) -> None:
        nonlocal hidden
        hidden = args[0]

    with torch.inference_mode(), model.lm_head.register_forward_pre_hook(kept):
        model(input_ids=torch.tensor([PROMPTS[2]]))
    last = hidden[0, -1] / hidden[0, -1].square().sum()
    model.lm_head.weight.data[:10] += 12 * last  # e^12 times as probable after the prompt
    with torch.inference_mode():
        p = model(input_ids=torch.tensor([PROMPTS[2]])).logits[0, -1].softmax(-1)
    min_p = float(p[50] / p.max()) * (1 + 1e-6)
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": 1}
    target = tiny_model(vocab_size=VOCAB_SIZE, head_dim=32, max_position_embeddings=128)
    llm = LLM(target, speculative_config=config, runtime="native")
    params = SamplingParams(seed=1, min_p=min_p, **limits)
    draft = drawn_in_one_call(llm, params, Budget(1, 1), monkeypatch)
    assert grown == [1]
    assert draft.tree.tokens[1] < 10


@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_is_refused(temperature: float, grown: list[int]) -> None:
    llm = made("draft_model", num_speculative_tokens=4)
    drafter: Any = drafter_of(llm)
    network = drafter._scorer._model.network
    for kept in network._kept:
        if isinstance(kept, torch.Tensor) and kept.dim() == 1:  # norms
            kept.fill_(torch.nan)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=5)
    (output,) = llm.generate([PROMPTS[0]], params)
    assert grown == [1]
    assert output.metrics.drafter_failure is not None
    assert "NaN" in output.metrics.drafter_failure


@pytest.mark.parametrize("shape", ["drawn chain", "drawn widths"])
def test_trees_of_draws_take_the_most_probable_tokens_of_greedy_requests(
    shape: str, grown: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call: there is nothing to draw at temperature 0."""
    llm = made("draft_model", **DRAWN[shape])
    draft = drawn_in_one_call(llm, GREEDY, Budget(99, 3), monkeypatch)
    assert grown == [1]
    assert draft.tree.num_drafted == {"drawn chain": 3, "drawn widths": 15}[shape]


@pytest.mark.parametrize("expansion", ["auto", "sample", "sample_with_replacement", "top_k"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_chains_say_how_probable_they_are(expansion: str, temperature: float) -> None:
    """However they are drawn: controllers learn from it where to stop."""
    llm = made("draft_model", num_speculative_tokens=4, expansion=expansion)
    params = SamplingParams(temperature=temperature, seed=1)
    (draft,) = proposed(llm, requests(params), [Budget(4, 4)])
    assert len(draft.path_probs) == draft.tree.num_drafted == 4
