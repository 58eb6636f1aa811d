"""`ngrams build` and `ngrams write`: files that `--method corpus_ngram` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, error_of
from tokenleap import LLM
from tokenleap.drafters.text.ngrams import NgramTables, count_ngrams
from tokenleap.training import collect
from tokenleap.training.conversations import SelfTalk


def test_build_and_use(run: Run, tiny: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "a.txt", tmp_path / "a.ngrams"
    text.write_text("the cat sat on the mat\n" * 20)
    built = run("ngrams", "build", text, text, "--model", tiny, "--output", output)
    assert built.exit_code == 0, built.stderr
    assert "has 920 tokens" in built.stdout
    assert "Counting n-grams (920 bytes" in built.stderr
    assert NgramTables.load(output).num_tokens == 920
    config = json.dumps({"method": "corpus_ngram", "corpus": str(output)})
    arguments = ("--model", tiny, "--max-tokens", 8)
    drafted = run("generate", "the cat", *arguments, "--speculative-config", config)
    assert drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == run("generate", "the cat", *arguments, "--method", "none").stdout


def test_write_counts_what_the_model_writes_by_itself(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "_ROWS", 2)
    output = tmp_path / "own.ngrams"
    written = run("ngrams", "write", "--model", tiny, "--tokens", 60, "--output", output)
    assert written.exit_code == 0, written.stderr
    llm = LLM(tiny)
    talks = SelfTalk(llm, collect._LENGTH).write(range(2))
    texts = [each.tokens[start:stop] for each in talks for start, stop in each.answers]
    cut = [texts[0][:60], texts[1][: max(0, 60 - len(texts[0]))]]
    expected = count_ngrams(cut, llm.engine.target.vocab_size, llm.tokenizer)
    found = NgramTables.load(output)
    assert found.num_tokens == 60
    assert found.fingerprint == expected.fingerprint
    for name in ("unigrams", "bigram_tokens", "bigram_counts", "trigram_tokens"):
        assert (getattr(found, name) == getattr(expected, name)).all()
    config = json.dumps({"method": "corpus_ngram", "corpus": str(output), "order": 1})
    arguments = ("--model", tiny, "--max-tokens", 8)
    drafted = run("generate", "the cat", *arguments, "--speculative-config", config)
    assert drafted.stdout == run("generate", "the cat", *arguments, "--method", "none").stdout


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("prompts.jsonl", '{"prompt": "the cat"}\n' * 2, None),
        ("notes.txt", "the cat sat on the mat", "there are no prompts to answer"),
        ("broken.jsonl", "{", "line 1: not JSON"),
    ],
)
def test_write_answers_prompts(
    run: Run, tiny: Path, tmp_path: Path, name: str, text: str, message: str | None
) -> None:
    data, output = tmp_path / name, tmp_path / "own.ngrams"
    data.write_text(text)
    result = run(
        "ngrams", "write", "--model", tiny, "--tokens", 900, "--data", data, "--output", output
    )
    if message is None:
        assert result.exit_code == 0, result.stderr
        assert 8 <= NgramTables.load(output).num_tokens <= 2 * 384
    else:
        assert message in error_of(result)
        assert not output.exists()
