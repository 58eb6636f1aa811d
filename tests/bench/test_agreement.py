"""How near outputs are to plain decoding's, and what they cost in p."""

from __future__ import annotations

import pytest
import torch

from tests.bench.records import (
    CONTESTANTS,
    HEADER,
    background,
    control,
    drafted,
    judgement,
    own_output,
    request,
)
from tests.tiny import tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.bench.contestants import BASELINE, Setting
from tokenleap.bench.own import OwnRunner, mean_logprob
from tokenleap.bench.report import markdown
from tokenleap.bench.summary import Results, agreements, bleu_metric, unjudged

TEXT = "the cat sat on the mat and slept"
OTHER = "the cat sat on the roof and slept"
RECORDS = [
    *background(),
    request("none", 1.0, own_output([1, 2, 3, 4])),
    request("ngram", 1.0, drafted([1, 2, 9, 4])),
    request("none", 1.0, own_output([5, 6]), unit="2"),
    request("ngram", 1.0, drafted([5, 6]), unit="2"),
    *control(same=False),
    judgement("none", TEXT, -1.0),
    judgement("ngram", OTHER, -2.0),
    judgement("none", TEXT, -1.0, unit="2"),
    judgement("ngram", TEXT, -1.0, unit="2"),
]


def test_agreement_with_plain_decoding() -> None:
    none, ngram = agreements(RECORDS)
    assert (none.label, none.equal, none.outputs, none.equal_tokens) == ("none", 2, 2, 1)
    assert (none.first_difference, none.logprob) == (None, -1)
    assert none.bleu == pytest.approx(100)
    assert (ngram.label, ngram.equal, ngram.outputs) == ("ngram", 1, 2)
    assert ngram.equal_tokens == pytest.approx(5 / 6)
    assert (ngram.first_difference, ngram.logprob) == (2, -1.5)
    expected = bleu_metric().corpus_score([OTHER, TEXT], [[TEXT, TEXT]]).score
    assert ngram.bleu == pytest.approx(expected)
    assert 0 < ngram.bleu < 100


def test_the_table_is_there_if_outputs_differ() -> None:
    text = markdown(Results(RECORDS, CONTESTANTS), HEADER)
    assert "## Agreement" in text
    assert "Relative BLEU: sacreBLEU" in text
    (line,) = [line for line in text.splitlines() if "1 of 2" in line]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[:5] == ["ngram", "yes", "1 of 2", "83.3%", "2.0"]
    same = [r for r in RECORDS if r.get("unit") != "1"]
    assert agreements(same) == []
    assert "Agreement" not in markdown(Results(same, CONTESTANTS), HEADER)


def test_what_is_not_judged_yet() -> None:
    """Neither the control nor batches are judged."""
    batch = request("none", 1.0, own_output([1]), own_output([1]), unit="both", kind="batch")
    assert unjudged([*RECORDS, batch]) == []
    assert unjudged(RECORDS[:-1]) == [RECORDS[len(background()) + 3]]


@pytest.mark.parametrize("length", [1, 2, 33, 34, 70])
def test_the_log_probability_is_the_models_own(length: int) -> None:
    """Against the logits of one plain forward pass; several chunks, and the last token alone."""
    model, prompt = tiny_model(), [1, 2, 3]
    output = [(7 * i) % 90 for i in range(length)]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0, 2:-1]
    expected = logits.log_softmax(-1)[range(length), output].mean()
    llm = LLM(model, max_model_len=3 + length)
    assert mean_logprob(llm, prompt, output) == pytest.approx(float(expected), abs=1e-4)


def test_a_contestant_judges_an_output(folder: str) -> None:
    runner = OwnRunner(BASELINE, Setting(folder, max_tokens=8))
    (prompt,) = runner.encode(["hello"], 256)
    (plain,) = runner.generate([prompt], 8)
    (hot,) = runner.generate([prompt], 8, 3.0, [1])
    found = runner.judge(prompt, plain["token_ids"])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert found["text"] == runner._llm.generate([prompt], params)[0].text
    assert found["logprob"] > runner.judge(prompt, hot["token_ids"])["logprob"]
