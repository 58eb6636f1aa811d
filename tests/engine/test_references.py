"""References and predictions: what users may pass, who takes them, and that outputs stay."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.matrix import (
    BRANCHING,
    LOSSLESS,
    PROMPTS,
    SPECULATIVE,
    fits,
    speculative_config,
    takes_any_tree,
    tiny_llm,
)
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, CompatibilityError, PromptError, SamplingParams, SpeculativeConfig
from tokenleap.control.features import AcceptanceRates, by_prediction
from tokenleap.core.references import References, common_prefix
from tokenleap.drafters.copying import PredictionDrafter
from tokenleap.drafters.options import LONGEST_PREDICTED
from tokenleap.engine.jobs import JobSpec
from tokenleap.engine.prompts import QUOTING, per_prompt, predictions_per_prompt
from tokenleap.outputs import Metrics

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=24)
COPY: dict[str, Any] = {"method": "copy", "copy_min_match": 1}
PREDICTION: dict[str, Any] = {"method": "prediction"}


def combined(drafter: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Methods that combine this one with others."""
    table = {"method": "ngram_table"}
    return {
        "ensemble": {"drafters": [drafter, {"method": "recycle"}]},
        "switch": {"drafters": [drafter, table], "try_every": 2},
        "horizontal_cascade": {"drafters": [drafter, table], "tokens": [3, 1]},
        "hybrid": {"lookup": drafter},
    }


COMBINED = {**combined(COPY), "cascade": {"drafter": COPY}, "prediction": {"drafter": COPY}}
QUOTE = (*QUOTING, *COMBINED)

Plain = dict[str, list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def model_llm() -> LLM:
    """One for all methods."""
    config = {"method": "none"}
    return LLM(tiny_model(), tokenizer=tiny_tokenizer(), speculative_config=config)


def generated(
    llm: LLM, params: SamplingParams, **given: Any
) -> tuple[list[tuple[int, ...]], list[Metrics]]:
    results = llm.generate(PROMPTS, params, **given)
    return [each.token_ids for each in results], [each.metrics for each in results]


@pytest.fixture(scope="module")
def plain(model_llm: LLM) -> Plain:
    kinds = {"greedy": GREEDY, "sampled": SAMPLED}
    return {kind: generated(model_llm, params)[0] for kind, params in kinds.items()}


def quoting(method: str, rule: str = "coupled", **more: Any) -> dict[str, Any]:
    fields = {"copy_min_match": 1} if method == "copy" else COMBINED.get(method, {})
    return speculative_config(method, rule, 4, **fields, **more)


def edited(tokens: tuple[int, ...]) -> list[int]:
    """An expectation of an output that has most of it right."""
    return [*tokens[:9], 7, *tokens[11:]]


# Outputs


@pytest.mark.parametrize("method", QUOTE)
def test_references_save_passes_and_change_nothing(method: str, plain: Plain) -> None:
    """They are the outputs themselves, after prompts that do not have them."""
    for kind, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        passes = []
        for quoted in (None, [list(tokens) for tokens in plain[kind]]):
            llm = LLM(tiny_model(), tokenizer=tiny_tokenizer(), speculative_config=quoting(method))
            tokens, metrics = generated(llm, params, references=quoted)
            assert tokens == plain[kind]
            passes.append(sum(each.target_passes for each in metrics))
        if method != "cascade":  # its middle model, which is another one, must agree, too
            assert passes[1] < 0.8 * passes[0]


@pytest.mark.parametrize("method", ["none", *SPECULATIVE])
def test_every_method_follows_a_prediction_first(method: str, plain: Plain) -> None:
    """Tokens are those of plain decoding; most of the prediction is accepted."""
    llm = tiny_llm(tiny_model(), method)
    for kind, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        tokens, metrics = generated(llm, params, prediction=[edited(each) for each in plain[kind]])
        assert tokens == plain[kind]
        for each in metrics:
            assert each.drafter_failure is None
            assert each.accepted_prediction_tokens <= each.num_accepted_tokens
        assert sum(each.accepted_prediction_tokens for each in metrics) > 60  # of 120
        assert sum(each.target_passes for each in metrics) < 50


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("method", ["copy", "ngram", "suffix", "ensemble"])
def test_references_under_every_rule(method: str, rule: str, model_llm: LLM, plain: Plain) -> None:
    if method == "ensemble" and not takes_any_tree(rule):
        pytest.skip("trees")
    half_right = [[*tokens[:9], 7, *tokens[12:]] for tokens in plain["greedy"]]
    given = {"references": half_right, "speculative_config": quoting(method, rule)}
    assert generated(model_llm, GREEDY, **given)[0] == plain["greedy"]


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "hybrid", "prediction"])
def test_predictions_under_every_rule(method: str, rule: str, plain: Plain) -> None:
    if not fits(method, rule):
        pytest.skip("trees")
    llm = tiny_llm(tiny_model(), method, rule)
    tokens, metrics = generated(llm, GREEDY, prediction=[edited(each) for each in plain["greedy"]])
    assert tokens == plain["greedy"]
    assert sum(each.accepted_prediction_tokens for each in metrics) > 60


@pytest.mark.parametrize("method", combined(PREDICTION))
def test_methods_that_combine_a_prediction_are_left_as_they_are(method: str, plain: Plain) -> None:
    llm = tiny_llm(tiny_model(), method, **combined(PREDICTION)[method])
    default = llm.engine._speculation.default
    assert llm.engine.strategies.for_prediction(None, default) is default
    tokens, metrics = generated(llm, GREEDY, prediction=list(map(list, plain["greedy"])))
    assert tokens == plain["greedy"]
    assert sum(each.accepted_prediction_tokens for each in metrics) > 20


def test_a_cascade_follows_a_prediction_in_its_middle_model(plain: Plain) -> None:
    llm = tiny_llm(tiny_model(), "cascade", drafter=PREDICTION, model=tiny_model())
    given = list(map(list, plain["greedy"]))
    assert generated(llm, GREEDY, prediction=given)[0] == plain["greedy"]


def test_a_draft_model_drafts_where_a_prediction_ends(plain: Plain) -> None:
    llm = tiny_llm(tiny_model(), "prediction", gamma=4, drafter={"model": tiny_model()})
    given = [list(each[:9]) for each in plain["greedy"]]
    tokens, metrics = generated(llm, GREEDY, prediction=given)
    assert tokens == plain["greedy"]
    for each in metrics:
        assert each.num_accepted_tokens > each.accepted_prediction_tokens > 0


@pytest.mark.parametrize("method", [*QUOTING, "prediction"])
def test_an_encoder_decoder_takes_translations_of_before(method: str) -> None:
    for kind in ("bart", "t5"):
        llm = LLM(tiny_seq2seq(kind), speculative_config={"method": method, "controller": "fixed"})
        (expected,) = llm.generate([4, 5, 6], GREEDY, speculative_config={"method": "none"})
        text: Any = list(expected.token_ids)
        given = {"prediction": text} if method == "prediction" else {"references": [text]}
        (result,) = llm.generate([4, 5, 6], GREEDY, **given)
        assert result.token_ids == expected.token_ids
        assert result.metrics.target_passes < 0.8 * expected.metrics.target_passes


def test_beams_quote_references_and_follow_no_prediction() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, beam_width=2)
    (expected,) = tiny_llm(tiny_model()).generate([PROMPTS[0]], params)
    texts = [list(beam.token_ids) for beam in expected.outputs[0].beams]
    llm = LLM(tiny_model(), speculative_config=quoting("copy"))
    (result,) = llm.generate([PROMPTS[0]], params, references=texts)
    assert result.outputs[0].beams == expected.outputs[0].beams
    assert result.metrics.num_draft_tokens > 0
    with pytest.raises(CompatibilityError, match="references: method 'none'"):
        tiny_llm(tiny_model()).generate([PROMPTS[0]], params, references=texts)
    with pytest.raises(CompatibilityError, match="give the text as `references`"):
        LLM(tiny_model()).generate([PROMPTS[0]], params, prediction=[1, 2])


def test_predicted_tokens_are_counted() -> None:
    """Of a prediction that is wrong in one place, by hand."""
    llm = tiny_llm(tiny_model(), "prediction", gamma=6, drafter=None)
    params = SamplingParams(temperature=0, max_tokens=9)
    ((tokens, *_), _) = generated(llm, params)
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


def test_requests_without_a_prediction_are_drafted_for_as_before() -> None:
    before = generated(tiny_llm(tiny_model(), "ngram"), GREEDY)[1]
    given = [None, [1, 2, 3], *[None] * (len(PROMPTS) - 2)]
    after = generated(tiny_llm(tiny_model(), "ngram"), GREEDY, prediction=given)[1]
    for place in (0, 2, 3, 4):
        assert after[place].num_draft_tokens == before[place].num_draft_tokens
        assert after[place].accepted_prediction_tokens == 0


@pytest.mark.parametrize("name", ["references", "prediction"])
def test_all_ways_in_take_them(name: str) -> None:
    llm = LLM(tiny_model(), speculative_config=quoting("copy"))
    prompt = PROMPTS[0]
    expected = llm.generate([prompt], GREEDY)[0]
    text = list(expected.token_ids)
    given: Any = {name: [text] if name == "references" else text}
    (result,) = llm.generate([prompt], GREEDY, **given)
    *_, last = llm.stream(prompt, GREEDY, **given)
    engine, chunks = llm.engine, []
    engine.add_request(prompt, GREEDY, **given)
    while engine.has_unfinished_requests():
        chunks += engine.step()
    for output in (result.outputs[0], last.output, chunks[-1].output):
        assert output is not None
        assert output.token_ids == expected.token_ids
        assert output.metrics.target_passes < expected.metrics.target_passes
        assert (output.metrics.accepted_prediction_tokens > 0) == (name == "prediction")


def test_a_preempted_request_keeps_its_references() -> None:
    texts = References(((1, 2),))
    llm = LLM(tiny_model(), speculative_config=quoting("copy"))
    (request,) = llm.engine.make_requests(JobSpec([1], GREEDY, references=texts))
    scheduler = llm.engine._scheduler
    scheduler.add(request)
    scheduler.step()
    scheduler._preempt(request)
    assert request.references is texts
    while scheduler.busy:
        scheduler.step()
    assert request.metrics.preemptions == 1
    assert tuple(request.output_ids) == llm.generate([[1]], GREEDY)[0].token_ids


# What is read and what is refused


def test_one_list_of_references_for_all_prompts_or_one_per_prompt(model_llm: LLM) -> None:
    def read(count: int, given: Any) -> list[References]:
        return model_llm.engine.references.read_all(per_prompt(count, given))

    (first, second) = read(2, ["ab", [1, 2]])
    assert first is second
    assert first.texts == (tuple(model_llm.encode("ab")), (1, 2))
    (first, second) = read(2, [["a"], None])
    assert (len(first.texts), len(second.texts)) == (1, 0)
    assert read(1, [[[3, 4]]])[0].texts == ((3, 4),)
    assert [each.texts for each in read(2, None)] == [(), ()]
    assert [each.texts for each in read(2, [])] == [(), ()]
    with pytest.raises(PromptError, match="references: half of a character at position 1"):
        read(1, ["a\ud800"])


def test_predictions_are_read_like_outputs(model_llm: LLM) -> None:
    def read(count: int, given: Any) -> list[References]:
        return model_llm.engine.references.predictions(predictions_per_prompt(count, given))

    tokens = tuple(model_llm.encode("x y"))
    shared = read(3, "x y")
    assert shared[0].texts == (tokens,)
    assert shared[0] is shared[2]
    assert [each.texts for each in read(2, ["x y", None])] == [(tokens,), ()]
    assert [each.texts for each in read(2, [1, 2])] == [((1, 2),)] * 2
    assert [each.texts for each in read(2, [[1, 2], "x y"])] == [((1, 2),), (tokens,)]
    assert not any(read(2, [[], ""]))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("references", "text", "references: expected a list of texts"),
        ("references", [["a"]], "references: 1 lists for 2 prompts"),
        ("references", [[1.5], ["a"]], "references: each is a text or a list of token ids"),
        ("references", [[96]], "references: token id 96 is outside the vocabulary"),
        ("references", [[b"ab"], None], "references: each is a text or a list of token ids"),
        ("references", ["a"], "this model has no tokenizer"),
        ("prediction", [[1]], "prediction: expected a text for all prompts, or a list with one"),
        ("prediction", 5, "prediction: expected a text for all prompts"),
        ("prediction", [{"a": 1}] * 2, "prediction: it is a text or a list of token ids"),
        ("prediction", [10**6], "prediction: token id 1000000 is outside the vocabulary"),
        ("prediction", "text", "tokenizer"),
    ],
)
def test_wrong_ones_are_refused(name: str, given: Any, message: str) -> None:
    llm = LLM(tiny_model(), speculative_config=quoting("ngram"))
    with pytest.raises(PromptError, match=message):
        llm.generate([[1, 2], [3, 4]], GREEDY, **{name: given})


def test_methods_that_cannot_quote_refuse_references() -> None:
    for method in SPECULATIVE:
        if method in COMBINED or method == "regex":
            continue
        drafter = tiny_llm(tiny_model(), method).engine._speculation.default.drafter
        assert drafter.traits.quotes_references == (method in QUOTING)
    assert set(QUOTING) <= set(SPECULATIVE)
    llm = LLM(tiny_model(), speculative_config=quoting("copy"))
    for method, message in (("recycle", "'copy', 'ngram' or 'suffix'"), ("none", "method 'none'")):
        config = {"method": method}
        with pytest.raises(CompatibilityError, match=message):
            llm.generate([[1, 2]], GREEDY, references=[[3]], speculative_config=config)


# Strategies that follow a prediction


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


@given(
    st.lists(st.integers(0, 1), max_size=600),
    st.lists(st.integers(0, 1), max_size=600),
    st.integers(0, 700),
    st.sampled_from([list, tuple]),
)
def test_the_common_prefix(first: list[int], second: list[int], same: int, kind: Any) -> None:
    one, other = [2] * same + first, kind([2] * same + second)
    naive = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_prefix(one, other) == naive
