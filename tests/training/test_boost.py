"""Draft models that are trained one after the other, each on what those before it missed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import save_tiny
from tests.tiny import reference_greedy, tiny_model
from tests.training.world import computed, cycles, refused, short_talks, tiny_target
from tokenleap import LLM, ConfigError, SamplingParams
from tokenleap.drafters.options import write_drafters
from tokenleap.errors import ModelError, TrainingError
from tokenleap.models import load_model
from tokenleap.training import report
from tokenleap.training import run as training_run
from tokenleap.training.conversations import ConversationFile
from tokenleap.training.distill import DistillTrainee, missed, missed_parts
from tokenleap.training.features import FeatureCache, TrainingSet
from tokenleap.training.method import DataSettings, TrainingSettings, training_method
from tokenleap.training.report import Served
from tokenleap.training.run import TrainingRun
from tokenleap.training.trainee import LOSSES
from tokenleap.training.trainer import Trainer

SETTINGS = TrainingSettings(
    epochs=24,
    batch_tokens=1024,
    learning_rate=2e-2,
    vector_learning_rate=1e-2,
    evaluate_every=12,
    patience=0,
    mixed_precision="no",
)


class Told:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def stage(self, doing: str, total: int) -> Iterator[Callable[[int, str], None]]:
        yield lambda count, remark: None


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        served = Served(2, 1.5, (0.5,), 0.1, 1.1)
        patched.setattr(training_run, "measure", lambda *_: served)  # see `test_train.py`
        patched.setattr(report, "save_panels", lambda *_: None)
        short_talks(patched, answer=16)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return LLM(str(target), speculative_config={"method": "none"})


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {n}{n}!"}) + "\n" for n in range(20)))
    return file


def training(
    llm: LLM, target: Path, prompts: Path, out: Path, told: Told, **options: Any
) -> TrainingRun:
    method = training_method("boost", {"loss": "ce", **options})
    data = DataSettings((prompts,), tokens=150, held_out_tokens=16)
    return TrainingRun(llm, str(target), method, data, SETTINGS, out, told)


class Trained:
    """A training of two draft models, and what it told."""

    def __init__(self, llm: LLM, target: Path, prompts: Path, out: Path) -> None:
        self.out, self.told = out, Told()
        self.report = training(llm, target, prompts, out, self.told).run()


@pytest.fixture(scope="module")
def trained(
    llm: LLM, target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    return Trained(llm, target, prompts, tmp_path_factory.mktemp("boost"))


def examples(out: Path) -> TrainingSet:
    return TrainingSet(FeatureCache(out / "training/features/train"), SETTINGS.max_length)


def drafter(out: Path, number: int) -> DistillTrainee:
    lm = load_model(out / f"drafter-{number}", torch.float32, torch.device("cpu"))
    return DistillTrainee(lm, 97, LOSSES["ce"])


# Samples


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ([], []),
        ([5], [(4, 8)]),
        ([3], []),  # not an answer
        ([7, 8], [(4, 12)]),
        ([4, 13], [(4, 8), (12, 14)]),
        ([20, 28], [(20, 24), (28, 29)]),
    ],
)
def test_samples_that_are_missed(wrong: list[int], expected: list[tuple[int, int]]) -> None:
    right = [token not in wrong for token in range(30)]
    found = missed_parts(right, [(4, 14), (20, 29)], 4)
    assert found == expected
    assert missed_parts(right, found, 4) == expected  # what is missed is cut in the same places
    assert missed_parts([False] * 30, [(0, 8)], 4) == [(2, 8)]  # no model guesses two tokens


def test_a_sample_is_missed_if_its_greedy_draft_differs(tmp_path: Path) -> None:
    """Against drafts that are generated token by token."""
    lm: Any = tiny_model(seed=4, vocab_size=96)
    data = TrainingSet(computed(tiny_target(), cycles(6, length=21), (), tmp_path), 64)
    trainee = DistillTrainee(lm, 96, LOSSES["kl"])
    optimizer = torch.optim.AdamW(lm.parameters(), 3e-3)
    tokens = torch.stack([data[at].tokens for at in range(6)])
    for _ in range(4):
        loss = lm(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    left = missed(trainee, data, 3)
    expected: dict[int, set[int]] = {}
    for at in range(6):
        text = data[at].tokens.tolist()
        for start in range(4, 21, 3):
            stop = min(start + 3, 21)
            if reference_greedy(lm, text[:start], stop - start) != text[start:stop]:
                expected.setdefault(at, set()).update(range(start, stop))
    learnt = {
        tuple(each.tokens.tolist()): {t for first, stop in each.answers for t in range(first, stop)}
        for each in (left[at] for at in range(len(left)))
    }
    assert learnt == {tuple(data[at].tokens.tolist()): found for at, found in expected.items()}
    number = sum(len(found) for found in expected.values())
    assert 10 < number < data.num_learnt - 10
    assert left.num_learnt == number


# Training


def test_the_second_learns_what_the_first_missed(
    trained: Trained,
    llm: LLM,
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[TrainingSet] = []
    made = Trainer.__init__

    def noting(self: Trainer, trainee: Any, data: TrainingSet, *rest: Any) -> None:
        seen.append(data)
        made(self, trainee, data, *rest)

    monkeypatch.setattr(Trainer, "__init__", noting)
    training(llm, target, prompts, trained.out, Told()).run()  # it has ended, so nothing is trained
    whole, rest = examples(trained.out), missed(drafter(trained.out, 1), examples(trained.out), 4)
    parts = [[each[at].answers for at in range(len(each))] for each in (*seen, whole, rest)]
    assert parts[0] == parts[2]
    assert parts[1] == parts[3]
    assert 0 < rest.num_learnt < whole.num_learnt
    told = f"learns what the one before it missed: {rest.num_learnt} of {whole.num_learnt} tokens."
    assert f"Drafter 2 of 2 {told}" in trained.told.lines
    after = missed(drafter(trained.out, 2), rest, 4)
    assert after.num_learnt < rest.num_learnt  # it has learnt some of it


def test_the_merged_tree_needs_the_fewest_passes(trained: Trained, target: Path) -> None:
    """On the text that was learnt. Each chain of four is in the tree, so it accepts no less."""
    written = ConversationFile(trained.out / "training/data/train.jsonl")
    texts = [each for each in written if not each.temperature][:4]
    params = SamplingParams(temperature=0, max_tokens=16)

    def passes(nodes: int, **config: Any) -> tuple[int, int]:
        fixed = {**config, "num_speculative_tokens": nodes, "controller": "fixed"}
        served = LLM(str(target), speculative_config=fixed)
        outputs = served.generate(
            [list(each.tokens[: each.answers[0][0]]) for each in texts], params
        )
        for each, output in zip(texts, outputs, strict=True):
            assert output.metrics.drafter_failure is None
            assert (
                tuple(output.token_ids)[: each.num_answer_tokens]
                == each.tokens[each.answers[0][0] :]
            )
        metrics = [output.metrics for output in outputs]
        return sum(m.num_drafts for m in metrics), sum(m.num_accepted_tokens for m in metrics)

    singles = [
        passes(4, method="draft_model", model=str(trained.out / f"drafter-{number}"))
        for number in (1, 2)
    ]
    merged = passes(8, method="ensemble", drafters=str(trained.out))
    assert all(accepted > 0 for _, accepted in singles)
    assert merged[0] <= min(drafts for drafts, _ in singles)
    assert merged[1] >= max(accepted for _, accepted in singles)


def test_what_is_written(trained: Trained) -> None:
    names = {each.name for each in trained.out.iterdir()}
    assert names == {"config.json", "drafter-1", "drafter-2", "training"}
    for number in (1, 2):
        assert (trained.out / f"training/drafter-{number}/curves.csv").exists()
        config = json.loads((trained.out / f"drafter-{number}/config.json").read_text())
        assert config["tokenleap"]["seed"] == 0
    assert trained.report is not None
    assert trained.report.best.best


def test_a_run_that_was_stopped_ends_with_the_same_weights(
    trained: Trained,
    llm: LLM,
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the training of the first, and of the second."""
    step = Trainer._step
    left = [0]

    def stopping(self: Trainer, batches: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step(self, batches)

    monkeypatch.setattr(Trainer, "_step", stopping)
    for count in (3, 30):
        left[0] = count
        with pytest.raises(KeyboardInterrupt):
            training(llm, target, prompts, tmp_path, Told()).run()
    left[0] = 0
    training(llm, target, prompts, tmp_path, Told()).run()
    for number in (1, 2):
        for name in (
            f"drafter-{number}/model.safetensors",
            f"training/drafter-{number}/curves.csv",
        ):
            assert (tmp_path / name).read_bytes() == (trained.out / name).read_bytes()


# Wrong use


def test_a_drafter_that_misses_nothing(
    llm: LLM, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the target's layers are the target."""
    monkeypatch.setattr(
        "tokenleap.training.distill.missed_parts", lambda *_: list[tuple[int, int]]()
    )
    short = SETTINGS.model_copy(update={"epochs": 1})
    method = training_method("boost", {"loss": "ce"})
    data = DataSettings((prompts,), tokens=32, held_out_tokens=16)
    run = TrainingRun(llm, str(target), method, data, short, tmp_path, Told())
    with refused(TrainingError, match=r"drafter-1 misses nothing that another"):
        run.run()
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("fault", ["nothing", "another model", "one is missing"])
def test_a_folder_without_draft_models(fault: str, tmp_path: Path) -> None:
    if fault == "another model":
        tiny_model().config.save_pretrained(tmp_path)
    elif fault == "one is missing":
        write_drafters(tmp_path, ["drafter-1", "drafter-2"])
    expected = "there is no draft model in" if fault == "one is missing" else "has no draft models"
    config = {"method": "ensemble", "drafters": str(tmp_path)}
    with refused(ConfigError, match=f"drafters: .*{expected}"):
        LLM(tiny_model(), speculative_config=config)


def test_a_list_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(ModelError, match="cannot be written"):
        write_drafters(tmp_path / "file", ["drafter-1"])
