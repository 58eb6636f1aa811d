"""The tokenizer of a GGUF file, as files that `AutoTokenizer` reads.

Transformers turns a GGUF file's vocabulary into a tokenizer, but cuts some text in another way
than the model was trained with. That is mended here, and what cannot be mended is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import ModelError
from foretoken.models.gguf_file import GgufFile
from foretoken.models.load import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["convert_tokenizer"]

# `tokenizer.ggml.pre` says how text is cut before merging. Transformers 5.23 is right about these,
_KNOWN_CUTS = {"gpt-2", "qwen2"}
# and cuts these like GPT-2, although they set every digit apart first.
_DIGIT_CUTS = {"smollm"}

# Token types whose spelling must survive: normal, control, user-defined.
_SPELT_TYPES = {1, 3, 4}
_PROBE = "  Two  spaces, 12 apples\n\n\tand 3.14 more;\r\n it's I'LL (é🎉中文) "
_ELSE = "use the model's safetensors folder instead"


def convert_tokenizer(file: GgufFile, alone: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, with its chat template, into a folder.

    Args:
        file: The GGUF file.
        alone: The same file in a folder where Transformers finds nothing else.
        folder: Where the tokenizer's files go, beside a `config.json`.

    Raises:
        ModelError: If the tokenizer cannot be converted without changing it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind, cut = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if kind != "llama" and (kind != "gpt2" or cut not in _KNOWN_CUTS | _DIGIT_CUTS):
        raise ModelError(
            f"{file.path} has a tokenizer (model {kind!r}, pre {cut!r}) that cannot be converted; "
            f"{_ELSE}"
        )
    read = AutoTokenizer.from_pretrained(alone.parent, gguf_file=alone.name, local_files_only=True)
    backend = read.backend_tokenizer
    if cut in _DIGIT_CUTS:
        _cut_digits(backend)
    if kind == "llama":
        _keep_leading_spaces(backend, file.get("tokenizer.ggml.add_space_prefix") is not False)
    # Wrapped anew, because `read` would save how and from where it was loaded.
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        model_max_length=file.setting("context_length"),
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        **read.special_tokens_map,
    )
    tokenizer.save_pretrained(folder)
    _check_saved(file, tokenizer, folder)


def _cut_digits(backend: Any) -> None:
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _keep_leading_spaces(backend: Any, prefix: bool) -> None:
    """SentencePiece puts a space before the text even where it starts with one.

    Transformers 5.23 does not, and so loses the text's own leading space; nor does it know of
    vocabularies without that prefix.
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
    """How a text is encoded, and how it is cut before any merging."""
    cutter = tokenizer.backend_tokenizer.pre_tokenizer
    cut = [] if cutter is None else [piece for piece, _ in cutter.pre_tokenize_str(_PROBE)]
    return tokenizer(_PROBE)["input_ids"], cut


def _check_saved(file: GgufFile, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """What a later load brings must encode like `tokenizer` and spell every token as the file."""
    loaded = load_tokenizer(folder)
    assert loaded is not None
    # For some architectures Transformers loads a tokenizer of its own choice.
    if _pieces(loaded) != _pieces(tokenizer):
        raise ModelError(
            f"{file.path} has a tokenizer that Transformers changes when loading it; {_ELSE}"
        )
    tokens = file.get("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    spelt = loaded.convert_ids_to_tokens(list(range(len(tokens))))
    for number, (old, new, kind) in enumerate(zip(tokens, spelt, types, strict=True)):
        if old != new and kind in _SPELT_TYPES:
            raise ModelError(
                f"{file.path} has token {number} {old!r}, which Transformers turns into {new!r}; "
                f"{_ELSE}"
            )
