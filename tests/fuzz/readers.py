"""Every reader of files, with a tiny intact folder for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from accelerate import Accelerator

from tests.cli.conftest import ascii_tokenizer
from tests.drafters.heads.test_published import EAGLE1, published
from tests.fuzz.mutants import Reader
from tests.heads import (
    STATE_NETS,
    parallel_config,
    random_pass_tokens,
    save_head,
    state_config,
    state_net,
    tiny_config,
    tiny_net,
)
from tests.tiny import VOCAB_SIZE, tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tests.traces import PIECES, step
from tokenleap import LLM, SamplingParams
from tokenleap.bench.run import Journal
from tokenleap.cli.prompts import LineResults
from tokenleap.cli.trace import trace as show_trace
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.layouts import write_head
from tokenleap.drafters.options import TunedLayers, drafters_in
from tokenleap.drafters.shapes import TreeFile
from tokenleap.drafters.text.datastore import index_texts, load_datastore
from tokenleap.drafters.text.ngrams import count_ngrams, load_corpus
from tokenleap.lines import line_of
from tokenleap.models.convert import convert_gguf
from tokenleap.models.gguf import GgufFile
from tokenleap.models.load import load_model, load_tokenizer
from tokenleap.models.loaded import FolderWeights
from tokenleap.runtime.native import build
from tokenleap.runtime.native.build import why_no_library
from tokenleap.trace import Trace
from tokenleap.training.collect import FileSource, texts_in
from tokenleap.training.conversations import Conversation, ConversationFile
from tokenleap.training.features import FeatureCache, compute_features
from tokenleap.training.trainer import Checkpoints, Progress

__all__ = ["READERS", "reader"]

Build: TypeAlias = Callable[[Path, Any], Callable[[Path], object]]
"""Fills a folder with an intact seed, with the fixture `make_gguf`; returns what reads it."""

CPU = torch.device("cpu")
FEW = SamplingParams(temperature=0, max_tokens=4)
TEXTS = [[1, 2, 3, 1, 2, 4, 5] * 4, [3, 1, 2, 6]]


def reader(name: str, folder: Path, make_gguf: Any) -> Reader:
    """A reader with its seed, which is made in a folder."""
    folder.mkdir()
    read = READERS[name](folder, make_gguf)
    files = {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}
    return Reader(files, read)


def generates(llm: LLM) -> None:
    llm.generate([[1, 2, 3, 1, 2, 3]], FEW)


def _gguf(folder: Path, make_gguf: Any) -> Callable[[Path], object]:
    make_gguf().rename(folder / "tiny.gguf")

    def read(place: Path) -> None:
        (place / "made").mkdir()
        convert_gguf(GgufFile.open(place / "tiny.gguf"), place / "made")
        load_tokenizer(place / "made")
        load_model(place / "made", torch.float32, CPU)

    return read


def _model(folder: Path, _: Any) -> Callable[[Path], object]:
    tiny_model("lean").save_pretrained(folder)
    return lambda place: generates(LLM(place, dtype="float32"))


def _shards(folder: Path, _: Any) -> Callable[[Path], object]:
    tiny_model("qwen3").save_pretrained(folder, max_shard_size="100KB")

    def read(place: Path) -> None:
        weights = FolderWeights(place)
        for name in weights.shapes:
            weights.read(name, torch.float32)
        load_model(place, torch.float32, CPU)

    return read


def _seq2seq(folder: Path, _: Any) -> Callable[[Path], object]:
    tiny_seq2seq().save_pretrained(folder)
    return lambda place: LLM(place, dtype="float32").generate([[5, 6, 7]], FEW)


def _tokenizer(folder: Path, _: Any) -> Callable[[Path], object]:
    ascii_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "chat_template": ascii_tokenizer().chat_template}))
    model = tiny_model(vocab_size=len(ascii_tokenizer().get_vocab()))
    messages = [{"role": "user", "content": "Hello"}]

    def read(place: Path) -> None:
        llm = LLM(model, tokenizer=place)
        llm.chat(messages, FEW)
        llm.generate("Hello there", FEW)

    return read


def _head(method: str, write: Callable[[Path], object]) -> Build:
    def build(folder: Path, _: Any) -> Callable[[Path], object]:
        write(folder)
        model = tiny_model()
        return lambda place: generates(
            LLM(model, speculative_config={"method": method, "model": str(place)})
        )

    return build


def _written(method: str, folder: Path) -> None:
    net = state_net(method, state_config(method), tiny_model())
    write_head(folder, net, Verifier("tiny", ("LlamaForCausalLM",), 2), {"seed": 3})


def _published(folder: Path) -> None:
    folder.rmdir()
    published(folder, tiny_net(EAGLE1, tiny_model()))


def _pass_tokens(folder: Path) -> None:
    for file in Path(random_pass_tokens()).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def _datastore(folder: Path, _: Any) -> Callable[[Path], object]:
    index_texts(TEXTS, VOCAB_SIZE).save(folder / "tiny.datastore")

    def read(place: Path) -> None:
        store = load_datastore(str(place / "tiny.datastore"), VOCAB_SIZE, None)
        entries = range(len(store.suffixes))
        for continuation in store.continuations(entries, 1, 8):
            assert all(0 <= token < VOCAB_SIZE for token in continuation)
        for text in TEXTS:
            store.find_suffix(text, 1, 16)
        assert store.num_tokens <= len(entries)
        assert max(store.num_documents, store.longest_document, store.highest) >= 0

    return read


def _ngrams(folder: Path, _: Any) -> Callable[[Path], object]:
    count_ngrams(TEXTS, VOCAB_SIZE).save(folder / "tiny.ngrams")

    def read(place: Path) -> None:
        for order in (1, 2, 3):
            ngrams = load_corpus(str(place / "tiny.ngrams"), order, VOCAB_SIZE, None)
            for text in TEXTS:
                for end in range(1, len(text)):
                    tokens, probs = ngrams.probabilities(text[:end])
                    assert 0 <= tokens.min() <= tokens.max() < VOCAB_SIZE
                    assert abs(probs.sum() - 1) < 1e-6
                    ngrams.distribution(text[:end], 0.7)

    return read


def _trace(folder: Path, _: Any) -> Callable[[Path], object]:
    steps = [step((1, 2, 3), (0, 1)), step((), ()), step((4, 2), (0, 1), draft_seconds=0.1)]
    (folder / "trace.json").write_text(json.dumps(Trace(steps, PIECES, 0.1, 0.2).as_dict()))

    def read(place: Path) -> None:
        file = place / "trace.json"
        show_trace([file])
        show_trace([file], json_output=True)
        show_trace([file], timeline=True)
        show_trace([file], svg=place / "out.svg")
        show_trace([file], page=place / "out.html")

    return read


def _journal(folder: Path, _: Any) -> Callable[[Path], object]:
    settings = {"seed": 0, "model": "tiny", "sizes": [1, 2]}
    journal = Journal(folder / "results.jsonl", "test", settings)
    for number in range(3):
        journal.add({"type": "request", "unit": str(number), "seconds": [0.5], "of": {"x": None}})
    expected = list(journal.records)

    def read(place: Path) -> None:
        found = Journal(place / "results.jsonl", "test", settings).records
        assert found == expected[: len(found)]

    return read


def _lines(folder: Path, _: Any) -> Callable[[Path], object]:
    lines = [line_of(number, {"prompt": "x"}, FEW) for number in range(3)]
    results = LineResults(folder / "results.jsonl", {}, resume=False)
    for place in results.begin({}, lines):
        results.add(place, {"text": "y", "error": None})
    return lambda place: LineResults(place / "results.jsonl", {}, resume=True).begin({}, lines)


def _tree(folder: Path, _: Any) -> Callable[[Path], object]:
    tree = {"format": "tokenleap-tree-1", "paths": [[0], [0, 0], [1]], "acceptance": [0.5, 0.2]}
    (folder / "tree.json").write_text(json.dumps({**tree, "method": "eagle", "model": "tiny"}))
    return lambda place: TreeFile.load(place / "tree.json")


def _layers(folder: Path, _: Any) -> Callable[[Path], object]:
    fields = {"skip_attention": [0], "skip_mlp": [1], "num_hidden_layers": 2}
    measured = {"num_speculative_tokens": 3, "measured": {"x": 1}, "format": "tokenleap-layers-1"}
    (folder / "layers.json").write_text(json.dumps({**fields, **measured}))
    return lambda place: TunedLayers.load(str(place / "layers.json"))


def _set(folder: Path, _: Any) -> Callable[[Path], object]:
    (folder / "first").mkdir()
    (folder / "first" / "config.json").write_text("{}")
    fields = {"model_type": "tokenleap_drafters", "drafters": ["first"]}
    (folder / "config.json").write_text(json.dumps(fields))
    return drafters_in


def _conversations(folder: Path, _: Any) -> Callable[[Path], object]:
    file = ConversationFile(folder / "conversations.jsonl")
    file.append([Conversation(tuple(range(9)), ((2, 5), (6, 9)), seed) for seed in range(3)])
    return lambda place: list(ConversationFile(place / "conversations.jsonl"))


def _features(folder: Path, _: Any) -> Callable[[Path], object]:
    texts = [Conversation((*range(9),), ((2, 5), (6, 9)), 0), Conversation((1, 2), ((0, 2),), 1)]
    llm = LLM(tiny_model())
    list(compute_features(llm.engine.target, texts, (0, 1), folder))

    def read(place: Path) -> None:
        cache = FeatureCache(place)
        for number in range(len(cache)):
            assert len(cache[number].tokens) == cache.lengths[number]

    return read


def _packed(folder: Path, _: Any) -> Callable[[Path], object]:
    if (reason := why_no_library()) is not None:
        pytest.skip(f"no native library here: {reason}")
    library, model = build.library(), folder.parent / "model"
    tiny_model().save_pretrained(model)

    def read(place: Path) -> list[int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "_library", lambda *_flags: library)
            patch.setenv("TOKENLEAP_CACHE", str(place))
            llm = LLM(model, quantization="int8", dtype="float32")
            return list(llm.generate([[1, 2, 3]], FEW)[0].token_ids)

    expected = read(folder)

    def same(place: Path) -> None:
        assert read(place) == expected

    return same


def _checkpoint(folder: Path, _: Any) -> Callable[[Path], object]:
    def checkpoints(place: Path) -> Checkpoints:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(module.parameters())
        module(torch.ones(3)).sum().backward()
        optimizer.step()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        parts = module, [optimizer], [schedule], Progress()
        return Checkpoints(Accelerator(cpu=True), place, *parts)

    checkpoints(folder).save(3)
    return lambda place: checkpoints(place).load()


def _entries(folder: Path, _: Any) -> Callable[[Path], object]:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    lines = [{"prompt": "Hi", "answer": "Ho"}, {"messages": talk}, {"text": "Once upon a time"}]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = ascii_tokenizer()
    llm = LLM(tiny_model(vocab_size=len(tokenizer.get_vocab())), tokenizer=tokenizer)

    def read(place: Path) -> None:
        FileSource(llm, [place / "data.jsonl"], 64, 1)
        list(texts_in(place / "data.jsonl"))

    return read


READERS: dict[str, Build] = {
    "gguf": _gguf,
    "model": _model,
    "shards": _shards,
    "seq2seq": _seq2seq,
    "tokenizer": _tokenizer,
    "eagle": _head("eagle", lambda f: save_head(f, tiny_net(tiny_config(), tiny_model()))),
    "eagle1": _head("eagle", _published),
    "parallel": _head(
        "parallel", lambda f: save_head(f, tiny_net(parallel_config(), tiny_model()))
    ),
    **{name: _head(name, partial(_written, name)) for name in STATE_NETS},
    "pass": _head("pass", _pass_tokens),
    "packed": _packed,
    "datastore": _datastore,
    "ngrams": _ngrams,
    "trace": _trace,
    "journal": _journal,
    "lines": _lines,
    "tree": _tree,
    "layers": _layers,
    "set": _set,
    "conversations": _conversations,
    "features": _features,
    "checkpoint": _checkpoint,
    "entries": _entries,
}
