from __future__ import annotations

from pathlib import Path

from benchmarks.loading import BASELINE
from benchmarks.methods import left_out, roster, table
from benchmarks.speed_report import rows_of

from foretoken import SpeculativeConfig
from foretoken.drafters.registry import METHODS
from tests.benchmarks.test_speed import timed


def test_with_everything_at_hand_only_what_needs_a_form_is_left_out() -> None:
    methods = roster(Path("a.ngrams"), Path("a.datastore"), draft_model=True)
    assert left_out(methods) == ["regex"]
    assert len({method.label for method in methods}) == len(methods)
    assert BASELINE not in methods


def test_without_files_and_models_their_methods_are_named() -> None:
    assert left_out(roster(None, None, draft_model=False)) == [
        name
        for name in METHODS
        if name in ("draft_model", "cascade", "corpus_ngram", "rest", "regex")
    ]


def test_every_entry_is_a_valid_configuration() -> None:
    for method in roster(Path("a.ngrams"), Path("a.datastore"), draft_model=True):
        assert SpeculativeConfig.parse(method.config("some model")).method in METHODS


def test_a_table_has_a_row_per_method_and_a_column_per_kind() -> None:
    items = [timed([2.0], [1.0], kind, kind) for kind in ("qa", "rag")]
    rows = rows_of(items, ["none", "ngram"], 0)
    lines = table(rows, lambda r: f"{r.ratio.mean:.1f}", lambda r: f"<{r.ratio.mean:.1f}>")
    assert [line.split() for line in lines.splitlines()[2:]] == [
        ["|", "none", "|", "1.0", "|", "1.0", "|", "<1.0>", "|"],
        ["|", "ngram", "|", "2.0", "|", "2.0", "|", "<2.0>", "|"],
    ]
