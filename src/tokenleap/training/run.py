"""`TrainingRun`: everything between a target and a drafter for it, in one folder (`folder.py`).

Every part continues where it stopped. The command line calls it (`cli/train.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tokenleap.drafters.heads.folder import vocabulary_weights
from tokenleap.errors import CompatibilityError, ConfigError, DataError
from tokenleap.llm import LLM, Prompt
from tokenleap.training.conversations import Conversation, ConversationFile, opening
from tokenleap.training.diversity import diversity
from tokenleap.training.draft_vocabulary import draft_vocabulary
from tokenleap.training.estimate import Estimate, estimate, measure_speeds
from tokenleap.training.features import FeatureCache
from tokenleap.training.folder import TrainingFolder
from tokenleap.training.memory import training_bytes
from tokenleap.training.method import HeadParts, TrainingMethod
from tokenleap.training.new_target import Perplexity, served_alike
from tokenleap.training.processes import processes
from tokenleap.training.report import Reporter, TrainingReport, advice, usage_text
from tokenleap.training.series import DrafterSeries
from tokenleap.training.serving import Served, measure
from tokenleap.training.settings import DataSettings, TrainingSettings
from tokenleap.training.text import TrainingText

__all__ = ["TrainingRun"]

_ROWS = 32
"""Sequences that the target writes at a time."""

_SERVED_PROMPTS = 12


class TrainingRun:
    """One training.

    Args:
        llm: the target without speculation.
        name: the target's, for the drafter's own file.
        method: the kind of drafter.
        data: what is learnt.
        settings: how.
        folder: for the drafter.
        reporter: shows how it goes.

    Raises:
        ConfigError: the folder has another training.
        CompatibilityError: the target has no chat template, and there is no data; or the method is
            for another kind of target.
    """

    def __init__(
        self,
        llm: LLM,
        name: str,
        method: TrainingMethod,
        data: DataSettings,
        settings: TrainingSettings,
        folder: Path,
        reporter: Reporter,
    ) -> None:
        _check_kind(method, llm)
        self._llm, self._name, self._method = llm, name, method
        self._data, self._settings, self._reporter = data, method.adapted(settings), reporter
        self._folder = TrainingFolder(folder)
        self._layers = method.layers(llm.engine.target.network.num_layers)
        self._processes = processes(on_cpu=llm.device.type == "cpu")
        self._folder.check(self._wanted())
        self._text = TrainingText(
            llm, method, data, self._settings.max_length, _ROWS, self._folder, reporter
        )

    @property
    def has_begun(self) -> bool:
        """Whether the folder holds a checkpoint, from which training continues."""
        return self._folder.has_begun

    @property
    def usage(self) -> str:
        """The options of the command line that use what was trained."""
        out = self._folder.out
        return usage_text(self._method.serving(out), out if self._method.tunes_target else None)

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return int(self._processes.num_processes)

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one of them that writes files."""
        return bool(self._processes.is_main_process)

    def _wanted(self) -> dict[str, Any]:
        """What the folder is to hold, for `settings.json`."""
        data, target = asdict(self._data), self._llm.engine.target
        for name in ("files", "unseen", "parallel"):
            data[name] = [str(file) for file in data[name]]
        if not data["parallel"]:
            del data["parallel"]
        return {
            "method": self._method.name,
            "options": self._method.options.model_dump(mode="json"),
            "model": self._name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "quantization": target.quantization,
            "data": data,
            "settings": self._settings.model_dump(mode="json"),
        }

    # Beforehand

    def estimate(self) -> Estimate:
        """How long it will take, and how much disk; measured in a few seconds.

        Raises:
            ConfigError: there are several processes.
            DataError: there is not enough space on the disk.
        """
        if self._processes.num_processes > 1:
            raise ConfigError("an estimate is for one process: ask without `accelerate launch`.")
        target, plan = self._llm.engine.target, self._method.on_policy
        vocab_size = min(self._method.draft_vocab_size, target.vocab_size)
        new_trainee = self._drafters(torch.arange(vocab_size)).trainee
        needed = training_bytes(
            new_trainee(), len(self._layers), target.hidden_size, self._settings
        )
        encoder = self._method.reads_encoder
        speeds = measure_speeds(
            self._llm, new_trainee, self._layers, self._settings, _ROWS, encoder=encoder
        )
        answers = self._data.tokens + self._data.held_out_tokens
        there = sum(
            each.num_answer_tokens
            for name in ("train", "held_out")
            for each in ConversationFile(self._folder.conversations(name))
        )
        found = estimate(
            speeds,
            answers,
            max(0, answers - there),
            len(self._layers),
            target.hidden_size,
            self._settings,
            needed,
            encoder=encoder,
            on_policy_share=plan.share if plan else 0.0,
            num_drafters=self._method.num_drafters,
        )
        free = self._folder.free_bytes
        if not self._folder.has_features and found.disk_bytes > free:
            raise DataError(
                f"the features need {found.disk_bytes / 1e9:.1f} GB, and {self._folder.out} has "
                f"{free / 1e9:.1f} GB free: learn fewer tokens, or choose another disk."
            )
        return found

    # The parts

    def run(self) -> TrainingReport | None:
        """Write, compute, train, measure; each part continues where it stopped.

        If several processes train (`accelerate launch`), one of them writes and computes while the
        others wait for it, and measures at the end; the others return None.
        """
        with self._processes.main_process_first():
            training, held_out = self._prepare()
        tokens, coverage = self._draft_tokens()
        best = self._drafters(tokens).train()
        if not self._processes.is_main_process:
            return None
        self._reporter.say("Measuring the drafter in the engine that will serve it ...")
        new = self._new_target()
        served = self._serve(new or self._llm, held_out)
        changed = Perplexity.of(self._llm, new, held_out) if new else None
        report = TrainingReport(
            diversity(training),
            diversity(held_out),
            coverage,
            best,
            served,
            tuple(advice(coverage, best, served, changed, self._method.deeper)),
            changed,
        )
        report.write(self._folder.report)
        return report

    def _prepare(self) -> tuple[list[Conversation], list[Conversation]]:
        """The conversations to learn and those that are held out; their features are there, too."""
        self._folder.claim(self._wanted())
        held_out = self._text.conversations("held_out", self._data.held_out_tokens)
        training = self._text.conversations("train", self._data.tokens, held_out)
        for name, chosen in (("train", training), ("held_out", held_out)):
            self._text.compute_features(name, chosen, self._layers)
        return training, held_out

    def _draft_tokens(self) -> tuple[torch.Tensor, float]:
        """The draft vocabulary: what the target writes most often, and its share held out."""
        tokens, coverage = draft_vocabulary(
            FeatureCache(self._folder.features("train")),
            FeatureCache(self._folder.features("held_out")),
            self._llm.eos_token_ids,
            self._method.draft_vocab_size,
            self._llm.engine.target.vocab_size,
        )
        self._reporter.say(
            f"Draft vocabulary: {len(tokens):,} tokens, {coverage:.1%} of what is held out."
        )
        return tokens, coverage

    def _parts(self, draft_tokens: torch.Tensor) -> HeadParts:
        target = self._llm.engine.target
        embedding, rows = self._vocabulary_weights
        return HeadParts(
            target.config,
            self._name,
            embedding,
            rows,
            draft_tokens,
            target.network.num_layers,
            target.final_norm,
            target.reload,
            target.logits_bias,
        )

    @cached_property
    def _vocabulary_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's embedding and output rows; [V, E] each. They may have to be loaded again."""
        return vocabulary_weights(self._llm.engine.target)

    def _drafters(self, draft_tokens: torch.Tensor) -> DrafterSeries:
        return DrafterSeries(
            self._llm,
            self._method,
            self._parts(draft_tokens),
            self._settings,
            self._folder,
            self._reporter,
            self._processes,
            _ROWS,
        )

    def _new_target(self) -> LLM | None:
        """The model that the method has written in place of the target, if it writes one."""
        tuned = self._method.tunes_target
        return served_alike(self._llm, self._folder.out) if tuned else None

    def _serve(self, llm: LLM, held_out: Sequence[Conversation]) -> Served:
        prompted = [each for each in held_out if each.answers[0][0]] or held_out
        prompts = [_prompt(each) for each in prompted[:_SERVED_PROMPTS]]
        method = self._method
        config = method.serving(self._folder.out)
        return measure(llm, config, prompts, method.served_tokens, method.nodes_per_token)


def _check_kind(method: TrainingMethod, llm: LLM) -> None:
    """Refuse a method that is for another kind of target.

    Raises:
        CompatibilityError: it is.
    """
    reads = llm.engine.target.reads_source
    if method.for_sources is None or method.for_sources == reads:
        return
    kinds = ("a decoder-only model", "an encoder-decoder")
    raise CompatibilityError(
        f"'{method.name}' is trained for {kinds[not reads]}, and this target is {kinds[reads]}."
    )


def _prompt(conversation: Conversation) -> Prompt:
    """What the target continues, as `LLM.generate` takes it."""
    start = list(opening(conversation.tokens, conversation.answers))
    if not conversation.source:
        return start
    return {"encoder_prompt": list(conversation.source), "decoder_prompt": start}
