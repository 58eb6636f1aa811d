"""Predictions: who takes them, what they save, and that outputs do not depend on them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.matrix import BRANCHING, LOSSLESS, PROMPTS, SPECULATIVE, fits, tiny_llm
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, CompatibilityError, PromptError, SamplingParams, SpeculativeConfig
from tokenleap.control.estimates import AcceptanceRates, by_prediction
from tokenleap.core.references import References
from tokenleap.drafters.copying import PredictionDrafter
from tokenleap.drafters.options import LONGEST_PREDICTED
from tokenleap.engine.prompts import predictions_per_prompt
from tokenleap.outputs import Metrics

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=24)
PREDICTION: dict[str, Any] = {"method": "prediction"}
COMBINED: dict[str, dict[str, Any]] = {
    "ensemble": {"drafters": [PREDICTION, {"method": "recycle"}]},
    "switch": {"drafters": [PREDICTION, {"method": "ngram_table"}], "try_every": 2},
    "horizontal_cascade": {"drafters": [PREDICTION, {"method": "ngram_table"}], "tokens": [3, 1]},
    "hybrid": {"lookup": PREDICTION},
}


def edited(tokens: tuple[int, ...]) -> list[int]:
    """An expectation of an output that has most of it right."""
    return [*tokens[:9], 7, *tokens[11:]]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[tuple[int, ...]]]:
    llm = tiny_llm(tiny_model())
    return {
        kind: [result.token_ids for result in llm.generate(PROMPTS, params)]
        for kind, params in (("greedy", GREEDY), ("sampled", SAMPLED))
    }


def generated(
    llm: LLM, params: SamplingParams, prediction: Any
) -> tuple[list[tuple[int, ...]], list[Metrics]]:
    results = llm.generate(PROMPTS, params, prediction=prediction)
    return [each.token_ids for each in results], [each.metrics for each in results]


@pytest.mark.parametrize("method", ["none", *SPECULATIVE])
def test_every_method_follows_a_prediction_first(
    method: str, plain: dict[str, list[tuple[int, ...]]]
) -> None:
    """Tokens are those of plain decoding; most of the prediction is accepted."""
    llm = tiny_llm(tiny_model(), method)
    for kind, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        expected = plain[kind]
        tokens, metrics = generated(llm, params, [edited(each) for each in expected])
        assert tokens == expected
        for each in metrics:
            assert each.drafter_failure is None
            assert each.accepted_prediction_tokens <= each.num_accepted_tokens
        accepted = sum(each.accepted_prediction_tokens for each in metrics)
        assert accepted > 60  # of 120
        assert sum(each.target_passes for each in metrics) < 50


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "hybrid", "prediction"])
def test_greedy_output_under_every_rule(
    method: str, rule: str, plain: dict[str, list[tuple[int, ...]]]
) -> None:
    if not fits(method, rule):
        pytest.skip("trees")
    expected = plain["greedy"]
    llm = tiny_llm(tiny_model(), method, rule)
    tokens, metrics = generated(llm, GREEDY, [edited(each) for each in expected])
    assert tokens == expected
    assert sum(each.accepted_prediction_tokens for each in metrics) > 60


@pytest.mark.parametrize("method", COMBINED)
def test_methods_that_combine_it_are_left_as_they_are(
    method: str, plain: dict[str, list[tuple[int, ...]]]
) -> None:
    llm = tiny_llm(tiny_model(), method, **COMBINED[method])
    default = llm.engine._speculation.default
    assert llm.engine.strategies.for_prediction(None, default) is default
    expected = plain["greedy"]
    tokens, metrics = generated(llm, GREEDY, [list(each) for each in expected])
    assert tokens == expected
    assert sum(each.accepted_prediction_tokens for each in metrics) > 20


def test_a_cascade_follows_it_in_its_middle_model(plain: dict[str, list[tuple[int, ...]]]) -> None:
    llm = tiny_llm(tiny_model(), "cascade", drafter=PREDICTION, model=tiny_model())
    expected = plain["greedy"]
    assert generated(llm, GREEDY, [list(each) for each in expected])[0] == expected


def test_a_draft_model_drafts_where_it_ends(plain: dict[str, list[tuple[int, ...]]]) -> None:
    llm = tiny_llm(tiny_model(), "prediction", gamma=4, drafter={"model": tiny_model()})
    expected = plain["greedy"]
    tokens, metrics = generated(llm, GREEDY, [list(each[:9]) for each in expected])
    assert tokens == expected
    for each in metrics:
        assert each.num_accepted_tokens > each.accepted_prediction_tokens > 0


def test_tokens_are_counted() -> None:
    """Of a prediction that is wrong in one place, by hand."""
    llm = tiny_llm(tiny_model(), "prediction", gamma=6, drafter=None)
    params = SamplingParams(temperature=0, max_tokens=9)
    ((tokens, *_), _) = generated(llm, params, None)
    wrong = next(token for token in range(1, 20) if token not in tokens)
    right = [*tokens[:3], wrong, *tokens[4:]]
    (result,) = llm.generate([PROMPTS[0]], params, prediction=right)
    assert result.token_ids == tokens
    first = result.trace.steps[0]
    assert len(first.drafted) == 6
    assert len(first.kept) == 3
    drafted = sum(len(step.drafted) for step in result.trace.steps)
    metrics = result.metrics
    assert metrics.accepted_prediction_tokens == sum(len(s.kept) for s in result.trace.steps)
    assert metrics.rejected_prediction_tokens == drafted - metrics.accepted_prediction_tokens > 2
    assert metrics.as_dict()["accepted_prediction_tokens"] == metrics.accepted_prediction_tokens
    # A stop cuts off what was accepted after it.
    stopping = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[tokens[1]])
    end = tokens.index(tokens[1]) + 1
    (cut,) = llm.generate([PROMPTS[0]], stopping, prediction=list(tokens))
    assert cut.token_ids == tokens[:end]
    assert cut.metrics.accepted_prediction_tokens == end
    assert cut.metrics.rejected_prediction_tokens == 6 - end


def test_requests_without_one_are_drafted_for_as_before() -> None:
    llm = tiny_llm(tiny_model(), "ngram")
    before = [each.metrics for each in llm.generate(PROMPTS, GREEDY)]
    llm = tiny_llm(tiny_model(), "ngram")
    given = [None, [1, 2, 3], *[None] * (len(PROMPTS) - 2)]
    after = [each.metrics for each in llm.generate(PROMPTS, GREEDY, prediction=given)]
    for place in (0, 2, 3, 4):
        assert after[place].num_draft_tokens == before[place].num_draft_tokens
        assert after[place].accepted_prediction_tokens == 0


def test_all_ways_in_take_one() -> None:
    llm = tiny_llm(tiny_model())
    expected = llm.generate([PROMPTS[0]], GREEDY)[0]
    text = list(expected.token_ids)
    (generated,) = llm.generate([PROMPTS[0]], GREEDY, prediction=text)
    *_, last = llm.stream(PROMPTS[0], GREEDY, prediction=text)
    engine, chunks = llm.engine, []
    engine.add_request(PROMPTS[0], GREEDY, prediction=text)
    while engine.has_unfinished_requests():
        chunks += engine.step()
    for output in (generated.outputs[0], last.output, chunks[-1].output):
        assert output is not None
        assert output.token_ids == expected.token_ids
        assert output.metrics.accepted_prediction_tokens > 0


def test_texts_are_read_like_outputs() -> None:
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer())

    def read(count: int, given: Any) -> list[References]:
        return llm.engine.references.predictions(predictions_per_prompt(count, given))

    tokens = tuple(llm.encode("x y"))
    shared = read(3, "x y")
    assert shared[0].texts == (tokens,)
    assert shared[0] is shared[2]
    assert [each.texts for each in read(2, ["x y", None])] == [(tokens,), ()]
    assert [each.texts for each in read(2, [1, 2])] == [((1, 2),)] * 2
    assert [each.texts for each in read(2, [[1, 2], "x y"])] == [((1, 2),), (tokens,)]
    assert not any(read(2, [[], ""]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1], [2]], "prediction: expected a text for all prompts, or a list with one for each"),
        (5, "prediction: expected a text for all prompts"),
        ([{"a": 1}], "prediction: it is a text or a list of token ids"),
        ([10**6], "prediction: token id 1000000 is outside the vocabulary"),
        ("text", "tokenizer"),
    ],
)
def test_bad_ones_are_refused(given: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        LLM(tiny_model()).generate([PROMPTS[0]], GREEDY, prediction=given)


def test_a_beam_search_takes_none() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, beam_width=2)
    with pytest.raises(CompatibilityError, match="give the text as `references`"):
        LLM(tiny_model()).generate([PROMPTS[0]], params, prediction=[1, 2])


def test_an_encoder_decoder_takes_the_draft_of_a_translation() -> None:
    for kind in ("bart", "t5"):
        llm = LLM(tiny_seq2seq(kind), speculative_config=PREDICTION | {"controller": "fixed"})
        (expected,) = llm.generate([4, 5, 6], GREEDY)
        (result,) = llm.generate([4, 5, 6], GREEDY, prediction=list(expected.token_ids))
        assert result.token_ids == expected.token_ids
        assert result.metrics.target_passes < 0.8 * expected.metrics.target_passes


def test_a_failing_drafter_is_named_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, *_: object) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(PredictionDrafter, "draft", fail)
    llm = tiny_llm(tiny_model(), "prediction")
    expected = tiny_llm(tiny_model()).generate([PROMPTS[0]], GREEDY)[0].token_ids
    (result,) = llm.generate([PROMPTS[0]], GREEDY, prediction=[1, 2, 3])
    assert result.token_ids == expected
    assert result.metrics.drafter_failure is not None


def test_how_much_is_drafted_is_chosen_as_without_one() -> None:
    """Where nothing was drafted, there was no choice; so the default controller does."""
    for config, controller, length in (
        (None, "cost_model", LONGEST_PREDICTED),
        ({"method": "ngram", "num_speculative_tokens": 64}, "cost_model", 64),
        ({"method": "ngram", "controller": "fixed"}, "fixed", LONGEST_PREDICTED),
        ({"method": "ngram", "acceptance": "rejection"}, "fixed", LONGEST_PREDICTED),
        ({"method": "prediction", "num_speculative_tokens": 3}, "cost_model", 3),
    ):
        llm = LLM(tiny_model(), speculative_config=config)
        strategy = llm.engine.strategies.for_prediction(None, llm.engine._speculation.default)
        assert strategy.controller.name == controller
        assert strategy.controller.num_speculative_tokens == length
        assert strategy.rule is llm.engine._speculation.default.rule
        again = llm.engine.strategies.for_prediction(None, llm.engine._speculation.default)
        assert again is strategy


def test_trees_stay_trees() -> None:
    for method in BRANCHING:
        llm = tiny_llm(tiny_model(), method)
        strategy = llm.engine.strategies.for_prediction(None, llm.engine._speculation.default)
        assert strategy.drafter.traits.drafts_trees
        assert strategy.drafter.traits.follows_prediction


def test_what_predictions_taught_is_forgotten() -> None:
    """Each of the two lookups proposes what it proposes at first."""
    llm = tiny_llm(tiny_model(), "ngram")
    (plain,) = llm.generate(PROMPTS[:1], GREEDY)
    default = llm.engine._speculation.default
    drafter: Any = llm.engine.strategies.for_prediction(None, default).drafter
    unlearnt = AcceptanceRates()
    feature = by_prediction(0)
    llm.generate(PROMPTS[:1], GREEDY, prediction=list(plain.token_ids))
    assert drafter._rates[0].of(feature) != unlearnt.of(feature)
    llm.reset_drafter_memory()
    for rates in drafter._rates:
        assert rates._rates == unlearnt._rates


@pytest.mark.parametrize("beams", [False, True])
def test_a_strategy_that_is_dropped_leaves_nothing_behind(*, beams: bool) -> None:
    """Its draft model and the KV of this would stay in memory."""
    strategies = tiny_llm(tiny_model()).engine.strategies
    config = SpeculativeConfig(model=tiny_model(), method="draft_model")
    strategy = strategies.strategy(config)
    assert strategy is not None
    made = strategies.for_beams(strategy) if beams else strategies.for_prediction(config, strategy)
    known = weakref.ref(strategy), weakref.ref(made), weakref.ref(made.drafter)
    assert beams or made in strategies.kept()
    strategies._built.clear()
    del strategy, made
    gc.collect()
    assert [each() for each in known] == [None, None, None]
    assert strategies.kept() == []
