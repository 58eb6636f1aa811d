"""A tiny target, conversations that follow a rule, and their features."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.cli.conftest import END, ascii_tokenizer
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM
from tokenleap.runtime.target import Target
from tokenleap.training import conversations as talks
from tokenleap.training.conversations import Conversation, Opening, first_opening, next_opening
from tokenleap.training.distill import OnPolicyRounds
from tokenleap.training.features import FeatureCache, Features, TrainingSet, compute_features
from tokenleap.training.method import TrainingMethod, TrainingSettings, training_method
from tokenleap.training.trainee import HeadParts, Trainee
from tokenleap.training.trainer import Evaluation, Step, Trainer

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Every message ends with the end token, so conversations can go on."""


def chat_llm(
    chat_template: str | None = CHAT,
    context: int = 2048,
    end_bias: float = 0.0,
    architecture: str = "llama",
    **fields: Any,
) -> LLM:
    """A target that speaks ASCII.

    Args:
        chat_template: of its tokenizer.
        context: most tokens of a row.
        end_bias: how much more often than by chance it ends a message.
        architecture: of `tiny_model`, another one being another text.
        fields: other arguments of `LLM`.
    """
    tokenizer: PreTrainedTokenizerFast = ascii_tokenizer(chat_template)
    vocab_size = len(tokenizer.get_vocab())
    model: Any = tiny_model(
        architecture,
        vocab_size=vocab_size,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )
    if end_bias:
        end = tokenizer.convert_tokens_to_ids(END)
        model.lm_head.weight.data[end] += end_bias * model.lm_head.weight.data.mean(0)
    return LLM(model, tokenizer=tokenizer, max_num_seqs=16, **fields)


def cycles(
    count: int, length: int = 24, seed: int = 0, prompt: int = 4, tokens: int = 30
) -> list[Conversation]:
    """Conversations in which every token follows from the one before, by a fixed permutation."""
    order = list(range(tokens))
    random.Random(7).shuffle(order)
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    drawn, made = random.Random(seed), []
    for number in range(count):
        text = [drawn.randrange(tokens)]
        while len(text) < length:
            text.append(after[text[-1]])
        made.append(Conversation(tuple(text), ((prompt, length),), seed=number))
    return made


def computed(
    target: Target, conversations: Sequence[Conversation], layers: Sequence[int], folder: Path
) -> FeatureCache:
    for _ in compute_features(target, conversations, layers, folder):
        pass
    return FeatureCache(folder)


def tiny_target(architecture: str = "llama", **fields: Any) -> Target:
    """A target whose model stays in memory."""
    if architecture == "llama":
        fields["head_dim"] = 32  # so that the native runtime takes it
    model = tiny_model(architecture, **fields)
    return Target(model, reload=lambda: model)


def parts_of(target: Target, stride: int = 1) -> HeadParts:
    """Of a head that can draft every token, or every `stride`-th."""
    weights = target.vocabulary_weights
    assert weights is not None
    draft_tokens = torch.arange(0, target.vocab_size, stride)
    parts = HeadParts.of(target, "tiny", weights, draft_tokens)
    return replace(parts, reload=partial(_again, target))


def _again(target: Target) -> PreTrainedModel:
    assert target.reload is not None
    return deepcopy(target.reload())


def new_trainee(
    method: TrainingMethod, target: Target, seed: int = 0, *, spread: float = 0.0, stride: int = 1
) -> Trainee:
    """A head with random weights, which `spread` moves away from where training starts."""
    torch.manual_seed(seed)
    trainee = method.trainee(parts_of(target, stride))
    for parameter in trainee.parameters():
        parameter.data += spread * torch.randn_like(parameter)
        parameter.data = parameter.data.bfloat16().float()  # as in a file
    return trainee


def short_talks(patched: pytest.MonkeyPatch, answer: int = 24, message: int = 12) -> None:
    """The target writes little: so many tokens of an answer, and at the end of a message."""

    def shortened(function: Callable[..., Opening], *arguments: int) -> Opening:
        opening = function(*arguments)
        return replace(opening, most=min(opening.most, message))

    for name in ("_GREEDY", "_SAMPLED"):
        shorter = getattr(talks, name).model_copy(update={"max_tokens": answer})
        patched.setattr(talks, name, shorter)
    for function in (first_opening, next_opening):
        patched.setattr(talks, function.__name__, partial(shortened, function))
    patched.setattr(talks, "_FEWEST_TEXT_TOKENS", 8)


@contextmanager
def refused(kind: type[Exception], match: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """An error of one line."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)


class World:
    """A target with a cache of features, for one method.

    Args:
        folder: for the cache.
        method: the method.
        count: conversations.
        tokens: different tokens in them.
        learnt: the conversations, and those that are held out; by default cycles.
        target: of the passes; drafters are made of `of`.
        options: of the method.
    """

    def __init__(
        self,
        folder: Path,
        method: str = "eagle",
        count: int = 12,
        tokens: int = 30,
        learnt: tuple[Sequence[Conversation], Sequence[Conversation]] | None = None,
        target: Target | None = None,
        of: Target | None = None,
        **options: Any,
    ) -> None:
        self.target = target or tiny_target()
        self._of = of or self.target
        self.method = training_method(method, options)
        layers = self.method.read_layers(self.target.network.num_layers)
        talks = learnt or (cycles(count, tokens=tokens), cycles(4, seed=1, tokens=tokens))
        self.training, self.held_out = (
            TrainingSet(computed(self.target, each, layers, folder / name), 64)
            for name, each in zip(("train", "held_out"), talks, strict=True)
        )

    def trainee(self) -> Trainee:
        return new_trainee(self.method, self._of)


SHORT = TrainingSettings(epochs=3, batch_tokens=96, evaluate_every=4, mixed_precision="no")


class Run:
    """A training of a world in a folder; `whole` continues until it ends.

    Attributes:
        saved: the evaluations of the best drafters, with their weights.
    """

    def __init__(
        self,
        world: World,
        folder: Path,
        settings: TrainingSettings = SHORT,
        rounds: Callable[[], OnPolicyRounds | None] = lambda: None,
    ) -> None:
        self.world, self.folder, self._rounds = world, folder, rounds
        self.settings = world.method.adapted(settings)
        self.saved: list[tuple[Evaluation, dict[str, Tensor]]] = []

    def trainer(self, trainee: Trainee | None = None) -> Trainer:
        self.trainee = trainee or self.world.trainee()
        self.made = Trainer(
            self.trainee,
            self.world.training,
            self.world.held_out,
            self.settings,
            self.folder,
            lambda each, found: self.saved.append((found, weights(each))),
            self._rounds(),
        )
        return self.made

    def whole(self) -> list[Step | Evaluation]:
        return list(self.trainer().run())

    def interrupt(self, *stops: int) -> None:
        """Close the run after these events, and begin it anew each time."""
        for stop in stops:
            events: Any = self.trainer().run()
            for _ in range(stop):
                next(events)
            events.close()


def weights(trainee: Trainee) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainee.state_dict().items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_alike(stopped: Run, whole: Run) -> None:
    """A run that was stopped ended as one that was not."""
    assert_same(weights(stopped.trainee), weights(whole.trainee))
    assert stopped.made.history == whole.made.history
    assert [found for found, _ in stopped.saved] == [found for found, _ in whole.saved]


def random_features(
    length: int,
    answers: Sequence[tuple[int, int]],
    layers: int = 1,
    size: int = 64,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
) -> Features:
    """Features without data."""
    generator = torch.Generator().manual_seed(seed)

    def ints(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator)

    return Features(
        tokens=ints(vocab_size, length),
        answers=list(answers),
        hidden=(ints(255, length, layers, size) - 127).to(torch.int8),
        scales=torch.rand(length, layers, size // 32, generator=generator) / 64,
        top_tokens=ints(vocab_size, length, 16),
        top_logprobs=torch.randn(length, 16, generator=generator).log_softmax(-1),
    )
