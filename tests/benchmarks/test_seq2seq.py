from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.seq2seq import (
    BEAM,
    GREEDY,
    Results,
    Score,
    app,
    as_markdown,
    contestants,
    digest,
    lossless,
    measure,
    measure_batches,
    ratio_of_sums,
    save_figures,
    score,
    specdec,
    tables,
    unverified,
)
from benchmarks.seq2seq_training import (
    AUTOREGRESSIVE,
    MAIN,
    DrafterOptions,
    TargetOptions,
    drafters_in,
    new_target,
    share_answers,
    train_command,
    train_drafters,
    train_target,
    train_vocabulary,
)
from safetensors.torch import load_file
from typer.testing import CliRunner

from benchmarks import BenchmarkError, seq2seq
from tests.spec_drafters import save_spec_drafter
from tokenleap import LLM
from tokenleap.bench.run import Journal
from tokenleap.drafters.spec_drafter import SpecDrafterNotes
from tokenleap.training.conversations import Conversation, ConversationFile
from tokenleap.training.method import TrainingSettings, training_method
from tokenleap.training.run import TrainingFolder
from tokenleap.training.spec_drafter import new_masked_lm

GENERAL = TrainingSettings.field_names()
SMALL = "specdec-small"
TEXTS = [f"Choose File {number} - Open." for number in range(40)]
SIZES = {"vocab_size": 300, "width": 16, "layers": 1, "feed_forward": 16, "heads": 2}
OPTIONS = TargetOptions(
    **SIZES, max_positions=16, batch_tokens=128, warmup_steps=2, save_every=2, averaged=2
)


def test_vocabulary_keeps_every_character() -> None:
    tokenizer = train_vocabulary(TEXTS, 300, 64)
    ids = tokenizer("Größe von A7 öffnen ☃")["input_ids"]
    assert len(tokenizer) == 300
    assert ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Größe von A7 öffnen ☃"


def write_data(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    for part, texts in (("train", TEXTS), ("dev", TEXTS[:2]), ("test", TEXTS[:3])):
        for language in ("en", "de"):
            (folder / f"data/{part}.{language}").write_text("\n".join(texts) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target of eight steps."""
    folder = tmp_path_factory.mktemp("seq2seq")
    write_data(folder)
    train_target(folder, OPTIONS, 8)
    return folder


def test_training_goes_on_as_if_it_had_not_stopped(trained: Path, tmp_path: Path) -> None:
    write_data(tmp_path)
    train_target(tmp_path, OPTIONS, 6)
    train_target(tmp_path, OPTIONS, 8)
    first, second = (load_file(each / "target/model.safetensors") for each in (trained, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_training_that_has_ended_is_not_gone_on_with(trained: Path) -> None:
    """So measurements of the target go on, too: their journal knows it by its digest."""
    before, kept = digest(trained / "target"), sorted((trained / "checkpoints").iterdir())
    train_target(trained, OPTIONS, 8)
    assert digest(trained / "target") == before
    assert sorted((trained / "checkpoints").iterdir()) == kept


def test_target_is_the_mean_of_the_last_checkpoints(trained: Path) -> None:
    kept = sorted((trained / "checkpoints").iterdir())
    assert [each.name for each in kept] == ["checkpoint-6", "checkpoint-8"]
    one, other = (load_file(each / "model.safetensors") for each in kept)
    mean = load_file(trained / "target/model.safetensors")
    name = "model.decoder.layers.0.fc1.weight"
    assert torch.allclose(mean[name], (one[name] + other[name]) / 2)
    assert not torch.equal(one[name], other[name])


def save_drafter(folder: Path, shape: str, masks: int) -> None:
    torch.manual_seed(0)
    config = new_target(OPTIONS, 300).config
    lm = new_masked_lm(config, 300, masks, shape)
    lm.train(False)
    save_spec_drafter(folder, lm, SpecDrafterNotes(masks, 300, 300))


def test_every_contestant_translates_every_sentence(trained: Path, tmp_path: Path) -> None:
    options = DrafterOptions(heads=(10, 25), shapes=("shared", "small"))
    for shape in options.shapes:
        save_drafter(tmp_path / f"drafters/specdec-{shape}", shape, 25)
    all_of_them = contestants(options, drafters_in(tmp_path, options))
    names = [one.name for one in all_of_them]
    assert names[:2] == [BEAM, GREEDY]
    assert len(set(names)) == len(names) == 22
    journal = Journal(tmp_path / "x.jsonl", "x", {})
    llm = LLM(trained / "target", dtype="float32", max_num_seqs=2, enable_prefix_caching=False)
    chosen = [one for one in all_of_them if one.name in (BEAM, GREEDY, lossless(MAIN))]
    others = (specdec(MAIN), specdec(SMALL), unverified(MAIN, 10))
    chosen += [one for one in all_of_them if one.name in others]
    measure(llm, chosen, TEXTS[:2], 1, journal)
    measure_batches(llm, chosen[:3], TEXTS[:2], (1, 2), 1, journal)
    count = len(journal.records)
    assert count == 6 * 2 + 3 * 2
    again = Journal(tmp_path / "x.jsonl", "x", {})
    measure(llm, chosen, TEXTS[:2], 1, again)
    measure_batches(llm, chosen[:3], TEXTS[:2], (1, 2), 1, again)
    assert len(again.records) == count  # nothing is measured twice
    results = Results(again.records, TEXTS[:2])
    assert results.mean(GREEDY, "tokens", "passes") == 1
    assert results.same(lossless(MAIN), GREEDY) == 1
    assert results.mean(specdec(MAIN), "draft_seconds", "drafts") > 0
    assert results.mean(unverified(MAIN, 10), "tokens", "passes") > 5
    assert [point.size for point in results.batch_points(GREEDY)] == [1, 2]
    assert "Table 2" in "".join(
        as_markdown(each) for each in tables(results, DrafterOptions(), [MAIN, SMALL])
    )
    save_figures(tmp_path / "x.png", results)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def record(name: str, number: int, text: str, seconds: float, **more: Any) -> dict[str, Any]:
    counts = {"tokens": 6, "passes": 2, "drafts": 2, "accepted": 4, "draft_seconds": 0.004}
    own = {"type": "sentence", "name": name, "round": 0, "number": number, "text": text}
    return {**own, "seconds": seconds, "verify_seconds": 0.01, **counts, **more}


def batch(turn: int, seconds: list[int]) -> dict[str, Any]:
    own = {"type": "batch", "name": GREEDY, "round": turn, "number": 4, "sentences": 8}
    return {**own, "seconds": seconds}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Results:
    """Two sentences; sentence 0 has three rounds. A score is the number of equal texts."""

    def equal(texts: list[str], references: list[str]) -> Score:
        same = sum(x == y for x, y in zip(texts, references, strict=True))
        return Score(float(same), float(10 * same))

    monkeypatch.setattr(seq2seq, "score", equal)
    records = [
        *(record(BEAM, number, text, 6.0) for number, text in enumerate("ab")),
        *(record(GREEDY, number, text, 4.0) for number, text in enumerate("ac")),
        record(specdec(MAIN), 0, "a", 1.0),
        record(specdec(MAIN), 0, "ignored", 9.0, draft_seconds=0.012),
        record(specdec(MAIN), 0, "ignored", 2.0, passes=1),
        record(specdec(MAIN), 1, "b", 1.0),
        record(specdec(MAIN), 2, "not translated by all", 1.0),
        batch(0, [1, 3]),
        batch(1, [1, 1]),
        batch(2, [9, 9]),
    ]
    return Results(records, ["a", "b"])


def test_figures_are_those_of_the_sentences_that_all_have_translated(results: Results) -> None:
    spec = specdec(MAIN)
    assert results.numbers == [0, 1]
    assert results.seconds(spec) == [2.0, 1.0]
    assert results.speedup(spec, BEAM).mean == 4.0
    assert results.single_speedups(spec, GREEDY) == [2.0, 4.0]
    assert results.mean(spec, "tokens", "passes") == 24 / 7
    assert results.mean(spec, "draft_seconds", "drafts") == (3 * 0.004 + 0.012) / 8
    assert results.same(spec, GREEDY) == 0.5
    assert results.score(spec, BEAM) == Score(2.0, 20.0)
    assert results.twentieths(spec, BEAM)[9] == 4.5
    (point,) = results.batch_points(GREEDY)
    assert (point.size, point.latency, point.throughput) == (4, 2.0, 2.0)


def test_tables_have_a_row_for_whatever_was_measured(results: Results) -> None:
    found = {each.title.split(":")[0]: each for each in tables(results, DrafterOptions(), [MAIN])}
    assert list(found) == [f"Table {n}" for n in (1, 2, 3, 4)] + ["Figure 5", "Table 6", "Figure 6"]
    assert [row[0] for row in found["Table 1"].rows] == [BEAM, GREEDY, "SpecDec, k 25"]
    _, greedy, spec = found["Table 1"].rows
    assert greedy[3:6] == ["1.00", "10.00", "3.00"]
    assert [cell.split(" [")[0] for cell in spec[1:3]] == ["4.000", "2.667"]
    assert found["Table 3"].rows[0][0] == "25"
    assert found["Table 4"].rows == [["3", "1", "3.43", "2.00", spec[1]]]
    assert found["Figure 6"].rows[0][-1] == "0.0%"


def test_ratio_of_sums_lies_in_its_interval() -> None:
    above = [2.0 + math.sin(number) for number in range(50)]
    found = ratio_of_sums(above, [1.0] * 50)
    low, mean, high = found.low or 0, found.mean, found.high or 0
    assert 0 < low < mean < high < 1.3 * low
    assert ratio_of_sums([3.0], [2.0]).low is None


def test_scores_are_sacrebleus() -> None:
    pytest.importorskip("sacrebleu")
    texts = ["Öffnet das Menü Datei dieses Fensters.", "Summen und Mittel der Zellen."]
    assert score(texts, texts).bleu == pytest.approx(100)
    half = score(texts, [texts[0], "Etwas ganz anderes steht hier."])
    assert 20 < half.bleu < 80
    assert 20 < half.chrf < 80


def test_drafts_have_their_own_drafter_or_the_first_tokens_of_the_main_one() -> None:
    there = dict.fromkeys(["specdec-shared-10", MAIN])
    found = [DrafterOptions().drafter_of(k, there) for k in (10, 15, 25, 30)]
    assert found == ["specdec-shared-10", MAIN, MAIN, None]
    assert DrafterOptions(num_masks=30).drafter_of(30, there) == MAIN


def test_commands_name_what_is_learnt() -> None:
    options = DrafterOptions(spec_set=("max_steps=5",), heads_set=(), answers="beam")
    command = " ".join(train_command("specdec-small", Path("out"), options))
    assert command.startswith("tokenleap train spec_drafter --model out/target --source ")
    assert command.endswith(
        "--set shape=small --set num_masks=25 --set answers=beam --set max_steps=5"
    )
    with pytest.raises(BenchmarkError, match="no drafter 'x'"):
        train_command("x", Path("out"), options)


def test_trainings_take_the_settings_of_all_drafters() -> None:
    for method, given in DrafterOptions(masks=(10, 30)).methods().values():
        fields = {name: value for name, _, value in (each.partition("=") for each in given)}
        own = {name: fields.pop(name) for name in list(fields) if name not in GENERAL}
        values = {name: as_json(value) for name, value in own.items()}
        settings = TrainingSettings(**{name: as_json(value) for name, value in fields.items()})
        assert training_method(method, values).adapted(settings).max_steps in (3000, 5000)


def as_json(text: str) -> Any:
    return json.loads(text) if text[0].isdigit() or text in ("true", "false") else text


def test_answers_are_written_once(tmp_path: Path) -> None:
    written = TrainingFolder(tmp_path / MAIN)
    written.conversations("train").parent.mkdir(parents=True)
    for part in ("train", "held_out"):
        written.conversations(part).write_text(part)
    share_answers(tmp_path, "blockwise-10")
    own = TrainingFolder(tmp_path / "blockwise-10")
    assert not own.conversations("train").exists()  # the other training has not ended
    written.report.write_text("{}")
    share_answers(tmp_path, "blockwise-10")
    assert own.conversations("train").read_text() == "train"
    assert own.conversations("held_out").read_text() == "held_out"


def test_the_autoregressive_draft_model_learns_the_answers(trained: Path, tmp_path: Path) -> None:
    for name in ("target", "tokenizer"):
        shutil.copytree(trained / name, tmp_path / name)
    written = TrainingFolder(tmp_path / "drafters" / MAIN)
    tokens = (0, *range(20, 30), 2)
    for part in ("train", "held_out"):
        file = ConversationFile(written.conversations(part))
        written.conversations(part).parent.mkdir(parents=True, exist_ok=True)
        file.append([Conversation(tokens, ((1, 12),), source=(30, 31, 2))] * 8)
    options = DrafterOptions(shapes=(), heads=(), autoregressive_steps=4)
    with pytest.raises(BenchmarkError, match="train one first"):
        train_drafters(tmp_path, options, OPTIONS)
    written.report.write_text("{}")
    train_drafters(tmp_path, options, OPTIONS)
    drafters = drafters_in(tmp_path, options)
    assert list(drafters) == [AUTOREGRESSIVE]
    before = digest(drafters[AUTOREGRESSIVE])
    train_drafters(tmp_path, options, OPTIONS)
    assert digest(drafters[AUTOREGRESSIVE]) == before  # it has ended
    llm = LLM(tmp_path / "target", dtype="float32")
    plain, *others = contestants(options, drafters)[1:]
    names = ["k=3", "k=3 top_beta", "k=5", "k=5 top_beta"]
    assert [one.name for one in others] == [f"{AUTOREGRESSIVE} {name}" for name in names]
    found = [
        llm.generate(TEXTS[0], one.params, speculative_config=one.config)[0]
        for one in (plain, others[2])
    ]
    assert found[0].token_ids == found[1].token_ids
    assert found[1].metrics.num_draft_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tables", "--plan", "nowhere.json"], "nowhere.json cannot be read"),
        (["tables", "--quick", "--plan", "x.json"], "give one of the two"),
        (["tables", "--quick"], "nothing is measured yet"),
        (["target", "--quick"], "run `data` first"),
        (["drafters", "--only", "x"], "no drafter 'x'"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, tmp_path: Path) -> None:
    command, *options = arguments
    result = CliRunner().invoke(app, [command, str(tmp_path), *options])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "measurements.jsonl").exists()


def test_plans_are_json(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"steps": 5, "target": {"width": 64}, "stps": 1}))
    result = CliRunner().invoke(app, ["score", str(tmp_path), "--plan", str(path)])
    assert result.exit_code == 2
    assert "did you mean 'steps'" in result.output


def test_models_are_told_apart_by_what_is_in_their_folders(tmp_path: Path) -> None:
    """So a journal is not continued with another target or drafter."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = digest(tmp_path)
    assert digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert digest(tmp_path) != first
