"""`DrafterSeries`: the training of all drafters of a method, one after the other.

Most methods have one. `boost` has several, and each learns what those before it missed.
"""

from __future__ import annotations

import torch
from accelerate import PartialState

from tokenleap.drafters.heads.probe import LENGTH, look
from tokenleap.errors import DataError, TrainingError
from tokenleap.llm import LLM
from tokenleap.training.batches import TrainingSet
from tokenleap.training.curves import save_curves
from tokenleap.training.features import FeatureCache
from tokenleap.training.folder import DrafterFolder, TrainingFolder
from tokenleap.training.method import HeadParts, TrainingMethod
from tokenleap.training.on_policy import OnPolicyRounds
from tokenleap.training.progress import Evaluation
from tokenleap.training.report import Reporter, evaluation_text, step_text
from tokenleap.training.rounds import Rounds
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainee import Trainee
from tokenleap.training.trainer import Trainer

__all__ = ["DrafterSeries"]


_FEW = 20
"""Held-out texts of which one becomes the probe."""


class DrafterSeries:
    """Trains the drafters of a method.

    Args:
        llm: the target without speculation.
        method: the kind of drafter.
        parts: what each is made of.
        settings: how they are trained.
        folder: has the features, and gets the drafters.
        reporter: shows how it goes.
        processes: that train together.
        rows: sequences that are written at a time.
    """

    def __init__(
        self,
        llm: LLM,
        method: TrainingMethod,
        parts: HeadParts,
        settings: TrainingSettings,
        folder: TrainingFolder,
        reporter: Reporter,
        processes: PartialState,
        rows: int,
    ) -> None:
        self._llm, self._method, self._parts, self._settings = llm, method, parts, settings
        self._folder, self._reporter, self._processes = folder, reporter, processes
        self._rows = rows

    def trainee(self, number: int = 0) -> Trainee:
        """A new drafter, by its number from 0; its random weights follow from the seed."""
        torch.manual_seed(self._settings.seed + number)
        return self._method.trainee(self._parts).to(self._llm.device)

    def train(self) -> Evaluation:
        """Train all of them; each continues where it stopped.

        Returns:
            The best evaluation of the first, which learns from everything.

        Raises:
            DataError: there is nothing to learn.
            TrainingError: there is nothing to learn for a second one, or a loss is not finite.
        """
        training, held_out = self._examples("train"), self._examples("held_out")
        number = self._method.num_drafters
        trained = [self._folder.drafter(0, number)]
        best = self._train(self.trainee(), training, held_out, trained[0])
        for at in range(1, number):
            total, before = training.num_learnt, trained[-1].out
            training = self._method.missed(before, self._parts, training)
            if not training:
                break
            held_out = self._method.missed(before, self._parts, held_out) or held_out
            self._reporter.say(
                f"Drafter {at + 1} of {number} learns what the one before it missed: "
                f"{training.num_learnt:,} of {total:,} tokens."
            )
            trained.append(self._folder.drafter(at, number))
            self._train(self.trainee(at), training, held_out, trained[-1])
        if len(trained) < min(2, number):
            raise TrainingError(
                f"the draft model in {trained[0].out} misses nothing that another could learn: use "
                "it alone, as a draft_model, or learn more tokens."
            )
        if self._processes.is_main_process:
            self._method.finish(self._folder.out, [each.out for each in trained])
        return best

    def _examples(self, name: str) -> TrainingSet:
        length = self._settings.max_length
        found = TrainingSet(FeatureCache(self._folder.features(name)), length)
        if not found:
            raise DataError(
                f"no conversation has something to learn in its first {length} tokens: raise "
                "max_length, or give more data."
            )
        return found

    def _train(
        self, trainee: Trainee, training: TrainingSet, held_out: TrainingSet, folder: DrafterFolder
    ) -> Evaluation:
        """Train one of them.

        Returns:
            Its best evaluation.
        """
        layers = self._method.layers(self._parts.num_layers)
        seen = look(self._llm.engine.target, _probe_text(held_out), layers)

        def save_best(best: Trainee, found: Evaluation) -> None:
            seed = self._settings.seed
            notes = {"seed": seed, "step": found.step, "mean_length": found.score}
            probed = self._method.probed(best, seen)
            self._method.write(best, self._parts, folder.out, {**notes, **probed})

        trainer = Trainer(
            trainee,
            training,
            held_out,
            self._settings,
            folder.checkpoints,
            save_best,
            self._rounds(training, folder),
        )
        with self._reporter.stage("Training", trainer.total_steps) as done:
            remark, evaluated = "", -1
            for event in trainer.run():
                if isinstance(event, Evaluation):
                    if self._processes.is_main_process:
                        save_curves(folder.work, trainer.history)
                    averaged = event.step == evaluated
                    beginning = "mean of the last weights, " if averaged else ""
                    self._reporter.say(beginning + evaluation_text(event))
                    remark, evaluated = f", mean acceptance length {event.score:.2f}", event.step
                else:
                    done(event.step, step_text(event) + remark)
        return next(each for each in reversed(trainer.history) if each.best)

    def _rounds(self, training: TrainingSet, folder: DrafterFolder) -> Rounds | None:
        """Text that the drafter writes itself, if the method asks for it."""
        if (plan := self._method.on_policy) is None:
            return None
        return OnPolicyRounds(
            self._llm,
            training,
            plan,
            self._settings,
            self._processes.num_processes,
            folder.rounds,
            self._rows,
            self._reporter.say,
        )


def _probe_text(held_out: TrainingSet) -> list[int]:
    """The tokens by which a head will tell its target: up to the middle of an answer.

    It is the longest of a few: two or three tokens would tell little.
    """
    few = [held_out[number] for number in range(min(_FEW, len(held_out)))]
    text = max(few, key=lambda each: len(each.tokens))
    stop = min(len(text.tokens), text.answers[0][0] + LENGTH * 3 // 4)
    tokens: list[int] = text.tokens[max(0, stop - LENGTH) : stop].tolist()
    return tokens
