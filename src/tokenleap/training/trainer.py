"""`Trainer`: the loop that trains any drafter, on Accelerate, and its checkpoints.

It goes over batches, evaluates on held-out conversations, keeps the best drafter, and stops early.
Its state is saved at every evaluation and when it is interrupted. A run that was killed continues
from there and gets the same weights as one that was not: batches follow from the seed, and the
state has that of the random number generators.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader

from tokenleap.core.files import write_whole
from tokenleap.engine.worker import Uninterrupted
from tokenleap.errors import ConfigError, TrainingError, in_one_line
from tokenleap.training.features import Batch, BatchSampler, Current, Examples, collate
from tokenleap.training.method import TrainingSettings
from tokenleap.training.trainee import Learnt, Trainee

if TYPE_CHECKING:
    from tokenleap.training.distill import OnPolicyRounds

_SCORED_LENGTH = 4
"""Chains of this length decide which drafter is the best."""


@dataclass(frozen=True)
class Step:
    """One step of the optimizer.

    Args:
        accuracy: for each of them, the share of its places whose token was right.
    """

    step: int
    total: int
    tokens: int
    seconds: float
    losses: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """Results on held-out conversations after a step.

    Args:
        by_position: for each level, the probability that it is accepted if those before were.
        mean_lengths: mean acceptance lengths of chains of 1 to L tokens.
    """

    step: int
    loss: float
    by_position: tuple[float, ...]
    mean_lengths: tuple[float, ...]
    best: bool

    @property
    def score(self) -> float:
        """The score by which the best drafter is chosen."""
        return self.mean_lengths[min(_SCORED_LENGTH, len(self.mean_lengths)) - 1]


@dataclass
class Progress:
    """Where training stands; a part of checkpoints."""

    step: int = 0
    epoch: int = 0
    batches: int = 0
    """Batches of this epoch that are done."""
    round: int = 0
    """See `OnPolicyRounds`."""
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last evaluation."""
    history: list[Evaluation] = field(default_factory=list)
    finished: bool = False
    averaged: bool = False
    """Whether the last weights were averaged."""

    @property
    def evaluated(self) -> int:
        """The last step after which there was an evaluation; 0 if there was none."""
        return self.history[-1].step if self.history else 0

    @property
    def since_best(self) -> int:
        """Evaluations after the best one."""
        best = [index for index, each in enumerate(self.history) if each.best]
        return len(self.history) - 1 - best[-1] if best else 0


class Trainer:
    """Trains one drafter.

    Args:
        save_best: called with the trainee and its evaluation when it is the best so far.
        rounds: what it learns from instead, in as many steps; None for nothing else.
    """

    def __init__(
        self,
        trainee: Trainee,
        training: Examples,
        held_out: Examples,
        settings: TrainingSettings,
        folder: Path,
        save_best: Callable[[Trainee, Evaluation], None],
        rounds: OnPolicyRounds | None = None,
    ) -> None:
        self._settings, self._save_best, self._rounds = settings, save_best, rounds
        on_cpu = next(trainee.parameters()).device.type == "cpu"
        if on_cpu and settings.mixed_precision == "fp16":
            raise ConfigError("mixed_precision: fp16 needs a GPU: choose 'bf16' or 'no'.")
        # Accelerate keeps the first choice of precision of a process. A later training in the
        # same process may choose another.
        AcceleratorState._reset_state()
        self._accelerator = Accelerator(
            mixed_precision=settings.mixed_precision,
            cpu=on_cpu,
            dataloader_config=DataLoaderConfiguration(even_batches=False),
            # The only buffers are the target's weights, which do not change.
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    broadcast_buffers=False, find_unused_parameters=not trainee.uses_all_weights
                )
            ],
        )
        set_seed(settings.seed + self._accelerator.process_index)
        self._sampler = BatchSampler(
            training.sizes,
            settings.batch_tokens,
            settings.seed,
            multiple_of=self._accelerator.num_processes,
        )
        self._training = Current(training)
        self._batches = self._accelerator.prepare(
            _loader(self._training, self._sampler, settings.levels, trainee.first_learnt)
        )
        in_order = BatchSampler(held_out.sizes, settings.batch_tokens)
        most = trainee.evaluated_levels
        self._levels = min(most, trainee.max_levels or most)
        self._held_out = self._accelerator.prepare(
            _loader(held_out, in_order, self._levels, trainee.first_learnt)
        )
        self._check_batches()
        self.total_steps = settings.steps(len(self._batches))
        self._trainee = self._accelerator.prepare(trainee)
        made = optimizers_of(trainee, settings)
        self._optimizers = [self._accelerator.prepare(each) for each in made]
        self._schedules = schedules(made, self.total_steps, settings)
        self._progress = Progress()
        self._checkpoints = Checkpoints(
            self._accelerator, folder, trainee, made, self._schedules, self._progress
        )
        self._averages = Averages(folder / "weights", settings.average)

    @property
    def history(self) -> Sequence[Evaluation]:
        return self._progress.history

    def _check_batches(self) -> None:
        """Refuse text that has no batch for each process."""
        if not len(self._batches):
            raise ConfigError(
                f"there are fewer batches than the {self._accelerator.num_processes} processes: "
                "lower batch_tokens, or start fewer."
            )

    # The loop

    def run(self) -> Iterator[Step | Evaluation]:
        """Train from where an earlier run stopped; checkpoints are saved on the way."""
        self._checkpoints.load()
        try:
            yield from self._steps_and_evaluations()
            yield from self._averaged()
        except (KeyboardInterrupt, GeneratorExit):
            if self._accelerator.num_processes == 1:  # several may be at different steps
                with Uninterrupted():
                    self._checkpoints.save(self._progress.step)
            raise

    def _steps_and_evaluations(self) -> Iterator[Step | Evaluation]:
        progress = self._progress
        yield from self._due_evaluation()  # a run may have been interrupted before it
        while not progress.finished:
            self._enter_round()
            for batches in self._step_batches():
                with Uninterrupted():
                    step = self._step(batches)
                yield step
                yield from self._due_evaluation()
                if self._progress.finished:
                    return
                if self._round != progress.round:
                    break
            with Uninterrupted():
                progress.epoch, progress.batches = progress.epoch + 1, 0

    @property
    def _round(self) -> int:
        return self._progress.step // self._rounds.steps if self._rounds else 0

    def _enter_round(self) -> None:
        """Learn from what the round of the next step learns from.

        A new round begins with a checkpoint, so what it prepares with the weights of this step can
        always be prepared again.
        """
        if self._rounds is None:
            return
        progress, number = self._progress, self._round
        if progress.round != number:
            with Uninterrupted():
                progress.round, progress.epoch, progress.batches = number, 0, 0
                self._checkpoints.save(progress.step)
        begins = progress.step == number * self._rounds.steps
        if begins and self._accelerator.is_main_process:
            self._rounds.begin(number, self._accelerator.unwrap_model(self._trainee))
        self._accelerator.wait_for_everyone()
        examples = self._rounds.examples(number)
        self._training.use(examples)
        self._sampler.sizes = examples.sizes
        self._check_batches()

    def _due_evaluation(self) -> Iterator[Evaluation]:
        progress, settings = self._progress, self._settings
        last = progress.step == self.total_steps
        is_time = progress.step > 0 and progress.step % settings.evaluate_every == 0
        if not (last or is_time) or progress.evaluated == progress.step:
            return
        with Uninterrupted():
            found = self._evaluate()
            if settings.average > 1 and self._accelerator.is_main_process:
                self._averages.keep(progress.step, self._weights())
            out_of_patience = 0 < settings.patience <= progress.since_best
            progress.finished = last or out_of_patience
            self._checkpoints.save(progress.step)
        yield found

    def _weights(self) -> dict[str, Tensor]:
        return dict(self._accelerator.unwrap_model(self._trainee).named_parameters())

    def _averaged(self) -> Iterator[Evaluation]:
        """Evaluate the mean of the last weights, once, if the settings ask for it."""
        progress = self._progress
        if self._settings.average == 1 or progress.averaged:
            return
        with Uninterrupted():
            self._accelerator.wait_for_everyone()
            self._averages.load_into(self._weights())
            found = self._evaluate()
            progress.averaged = True
            self._checkpoints.save(progress.step)
        yield found

    def _step_batches(self) -> Iterator[list[Batch]]:
        for loader in (self._batches, self._sampler):
            loader.set_epoch(self._progress.epoch)
        left = self._accelerator.skip_first_batches(self._batches, self._progress.batches)
        batches = iter(left)
        while group := list(itertools.islice(batches, self._settings.accumulation)):
            yield group

    def _num_levels(self) -> int:
        settings = self._settings
        alone = self._progress.step < settings.first_level_share * self.total_steps
        return 1 if alone else settings.levels

    def _step(self, batches: Sequence[Batch]) -> Step:
        began, num_levels, progress = time.perf_counter(), self._num_levels(), self._progress
        self._trainee.train()
        self._accelerator.unwrap_model(self._trainee).step = (progress.step, self.total_steps)
        found = []
        for left, batch in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
            with self._accelerator.no_sync(self._trainee) if left else nullcontext():
                found.append(self._learn(batch, num_levels, len(batches)))
        self._update()
        losses = torch.stack([each.losses.detach().cpu() for each in found]).mean(0)
        right = torch.stack([each.right.sum((0, 2)).cpu() for each in found]).sum(0)
        counts = torch.stack([each.counts.cpu() for each in found]).sum(0)
        progress.step += 1
        progress.batches += len(batches)
        progress.losses.append(float(losses[0]))
        return Step(
            progress.step,
            self.total_steps,
            sum(batch.num_tokens for batch in batches),
            time.perf_counter() - began,
            tuple(losses.tolist()),
            tuple((right / counts.clamp(min=1)).tolist()),
        )

    def _learn(self, batch: Batch, num_levels: int, num_batches: int) -> Learnt:
        with self._accelerator.autocast():
            found: Learnt = self._trainee(batch, num_levels)
        weights = self._settings.decay ** torch.arange(num_levels, device=found.losses.device)
        loss = (found.losses * weights).sum()
        if not loss.isfinite():
            raise TrainingError(
                f"the loss of step {self._progress.step + 1} is not a finite number: lower the "
                f"learning rate ({self._settings.learning_rate:g}). The best drafter so far stays."
            )
        self._accelerator.backward(loss / num_batches)
        return found

    def _update(self) -> None:
        settings = self._settings
        self._accelerator.clip_grad_norm_(self._trainee.parameters(), settings.max_grad_norm)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    # Evaluation

    @torch.no_grad()
    def _evaluate(self) -> Evaluation:
        progress, levels = self._progress, range(1, self._levels + 1)
        counts = self._count()
        losses, progress.losses = progress.losses, []
        found = Evaluation(
            progress.step,
            # The mean of the last weights has the loss of the steps that led to them.
            sum(losses) / len(losses) if losses else progress.history[-1].loss,
            tuple(counts.by_position()),
            tuple(counts.mean_length(level) for level in levels),
            best=False,
        )
        found = replace(found, best=all(found.score > each.score for each in progress.history))
        progress.history.append(found)
        if found.best and self._accelerator.is_main_process:
            self._save_best(self._accelerator.unwrap_model(self._trainee), found)
        return found

    def _count(self) -> Acceptance:
        trainee = self._accelerator.unwrap_model(self._trainee)  # waits for no other process
        trainee.eval()
        counts = Acceptance(self._levels)
        for batch in self._held_out:
            with self._accelerator.autocast():
                found = trainee(batch, self._levels)
            counts.add(found.right, batch.levels.valid)
        totals = counts.totals.to(self._accelerator.device)
        counts.totals = self._accelerator.reduce(totals).cpu()
        return counts


def _loader(
    data: Examples, sampler: BatchSampler, num_levels: int, first_learnt: int
) -> DataLoader[Batch]:
    return DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=partial(collate, num_levels=num_levels, first=first_learnt),
        # Loaders draw a number whenever they begin: not from the generator that noise comes from,
        # or a run that was resumed would get other noise.
        generator=torch.Generator(),
    )


# The optimizers of a drafter, and how their learning rates go.


def optimizers_of(trainee: Trainee, settings: TrainingSettings) -> list[Optimizer]:
    """One for the matrices, one for everything else, and one for `Trainee.own_rate`."""
    matrices, own = trainee.matrices, trainee.own_rate
    chosen = {id(each) for each in (*matrices, *own.weights)}
    vectors = [p for p in trainee.parameters() if p.requires_grad and id(p) not in chosen]
    rate, decay = settings.learning_rate, settings.weight_decay
    optimizers: list[Optimizer] = []
    if matrices and settings.optimizer == "muon":
        optimizers.append(
            Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
        matrices = []
    for weights, lr, weight_decay in (
        (matrices, rate, decay),
        (vectors, settings.vector_learning_rate, 0),
        (own.weights, own.learning_rate, 0),
    ):
        if weights:
            optimizers.append(
                AdamW(weights, lr=lr, weight_decay=weight_decay, betas=settings.betas)
            )
    return optimizers


def schedules(
    optimizers: Sequence[Optimizer], total: int, settings: TrainingSettings
) -> list[LambdaLR]:
    """The learning rates of each optimizer: they rise linearly, and fall as the settings say."""
    rising = max(1.0, settings.rising_steps(total))

    def rate(step: int) -> float:
        if settings.schedule == "cosine":
            fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
        else:  # one over the square root (Vaswani et al., 2017)
            fall = math.sqrt(rising / max(rising, step + 1))
        return min(1.0, (step + 1) / rising) * fall

    return [LambdaLR(each, rate) for each in optimizers]


# `Averages`: the weights of the last evaluations, and their mean (checkpoint averaging).
#
# Vaswani et al., "Attention Is All You Need" (2017), section 6.1. The weights are files beside the
# checkpoints, so a run that was killed finds them again. PyTorch's `AveragedModel` cannot forget:
# it averages from its first update on, and which evaluations are the last is not known then.


_SUFFIX = ".safetensors"


class Averages:
    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: int(path.stem))

    def keep(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights after a step, and forget the oldest."""
        tensors = {name: each.detach().cpu().contiguous() for name, each in weights.items()}
        path = self._folder / f"{step}{_SUFFIX}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, partial(save_file, tensors))
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"{path} cannot be written: {in_one_line(error)}.") from None
        for old in self._files()[: -self._number]:
            old.unlink()

    @torch.no_grad()
    def load_into(self, weights: Mapping[str, Tensor]) -> None:
        """Give weights the mean of those that are kept."""
        files = self._files()
        total = {name: each.float() for name, each in load_file(files[0]).items()}
        for file in files[1:]:
            for name, each in load_file(file).items():
                total[name] += each.float()
        for name, each in total.items():
            weights[name].copy_(each / len(files))


# How often a drafter's greedy drafts are right, and the mean acceptance length that follows.
#
# The drafts of all roots are known from one pass of training. A chain of n tokens is simulated on
# them as decoding would use it: it accepts the right tokens before the first wrong one, adds
# the target's own token, and goes on from there.


class Acceptance:
    """Counts over batches.

    Attributes:
        totals: [4, L] counts that may be added to those of other processes: how often a level
            was reached, how often it was right then, and tokens and passes of such chains.
    """

    def __init__(self, num_levels: int) -> None:
        self.totals = torch.zeros(4, num_levels, dtype=torch.long)

    def add(self, right: Tensor, valid: Tensor) -> None:
        """Count a batch.

        Args:
            right: [B, L, Q] whether the draft's token is the target's.
            valid: [B, L, Q] whether there is a token to guess.
        """
        accepted = right.cumprod(1).bool()
        above = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=1) & valid
        self.totals[0] += above.sum((0, 2)).cpu()
        self.totals[1] += (above & accepted).sum((0, 2)).cpu()
        lengths, counts = accepted.sum(1).tolist(), valid[:, 0].sum(-1).tolist()
        for row, count in zip(lengths, counts, strict=True):
            for index in range(self.totals.shape[1]):
                self.totals[2, index] += count
                self.totals[3, index] += _passes(row[:count], index + 1)

    def by_position(self) -> list[float]:
        """[L] the probability that a level is accepted, given that the levels before were."""
        rates: list[float] = (self.totals[1] / self.totals[0].clamp(min=1)).tolist()
        return rates

    def mean_length(self, num_speculative_tokens: int) -> float:
        """Tokens per pass with chains of this length, bonus token included."""
        tokens, passes = self.totals[2:, num_speculative_tokens - 1].tolist()
        return float(tokens / max(1, passes))


def _passes(accepted: Sequence[int], length: int) -> int:
    """Passes that chains of `length` tokens need; `accepted` is how many are right at each root."""
    at = passes = 0
    while at < len(accepted):
        at += min(accepted[at], length) + 1
        passes += 1
    return passes


# `Checkpoints`: the states of a training on the disk, from which it continues.
#
#     state.safetensors        weights, optimizers, schedules and progress
#     random-0.safetensors     random number generators of process 0, and so on
#
# Tensors are in safetensors, and everything else is JSON in their headers. Accelerate's own
# checkpoints hold pickle files, which can run code, so neither they nor its `ProjectConfiguration`,
# which deletes old ones of that kind, are used.


_PREFIX, _OLD = "checkpoint-", "-old"
_NAME = re.compile(rf"{_PREFIX}\d+({_OLD})?")
_STATE = "state.safetensors"


class Checkpoints:
    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[LRScheduler],
        progress: Progress,
    ) -> None:
        self._accelerator, self._folder, self._module = accelerator, folder, module
        self._optimizers, self._schedules, self._progress = optimizers, schedules, progress

    def load(self) -> None:
        if not (found := checkpoints_in(self._folder)):
            return
        place = found[-1]
        again = f"delete {self._folder} to begin the training again"
        if not (place / _STATE).exists():
            raise TrainingError(
                f"{place} is of an older version: it has pickle files, which are never loaded "
                f"because they can run code; {again}."
            )
        try:
            self._use(_read(place / _STATE))
            _restore_random(_read(place / self._random))
        except Exception as error:  # a damaged file has states that PyTorch stumbles over somewhere
            raise TrainingError(f"{place} cannot be read: {in_one_line(error)}; {again}.") from None

    def save(self, step: int) -> None:
        """Save the state after a step; the one before is deleted when this one is complete."""
        beside = self._folder / "saving"
        if self._accelerator.is_main_process:
            shutil.rmtree(beside, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        try:
            beside.mkdir(parents=True, exist_ok=True)
            if self._accelerator.is_main_process:
                _write(beside / _STATE, self._state())
            _write(beside / self._random, _random_state())
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise TrainingError(
                f"{beside} cannot be written: {in_one_line(error)}. The checkpoint before is kept."
            ) from None
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            _replace(beside, self._folder / f"{_PREFIX}{step}")

    @property
    def _random(self) -> str:
        return f"random-{self._accelerator.process_index}.safetensors"

    def _state(self) -> dict[str, Any]:
        scaler = self._accelerator.scaler
        return {
            "weights": self._module.state_dict(),
            "optimizers": [each.state_dict() for each in self._optimizers],
            "schedules": [each.state_dict() for each in self._schedules],
            "progress": asdict(self._progress),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def _use(self, state: dict[str, Any]) -> None:
        progress = TypeAdapter(Progress).validate_python(state["progress"])
        self._module.load_state_dict(state["weights"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            _check_moments(optimizer, saved)
            optimizer.load_state_dict(saved)
        for schedule, saved in zip(self._schedules, state["schedules"], strict=True):
            if saved.keys() != schedule.state_dict().keys():
                raise ValueError("its schedules are of another kind")
            schedule.load_state_dict(saved)
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.load_state_dict(state["scaler"])
        vars(self._progress).update(vars(progress))


def _check_moments(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Refuse an optimizer's state that is not one of its weights, which PyTorch does not check."""
    shapes = [each.shape for group in optimizer.param_groups for each in group["params"]]
    for number, moments in saved["state"].items():
        shape = shapes[number]
        for name, tensor in moments.items():
            if name != "step" and tensor.shape != shape:
                raise ValueError(f"{name} of weight {number} has the shape {list(tensor.shape)}")


def _random_state() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _write(path: Path, state: Any) -> None:
    """Write nested dictionaries, lists and tuples of tensors, numbers and texts."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()

    def kept(tensor: Tensor) -> int:
        """The number of a tensor; safetensors refuses several that share memory."""
        whole = tensor.detach().cpu().contiguous()
        if (storage := whole.untyped_storage().data_ptr()) in storages:
            whole = whole.clone()
        storages.add(storage)
        tensors[str(len(tensors))] = whole
        return len(tensors) - 1

    def plain(value: Any) -> Any:
        """A value in JSON. Dictionaries are lists of pairs, because their keys may be numbers."""
        match value:
            case Tensor():
                return {"tensor": kept(value)}
            case dict():
                return {"dict": [[key, plain(each)] for key, each in value.items()]}
            case tuple():
                return {"tuple": [plain(each) for each in value]}
            case list():
                return [plain(each) for each in value]
        return value

    text = json.dumps(plain(state))
    save_file(tensors, path, {"state": text})


def _read(path: Path) -> dict[str, Any]:
    """Read a file of `_write`."""
    with safe_open(path, "pt") as file:
        text = (file.metadata() or {})["state"]

        def value(found: dict[str, Any]) -> Any:
            """The value that an object of JSON stands for."""
            ((kind, content),) = found.items()
            made: dict[str, Callable[[Any], Any]] = {
                "tensor": lambda number: file.get_tensor(str(number)),
                "dict": dict,
                "tuple": tuple,
            }
            return made[kind](content)

        state = json.loads(text, object_hook=value)
    assert isinstance(state, dict)
    return state


def _replace(new: Path, place: Path) -> None:
    """Rename a checkpoint to its place, and delete all others.

    One of the same step is renamed first, so that there is a complete one at any time.
    """
    if place.exists():
        old = place.with_name(f"{place.name}{_OLD}")
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    new.rename(place)
    for each in checkpoints_in(place.parent):
        if each != place:
            shutil.rmtree(each)


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, the last one at the end."""
    found = (each for each in folder.glob(f"{_PREFIX}*") if _NAME.fullmatch(each.name))
    return sorted(found, key=_age)


def _age(checkpoint: Path) -> tuple[int, bool]:
    """Its step, and whether it is in its place: one that was to be replaced is older."""
    name = checkpoint.name.removeprefix(_PREFIX)
    return int(name.removesuffix(_OLD)), not name.endswith(_OLD)


# The processes of one training, as `accelerate launch` starts them; usually there is only one.


_PATIENCE = timedelta(days=30)
"""How long processes wait for the one that writes the data."""


def processes(*, on_cpu: bool) -> PartialState:
    """The state that Accelerate keeps of them; the first call joins them."""
    return PartialState(cpu=on_cpu, timeout=_PATIENCE)
