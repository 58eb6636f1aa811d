"""`TrainingRun`: everything between a target and a drafter for it, in one folder.

Every part continues where it stopped. The command line calls it (`cli/train.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout

from tokenleap.core.files import read_json, validated, write_whole
from tokenleap.core.params import SamplingParams
from tokenleap.drafters.heads.folder import vocabulary_weights
from tokenleap.drafters.heads.probe import LENGTH, look
from tokenleap.drafters.options import write_drafters
from tokenleap.errors import CompatibilityError, ConfigError, DataError, TrainingError
from tokenleap.llm import LLM, Prompt
from tokenleap.runtime.target import Target
from tokenleap.training.collect import (
    Chooser,
    FileSource,
    PairSource,
    SelfSource,
    Source,
    Unseen,
    collect,
    diversity,
    texts_in,
)
from tokenleap.training.conversations import Conversation, ConversationFile, opening
from tokenleap.training.distill import OnPolicyRounds, missed_by
from tokenleap.training.features import (
    INDEX,
    FeatureCache,
    TrainingSet,
    bytes_per_token,
    compute_features,
    draft_vocabulary,
)
from tokenleap.training.method import DataSettings, Plan, TrainingMethod, TrainingSettings
from tokenleap.training.report import (
    Estimate,
    Perplexity,
    Reporter,
    Served,
    TrainingReport,
    advice,
    estimate,
    evaluation_text,
    measure,
    measure_speeds,
    save_curves,
    served_alike,
    step_text,
    training_bytes,
    usage_text,
)
from tokenleap.training.trainee import HeadParts, Trainee
from tokenleap.training.trainer import Evaluation, Trainer, checkpoints_in, processes

_ROWS = 32
"""Sequences that the target writes at a time."""

_SERVED_PROMPTS = 12


@dataclass(frozen=True)
class _Job:
    """What a training is of."""

    llm: LLM
    name: str
    method: TrainingMethod
    data: DataSettings
    settings: TrainingSettings
    folder: TrainingFolder
    reporter: Reporter
    processes: PartialState

    @property
    def target(self) -> Target:
        return self.llm.engine.target

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return self.method.read_layers(self.target.network.num_layers)

    @cached_property
    def plan(self) -> Plan:
        return self.method.plan

    def wanted(self) -> dict[str, Any]:
        """The content of `settings.json`."""
        data = asdict(self.data)
        for name in ("files", "unseen", "parallel"):
            data[name] = [str(file) for file in data[name]]
        if not data["parallel"]:
            del data["parallel"]
        data["content"] = _content_of([*self.data.files, *self.data.unseen, *self.data.parallel])
        return {
            "method": self.method.name,
            "options": self.method.model_dump(mode="json"),
            "model": self.name,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "quantization": self.target.quantization,
            "data": data,
            "settings": self.settings.model_dump(mode="json"),
        }


def _content_of(files: Iterable[Path]) -> str:
    """Tells whether a file of the same name has another content."""
    found = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    return found.hexdigest()[:16]


class TrainingRun:
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
        state = processes(on_cpu=llm.device.type == "cpu")
        adapted, self._folder = method.adapted(settings), TrainingFolder(folder)
        self._job = _Job(llm, name, method, data, adapted, self._folder, reporter, state)
        self._plan = self._job.plan
        self._folder.check(self._job.wanted())
        self._text = TrainingText(self._job)

    @property
    def has_begun(self) -> bool:
        """Whether the folder holds a checkpoint, from which training continues."""
        return self._folder.has_begun

    @property
    def usage(self) -> str:
        """The options of the command line that use what was trained."""
        method, out = self._job.method, self._folder.out
        return usage_text(method.serving(out), out if method.tunes_target else None)

    @property
    def num_processes(self) -> int:
        return int(self._job.processes.num_processes)

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one of them that writes files."""
        return bool(self._job.processes.is_main_process)

    # Beforehand

    def estimate(self) -> Estimate:
        if self.num_processes > 1:
            raise ConfigError("an estimate is for one process: ask without `accelerate launch`.")
        job, target, encoder = self._job, self._job.target, self._plan.reads_encoder
        vocab_size = min(self._plan.draft_vocab_size or target.vocab_size, target.vocab_size)
        new_trainee = self._drafters(torch.arange(vocab_size)).trainee
        shape, settings = (len(job.layers), target.hidden_size), job.settings
        needed = training_bytes(new_trainee(), *shape, settings, encoder=encoder)
        speeds = measure_speeds(job.llm, new_trainee, job.layers, settings, _ROWS, encoder=encoder)
        answers = job.data.tokens + job.data.held_out_tokens
        there = sum(
            each.num_answer_tokens
            for name in ("train", "held_out")
            for each in ConversationFile(self._folder.conversations(name))
        )
        token_bytes = bytes_per_token(*shape, encoder=encoder)
        left = max(0, answers - there)
        found = estimate(speeds, answers, left, token_bytes, settings, self._plan, needed)
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
        with self._folder.held() if self.is_main_process else nullcontext():
            return self._run()

    def _run(self) -> TrainingReport | None:
        llm, method = self._job.llm, self._job.method
        with self._job.processes.main_process_first():
            training, held_out = self._prepare()
        tokens, coverage = self._draft_tokens()
        best = self._drafters(tokens).train()
        if not self.is_main_process:
            return None
        self._job.reporter.say("Measuring the drafter in the engine that will serve it ...")
        tuned = method.tunes_target  # then the folder is a model in place of the target
        new = served_alike(llm, self._folder.out) if tuned else None
        served = self._serve(new or llm, held_out)
        changed = Perplexity.of(llm, new, held_out) if new else None
        report = TrainingReport(
            diversity(training),
            diversity(held_out),
            coverage,
            best,
            served,
            tuple(advice(coverage, best, served, changed, method.deeper)),
            changed,
        )
        report.write(self._folder.report)
        return report

    def _prepare(self) -> tuple[list[Conversation], list[Conversation]]:
        """The conversations to learn and those that are held out; their features are there, too."""
        self._folder.claim(self._job.wanted())
        data = self._job.data
        held_out = self._text.conversations("held_out", data.held_out_tokens)
        training = self._text.conversations("train", data.tokens, held_out)
        for name, chosen in (("train", training), ("held_out", held_out)):
            self._text.compute_features(name, chosen)
        return training, held_out

    def _draft_tokens(self) -> tuple[torch.Tensor, float]:
        """The draft vocabulary: what the target writes most often, and its share held out."""
        tokens, coverage = draft_vocabulary(
            FeatureCache(self._folder.features("train")),
            FeatureCache(self._folder.features("held_out")),
            self._job.llm.eos_token_ids,
            self._plan.draft_vocab_size,
            self._job.target.vocab_size,
        )
        self._job.reporter.say(
            f"Draft vocabulary: {len(tokens):,} tokens, {coverage:.1%} of what is held out."
        )
        return tokens, coverage

    @cached_property
    def _vocabulary_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's embedding and output rows; [V, E] each. They may have to be loaded again."""
        return vocabulary_weights(self._job.target)

    def _drafters(self, draft_tokens: torch.Tensor) -> DrafterSeries:
        job, weights = self._job, self._vocabulary_weights
        return DrafterSeries(job, HeadParts.of(job.target, job.name, weights, draft_tokens))

    def _serve(self, llm: LLM, held_out: Sequence[Conversation]) -> Served:
        prompted = [each for each in held_out if each.answers[0][0]] or held_out
        prompts = [_prompt(each) for each in prompted[:_SERVED_PROMPTS]]
        config, plan = self._job.method.serving(self._folder.out), self._plan
        return measure(llm, config, prompts, plan.served_tokens, plan.nodes_per_token)


def _check_kind(method: TrainingMethod, llm: LLM) -> None:
    reads = llm.engine.target.reads_source
    if method.for_sources is None or method.for_sources == reads:
        return
    kinds = ("a decoder-only model", "an encoder-decoder")
    raise CompatibilityError(
        f"'{method.name}' is trained for {kinds[not reads]}, and this target is {kinds[reads]}."
    )


def _prompt(conversation: Conversation) -> Prompt:
    """The prompt that the target continues, as `LLM.generate` takes it."""
    start = list(opening(conversation.tokens, conversation.answers))
    if not conversation.source:
        return start
    return {"encoder_prompt": list(conversation.source), "decoder_prompt": start}


# `DrafterSeries`: the training of all drafters of a method, one after the other.
#
# Most methods have one. `boost` has several, and each learns what those before it missed.


_FEW = 20
"""Held-out texts of which one becomes the probe."""


class DrafterSeries:
    def __init__(self, job: _Job, parts: HeadParts) -> None:
        self._job, self._parts, self._plan = job, parts, job.plan
        self._settings, self._folder, self._reporter = job.settings, job.folder, job.reporter
        self._is_main = job.processes.is_main_process

    def trainee(self, number: int = 0) -> Trainee:
        """A new drafter, by its number from 0; its random weights follow from the seed."""
        torch.manual_seed(self._settings.seed + number)
        return self._job.method.trainee(self._parts).to(self._job.llm.device)

    def train(self) -> Evaluation:
        """Train all of them; each continues where it stopped."""
        training, held_out = self._examples("train"), self._examples("held_out")
        number, length = self._plan.num_drafters, self._plan.sample_length
        trained = [self._folder.drafter(0, number)]
        best = self._train(self.trainee(), training, held_out, trained[0])
        for at in range(1, number):
            total, before = training.num_learnt, trained[-1].out
            training = missed_by(before, self._parts, training, length)
            if not training:
                break
            held_out = missed_by(before, self._parts, held_out, length) or held_out
            self._reporter.say(
                f"Drafter {at + 1} of {number} learns what the one before it missed: "
                f"{training.num_learnt:,} of {total:,} tokens."
            )
            trained.append(self._folder.drafter(at, number))
            self._train(self.trainee(at), training, held_out, trained[-1])
        if number > 1:
            self._finish([each.out for each in trained])
        return best

    def _finish(self, folders: Sequence[Path]) -> None:
        """Write the list of several drafters, which serving needs."""
        if len(folders) < 2:
            raise TrainingError(
                f"the draft model in {folders[0]} misses nothing that another could learn: use "
                "it alone, as a draft_model, or learn more tokens."
            )
        if self._is_main:
            write_drafters(self._folder.out, [each.name for each in folders])

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
        seen = look(self._job.target, _probe_text(held_out), self._job.layers)

        def save_best(best: Trainee, found: Evaluation) -> None:
            seed = self._settings.seed
            notes = {"seed": seed, "step": found.step, "mean_length": found.score}
            best.write(self._parts, folder.out, {**notes, **best.probe(seen)})

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
                    if self._is_main:
                        save_curves(folder.work, trainer.history)
                    averaged = event.step == evaluated
                    beginning = "mean of the last weights, " if averaged else ""
                    self._reporter.say(beginning + evaluation_text(event))
                    remark, evaluated = f", mean acceptance length {event.score:.2f}", event.step
                else:
                    done(event.step, step_text(event) + remark)
        return next(each for each in reversed(trainer.history) if each.best)

    def _rounds(self, training: TrainingSet, folder: DrafterFolder) -> OnPolicyRounds | None:
        """Text that the drafter writes itself, if the method asks for it."""
        if (plan := self._plan.on_policy) is None:
            return None
        return OnPolicyRounds(
            self._job.llm,
            training,
            plan,
            self._settings,
            self._job.processes.num_processes,
            folder.rounds,
            _ROWS,
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


# `TrainingText`: what one training learns: conversations, and the target's features of them.


class TrainingText:
    """The conversations of one training."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._llm, self._data, self._reporter = job.llm, job.data, job.reporter
        self._source = self._made_source()

    def _made_source(self) -> Source:
        given, length = self._job.plan.given_answers, self._job.settings.max_length
        if self._job.target.reads_source:
            return self._pairs(given, length)
        if self._data.parallel:
            raise ConfigError("--source and --target are for encoder-decoders: give --data.")
        if not self._data.files:
            if given:
                raise ConfigError("answers: 'fixed' learns those in your files: give --data FILE.")
            return SelfSource(self._llm, _ROWS, length, self._job.settings.seed)
        found = FileSource(self._llm, self._data.files, length, _ROWS, given_answers=given)
        if found.too_long:
            self._reporter.say(f"{found.too_long} prompts are too long, and are left out.")
        return found

    def _pairs(self, given: bool, length: int) -> PairSource:
        if not (self._data.files or self._data.parallel):
            raise ConfigError(
                "an encoder-decoder cannot write sources by itself: give --data FILE, or --source."
            )
        width = self._job.plan.beam_width
        params = SamplingParams(temperature=0, max_tokens=length, beam_width=width)
        found = PairSource(self._llm, self._data, _ROWS, params, given_answers=given)
        if found.left_out:
            self._reporter.say(f"{found.left_out} sources are left out. {found.reason}")
        return found

    def conversations(
        self, name: str, tokens: int, others: Sequence[Conversation] = ()
    ) -> list[Conversation]:
        """Conversations that are there, and new ones until there are enough."""
        path, held_out = self._job.folder.conversations(name), name == "held_out"
        path.parent.mkdir(parents=True, exist_ok=True)
        what = "Held-out conversations" if held_out else "Conversations"
        chooser = Chooser(tokens, self._unseen, others)
        with self._reporter.stage(what, tokens) as done:
            for total in collect(self._source, path, chooser, held_out=held_out):
                done(min(total, tokens), f"{total:,} tokens of answers")
        found = diversity(chooser.kept)
        self._reporter.say(
            f"{what}: {found.conversations:,} with {found.answer_tokens:,} tokens of answers, "
            f"{found.prompt_tokens:.0f} tokens before an answer, {found.turns:.2f} turns, "
            f"{found.greedy:.0%} greedy; distinct 1-, 2- and 3-grams "
            f"{', '.join(f'{share:.1%}' for share in found.distinct)}; left out: {chooser.twice} "
            f"twice, {chooser.overlapping} for prompts that must stay unseen."
        )
        return chooser.kept

    @cached_property
    def _unseen(self) -> Unseen:
        if not self._data.unseen:
            return Unseen(())
        assert self._llm.tokenizer is not None
        texts = [text for path in self._data.unseen for text in texts_in(path)]
        encode = self._llm.tokenizer.encode
        return Unseen(encode(text, add_special_tokens=False) for text in texts)

    def compute_features(self, name: str, conversations: Sequence[Conversation]) -> None:
        """Run the target over conversations; complete features stay as they are."""
        target, total = self._job.target, sum(len(c.tokens) for c in conversations)
        encoder, layers = self._job.plan.reads_encoder, self._job.layers
        size = total * bytes_per_token(len(layers), target.hidden_size, encoder=encoder)
        doing = f"Features ({size / 1e9:.2f} GB)"
        folder = self._job.folder.features(name)
        with self._reporter.stage(doing, total) as done:
            for count in compute_features(target, conversations, layers, folder, encoder=encoder):
                done(count, f"{count:,} tokens")


# `TrainingFolder`: the files of one training.
#
# OUT/config.json, OUT/model.safetensors    the best drafter so far
# OUT/training/settings.json                what it is made with
# OUT/training/data/*.jsonl                 conversations
# OUT/training/features/                    what training needs of the target's passes
# OUT/training/checkpoints/                 where to continue
# OUT/training/curves.csv, curves.png       the course
# OUT/training/report.json                  what it brings
#
# If several drafters are trained one after the other, number N is in OUT/drafter-N, and its
# checkpoints and curves are in OUT/training/drafter-N.


@dataclass(frozen=True)
class DrafterFolder:
    out: Path
    work: Path

    @property
    def checkpoints(self) -> Path:
        return self.work / "checkpoints"

    @property
    def rounds(self) -> Path:
        return self.work / "on_policy"


class TrainingFolder:
    """Where everything is. The data are called "train" and "held_out"."""

    def __init__(self, out: Path) -> None:
        self.out, self.work = out, out / "training"
        self.report = self.work / "report.json"
        self._settings = self.work / "settings.json"

    def drafter(self, number: int, of: int) -> DrafterFolder:
        """Where a drafter is, by its number from 0, if so many are trained."""
        if of == 1:
            return DrafterFolder(self.out, self.work)
        name = f"drafter-{number + 1}"
        return DrafterFolder(self.out / name, self.work / name)

    def conversations(self, name: str) -> Path:
        return self.work / "data" / f"{name}.jsonl"

    def features(self, name: str) -> Path:
        return self.work / "features" / name

    @property
    def has_features(self) -> bool:
        return all((self.features(name) / INDEX).exists() for name in ("train", "held_out"))

    @property
    def has_begun(self) -> bool:
        return any(checkpoints_in(each) for each in self.work.rglob("checkpoints"))

    @property
    def free_bytes(self) -> int:
        """Space on its disk; the folder need not exist."""
        folder = self.work.resolve()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        return shutil.disk_usage(there).free

    def check(self, wanted: dict[str, Any]) -> None:
        """Refuse a folder that has another training, or a drafter of another one."""
        if self._settings.exists():
            try:
                found = validated(dict[str, Any], read_json(self._settings))
            except ValueError as error:
                raise ConfigError(
                    f"{self._settings} is damaged: {error}: delete {self.work}."
                ) from None
            if found != wanted:
                changed = {*found, *wanted}
                other = next(k for k in sorted(changed) if found.get(k) != wanted.get(k))
                raise ConfigError(
                    f"{self.out} has a training with another '{other}': choose another folder, "
                    f"or delete {self.work}."
                )
        elif (self.out / "config.json").exists():
            raise ConfigError(f"{self.out} already has a drafter: choose another folder.")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from training in the same folder."""
        self.work.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.work / ".lock", timeout=0):
                yield
        except Timeout:
            raise ConfigError(f"another process trains in {self.out}.") from None

    def claim(self, wanted: dict[str, Any]) -> None:
        text = json.dumps(wanted, indent=2) + "\n"
        self.work.mkdir(parents=True, exist_ok=True)
        write_whole(self._settings, lambda to: to.write_text(text))
