"""Conversations of the user's own data, chosen: each form is understood, each prompt used once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.cli.conftest import END, ascii_tokenizer
from tests.tiny_seq2seq import reference_logits, tiny_seq2seq
from tests.training.world import chat_llm, computed, refused, short_talks
from tokenleap import LLM, SamplingParams
from tokenleap.core.references import Source
from tokenleap.errors import DataError
from tokenleap.runtime.network import Need
from tokenleap.training.collect import (
    Chooser,
    FileSource,
    PairSource,
    Unseen,
    collect,
    diversity,
)
from tokenleap.training.conversations import Conversation, ConversationFile
from tokenleap.training.features import passes
from tokenleap.training.method import DataSettings

LENGTH = 200


@pytest.fixture(autouse=True, scope="module")
def short_answers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        short_talks(patched)
        yield


def written(folder: Path, *entries: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    lines = (each if isinstance(each, str) else json.dumps(each) for each in entries)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def prompts_of(llm: LLM, data: FileSource) -> list[str]:
    assert llm.tokenizer is not None
    return [str(llm.tokenizer.decode(talk.tokens)) for talk in data.talks]


ASKED = [{"role": "user", "content": "one"}]
ASKED_AGAIN = [*ASKED, {"role": "assistant", "content": "two"}, {"role": "user", "content": "3"}]
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "prompt": ({"prompt": "one"}, ASKED),
    "turns": ({"question_id": 1, "turns": ["one", "later"]}, ASKED),
    "messages": ({"messages": ASKED}, ASKED),
    "an answered conversation": (
        {"messages": [*ASKED, {"role": "assistant", "content": "no"}]},
        ASKED,
    ),
    "several turns": ({"messages": ASKED_AGAIN}, ASKED_AGAIN),
    "ShareGPT": (
        {
            "conversations": [
                {"from": "human", "value": "one"},
                {"from": "gpt", "value": "two"},
                {"from": "human", "value": "3"},
                {"from": "gpt", "value": "four"},
            ]
        },
        ASKED_AGAIN,
    ),
    "a system prompt": (
        {"messages": [{"role": "system", "content": "be"}, *ASKED]},
        [{"role": "system", "content": "be"}, *ASKED],
    ),
    "characters that end lines elsewhere": (
        {"prompt": "one\u2028two\x85"},
        [{"role": "user", "content": "one\u2028two\x85"}],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompts(form: str, llm: LLM, tmp_path: Path) -> None:
    entry, expected = FORMS[form]
    text = json.dumps(entry, ensure_ascii=False)
    data = FileSource(llm, [written(tmp_path, text, "", text)], LENGTH, 1)
    assert [talk.tokens for talk in data.talks] == [llm.encode(expected)] * 2
    assert [talk.temperature for talk in data.talks] == [0.0, 0.7]
    assert data.texts == []


def test_text_is_learnt_in_pieces(llm: LLM, tmp_path: Path) -> None:
    assert llm.tokenizer is not None
    text = "abcdefghij" * 45
    plain = tmp_path / "some.txt"
    plain.write_text(text)
    for path in (plain, written(tmp_path, {"text": text})):
        texts = FileSource(llm, [path], LENGTH, 1).texts
        assert [len(each.tokens) for each in texts] == [200, 200, 50]
        joined = [token for each in texts for token in each.tokens]
        assert joined == llm.tokenizer.encode(text, add_special_tokens=False)
        assert all(each.answers == ((0, len(each.tokens)),) for each in texts)
        assert [each.seed for each in texts] == [-3, -2, -1]


def test_pieces_fit_the_model(tmp_path: Path) -> None:
    small = chat_llm(context=64)
    data = FileSource(small, [written(tmp_path, {"text": "x" * 500})], LENGTH, 1)
    assert max(len(each.tokens) for each in data.texts) == 63


def test_without_a_chat_template_a_prompt_is_taken_as_it_is(tmp_path: Path) -> None:
    plain = chat_llm(chat_template=None)
    data = FileSource(plain, [written(tmp_path, {"prompt": "Once"})], LENGTH, 1)
    assert prompts_of(plain, data) == ["Once"]
    with pytest.raises(DataError, match=r"line 1: .*no chat template"):
        FileSource(plain, [written(tmp_path, {"messages": ASKED})], LENGTH, 1)


FAULTS: dict[str, tuple[Any, str]] = {
    "half an object": ('{"prompt": "on', "not JSON"),
    "a list": ([1], "not a JSON object"),
    "nothing known": ({"question": "one"}, "has none of 'prompt', "),
    "a number": ({"prompt": 1}, "has none of 'prompt', "),
    "an unknown role": ({"messages": [{"role": "tool", "content": ""}]}, "the role 'tool': known"),
    "no role": ({"messages": [{"content": "one"}]}, "the role None: known are assistant, "),
    "no text": ({"messages": [{"role": "user"}]}, "no text in 'content'"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "no text in"),
    "a string": ({"messages": ["one"]}, "not a JSON object with 'role'"),
    "only answers": ({"messages": [{"role": "assistant", "content": "one"}]}, "no message of a"),
    "an empty conversation": ({"messages": []}, "has none of|no message"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_with_their_line(fault: str, llm: LLM, tmp_path: Path) -> None:
    entry, message = FAULTS[fault]
    path = written(tmp_path, {"prompt": "good"}, "", entry)
    with pytest.raises(DataError, match=message) as caught:
        FileSource(llm, [path], LENGTH, 1)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "nothing to learn"),
        (b"\n\n", "nothing to learn"),
        (b'{"text": ""}\n', "nothing to learn"),
        (b"\xff\xfe", "cannot be read"),
        (json.dumps({"prompt": "x" * 500}).encode(), "1 prompts are too long"),
    ],
)
def test_files_of_no_use(content: bytes, message: str, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        FileSource(llm, [path], LENGTH, 1)


def test_a_missing_file(llm: LLM, seq2seq: LLM, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        FileSource(llm, [tmp_path / "none.jsonl"], LENGTH, 1)
    with pytest.raises(DataError, match=r"none\.txt: cannot be read"):
        pair_source(seq2seq, tmp_path / "none.txt")


# Answers that are learnt


ANSWERED = {"messages": [*ASKED, {"role": "assistant", "content": "two"}]}


@pytest.mark.parametrize("entry", [ANSWERED, {"prompt": "one", "answer": "two"}])
def test_given_answers(entry: dict[str, Any], llm: LLM, tmp_path: Path) -> None:
    """With the token that ends them."""
    assert llm.tokenizer is not None
    data = FileSource(
        llm, [written(tmp_path, entry, {"text": "abc"})], LENGTH, 1, given_answers=True
    )
    prompt = llm.encode(ASKED)
    (talk,), (found,) = data.talks, data.answered
    assert talk.tokens == prompt
    assert found.answers == ((len(prompt), len(found.tokens)),)
    assert list(found.tokens[: len(prompt)]) == prompt
    assert llm.tokenizer.decode(list(found.tokens[len(prompt) :])) == f"two{END}"
    assert len(data.texts) == 1
    assert FileSource(llm, [written(tmp_path, entry)], LENGTH, 1).answered == []


def test_the_target_answers_only_what_is_held_out(llm: LLM, tmp_path: Path) -> None:
    entries = [{"prompt": f"{n}?", "answer": f"{n}{n}{n}"} for n in range(21)]
    source = FileSource(llm, [written(tmp_path, *entries)], LENGTH, 4, given_answers=True)
    learnt = [each for batch in source.write(None, held_out=False) for each in batch]
    assert len(learnt) == 20
    assert set(learnt) < set(source.answered)
    assert [each for batch in source.write(9, held_out=False) for each in batch] == learnt[10:]
    (held_out,) = [each for batch in source.write(None, held_out=True) for each in batch]
    assert held_out.seed == 19
    assert held_out not in source.answered
    prompt = held_out.tokens[: held_out.answers[0][0]]
    assert prompt == source.answered[19].tokens[: len(prompt)]


@pytest.mark.parametrize(
    "entry",
    [
        {"prompt": "one"},
        {"prompt": "one", "answer": ""},
        {"prompt": "one", "answer": 1},
        {"messages": ASKED},
        {"messages": [*ASKED, {"role": "assistant", "content": ""}]},
    ],
)
def test_an_answer_that_is_missing(entry: dict[str, Any], llm: LLM, tmp_path: Path) -> None:
    path = written(tmp_path, ANSWERED, entry)
    with refused(DataError, match="line 2: has no answer to learn"):
        FileSource(llm, [path], LENGTH, 1, given_answers=True)
    FileSource(llm, [path], LENGTH, 1)


# As a source


def everything() -> Chooser:
    return Chooser(10**9, Unseen(()))


@pytest.mark.parametrize("entries", [2, 3, 25])
def test_every_entry_is_learnt_or_held_out(entries: int, llm: LLM, tmp_path: Path) -> None:
    given = [
        *({"prompt": f"{n}?"} for n in range(entries)),
        *({"text": f"{n} abc"} for n in range(7)),
    ]
    source = FileSource(llm, [written(tmp_path, *given)], LENGTH, 1)
    seen: dict[bool, set[tuple[int, ...]]] = {}
    for held_out in (False, True):
        path = tmp_path / f"{held_out}.jsonl"
        list(collect(source, path, everything(), held_out=held_out))
        seen[held_out] = {each.tokens[:8] for each in ConversationFile(path)}
        assert seen[held_out]
    assert not seen[True] & seen[False]


def test_a_file_that_is_continued_holds_every_text_and_answer(llm: LLM, tmp_path: Path) -> None:
    given = [*({"text": f"{n} abc"} for n in range(9)), *({"prompt": f"{n}?"} for n in range(6))]
    source = FileSource(llm, [written(tmp_path, *given)], LENGTH, 1)
    whole = tmp_path / "whole.jsonl"
    list(collect(source, whole, everything(), held_out=False))
    text = whole.read_bytes()
    assert text.count(b"\n") > 8
    for end in (0, len(text) // 20, len(text) // 5, len(text) // 2, len(text) - 1):
        part = tmp_path / "part.jsonl"
        part.write_bytes(text[:end])
        list(collect(source, part, everything(), held_out=False))
        assert part.read_bytes() == text


GREEDY = SamplingParams(temperature=0, max_tokens=12)
TEXTS = [f"say {4 * word}!" for word in ("ab", "cd", "ef", "gh", "ij", "kl")]
TARGETS = [f"{word}." for word in ("ab", "cd", "ef", "gh", "ij", "kl")]


def pair_source(llm: LLM, file: Path, **fields: Any) -> PairSource:
    return PairSource(llm, DataSettings((file,)), 1, GREEDY, **fields)


@cache
def model_of() -> PreTrainedModel:
    tokenizer = ascii_tokenizer(None)
    size, end = len(tokenizer.get_vocab()), tokenizer.eos_token_id
    fields = {"eos_token_id": end, "decoder_start_token_id": end, "pad_token_id": 0}
    return tiny_seq2seq("bart", vocab_size=size, max_position_embeddings=64, **fields)


@pytest.fixture(scope="module")
def seq2seq() -> LLM:
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
def test_every_kind_of_file(seq2seq: LLM, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    found = pair_source(seq2seq, tmp_path / name)
    assert [pair.prompt for pair in found.pairs] == [{"prompt": text} for text in TEXTS]
    given = TARGETS if "pairs" in name else [None] * len(TEXTS)
    assert [pair.target for pair in found.pairs] == given


def parallel(folder: Path, sources: str, targets: str) -> DataSettings:
    paths = (folder / "a.txt", folder / "b.txt")
    for path, text in zip(paths, (sources, targets), strict=True):
        path.write_text(text)
    return DataSettings(parallel=paths)


def test_parallel_files(seq2seq: LLM, tmp_path: Path) -> None:
    """An empty line of one belongs to one of the other."""
    data = parallel(tmp_path, "one\n\nthree", "1\n2\n3\n")
    pairs = PairSource(seq2seq, data, 1, GREEDY).pairs
    assert [(pair.prompt["prompt"], pair.target) for pair in pairs] == [
        ("one", "1"),
        ("three", "3"),
    ]


def test_unequal_line_counts(seq2seq: LLM, tmp_path: Path) -> None:
    data = parallel(tmp_path, "one\ntwo\nthree\n", "1\n2\n")
    with pytest.raises(DataError, match=r"a\.txt has 3 lines and .*b\.txt 2: line N of one"):
        PairSource(seq2seq, data, 1, GREEDY)


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
def test_bad_files(seq2seq: LLM, name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    (tmp_path / name).write_text(text)
    with refused(DataError, match=message):
        pair_source(seq2seq, tmp_path / name)


def test_sources_that_are_too_long_are_left_out(seq2seq: LLM, tmp_path: Path) -> None:
    (tmp_path / "sources.txt").write_text(f"{100 * 'a'}\nshort\n{99 * 'b'}\n")
    found = pair_source(seq2seq, tmp_path / "sources.txt")
    assert [pair.prompt for pair in found.pairs] == [{"prompt": "short"}]
    assert found.left_out == 2
    assert "line 1: the source has 100 tokens" in found.reason


def source_of(seq2seq: LLM, folder: Path, name: str = "pairs.tsv", **fields: Any) -> PairSource:
    (folder / name).write_text(FILES[name])
    return pair_source(seq2seq, folder / name, **fields)


def test_the_target_answers(seq2seq: LLM, tmp_path: Path) -> None:
    source = source_of(seq2seq, tmp_path)
    written = [each for batch in source.write(None, held_out=False) for each in batch]
    held_out = [each for batch in source.write(None, held_out=True) for each in batch]
    assert [each.seed for each in written] == [0, 1, 2, 3, 4]
    assert [each.seed for each in held_out] == [5]
    for each in (*written, *held_out):
        (output,) = seq2seq.generate([TEXTS[each.seed]], GREEDY)
        assert list(each.source) == seq2seq.encode(TEXTS[each.seed])
        assert each.answers == ((1, len(each.tokens)),)
        assert each.tokens[0] == seq2seq.eos_token_ids[0]
        answer = each.tokens[1:]
        assert answer == tuple(output.token_ids[: len(answer)])  # cut where it begins to loop
    after = [each for batch in source.write(2, held_out=False) for each in batch]
    assert after == written[3:]


def test_given_outputs(seq2seq: LLM, tmp_path: Path) -> None:
    """They are learnt, and the target answers what is held out."""
    source = source_of(seq2seq, tmp_path, given_answers=True)
    written = [each for batch in source.write(None, held_out=False) for each in batch]
    for each in written:
        start = seq2seq.eos_token_ids[0]
        assert each.tokens == (start, *seq2seq.encode(TARGETS[each.seed]))
        assert list(each.source) == seq2seq.encode(TEXTS[each.seed])
    (held_out,) = (each for batch in source.write(None, held_out=True) for each in batch)
    assert held_out == next(
        each for batch in source_of(seq2seq, tmp_path).write(None, held_out=True) for each in batch
    )
    with pytest.raises(DataError, match="'fixed' learns the outputs in your files"):
        source_of(seq2seq, tmp_path, "sources.txt", given_answers=True)


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


def test_features_are_those_of_the_source(seq2seq: LLM, tmp_path: Path) -> None:
    target = seq2seq.engine.target
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


NOTHING = Unseen(())


def talk(prompt: list[int], answer: list[int], **fields: float) -> Conversation:
    stop = len(prompt) + len(answer)
    return Conversation((*prompt, *answer), ((len(prompt), stop),), **fields)  # type: ignore[arg-type]


def test_diversity_counts_answers_alone() -> None:
    turns = Conversation((9, 1, 1, 9, 9, 2, 3), ((1, 3), (5, 7)), temperature=0.7)
    found = diversity([turns, talk([9, 9, 9], [1, 2])])
    assert (found.conversations, found.answer_tokens, found.turns) == (2, 6, 1.5)
    assert found.prompt_tokens == (1 + 5 + 3) / 3
    assert found.greedy == 0.5
    assert list(found.distinct) == [3 / 6, 3 / 3, 0]  # of 1 1, 2 3 and 1 2; there are no 3-grams
    assert diversity([]).conversations == 0


def choose(
    given: list[Conversation], tokens: int, unseen: Unseen = NOTHING, others: Any = ()
) -> Chooser:
    chooser = Chooser(tokens, unseen, others)
    for each in given:  # in any parts
        chooser.add([each])
    whole = Chooser(tokens, unseen, others)
    whole.add(given)
    assert vars(whole) == vars(chooser)
    return chooser


def test_the_first_conversations_with_enough_tokens() -> None:
    given = [talk([n], [0] * 10) for n in range(9)]
    assert choose(given, 25).kept == given[:3]
    assert choose(given, 30).kept == given[:3]
    assert choose(given, 30).full
    assert choose(given, 1000).kept == given
    assert not choose(given, 1000).full


def test_a_prompt_is_used_once() -> None:
    first, same, other = talk([1, 2], [3, 4]), talk([1, 2], [5, 6]), talk([1, 3], [3, 4])
    chosen = choose([first, same, other], 100)
    assert (chosen.kept, chosen.twice, chosen.overlapping) == ([first, other], 1, 0)
    assert choose([first, other], 100, NOTHING, [same]).kept == [other]
    text = Conversation((1, 2, 3), ((0, 3),))
    assert choose([text, text], 100).kept == [text]


def test_prompts_that_must_stay_unseen() -> None:
    secret = list(range(20, 40))
    unseen = Unseen([secret, [1, 2, 3]])
    whole, part, short, answer = (
        talk([0, *secret], [1]),
        talk([0, *secret[5:13], 0], [1]),
        talk([0, *secret[5:12], 0], [1]),
        talk([0], secret),
    )
    later = Conversation((0, 1, *secret), ((1, 2), (21, 22)))
    text = Conversation(tuple(secret), ((0, 20),))
    assert [unseen.overlaps(each) for each in (whole, part, later, text)] == [True] * 4
    assert [unseen.overlaps(each) for each in (short, answer)] == [False] * 2
    chosen = choose([whole, short], 100, unseen)
    assert (chosen.kept, chosen.overlapping) == ([short], 1)


class Repeated:
    """Writes the same conversation for ever."""

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        for seed in count(0 if after is None else after + 1):
            yield [talk(list(range(9)), [1, 2], seed=seed)]


def test_a_source_that_has_nothing_new_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    chooser = Chooser(100, NOTHING)
    with pytest.raises(DataError, match="50 conversations begin like another one"):
        list(collect(Repeated(), path, chooser, held_out=False))
    unseen = Chooser(100, Unseen([range(9)]))
    with pytest.raises(DataError, match="with a prompt that must stay unseen"):
        list(collect(Repeated(), path, unseen, held_out=False))
    enough = Chooser(2, NOTHING)
    assert list(collect(Repeated(), path, enough, held_out=False)) == [2]


def test_a_source_that_ends_with_nothing(tmp_path: Path) -> None:
    class Empty:
        def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
            yield []

    with pytest.raises(DataError, match="not enough to learn from"):
        list(collect(Empty(), tmp_path / "some.jsonl", Chooser(1, NOTHING), held_out=False))
