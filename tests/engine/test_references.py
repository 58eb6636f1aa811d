"""References: what users may pass, who takes them, and that outputs do not depend on them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import LOSSLESS, PROMPTS, SPECULATIVE, takes_any_tree, tiny_llm
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, CompatibilityError, PromptError, SamplingParams
from tokenleap.core.references import References
from tokenleap.drafters.registry import METHODS
from tokenleap.engine.jobs import JobSpec
from tokenleap.engine.prompts import QUOTING, per_prompt

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=24)
COPY: dict[str, Any] = {"method": "copy", "copy_min_match": 1}
COMBINED: dict[str, dict[str, Any]] = {
    "ensemble": {"drafters": [COPY, {"method": "recycle"}]},
    "switch": {"drafters": [COPY, {"method": "ngram_table"}], "try_every": 2},
    "horizontal_cascade": {"drafters": [COPY, {"method": "ngram_table"}], "tokens": [3, 1]},
    "hybrid": {"lookup": COPY},
    "cascade": {"drafter": COPY},
    "prediction": {"drafter": COPY},
}
QUOTE = (*QUOTING, *COMBINED)


def quoting_llm(method: str, rule: str = "coupled", **more: Any) -> LLM:
    fields = {"copy_min_match": 1} if method == "copy" else COMBINED.get(method, {})
    return tiny_llm(tiny_model(), method, rule, **fields, **more)


def outputs(llm: LLM, params: SamplingParams, references: Any = None) -> list[tuple[int, ...]]:
    results = llm.generate(PROMPTS, params, references=references)
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[tuple[int, ...]]]:
    llm = tiny_llm(tiny_model())
    return {"greedy": outputs(llm, GREEDY), "sampled": outputs(llm, SAMPLED)}


@pytest.mark.parametrize("method", QUOTE)
def test_they_save_passes_and_change_nothing(
    method: str, plain: dict[str, list[tuple[int, ...]]]
) -> None:
    """The references are the outputs themselves, after prompts that do not have them."""
    for kind, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        expected = plain[kind]
        passes = []
        for given in (None, [list(tokens) for tokens in expected]):
            llm = quoting_llm(method)
            results = llm.generate(PROMPTS, params, references=given)
            assert [result.token_ids for result in results] == expected
            passes.append(sum(result.outputs[0].metrics.target_passes for result in results))
        if method != "cascade":  # its middle model, which is another one, must agree, too
            assert passes[1] < 0.8 * passes[0]


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("method", ["copy", "ngram", "suffix", "ensemble"])
def test_greedy_output_under_every_rule(
    method: str, rule: str, plain: dict[str, list[tuple[int, ...]]]
) -> None:
    if method == "ensemble" and not takes_any_tree(rule):
        pytest.skip("trees")
    expected = plain["greedy"]
    half_right = [[*tokens[:9], 7, *tokens[12:]] for tokens in expected]
    assert outputs(quoting_llm(method, rule), GREEDY, half_right) == expected


def test_an_encoder_decoder_quotes_translations_of_before() -> None:
    model = tiny_seq2seq()
    (expected,) = LLM(model).generate([4, 5, 6], GREEDY)
    for method in QUOTING:
        config = {"method": method, "controller": "fixed"}
        (result,) = LLM(model, speculative_config=config).generate(
            [4, 5, 6], GREEDY, references=[list(expected.token_ids)]
        )
        assert result.token_ids == expected.token_ids
        passes = (result, expected)
        quoted, alone = (each.outputs[0].metrics.target_passes for each in passes)
        assert quoted < alone


def test_beams_quote_them() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, beam_width=2)
    (expected,) = tiny_llm(tiny_model()).generate([PROMPTS[0]], params)
    texts = [list(beam.token_ids) for beam in expected.outputs[0].beams]
    (result,) = quoting_llm("copy").generate([PROMPTS[0]], params, references=texts)
    assert result.outputs[0].beams == expected.outputs[0].beams
    assert result.outputs[0].metrics.num_draft_tokens > 0
    with pytest.raises(CompatibilityError, match="references: method 'none'"):
        tiny_llm(tiny_model()).generate([PROMPTS[0]], params, references=texts)


def test_all_ways_in_take_them() -> None:
    llm = quoting_llm("copy")
    prompt = PROMPTS[0]
    expected = llm.generate([prompt], GREEDY)[0]
    texts = [list(expected.token_ids)]
    (generated,) = llm.generate([prompt], GREEDY, references=texts)
    *_, last = llm.stream(prompt, GREEDY, references=texts)
    engine, chunks = llm.engine, []
    engine.add_request(prompt, GREEDY, references=texts)
    while engine.has_unfinished_requests():
        chunks += engine.step()
    for output in (generated.outputs[0], last.output, chunks[-1].output):
        assert output is not None
        assert output.token_ids == expected.token_ids
        passes = output.metrics.target_passes
        assert passes < expected.outputs[0].metrics.target_passes


def test_one_list_for_all_prompts_or_one_per_prompt() -> None:
    llm = LLM(tiny_model(), tokenizer=tiny_tokenizer(), speculative_config={"method": "ngram"})

    def read(count: int, given: Any) -> list[References]:
        return llm.engine.references.read_all(per_prompt(count, given))

    (first, second) = read(2, ["ab", [1, 2]])
    assert first is second
    assert first.texts == (tuple(llm.encode("ab")), (1, 2))
    (first, second) = read(2, [["a"], None])
    assert (len(first.texts), len(second.texts)) == (1, 0)
    assert read(1, [[[3, 4]]])[0].texts == ((3, 4),)
    assert [each.texts for each in read(2, None)] == [(), ()]
    assert [each.texts for each in read(2, [])] == [(), ()]
    with pytest.raises(PromptError, match="references: half of a character at position 1"):
        read(1, ["a\ud800"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "references: expected a list of texts"),
        ([["a"]], "references: 1 lists for 2 prompts"),
        ([[1.5], ["a"]], "references: each is a text or a list of token ids"),
        ([[96]], "references: token id 96 is outside the vocabulary"),
        ([[b"ab"], None], "references: each is a text or a list of token ids"),
        (["a"], "this model has no tokenizer"),
    ],
)
def test_wrong_references_are_refused(given: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        quoting_llm("ngram").generate([[1, 2], [3, 4]], GREEDY, references=given)


def test_methods_that_cannot_quote_refuse_them() -> None:
    quoting = {method for method in METHODS if method not in COMBINED}
    for method in SPECULATIVE:
        if method in COMBINED or method == "regex":
            continue
        llm = tiny_llm(tiny_model(), method)
        assert llm.engine._speculation.default.drafter.traits.quotes_references == (
            method in QUOTING
        )
    assert set(QUOTING) <= quoting
    with pytest.raises(CompatibilityError, match="'copy', 'ngram' or 'suffix'"):
        tiny_llm(tiny_model(), "recycle").generate([[1, 2]], GREEDY, references=[[3]])
    with pytest.raises(CompatibilityError, match="method 'none'"):
        quoting_llm("copy").generate(
            [[1, 2]], GREEDY, references=[[3]], speculative_config={"method": "none"}
        )


def test_a_preempted_request_keeps_them() -> None:
    texts = References(((1, 2),))
    llm = quoting_llm("copy")
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
