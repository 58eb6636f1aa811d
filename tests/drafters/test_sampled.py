"""q's own temperature, top-k and top-p: q is exactly the truncated distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.drafting import draft_of, drafter_of, request_of
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import ConfigError, SamplingParams
from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution, Truncation, truncate, truncated
from tokenleap.core.tree import Draft
from tokenleap.drafters.lookups import NgramTableDrafter
from tokenleap.drafters.options import CorpusNgramOptions, NgramTableOptions
from tokenleap.drafters.text.ngrams import CorpusNgramDrafter, SmoothedNgrams, count_ngrams
from tokenleap.request import Request

OWN: list[dict[str, Any]] = [
    {"draft_top_k": 3},
    {"draft_top_p": 0.5},
    {"draft_temperature": 1.7, "draft_top_k": 12, "draft_top_p": 0.8},
    {"draft_top_k": 0, "draft_top_p": 1.0},  # q is not truncated, though p is
]
PARAMS = SamplingParams(temperature=0.9, top_k=7, top_p=0.9, min_p=0.01)


def expected_q(model: PreTrainedModel, tokens: list[int], own: dict[str, Any]) -> Distribution:
    """Transformers' distribution from the draft model's logits; min-p is the request's."""
    top_k, top_p = own.get("draft_top_k", PARAMS.top_k), own.get("draft_top_p", PARAMS.top_p)
    warpers = LogitsProcessorList(
        [
            TemperatureLogitsWarper(own.get("draft_temperature", PARAMS.temperature)),
            MinPLogitsWarper(PARAMS.min_p),
            *([TopKLogitsWarper(top_k)] if top_k else []),
            TopPLogitsWarper(top_p),
        ]
    )
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[:, -1].float()
        scores = warpers(ids, logits)  # type: ignore[arg-type]
    return Distribution.of(scores[0].softmax(-1))


@pytest.mark.parametrize("own", OWN, ids=lambda own: "-".join(map(str, own.values())))
@pytest.mark.parametrize(
    ("tree", "expansion"),
    [(None, "auto"), ([4, 2], "sample"), ([4, 2], "sample_with_replacement")],
)
def test_q_is_the_truncated_distribution(
    own: dict[str, Any], tree: list[int] | None, expansion: str
) -> None:
    """At every node of chains and trees, given the earlier siblings without replacement."""
    model = tiny_model(seed=1)
    fields = {"model": model, "tree": tree, "expansion": expansion, **own}
    drafter = drafter_of(tiny_llm(tiny_model(), "draft_model", "rejection", **fields))
    budget = Budget(12, 4)
    for seed in range(3):
        params = PARAMS.model_copy(update={"seed": seed})
        request = Request(PROMPTS[0], params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
        (draft,) = drafter.propose([request], [budget])
        drafter.release(request)
        assert draft.tree.num_drafted >= 2  # equal draws share a node
        for node in range(1, len(draft.tree)):
            parent = draft.tree.parents[node]
            path = [*PROMPTS[0], *draft.tree.path_tokens(parent)]
            q = expected_q(model, path, own)
            if expansion == "sample":
                for sibling in draft.tree.children[parent]:
                    if sibling < node:
                        q = q.without(draft.tree.tokens[sibling])
            assert draft.q_of(node).tokens.tolist() == q.tokens.tolist()
            torch.testing.assert_close(draft.q_of(node).probs, q.probs, rtol=1e-4, atol=1e-6)
            assert draft.q_of(node).prob(draft.tree.tokens[node]) > 0


@given(
    probs=st.lists(st.floats(0.001, 1), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.05, 1),
)
def test_counted_distributions_are_truncated_like_logits(
    probs: list[float], top_k: int, top_p: float
) -> None:
    weights = torch.tensor(probs, dtype=torch.float64)
    distribution = Distribution.of(weights / weights.sum())
    found = truncated(distribution, top_k, top_p)
    wanted = truncate(distribution.probs.log(), Truncation(top_k=top_k, top_p=top_p))
    assert abs(len(found.probs) - len(wanted.probs)) <= 1  # where the mass is top_p to the last bit
    assert float(found.probs.sum()) == pytest.approx(1)
    if len(found.probs) == len(wanted.probs):
        torch.testing.assert_close(found.dense(12), wanted.dense(12))


@pytest.mark.parametrize("method", ["ngram_table", "corpus_ngram"])
def test_counted_drafters_truncate_their_own_q(method: str) -> None:
    text = [9, 1, 9, 1, 9, 1, 9, 2, 9, 2, 9, 3, 9]
    request = request_of(text, SamplingParams(seed=3), 50)

    def first_q(**own: Any) -> Distribution:
        drafter: NgramTableDrafter | CorpusNgramDrafter
        if method == "ngram_table":
            drafter = NgramTableDrafter(NgramTableOptions(**own), coupled=False)
        else:
            ngrams = SmoothedNgrams(count_ngrams([text], vocab_size=50))
            options = CorpusNgramOptions(corpus="x", **own)
            drafter = CorpusNgramDrafter(ngrams, options, coupled=False)
        return draft_of(drafter, request, 1).q_of(1)

    whole = first_q()
    assert whole.tokens.tolist() == [1, 2, 3]
    two = first_q(draft_top_k=2)
    assert two.tokens.tolist() == [1, 2]
    assert two.prob(1) == pytest.approx(whole.prob(1) / (whole.prob(1) + whole.prob(2)))
    assert first_q(draft_top_p=0.01).certain == 1
    assert first_q(draft_top_k=0, draft_top_p=1.0).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("method", ["eagle", "parallel", "medusa", "early_exit", "hybrid"])
def test_all_that_sample_take_them(method: str, all_drafts: list[Draft]) -> None:
    """Heads, some of which draft a part of the vocabulary alone, and parts of the target."""
    own: dict[str, Any] = {"draft_top_k": 2, "draft_temperature": 3.0}
    fields = {"drafter": {"method": "eagle", **own}} if method == "hybrid" else own
    llm = tiny_llm(tiny_model(), method, "rejection", **fields)
    llm.generate(PROMPTS[:2], SamplingParams(seed=2, max_tokens=16))
    sizes = {len(q.probs) for draft in all_drafts for q in draft.q}
    assert 2 in sizes
    assert max(sizes) == 2


def test_the_output_is_the_same_whatever_q_is() -> None:
    """Under the rule `coupled`, to the token."""
    params = SamplingParams(temperature=1.1, seed=4, max_tokens=24)
    plain = tiny_llm(tiny_model()).generate(PROMPTS[:2], params)
    found = tiny_llm(tiny_model(), "draft_model", **OWN[2]).generate(PROMPTS[:2], params)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("draft_model", {"expansion": "top_k", "draft_top_k": 3}, "draft_top_k has no effect"),
        ("draft_model", {"tree": "dynamic", "draft_top_p": 0.5}, "draft_top_p is not for tree"),
        ("draft_model", {"vocabulary": "text", "draft_top_p": 0.5}, "drafts are greedy chains"),
        ("draft_model", {"draft_top_p": 0.0}, "draft_top_p: input should be greater than 0"),
        ("draft_model", {"draft_top_k": -1}, "draft_top_k: input should be greater than or"),
        ("eagle", {"draft_temperature": 0, "draft_top_k": 3}, "no effect with draft_temperature 0"),
        ("ngram_table", {"draft_temperature": 0, "draft_top_p": 0.5}, "remove one of the two"),
        ("ngram", {"draft_top_k": 3}, "has no field 'draft_top_k'"),
        ("random", {"draft_top_p": 0.3}, "has no field 'draft_top_p'"),
        ("cascade", {"draft_top_p": 0.3}, "has no field 'draft_top_p'"),
    ],
)
def test_where_they_cannot_apply(method: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_llm(tiny_model(), method, **fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
