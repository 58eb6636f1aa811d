"""On-policy text: what the draft model writes while it learns (DistillSpec, section 4.1).

While it drafts, a draft model continues its own tokens. So it also learns from its own answers to
the prompts, with the target's distribution p behind every token. The paper samples every batch
anew. Here the steps are cut into rounds: where a round begins, the draft model, as it then is,
answers the next prompts, and the passes of the runtime that serves compute p. Half of the answers
are greedy, as those of the target (`talks.py`).

The text of a round follows from the seed and the weights with which the round begins. Those are in
a checkpoint, and the text stays on disk until the next round, so a run that was stopped learns from
the same text.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from tokenleap.core.files import write_whole
from tokenleap.errors import TrainingError
from tokenleap.llm import LLM
from tokenleap.models.support import context_length
from tokenleap.training.batches import Examples, Joined, TrainingSet
from tokenleap.training.conversations import Conversation, ConversationFile, opening
from tokenleap.training.distill import DistillTrainee
from tokenleap.training.feature_passes import compute_features
from tokenleap.training.features import FeatureCache
from tokenleap.training.method import OnPolicy
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.talks import Answerer, Talk, usual_temperature
from tokenleap.training.trainee import Trainee

__all__ = ["OnPolicyRounds"]


class OnPolicyRounds:
    """See `rounds.Rounds`: answers of the draft model, beside those that are there.

    Args:
        llm: the target.
        training: conversations with the prompts, and the other answers.
        plan: how many of them the draft model writes, and how often.
        settings: of the training.
        num_processes: that train together.
        folder: for the text of a round.
        rows: sequences that are written at a time.
        say: tells the user.
    """

    def __init__(
        self,
        llm: LLM,
        training: Examples,
        plan: OnPolicy,
        settings: TrainingSettings,
        num_processes: int,
        folder: Path,
        rows: int,
        say: Callable[[str], None],
    ) -> None:
        self._llm, self._training, self._share = llm, training, plan.share
        self._length, self._seed = settings.max_length, settings.seed
        self._folder, self._rows, self._say = folder, rows, say
        self.steps = plan.every
        tokens = plan.every * settings.accumulation * settings.batch_tokens * num_processes
        mean = sum(training.sizes) / len(training)
        self._count = min(len(training), ceil(tokens / mean))
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def begin(self, number: int, trainee: Trainee) -> None:
        """See `Rounds.begin`."""
        assert isinstance(trainee, DistillTrainee)
        folder = self._folder / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        for other in self._folder.iterdir():
            if other != folder:
                shutil.rmtree(other)
        self._write(number, trainee)
        texts = list(ConversationFile(self._text(number)))
        for _ in compute_features(self._llm.engine.target, texts, (), self._features(number)):
            pass

    def examples(self, number: int) -> Examples:
        """See `Rounds.examples`.

        Raises:
            TrainingError: there is nothing.
        """
        if not self._text(number).exists():
            raise TrainingError(
                f"{self._text(number)} is gone: delete {self._folder.parent / 'checkpoints'} to "
                "train from the beginning."
            )
        own = TrainingSet(FeatureCache(self._features(number)), self._length)
        others = [at for index, at in self._places(number) if not self._is_own(index)]
        found = Joined((own, range(len(own))), (self._training, others))
        if not len(found):
            raise TrainingError(
                "the draft model writes nothing that can be learnt: its answers are too short. "
                "Let the target write some of them, too (answers=mixed), or start from a better "
                "model."
            )
        return found

    def _text(self, number: int) -> Path:
        return self._folder / str(number) / "text.jsonl"

    def _features(self, number: int) -> Path:
        return self._folder / str(number) / "features"

    # Which prompts

    def _places(self, number: int) -> Iterator[tuple[int, int]]:
        """(index, place in the training set) of each prompt of a round; indices go on forever."""
        for index in range(number * self._count, (number + 1) * self._count):
            epoch, at = divmod(index, len(self._training))
            yield index, self._order(epoch)[at]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._training)))
        random.Random(f"order {self._seed} {epoch}").shuffle(order)
        return order

    def _is_own(self, index: int) -> bool:
        """Whether the draft model answers this prompt."""
        return random.Random(f"writer {self._seed} {index}").random() < self._share

    # Writing

    def _write(self, number: int, trainee: DistillTrainee) -> None:
        """Write the text of a round, unless it is there."""
        path = self._text(number)
        if path.exists():
            return
        talks = [
            Talk(index, usual_temperature(index), self._prompt(at))
            for index, at in self._places(number)
            if self._is_own(index)
        ]
        self._say(f"Step {number * self.steps}: the draft model answers {len(talks)} prompts ...")
        written = self._answers(trainee, talks) if talks else []
        write_whole(path, lambda to: ConversationFile(to).append(written))

    def _prompt(self, at: int) -> list[int]:
        features = self._training[at]
        return list(opening(features.tokens.tolist(), features.answers))

    def _answers(self, trainee: DistillTrainee, talks: list[Talk]) -> list[Conversation]:
        devices = [self._llm.device] if self._llm.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # training goes on with the same noise as without
            writer = Answerer(self._writer(trainee.lm))
            return [talk.written() for talk in writer.answer(talks)]

    def _writer(self, lm: PreTrainedModel) -> LLM:
        """A copy of the draft model that writes; training does not change it."""
        target = self._llm.engine.target
        copy: Any = deepcopy(lm)
        copy.requires_grad_(False).eval().to(target.dtype)
        if copy.config.get_text_config().vocab_size > target.vocab_size:
            copy.resize_token_embeddings(target.vocab_size)  # the rest is padding
        generation: Any = GenerationConfig  # which has no type hints
        copy.generation_config = generation(eos_token_id=list(self._llm.eos_token_ids) or None)
        return LLM(
            copy,
            speculative_config={"method": "none"},
            max_model_len=min(self._length, context_length(copy.config, None)),
            max_num_seqs=self._rows,
            enable_prefix_caching=False,
        )
