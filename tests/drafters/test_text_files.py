"""Drafters that read a file made of users' texts: which files they take, and which do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ascii_tokenizer
from tests.tiny import tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams, TokenleapError
from tokenleap.drafters.text.datastore import build_datastore, index_texts
from tokenleap.drafters.text.ngrams import build_ngrams, count_ngrams

V = 40
TEXTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [9, 2, 8, 8, 8], [2]]


@dataclass(frozen=True)
class Kind:
    """A method, the field that names its file, and what makes one of tokens or of text files."""

    method: str
    field: str
    of_tokens: Callable[..., Any]
    of_files: Callable[..., Any]

    def config(self, path: Path | str | None) -> dict[str, Any]:
        return {"method": self.method} | ({} if path is None else {self.field: path})

    def llm(self, path: Path | str | None) -> LLM:
        return LLM(tiny_model(vocab_size=V), speculative_config=self.config(path))


@pytest.fixture(
    params=[
        Kind("corpus_ngram", "corpus", count_ngrams, build_ngrams),
        Kind("rest", "datastore", index_texts, build_datastore),
    ],
    ids=lambda kind: kind.method,
)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


def test_a_path_or_text(kind: Kind, tmp_path: Path) -> None:
    kind.of_tokens(TEXTS, V).save(tmp_path / "a")
    for path in (tmp_path / "a", str(tmp_path / "a")):
        loaded = kind.llm(path)
        assert loaded.speculative_config.as_dict()[kind.field] == str(path)
        loaded.generate([[1, 2]], SamplingParams(max_tokens=3))


def test_no_file(kind: Kind, tmp_path: Path) -> None:
    needs = f"'{kind.method}' needs '{kind.field}': a file made by 'tokenleap"
    for path in (None, ""):
        with pytest.raises(ConfigError, match=needs):
            kind.llm(path)
    with pytest.raises(TokenleapError, match=r"cannot read .*none: No such file"):
        kind.llm(tmp_path / "none")


def test_tokens_outside_the_targets_vocabulary(kind: Kind, tmp_path: Path) -> None:
    kind.of_tokens([[1, 2], [V, 1]], V + 1).save(tmp_path / "a")
    with pytest.raises(
        CompatibilityError, match="has token 40, and the target's vocabulary has 40"
    ):
        kind.llm(tmp_path / "a")


def test_another_vocabulary_of_the_same_size(kind: Kind, tmp_path: Path) -> None:
    tokenizer, other = ascii_tokenizer(), ascii_tokenizer()
    tokenizer.add_tokens(["one"])
    other.add_tokens(["two"])
    model = tiny_model(vocab_size=len(tokenizer))
    (tmp_path / "text").write_text("some text")
    kind.of_files([tmp_path / "text"], tokenizer).save(tmp_path / "a")
    config = kind.config(tmp_path / "a")
    LLM(model, tokenizer=tokenizer, speculative_config=config)
    LLM(model, speculative_config=config)  # no tokenizer to compare with
    with pytest.raises(CompatibilityError, match="with the vocabulary of another model"):
        LLM(model, tokenizer=other, speculative_config=config)
