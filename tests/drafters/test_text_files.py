"""Drafters that read a file made of users' texts: which files they take, and which do not fit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import ascii_tokenizer
from tests.tiny import tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams, TokenleapError
from tokenleap.drafters.text import datastore, ngrams
from tokenleap.drafters.text.datastore import Datastore, build_datastore, index_texts
from tokenleap.drafters.text.ngrams import NgramTables, TensorFile, build_ngrams, count_ngrams

V = 40
TEXTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [9, 2, 8, 8, 8], [2]]


@dataclass(frozen=True)
class Kind:
    """A method, the field that names its file, and what makes one of tokens or of text files."""

    method: str
    field: str
    file: TensorFile
    of_tokens: Callable[..., Any]
    of_files: Callable[..., Any]
    load: Callable[..., Any]

    def config(self, path: Path | str | None) -> dict[str, Any]:
        return {"method": self.method} | ({} if path is None else {self.field: path})

    def llm(self, path: Path | str | None) -> LLM:
        return LLM(tiny_model(vocab_size=V), speculative_config=self.config(path))


@pytest.fixture(
    params=[
        Kind("corpus_ngram", "corpus", ngrams.FILE, count_ngrams, build_ngrams, NgramTables.load),
        Kind("rest", "datastore", datastore.FILE, index_texts, build_datastore, Datastore.load),
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


def test_nothing_to_make_it_of(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for files in ([tmp_path / "empty"], []):
        with pytest.raises(TokenleapError, match="the corpus is empty"):
            kind.of_files(files, ascii_tokenizer())
    with pytest.raises(TokenleapError, match="missing: No such file"):
        kind.of_files([tmp_path / "missing"], ascii_tokenizer())
    with pytest.raises(TokenleapError, match="the corpus is empty"):
        kind.of_tokens([[], []], 5)
    with pytest.raises(TokenleapError, match="outside the vocabulary of 5 tokens"):
        kind.of_tokens([[1, 5]], 5)
    for vocab_size in (0, 2**31):
        with pytest.raises(TokenleapError, match=f"a vocabulary of {vocab_size} tokens"):
            kind.of_tokens([[0]], vocab_size)


# The file, whatever its arrays are


def test_saved_and_loaded(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some text")
    made, path = kind.of_files([tmp_path / "text"], ascii_tokenizer()), tmp_path / "a"
    made.save(path)
    loaded = kind.load(path)
    for field in fields(made):
        assert np.array_equal(getattr(loaded, field.name), getattr(made, field.name)), field.name
    assert made.fingerprint
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["a", "text"]
    assert path.stat().st_mode == (tmp_path / "text").stat().st_mode


@pytest.fixture
def file(kind: Kind, tmp_path: Path) -> Path:
    dice = random.Random(0)
    kind.of_tokens([[dice.randrange(V) for _ in range(200)]], V).save(tmp_path / "a")
    return tmp_path / "a"


def test_foreign_and_missing_files(kind: Kind, file: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no arrays here")
    (tmp_path / "empty").touch()
    save_file({"weight": torch.ones(2)}, tmp_path / "model")
    for name in ("text", "empty", "model"):
        message = f"{name} is not a valid {kind.file.what}: make one with 'tokenleap"
        with pytest.raises(TokenleapError, match=message):
            kind.load(tmp_path / name)
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(TokenleapError, match="cannot read"):
            kind.load(path)
    newer = {"format": kind.file.format, "version": "2"}
    save_file(load_file(file), tmp_path / "newer", newer)
    with pytest.raises(TokenleapError, match=r"version 2 .* reads version 1"):
        kind.load(tmp_path / "newer")


def test_a_file_with_the_projects_first_name(kind: Kind, file: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(file.read_bytes().replace(b"tokenleap-", b"foretoken-", 1))
    assert kind.file.format.replace("tokenleap", "foretoken").encode() in old.read_bytes()
    assert kind.load(old).num_tokens == kind.load(file).num_tokens


def test_a_cut_file(kind: Kind, file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for size in (3, 40, len(content) // 2, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(TokenleapError, match="cut is not a valid"):
            kind.load(tmp_path / "cut")


@pytest.mark.parametrize(
    "interruption", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr
)
def test_nothing_is_half_written(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    made, path = kind.of_tokens([[0, 1, 2]], V), tmp_path / "a"
    path.write_text("what was there")

    def interrupted(_tensors: object, beside: Path, _metadata: object) -> None:
        beside.write_text("half")
        raise interruption

    monkeypatch.setattr(ngrams, "save_file", interrupted)
    if isinstance(interruption, OSError):
        with pytest.raises(TokenleapError, match=r"cannot write .*a: No space left"):
            made.save(path)
    else:
        with pytest.raises(KeyboardInterrupt):
            made.save(path)
    assert path.read_text() == "what was there"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_nowhere_to_write(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(TokenleapError, match=r"cannot write .*a: No such file"):
        kind.of_tokens([[0]], V).save(tmp_path / "no" / "a")
