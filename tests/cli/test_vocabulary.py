"""Messages of the command line about a draft model with other tokens than the target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, error_of
from tests.tiny import tiny_model
from tests.vocabularies import bpe

CALL = ("generate", "the cat", "--no-chat", "--max-tokens", 6)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model with most of the target's characters, and words besides."""
    folder = tmp_path_factory.mktemp("other")
    tokenizer = bpe()
    tiny_model(vocab_size=len(tokenizer.get_vocab())).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_overlap_is_told_once_the_models_are_loaded(run: Run, tiny: Path, other: Path) -> None:
    plain = run(*CALL, "--model", tiny, "--method", "none")
    result = run.done(*CALL, "--model", tiny, "--draft-model", other)
    assert result.stdout == plain.stdout
    size = len(bpe().get_vocab())
    told = f"55 of the target's 97 tokens are among the draft model's {size} (vocabulary 'inter"
    assert sum(told in line for line in result.stderr.splitlines()) == 1


def test_not_where_the_tokens_are_the_same_or_quiet_is_wanted(
    run: Run, tiny: Path, other: Path
) -> None:
    assert "tokens are among" not in run(*CALL, "--model", tiny, "--draft-model", tiny).stderr
    quiet = run.done(*CALL, "--model", tiny, "--draft-model", other, "--quiet")
    assert quiet.stderr == ""


def test_a_way_that_is_refused(run: Run, tiny: Path, other: Path) -> None:
    result = run(
        *(*CALL, "--model", tiny, "--draft-model", other),
        *("--speculative-config", '{"vocabulary": "same"}'),
    )
    assert "set vocabulary to 'intersection' or 'text'" in error_of(result)
