"""The tokenizer of a GGUF file, as files that `AutoTokenizer` reads.

Transformers makes a tokenizer from a GGUF file's vocabulary, but splits some text differently from
the model's own tokenizer. This module corrects the known cases and refuses the others. `convert`
calls it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenleap.errors import ModelError
from tokenleap.models.gguf_file import GgufFile
from tokenleap.models.load import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["convert_tokenizer"]

# `tokenizer.ggml.pre` names the pre-tokenizer. Transformers 5.23 splits text for these correctly.
_CORRECT_SPLITS = {"gpt-2", "qwen2", "dbrx", "smaug-bpe", "llama-bpe", "llama3", "llama-v3"}
# It splits text for these as for GPT-2, although they split off every digit first.
_DIGIT_SPLITS = {"smollm", "refact", "starcoder", "command-r"}
# A word that is a token by itself is not put together from pieces.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3"}

# What Transformers calls the parts of a vocabulary, and the last part of GGUF's keys.
_VOCABULARY = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
}
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}

# Token types whose text must not change: normal, control, user-defined.
_CHECKED_TYPES = {1, 3, 4}
_PROBE = "  Two  spaces, 12 apples\n\n\tand 3.14 more;\r\n it's I'LL (é🎉中文) "
_MAX_TOKEN = 4096
"""Characters of a token: Transformers tries all its parts, two by two."""
_HINT = "use the model's safetensors folder instead"


def convert_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, with its chat template, into a folder.

    Args:
        file: The GGUF file.
        folder: Where the tokenizer's files go, beside a `config.json`.

    Raises:
        ModelError: If the tokenizer cannot be converted without changing it.
    """
    from transformers import PreTrainedTokenizerFast

    kind, split = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if kind != "llama" and (kind != "gpt2" or split not in _CORRECT_SPLITS | _DIGIT_SPLITS):
        raise ModelError(
            f"{file.path} has a tokenizer (model {kind!r}, pre {split!r}) that cannot be "
            f"converted; {_HINT}"
        )
    _check_vocabulary(file)
    backend = _backend(file)
    if split in _DIGIT_SPLITS:
        _split_digits(backend)
    if split in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if kind == "llama":
        _keep_leading_spaces(backend, file.get("tokenizer.ggml.add_space_prefix") is not False)
    tokens = file.get("tokenizer.ggml.tokens")
    special = {name: file.token_id(key) for name, key in _SPECIAL.items()}
    # Files of these vocabularies need not say that a text begins with a token of its own.
    begins = file.get("tokenizer.ggml.add_bos_token")
    usual = kind == "llama" or split in _WHOLE_WORDS
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        model_max_length=file.setting("context_length"),
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: tokens[number] for name, number in special.items() if number is not None},
    )
    tokenizer.add_bos_token = usual if begins is None else begins  # type: ignore[misc]
    tokenizer.add_eos_token = bool(file.get("tokenizer.ggml.add_eos_token"))  # type: ignore[misc]
    tokenizer.save_pretrained(folder)
    _check_saved(file, tokenizer, folder)


def _check_vocabulary(file: GgufFile) -> None:
    """Check the types and lengths of what makes up the vocabulary.

    Raises:
        ModelError: One is wrong.
    """
    tokens = file.get("tokenizer.ggml.tokens")
    if not _are(str, tokens) or max(map(len, tokens), default=_MAX_TOKEN + 1) > _MAX_TOKEN:
        raise file.wrong("tokenizer.ggml.tokens")
    for key, kind, size in (
        ("scores", float, len(tokens)),
        ("token_type", int, len(tokens)),
        ("merges", str, None),
    ):
        name = f"tokenizer.ggml.{key}"
        given = file.get(name)
        if given is not None and not (_are(kind, given) and size in (None, len(given))):
            raise file.wrong(name)
    for key, single in (("tokenizer.chat_template", str), ("tokenizer.ggml.add_bos_token", bool)):
        if not isinstance(file.get(key), single | None):
            raise file.wrong(key)


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) for each in values)


def _backend(file: GgufFile) -> Any:
    """The tokenizer that Transformers makes of the file's vocabulary."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    given = {name: file.get(f"tokenizer.ggml.{key}") for name, key in _VOCABULARY.items()}
    present = {name: value for name, value in given.items() if value is not None}
    return convert_gguf_tokenizer(file.architecture, present)[0]


def _split_digits(backend: Any) -> None:
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _keep_leading_spaces(backend: Any, prefix: bool) -> None:
    """Insert a space before the text even if it starts with one, as SentencePiece does.

    Transformers 5.23 does not, so it loses the leading space of a text. It also ignores that some
    vocabularies have no such prefix.
    """
    from tokenizers import decoders, normalizers

    replace = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *replace] if prefix else replace
    )
    backend.pre_tokenizer = None
    join = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*join, decoders.Strip(" ", 1, 0)] if prefix else join)


def _pieces(tokenizer: Any) -> tuple[list[int], list[str]]:
    """How the probe text is encoded, and how the pre-tokenizer splits it."""
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    split = [] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(_PROBE)]
    return tokenizer(_PROBE)["input_ids"], split


def _check_saved(file: GgufFile, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Check that the saved tokenizer encodes like `tokenizer` and has the file's tokens.

    Raises:
        ModelError: If it does not.
    """
    loaded = load_tokenizer(folder)
    assert loaded is not None
    # For some architectures Transformers ignores the saved class and loads another.
    if _pieces(loaded) != _pieces(tokenizer):
        raise ModelError(
            f"{file.path} has a tokenizer that Transformers changes when loading it; {_HINT}"
        )
    tokens = file.get("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    spaces = file.get("tokenizer.ggml.model") == "llama"
    loaded_tokens = loaded.convert_ids_to_tokens(list(range(len(tokens))))
    for number, (old, new, kind) in enumerate(zip(tokens, loaded_tokens, types, strict=True)):
        # llama.cpp stores spaces of user-defined tokens as they are.
        same = new == old or (spaces and new == old.replace(" ", "▁"))
        if not same and kind in _CHECKED_TYPES:
            raise ModelError(
                f"{file.path} has token {number} {old!r}, which Transformers turns into {new!r}; "
                f"{_HINT}"
            )
