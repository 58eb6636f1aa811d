"""Pairs of source and output: every kind of file, and what is learnt of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.cli.conftest import ascii_tokenizer
from tests.tiny_seq2seq import reference_logits, tiny_seq2seq
from tests.training.world import computed
from tokenleap import LLM, SamplingParams
from tokenleap.core.references import Source
from tokenleap.errors import DataError
from tokenleap.runtime.network import Need
from tokenleap.training.collect import Chooser, PairData, PairSource, Unseen
from tokenleap.training.conversations import Conversation, ConversationFile
from tokenleap.training.features import passes
from tokenleap.training.settings import DataSettings

GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEXTS = [f"say {4 * word}!" for word in ("ab", "cd", "ef", "gh", "ij", "kl")]
TARGETS = [f"{word}." for word in ("ab", "cd", "ef", "gh", "ij", "kl")]


@cache
def model_of() -> PreTrainedModel:
    tokenizer = ascii_tokenizer(None)
    size, end = len(tokenizer.get_vocab()), tokenizer.eos_token_id
    fields = {"eos_token_id": end, "decoder_start_token_id": end, "pad_token_id": 0}
    return tiny_seq2seq("bart", vocab_size=size, max_position_embeddings=64, **fields)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model_of(), tokenizer=ascii_tokenizer(None))


def jsonl(entries: list[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


FILES: dict[str, str] = {
    "pairs.tsv": "".join(f"{a}\t{b}\n" for a, b in zip(TEXTS, TARGETS, strict=True)),
    "pairs.jsonl": jsonl([{"source": a, "target": b} for a, b in zip(TEXTS, TARGETS, strict=True)]),
    "sources.jsonl": jsonl([{"source": text} for text in TEXTS]),
    "sources.txt": "\n".join(TEXTS) + "\n\n",
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file(llm: LLM, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    found = PairData(llm, DataSettings((tmp_path / name,)))
    assert [pair.prompt for pair in found.pairs] == [{"prompt": text} for text in TEXTS]
    given = TARGETS if "pairs" in name else [None] * len(TEXTS)
    assert [pair.target for pair in found.pairs] == given


def parallel(folder: Path, sources: str, targets: str) -> DataSettings:
    paths = (folder / "a.txt", folder / "b.txt")
    for path, text in zip(paths, (sources, targets), strict=True):
        path.write_text(text)
    return DataSettings(parallel=paths)


def test_parallel_files(llm: LLM, tmp_path: Path) -> None:
    """An empty line of one belongs to one of the other."""
    data = parallel(tmp_path, "one\n\nthree", "1\n2\n3\n")
    pairs = PairData(llm, data).pairs
    assert [(pair.prompt["prompt"], pair.target) for pair in pairs] == [
        ("one", "1"),
        ("three", "3"),
    ]


def test_unequal_line_counts(llm: LLM, tmp_path: Path) -> None:
    data = parallel(tmp_path, "one\ntwo\nthree\n", "1\n2\n")
    with pytest.raises(DataError, match=r"a\.txt has 3 lines and .*b\.txt 2: line N of one"):
        PairData(llm, data)


BAD: dict[str, tuple[str, str]] = {
    "tabs.tsv": ("a\tb\nc\n", "line 2: has 0 tabs"),
    "json.jsonl": ("{\n", "line 1: not JSON"),
    "list.jsonl": ("[]\n", "line 1: has no text in 'source'"),
    "prompt.jsonl": ('{"prompt": "a"}\n', "line 1: has no text in 'source'"),
    "number.jsonl": ('{"source": "a", "target": 5}\n', "line 1: has no text in 'target'"),
    "empty.txt": ("\n", "there is nothing to learn from"),
    "long.txt": (100 * "a", "nothing to learn from .*the source has 100 tokens"),
    "language.jsonl": ('{"source": "a", "source_language": "de"}\n', "no tokens of languages"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(llm: LLM, name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        PairData(llm, DataSettings((tmp_path / name,)))
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_exist(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        PairData(llm, DataSettings((tmp_path / "none.txt",)))


def test_sources_that_are_too_long_are_left_out(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "sources.txt").write_text(f"{100 * 'a'}\nshort\n{99 * 'b'}\n")
    found = PairData(llm, DataSettings((tmp_path / "sources.txt",)))
    assert [pair.prompt for pair in found.pairs] == [{"prompt": "short"}]
    assert found.left_out == 2
    assert "line 1: the source has 100 tokens" in found.reason


def source_of(llm: LLM, folder: Path, name: str = "pairs.tsv", **fields: Any) -> PairSource:
    (folder / name).write_text(FILES[name])
    return PairSource(llm, PairData(llm, DataSettings((folder / name,))), 1, GREEDY, **fields)


def test_the_target_answers(llm: LLM, tmp_path: Path) -> None:
    source = source_of(llm, tmp_path)
    written = [each for batch in source.write(None, held_out=False) for each in batch]
    held_out = [each for batch in source.write(None, held_out=True) for each in batch]
    assert [each.seed for each in written] == [0, 1, 2, 3, 4]
    assert [each.seed for each in held_out] == [5]
    for each in (*written, *held_out):
        (output,) = llm.generate([TEXTS[each.seed]], GREEDY)
        assert list(each.source) == llm.encode(TEXTS[each.seed])
        assert each.answers == ((1, len(each.tokens)),)
        assert each.tokens[0] == llm.eos_token_ids[0]
        answer = each.tokens[1:]
        assert answer == tuple(output.token_ids[: len(answer)])  # cut where it begins to loop
    after = [each for batch in source.write(2, held_out=False) for each in batch]
    assert after == written[3:]


def test_given_answers(llm: LLM, tmp_path: Path) -> None:
    """They are learnt, and the target answers what is held out."""
    source = source_of(llm, tmp_path, given_answers=True)
    written = [each for batch in source.write(None, held_out=False) for each in batch]
    for each in written:
        start = llm.eos_token_ids[0]
        assert each.tokens == (start, *llm.encode(TARGETS[each.seed]))
        assert list(each.source) == llm.encode(TEXTS[each.seed])
    (held_out,) = (each for batch in source.write(None, held_out=True) for each in batch)
    assert held_out == next(
        each for batch in source_of(llm, tmp_path).write(None, held_out=True) for each in batch
    )
    with pytest.raises(DataError, match="'fixed' learns the outputs in your files"):
        source_of(llm, tmp_path, "sources.txt", given_answers=True)


# Conversations with a source


def conversations() -> list[Conversation]:
    return [
        Conversation((96, 5, 6, 7), ((1, 4),), 0, source=(8, 9, 10)),
        Conversation((96, 5, 6), ((1, 3),), 1, source=(20, 21)),
    ]


def test_they_are_kept_in_files(tmp_path: Path) -> None:
    file = ConversationFile(tmp_path / "file.jsonl")
    decoder_only = Conversation((1, 2, 3), ((1, 3),), 2)
    file.append([*conversations(), decoder_only])
    assert list(file) == [*conversations(), decoder_only]
    assert "source" not in file.path.read_text().splitlines()[-1]


def test_they_differ_by_their_sources() -> None:
    """Decoders begin alike; what comes before an answer is the source, too."""
    chooser = Chooser(100, Unseen([tuple(range(30, 50))]))
    chooser.add([*conversations(), *conversations()])
    assert (len(chooser.kept), chooser.twice) == (2, 2)
    chooser.add([Conversation((96, 5, 6), ((1, 3),), 2, source=tuple(range(35, 48)))])
    assert chooser.overlapping == 1


def test_features_are_those_of_the_source(llm: LLM, tmp_path: Path) -> None:
    target = llm.engine.target
    cache = computed(target, conversations(), (), tmp_path)
    for number, each in enumerate(conversations()):
        found = cache[number]
        assert found.source.tolist() == list(each.source)
        (output,) = passes(target, each.tokens, Need(), each.source)
        best = output.scores.float().topk(16)
        assert found.top_tokens.tolist() == best.indices.tolist()
        expected = reference_logits(model_of(), Source(each.source), list(each.tokens))
        assert found.top_tokens[:, 0].tolist() == expected.argmax(-1).tolist()
    assert len({tuple(cache[number].top_tokens[0].tolist()) for number in range(2)}) == 2
