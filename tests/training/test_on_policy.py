"""Text that the draft model writes while it learns, with the target's distribution for it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_model
from tests.training.world import (
    Run,
    World,
    assert_alike,
    assert_same,
    cycles,
    refused,
    short_talks,
    tiny_target,
    weights,
)
from tokenleap import LLM, SamplingParams
from tokenleap.errors import TrainingError
from tokenleap.runtime.target import Target
from tokenleap.training import conversations, distill
from tokenleap.training.conversations import Conversation, ConversationFile
from tokenleap.training.distill import DistillTrainee, OnPolicyRounds
from tokenleap.training.features import compute_features
from tokenleap.training.method import TrainingSettings
from tokenleap.training.trainer import Step

SETTINGS = TrainingSettings(
    epochs=4, batch_tokens=48, max_length=40, evaluate_every=4, mixed_precision="no"
)
EVERY = 3
ON_POLICY: dict[str, Any] = {"answers": "on_policy", "refresh_every": EVERY}
MIXED: dict[str, Any] = {"answers": "mixed", "refresh_every": EVERY}


@pytest.fixture(autouse=True, scope="module")
def short_answers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        short_talks(patched, answer=12)
        yield


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model(head_dim=32), max_num_seqs=8)


@cache
def with_weights() -> Target:
    """The same target; it still has the weights that a draft model is made of."""
    return tiny_target()


class OnPolicy(Run):
    """A training whose draft model writes, in a folder that is used again to continue."""

    def __init__(self, llm: LLM, folder: Path, count: int = 6, **options: Any) -> None:
        self.llm, self.place, self.told = llm, folder, list[str]()
        talks = (cycles(count), cycles(2, seed=1))
        target = llm.engine.target
        world = World(folder, "distill", learnt=talks, target=target, of=with_weights(), **options)
        super().__init__(world, folder / "checkpoints", SETTINGS, self.rounds)

    def rounds(self) -> OnPolicyRounds:
        plan = self.world.method.plan.on_policy
        assert plan is not None
        return OnPolicyRounds(
            self.llm,
            self.world.training,
            plan,
            self.settings,
            1,
            self.place / "on_policy",
            4,
            self.told.append,
        )

    def text(self, number: int) -> list[Conversation]:
        return list(ConversationFile(self.place / "on_policy" / str(number) / "text.jsonl"))


def prompts(run: OnPolicy) -> set[tuple[int, ...]]:
    data = run.world.training
    found = (data[at] for at in range(len(data)))
    return {tuple(each.tokens[: each.answers[0][0]].tolist()) for each in found}


# The text


def test_the_draft_model_writes_and_the_target_scores(llm: LLM, tmp_path: Path) -> None:
    """Greedy answers are the draft model's, and p after every token is the target's."""
    run = OnPolicy(llm, tmp_path, **ON_POLICY)
    rounds, trainee = run.rounds(), run.world.trainee()
    assert isinstance(trainee, DistillTrainee)
    rounds.begin(0, trainee)
    written, examples = run.text(0), rounds.examples(0)
    assert len(written) == len(examples) == EVERY * 48 // 24
    assert {each.tokens[:4] for each in written} <= prompts(run)
    assert {each.temperature for each in written} == {0.0, 0.7}
    target, lm = tiny_model(head_dim=32), LLM(trainee.lm)
    for index, each in enumerate(written):
        assert each.answers == ((4, len(each.tokens)),)
        if not each.temperature:
            params = SamplingParams(temperature=0, max_tokens=len(each.tokens) - 4)
            (own,) = lm.generate([list(each.tokens[:4])], params)
            assert tuple(own.token_ids) == each.tokens[4:]
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([each.tokens])).logits[0]
        expected = logits.log_softmax(-1)
        found = examples[index]
        torch.testing.assert_close(
            found.top_logprobs, expected.gather(1, found.top_tokens), atol=2e-2, rtol=0
        )
        assert torch.equal(found.top_tokens[:, 0], expected.argmax(-1))


def test_text_follows_from_seed_weights_and_round(llm: LLM, tmp_path: Path) -> None:
    first, second = (OnPolicy(llm, tmp_path / name, **ON_POLICY) for name in "ab")
    for run in (first, second):
        run.rounds().begin(0, run.world.trainee())
    assert first.text(0) == second.text(0)
    other = second.world.trainee()
    for weight in other.parameters():
        weight.data += 0.5
    second.rounds().begin(1, other)
    assert not (second.place / "on_policy" / "0").exists()
    first.rounds().begin(1, first.world.trainee())
    assert second.text(1) != first.text(1)
    assert [each.seed for each in first.text(1)] == [each.seed for each in second.text(1)]


def test_a_share_of_the_text_is_the_draft_models(llm: LLM, tmp_path: Path) -> None:
    """The others are conversations of the target, as they are."""
    run = OnPolicy(llm, tmp_path, **MIXED)
    rounds = run.rounds()
    data = run.world.training
    given = {tuple(data[at].tokens.tolist()) for at in range(len(data))}
    own, others = 0, 0
    for number in range(6):
        rounds.begin(number, run.world.trainee())
        examples, written = rounds.examples(number), run.text(number)
        texts = [tuple(examples[at].tokens.tolist()) for at in range(len(examples))]
        assert texts[: len(written)] == [each.tokens for each in written]
        assert set(texts[len(written) :]) <= given
        own, others = own + len(written), others + len(texts) - len(written)
    assert own + others == 36
    assert 10 <= own <= 26  # of 36 with probability 1/2: outside in 0.4 % of the seeds
    assert f"Step {EVERY}: the draft model answers" in run.told[1]


def test_tokens_of_its_padding_are_not_written(llm: LLM, tmp_path: Path) -> None:
    tiny_model(seed=3, vocab_size=104).save_pretrained(tmp_path / "start")
    run = OnPolicy(llm, tmp_path / "run", **ON_POLICY)
    lm: Any = tiny_model(seed=3, vocab_size=104)
    lm.lm_head.weight.data[100] = 10 * lm.lm_head.weight.data[:96].abs().sum(0)
    trainee = DistillTrainee(lm, 96, run.world.trainee()._loss)
    run.rounds().begin(0, trainee)
    assert run.text(0)
    assert max(max(each.tokens) for each in run.text(0)) < 96
    assert trainee.lm.config.vocab_size == 104


# Training


def test_it_learns_from_text_of_its_own(tmp_path: Path) -> None:
    """The target's next token depends on the last one only; the text is new in every round."""
    model = tiny_model(head_dim=32)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data.zero_()
    run = OnPolicy(LLM(model, max_num_seqs=8), tmp_path, count=20, **ON_POLICY)
    changed = {"batch_tokens": 240, "epochs": 12, "evaluate_every": 100}
    rates = {"learning_rate": 3e-2, "vector_learning_rate": 1e-2}
    run.settings = run.settings.model_copy(update={**changed, **rates})
    losses = [event.losses[0] for event in run.whole() if isinstance(event, Step)]
    assert len(run.told) == len(losses) / EVERY == 8
    assert sum(losses[-6:]) < 0.7 * sum(losses[:6])


@pytest.fixture(scope="module")
def uninterrupted(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, OnPolicy]:
    found = {}
    for name, options in (("on_policy", ON_POLICY), ("mixed", MIXED)):
        found[name] = OnPolicy(llm, tmp_path_factory.mktemp(name), **options)
        assert len(found[name].whole()) == 15
        assert len(found[name].told) == 4
    return found


@pytest.mark.parametrize(
    ("answers", "stops"),
    [("on_policy", [1]), ("on_policy", [3]), ("mixed", [4, 1]), ("mixed", [5, 2, 3])],
)
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    answers: str,
    stops: Sequence[int],
    uninterrupted: dict[str, OnPolicy],
    llm: LLM,
    tmp_path: Path,
) -> None:
    """Within a round, at its end, and at evaluations beside it."""
    whole = uninterrupted[answers]
    stopped = OnPolicy(llm, tmp_path, answers=answers, refresh_every=EVERY)
    stopped.interrupt(*stops)
    stopped.whole()
    assert_alike(stopped, whole)
    assert sorted(set(stopped.told)) == sorted(whole.told)


@pytest.mark.parametrize("killed_in", ["writing", "features"])
def test_a_kill_while_text_is_written(
    killed_in: str,
    uninterrupted: dict[str, OnPolicy],
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work left by a killed run is used: the whole text, but no half-written features."""
    whole, killed = uninterrupted["mixed"], OnPolicy(llm, tmp_path, **MIXED)

    def half(*arguments: Any) -> Any:
        for done in compute_features(*arguments):
            yield done
            raise KeyboardInterrupt

    def nothing(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if killed_in == "writing":
            patched.setattr(OnPolicyRounds, "_answers", nothing)
        else:
            patched.setattr(distill, "compute_features", half)
        with pytest.raises(KeyboardInterrupt):
            killed.whole()
    assert (tmp_path / "on_policy/0/text.jsonl").exists() == (killed_in == "features")
    killed.whole()
    assert_same(weights(killed.trainee), weights(whole.trainee))


def test_writing_leaves_the_noise_of_training_alone(llm: LLM, tmp_path: Path) -> None:
    """A round whose text is there goes on with the same numbers as one that writes it."""
    run, numbers = OnPolicy(llm, tmp_path, **ON_POLICY), []
    trainee = run.world.trainee()
    for _ in range(2):
        torch.manual_seed(5)
        run.rounds().begin(0, trainee)
        numbers.append(torch.rand(1))
    assert len(run.told) == 1
    assert torch.equal(*numbers)


# What can go wrong


def test_text_that_is_gone(llm: LLM, tmp_path: Path) -> None:
    run = OnPolicy(llm, tmp_path, **ON_POLICY)
    run.interrupt(2)
    shutil.rmtree(tmp_path / "on_policy")
    with refused(TrainingError, match=r"text.jsonl is gone: delete .*checkpoints"):
        run.whole()


def test_a_draft_model_that_writes_nothing(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "FEWEST_ANSWER_TOKENS", 99)
    with refused(TrainingError, match="writes nothing that can be learnt"):
        OnPolicy(llm, tmp_path / "alone", **ON_POLICY).whole()
    OnPolicy(llm, tmp_path / "mixed", **MIXED).whole()
