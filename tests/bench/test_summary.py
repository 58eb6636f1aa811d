"""Ratios, agreement and costs from records whose figures are known."""

from __future__ import annotations

import random
from collections import Counter
from math import exp
from typing import Any

import pytest

from tests.bench.records import (
    CONTESTANTS,
    OWN_FACTS,
    background,
    complete,
    control,
    drafted,
    own_output,
    request,
)
from tokenleap.bench.contestants import BASELINE, OWN, Contestant
from tokenleap.bench.run import order
from tokenleap.bench.summary import Footprint, Interval, Results, Start, bootstrap_ratio, t_ratio


def results(*requests: dict[str, Any]) -> Results:
    return Results([*background(), *requests], CONTESTANTS)


def test_a_ratio_is_of_medians_and_an_outlier_does_not_count() -> None:
    tokens = [1, 2, 3, 4]
    slow = [request("none", s, own_output(tokens), index=i) for i, s in enumerate((2, 2, 50))]
    fast = [request("ngram", s, drafted(tokens), index=i) for i, s in enumerate((1, 40, 1))]
    assert results(*slow, *fast).ratios("ngram") == [pytest.approx(2)]


def test_rows_of_all_and_of_each_kind() -> None:
    found = {(row.label, row.kind): row for row in Results(complete(), CONTESTANTS).rows}
    assert {kind for _, kind in found} == {"all", "qa", "rag"}
    assert found["ngram", "qa"].ratio.mean == pytest.approx(2**0.5)
    overall = found["ngram", "all"]
    assert overall.ratio.mean == pytest.approx((2 * 1 * 4 * 3) ** 0.25)
    assert overall.ratio.low is not None
    assert overall.ratio.low < overall.ratio.mean
    assert overall.mean_acceptance_length == 2
    assert overall.promised
    assert found["transformers-plain", "all"].ratio.mean == pytest.approx(0.5)
    assert found["transformers-plain", "all"].mean_acceptance_length is None
    assert not found["transformers-plain", "all"].promised


def test_the_control_has_a_row_of_its_own() -> None:
    found = Results([*complete(), *control()], CONTESTANTS)
    assert found.kinds == ["qa", "rag", "control"]
    assert found.ratios("ngram") == Results(complete(), CONTESTANTS).ratios("ngram")
    rows = {row.kind: row for row in found.rows if row.label == "ngram"}
    assert rows["control"].ratio.mean == pytest.approx(0.8)
    assert (rows["control"].mean_acceptance_length, rows["control"].drafting_share) == (1, 1)
    assert rows["all"].prompts == 4


@pytest.mark.parametrize("same_samples", [True, False])
def test_samples_must_agree_only_under_a_rule_that_keeps_them(same_samples: bool) -> None:
    """Another lossless rule draws other tokens from the same distribution."""
    records = [*complete(), *control(same=False)]
    for record in records:
        if record["type"] == "contestant" and record["label"] == "ngram":
            record["facts"] = {**record["facts"], "same_samples": same_samples}
    broken = Results(records, CONTESTANTS).broken()
    assert [row.kind for row in broken] == (["control"] if same_samples else [])


def test_the_prefill_is_taken_off_where_it_is_known() -> None:
    found = {row.label: row for row in Results(complete(), CONTESTANTS).rows if row.kind == "qa"}
    ratio = found["ngram"].decode_ratio
    assert ratio is not None
    assert ratio.mean == pytest.approx((3.5 / 1.5 * 1) ** 0.5)
    assert found["transformers-plain"].decode_ratio is None


def test_other_tokens_are_counted_and_broken_where_they_must_not_be() -> None:
    requests = [
        request("none", 1.0, own_output([1, 2, 3])),
        request("ngram", 1.0, drafted([1, 2, 4])),
        request("transformers-plain", 1.0, {"token_ids": [1, 2]}),
    ]
    found = results(*requests)
    rows = {row.label: row for row in found.rows}
    assert (rows["ngram"].differing, rows["ngram"].first_difference) == (1, 2)
    assert (rows["transformers-plain"].differing, rows["transformers-plain"].first_difference) == (
        1,
        2,
    )
    assert [row.label for row in found.broken()] == ["ngram"]


@pytest.mark.parametrize(
    ("facts", "fields", "contestant"),
    [
        ({"lossless": False}, {}, {}),
        ({"dtype": "bfloat16"}, {"branched": True}, {}),
        ({}, {}, {"quantization": "int8"}),
    ],
)
def test_nothing_is_promised_of(
    facts: dict[str, Any], fields: dict[str, Any], contestant: dict[str, Any]
) -> None:
    other = Contestant("other", OWN, {"method": "ngram"}, **contestant)
    records = [
        *background(),
        {"type": "contestant", "label": "other", "facts": {**OWN_FACTS, **facts}},
        request("none", 1.0, own_output([1])),
        request("other", 1.0, drafted([2], **fields)),
    ]
    found = Results(records, (BASELINE, other))
    assert not found.broken()
    assert [row.differing for row in found.rows] == [0, 1]


def test_rounds_that_take_other_passes_are_told() -> None:
    requests = [
        request("none", 1.0, own_output([1])),
        request("ngram", 1.0, drafted([1], passes=2), index=0),
        request("ngram", 1.0, drafted([1], passes=1), index=1),
    ]
    assert [row.learning for row in results(*requests).rows] == [0, 1]


def test_histogram_and_verify_cost_are_those_of_single_prompts() -> None:
    found = Results(complete(), CONTESTANTS)
    assert found.accepted_lengths("ngram") == {0: 4, 2: 4}
    assert found.verify_seconds("none") == {1: pytest.approx(0.2)}
    assert found.verify_seconds("ngram") == {3: pytest.approx(0.3)}
    assert found.accepted_lengths("transformers-plain") == {}


def test_batches_have_latency_and_throughput() -> None:
    points = {(p.label, p.size): p for p in Results(complete(), CONTESTANTS).batches()}
    assert set(points) == {("none", 1), ("none", 2), ("ngram", 1), ("ngram", 2)}
    assert points["none", 2].latency == 5
    assert points["none", 2].throughput == pytest.approx(8 / 5)


def test_a_start_is_loading_and_the_time_to_the_first_token() -> None:
    records = complete()
    slow = next(each for each in records if each.get("contestant") == "none")
    slow["outputs"][0]["first_token_seconds"] = 9.0  # one of four: the median does not see it
    none, ngram, peer = Results(records, CONTESTANTS).starts()
    assert none == Start("none", 3.25, 0.75)
    assert ngram == Start("ngram", 3.25, 0.75)
    assert peer == Start("transformers-plain", None, None)


def test_memory_by_parts() -> None:
    none, _, peer = Results(complete(), CONTESTANTS).memory()
    assert (none.peak, none.weights, none.cache, none.drafter) == (6_000_000, 1_000_000, 1000, 0)
    assert (peer.peak, peer.cache, peer.drafter) == (4_000_000, None, None)


def test_the_roofline_is_of_passes_without_a_draft() -> None:
    ((label, stream, step),) = Results(complete(), CONTESTANTS).roofline()
    assert (label, stream) == ("none", 0.05)
    assert step == pytest.approx(0.2)


def test_the_step_of_a_plain_peer_is_a_token_after_the_first() -> None:
    requests = [
        request("none", 1.0, own_output([1, 2])),
        request(
            "transformers-plain",
            1.0,
            {"token_ids": [1, 2], "prefill_seconds": 0.5, "decode_tokens": 1},
        ),
    ]
    steps = {label: step for label, _, step in results(*requests).roofline()}
    assert steps["transformers-plain"] == pytest.approx(0.5)


def test_a_drafter_that_was_given_up_is_told() -> None:
    requests = [
        request("none", 1.0, own_output([1])),
        request("ngram", 1.0, drafted([1], drafter_failure="out of memory")),
    ]
    assert results(*requests).drafter_failures() == {"ngram": "out of memory"}


def test_tokens_and_times_of_steps() -> None:
    """SpecDec's Tok., t_d and t_v; peers do not count their steps."""
    none, ngram = Results(complete(), CONTESTANTS).steps()
    assert (none.label, none.tokens) == ("none", 1)
    assert (none.draft_seconds, none.verify_seconds) == (None, None)
    assert (ngram.label, ngram.tokens) == ("ngram", 2)
    assert ngram.draft_seconds == pytest.approx(0.02)
    assert ngram.verify_seconds == pytest.approx(0.3)


def test_energy_and_emissions_as_specdec_computes_them() -> None:
    """Average watts * hours * PUE, and grams of CO2 per Wh."""
    requests = [
        request("none", 1800.0, own_output([1] * 500), joules=9e4),
        request("none", 1800.0, own_output([1] * 500), index=1, joules=27e4),
    ]
    records = [*background(), *requests]
    (found,) = Results(records, CONTESTANTS).energy()
    assert (found.joules, found.watts, found.hours) == (36e4, 100, 1)
    assert found.watt_hours == pytest.approx(110)
    assert found.co2 == pytest.approx(110 * 0.385)
    (other,) = Results(records, CONTESTANTS, footprint=Footprint(pue=1, co2=0.5)).energy()
    assert (other.watt_hours, other.co2) == (100, 50)
    assert Results(complete(), CONTESTANTS).energy() == []


def test_energy_is_per_thousand_tokens() -> None:
    requests = [
        request("none", 1.0, own_output([1, 2]), joules=3.0),
        request("ngram", 1.0, drafted([1, 2]), joules=None),
    ]
    assert [row.joules for row in results(*requests).rows] == [1500.0, None]


def test_a_bootstrap_interval_contains_the_mean_and_is_reproducible() -> None:
    ratios = [1.1, 1.3, 0.9, 1.2, 1.05]
    interval = bootstrap_ratio(ratios, seed=4)
    assert interval.low is not None
    assert interval.high is not None
    assert min(ratios) <= interval.low < interval.mean < interval.high <= max(ratios)
    assert interval == bootstrap_ratio(ratios, seed=4)
    assert bootstrap_ratio([1.25]).low is None
    assert bootstrap_ratio([1.0, 1.0]) == Interval(1.0, 1.0, 1.0)


def test_a_t_interval_is_that_of_the_logarithms() -> None:
    """Student's t for 2 degrees of freedom at 95 % is 4.303."""
    found = t_ratio([0.5, 1.0, 2.0], 0.95)
    half = 4.302652729696142 * 0.6931471805599453 / 3**0.5
    assert found.mean == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((exp(-half), exp(half)))
    assert t_ratio([1.1], 0.95).low is None
    assert t_ratio([1.1] * 3, 0.95).high == pytest.approx(1.1)


def test_t_intervals_over_five_rounds_hold_the_truth_as_often_as_they_say() -> None:
    """95 % of 500, within four standard deviations of 1 %; a bootstrap's hold it in 83 %."""
    dice, held = random.Random(0), 0
    for _ in range(500):
        found = t_ratio([exp(dice.gauss(0, 0.05)) for _ in range(5)], 0.95)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1 <= found.high
    assert held / 500 == pytest.approx(0.95, abs=4 * 0.01)


@pytest.mark.parametrize("methods", [["none", "a"], ["none", "a", "b"], ["none", "a", "b", "c"]])
def test_over_a_full_turn_every_method_is_as_often_before_as_after_every_other(
    methods: list[str],
) -> None:
    rounds = [order(methods, index) for index in range(2 * len(methods))]
    assert all(sorted(each) == sorted(methods) for each in rounds)
    before = Counter((a, b) for each in rounds for i, a in enumerate(each) for b in each[i + 1 :])
    assert len(set(before.values())) == 1
