"""A tiny model on disk that speaks printable ASCII, and ways to run the command line on it."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from tests.tiny import tiny_model
from tokenleap.cli import app

# One token per character, in the letters of byte-level tokenizers.
CHARACTERS = ["\u0120", "\u010a", *(chr(code) for code in range(33, 127))]
END = "<|end|>"
CONTEXT = 8192
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def ascii_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    vocabulary = {symbol: number for number, symbol in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, chat_template=chat_template
    )


def save_tiny(folder: Path, chat_template: str | None = CHAT_TEMPLATE, seed: int = 0) -> Path:
    tokenizer = ascii_tokenizer(chat_template)
    model = tiny_model(
        seed=seed, vocab_size=len(tokenizer.get_vocab()), max_position_embeddings=CONTEXT
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_gguf(file: Path, layers: int = 2, hidden: int = 64, vocabulary: int | None = None) -> Path:
    """A GGUF file that says it is the tiny model, without its layers' weights."""
    tokens = ascii_tokenizer().get_vocab()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    rows = len(tokens) if vocabulary is None else vocabulary
    writer.add_tensor("token_embd.weight", np.zeros((rows, hidden), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("plain"), chat_template=None)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file with two prompts that repeat themselves."""
    file = tmp_path / "prompts.txt"
    file.write_text("abc abc abc abc abc\nhello hello\n")
    return file


class Run:
    """The command line in this process; what escapes it is a failure of the test."""

    def __call__(self, *arguments: object, stdin: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        logging.getLogger("tokenleap.serve.requests").handlers.clear()  # their stream is closed
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def done(self, *arguments: object, stdin: str | bytes | None = None) -> Result:
        """A command line that succeeds."""
        result = self(*arguments, stdin=stdin)
        assert result.exit_code == 0, result.stderr
        return result

    def refused(self, *arguments: object, stdin: str | bytes | None = None, code: int = 2) -> str:
        """The one line on stderr of a command line that fails, and prints nothing else."""
        result = self(*arguments, stdin=stdin)
        assert (result.exit_code, result.stdout) == (code, ""), result.stderr
        return error_of(result)


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Rich believe it writes to a terminal of 40 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def error_of(result: Result) -> str:
    """The one line on stderr."""
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
