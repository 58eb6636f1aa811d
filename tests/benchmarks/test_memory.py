from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.memory import Case, Peak, measure, table

from tests.spec_drafters import random_spec_drafter
from tests.tiny import tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap.bench.contestants import BASELINE
from tokenleap.runtime.attention import KEY_BLOCK


def test_differences_are_to_plain_decoding_of_the_same_batch() -> None:
    ngram = {"method": "draft_model", "model": "path/to/draft"}
    sizes = {(1, "none"): 100, (1, "draft"): 130, (8, "none"): 200, (8, "draft"): 190}
    peaks = {
        Case("m", BASELINE.config if kind == "none" else ngram, batch): Peak(1, 2, 3, size * 10**6)
        for (batch, kind), size in sizes.items()
    }
    header, rows = table(peaks)
    assert header[-1] == "over none"
    assert [row[-1] for row in rows] == ["", "+30.0", "", "-10.0"]
    assert rows[1][:2] == ["1", "draft_model (draft)"]


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_the_kv_of_a_batch(kind: str, tmp_path: Path) -> None:
    """Rows of one key block, for the target and for its drafter; sources count, too."""
    target = tiny_model() if kind == "decoder" else tiny_seq2seq("bart")
    target.save_pretrained(tmp_path / "target")
    config: dict[str, Any] = {"method": "spec_drafter", "model": random_spec_drafter("bart", 5)}
    if kind == "decoder":
        tiny_model(seed=1, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
        config = {"method": "draft_model", "model": str(tmp_path / "draft")}
    config["controller"] = "fixed"  # the default one may find that drafts do not pay
    case = Case(str(tmp_path / "target"), config, 2, prompt_tokens=9, max_tokens=6, dtype="float32")
    plain = measure(Case(case.model, BASELINE.config, *(2, 9, 6, "float32")))
    found = measure(case)
    assert found.kv == plain.kv >= 2 * KEY_BLOCK * 4 * 2 * 32
    assert plain.draft_kv == 0 < found.draft_kv
    assert found.weights > plain.weights > 0
    assert found.total > 10**7
