from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from benchmarks.report import markdown_table
from benchmarks.speed_report import CONTROL, Report, rows_of, verdict
from benchmarks.timing import Run, Timed, row, spread

from benchmarks import timing
from foretoken import SamplingParams
from foretoken.bench.ratios import Interval, bootstrap_ratio, geometric_mean
from foretoken.bench.rounds import order


def run(seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), **counts: Any) -> Run:
    defaults = {"target_passes": 4, "num_drafts": 0, "num_accepted_tokens": 0}
    return Run(tokens, seconds, 0.0, 0.0, **{**defaults, **counts})


def timed(none: list[float], ngram: list[float], kind: str = "qa", prompt: str = "1") -> Timed:
    runs = {
        "none": [run(seconds) for seconds in none],
        "ngram": [
            run(seconds, target_passes=2, num_drafts=2, num_accepted_tokens=2) for seconds in ngram
        ],
    }
    return Timed(prompt, kind, 5, runs)


def test_a_prompt_that_comes_again_has_been_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Remembering:
        def reset_drafter_memory(self) -> None:
            said.append("forget")

    def measured(llm: Any, *_: object) -> Run:
        said.append("run")
        return run(1.0)

    monkeypatch.setattr(timing, "measure", measured)
    llms: Any = {"none": Remembering()}
    timing.time_prompt(llms, timing.Work("1", "qa", [1], SamplingParams()), 3)
    assert said == ["run", "forget", "run", "forget", "run"]


def test_the_geometric_mean_of_twice_and_half_is_one() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)


def test_the_interval_contains_the_mean_and_is_reproducible() -> None:
    ratios = [1.1, 1.3, 0.9, 1.2, 1.05]
    interval = bootstrap_ratio(ratios, seed=4)
    assert interval.low is not None
    assert interval.high is not None
    assert min(ratios) <= interval.low < interval.mean < interval.high <= max(ratios)
    assert interval == bootstrap_ratio(ratios, seed=4)
    assert bootstrap_ratio([1.25]) == Interval(1.25, None, None)


@pytest.mark.parametrize("methods", [["none", "a"], ["none", "a", "b"], ["none", "a", "b", "c"]])
def test_over_a_full_turn_every_method_is_as_often_before_as_after_every_other(
    methods: list[str],
) -> None:
    rounds = [order(methods, index) for index in range(2 * len(methods))]
    assert all(sorted(each) == sorted(methods) for each in rounds)
    before = Counter((a, b) for each in rounds for i, a in enumerate(each) for b in each[i + 1 :])
    assert len(set(before.values())) == 1


def test_a_ratio_is_that_of_medians_and_an_outlier_does_not_count() -> None:
    item = timed([2.0, 2.0, 200.0], [1.0, 100.0, 1.0])
    assert item.ratio("ngram") == 2
    assert row("qa", "ngram", [item]).ratio.mean == pytest.approx(2)


def test_a_row_counts_passes_and_acceptance() -> None:
    found = row("qa", "ngram", [timed([2.0], [1.0])])
    assert found.mean_acceptance_length == 2
    assert found.passes_ratio == 0.5
    assert found.drafting_share == 1
    assert found.differing == 0


def test_other_tokens_are_counted_as_differing() -> None:
    item = timed([1.0], [1.0])
    other = Timed("1", "qa", 5, {**item.runs, "ngram": [run(1.0, (1, 2, 3, 5))]})
    assert row("qa", "ngram", [item, other]).differing == 1


def test_spread_is_the_range_over_the_median() -> None:
    assert spread([timed([1.0, 1.1, 0.9], [2.0, 2.2, 1.8])]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.98, 1.0, "shown"), (0.95, 0.96, "missed"), (0.95, 0.99, "open"), (None, None, "open")],
)
def test_a_verdict_needs_the_whole_interval(
    low: float | None, high: float | None, expected: str
) -> None:
    assert verdict(Interval(0.97, low, high)) == expected


def report(items: list[Timed]) -> Report:
    return Report(items, rows_of(items, ["ngram"], 0), {"cpu": "any"}, {}, 0)


def test_a_method_whose_passes_change_between_rounds_is_told() -> None:
    item = timed([1.0, 1.0], [1.0, 1.0])
    runs = [run(1.0, target_passes=2, num_drafts=2), run(1.0, target_passes=1, num_drafts=1)]
    learner = Timed("1", "qa", 5, {**item.runs, "ngram": runs})
    assert row("qa", "ngram", [item]).learning == 0
    assert row("qa", "ngram", [item, learner]).learning == 1
    assert "learns from earlier runs" in report([learner]).markdown()


def test_a_report_has_a_row_per_kind_for_all_and_for_the_control() -> None:
    items = [timed([2.0], [1.0], kind) for kind in ("qa", "rag", CONTROL)]
    made = report(items)
    assert [r.label for r in made.rows] == ["qa", "rag", "all", CONTROL]
    assert made.good
    assert "2.000" in made.markdown()
    assert len(made.as_dict()["prompts"]) == 3


def test_a_control_that_misses_the_floor_is_not_good() -> None:
    items = [timed([1.0], [seconds], CONTROL, str(seconds)) for seconds in (1.1, 1.2)]
    assert not report(items).good


def test_a_table_is_markdown() -> None:
    table = markdown_table(["name", "value"], [["a", "1"], ["bc", "10"]])
    assert table.splitlines() == [
        "| name | value |",
        "| ---- | ----: |",
        "| a    |     1 |",
        "| bc   |    10 |",
    ]
