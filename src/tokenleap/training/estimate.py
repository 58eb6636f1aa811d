"""How long a training will take on this machine, and how much disk: measured beforehand.

Every part is run for a few seconds: the target writes, its features are computed, and the drafter
makes two steps of one level and two of all levels. The numbers of tokens do the rest.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from tokenleap.core.params import SamplingParams
from tokenleap.llm import LLM
from tokenleap.training.batches import TrainingSet, collate
from tokenleap.training.checkpoints import Step
from tokenleap.training.conversations import Conversation
from tokenleap.training.features import (
    TOP_K,
    FeatureCache,
    Features,
    bytes_per_token,
    compute_features,
    quantize,
)
from tokenleap.training.method import Trainee
from tokenleap.training.settings import TrainingSettings
from tokenleap.training.trainer import Trainer, optimizers_of

__all__ = ["Estimate", "Speeds", "TrainingBytes", "estimate", "measure_speeds", "training_bytes"]


# How much memory and disk a training takes.


_SAMPLE = 128
"""Tokens of the conversations on which activations are counted, at most."""


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes that a training takes besides the target and the features.

    Args:
        memory: weights, gradients, the optimizers' states, and what a batch keeps for gradients,
            copies of weights in lower precision included. What is computed and freed within a step
            comes on top.
        disk: of two checkpoints: the one before is deleted when the next one is complete.
    """

    memory: int
    disk: int


def training_bytes(
    trainee: Trainee, num_layers: int, hidden_size: int, settings: TrainingSettings
) -> TrainingBytes:
    """The cost of a training."""
    weights = sum(weight.numel() for weight in trainee.parameters() if weight.requires_grad)
    moments = sum(
        weight.numel() * (1 if isinstance(each, torch.optim.Muon) else 2)
        for each in optimizers_of(trainee, settings)
        for group in each.param_groups
        for weight in group["params"]
    )
    trainee.at_step(1, 1)  # in the last step, nothing is left out any more
    # What grows is counted by texts: some drafters have as many masks for a text of any length.
    one, two = (_kept_bytes(trainee, num_layers, hidden_size, settings, n) for n in (1, 2))
    batch = settings.batch_tokens * (two - one) // _size(settings)
    copies = max(0, 2 * one - two)
    states = 4 * (2 * weights + moments)
    return TrainingBytes(states + copies + batch, 2 * 4 * (weights + moments))


def _size(settings: TrainingSettings) -> int:
    return min(_SAMPLE, settings.max_length)


def _kept_bytes(
    trainee: Trainee, num_layers: int, hidden_size: int, settings: TrainingSettings, count: int
) -> int:
    """Bytes of the tensors that a step keeps for the gradients of so many conversations.

    With mixed precision there are copies of weights among them, which do not grow with these.
    """
    size = _size(settings)
    hidden, scales = quantize(torch.zeros(size, num_layers, hidden_size))
    tokens = torch.zeros(size, dtype=torch.long)
    top = tokens.unsqueeze(-1).expand(-1, TOP_K)
    encoded = torch.zeros(size, hidden_size if trainee.reads_encoder else 0).half()
    sample = Features(tokens, [(0, size)], hidden, scales, top, top.float(), tokens, encoded)
    own = {
        each.untyped_storage().data_ptr()
        for each in itertools.chain(trainee.parameters(), trainee.buffers())
    }
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(trainee.parameters()).device
    dtype = torch.bfloat16 if settings.mixed_precision == "bf16" else torch.float16
    enabled = settings.mixed_precision != "no"
    levels = max(1, settings.levels)
    batch = send_to_device(collate([sample] * count, levels, trainee.first_learnt), device)
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(device.type, dtype, enabled=enabled),
    ):
        torch.manual_seed(settings.seed)  # both sizes draw the same
        trainee(batch, settings.levels)
    return sum(kept.values())


_SAMPLE_TOKENS = 48
_PROMPT_SHARE, _WRITTEN_SHARE = 2.2, 1.3
"""Tokens of a conversation, and those that are written, for each token of its answers; before any
were written, and as in conversations that the target writes by itself."""


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of the parts of a training.

    Args:
        one_level, all_levels: tokens that training processes with one level, and with all.
    """

    writing: float
    features: float
    one_level: float
    all_levels: float


@dataclass(frozen=True)
class Estimate:
    """The cost of a training."""

    writing_hours: float
    feature_hours: float
    training_hours: float
    disk_bytes: int
    training_bytes: TrainingBytes

    @property
    def hours(self) -> float:
        """Of all parts."""
        return self.writing_hours + self.feature_hours + self.training_hours


def estimate(
    speeds: Speeds,
    answer_tokens: int,
    tokens_to_write: int,
    num_layers: int,
    hidden_size: int,
    settings: TrainingSettings,
    needed: TrainingBytes,
    *,
    encoder: bool = False,
    on_policy_share: float = 0.0,
    num_drafters: int = 1,
) -> Estimate:
    """The cost of a training.

    Args:
        on_policy_share: share of the text that the drafter writes, anew for every epoch. It is
            taken to be as slow as the target.
    """
    tokens = _PROMPT_SHARE * answer_tokens
    own_tokens = on_policy_share * settings.epochs * tokens
    learnt_tokens = settings.epochs * tokens
    if settings.max_steps is not None:
        learnt_tokens = settings.max_steps * settings.accumulation * settings.batch_tokens
    first = settings.first_level_share
    per_token = first / speeds.one_level + (1 - first) / speeds.all_levels
    return Estimate(
        (_WRITTEN_SHARE * tokens_to_write + own_tokens) / speeds.writing / 3600,
        (tokens + own_tokens) / speeds.features / 3600,
        num_drafters * learnt_tokens * per_token / 3600,
        round(tokens * bytes_per_token(num_layers, hidden_size, encoder=encoder)),
        replace(needed, disk=num_drafters * needed.disk),
    )


def measure_speeds(
    llm: LLM,
    new_trainee: Callable[[], Trainee],
    layers: Sequence[int],
    settings: TrainingSettings,
    rows: int,
    *,
    encoder: bool = False,
) -> Speeds:
    """Run every part for a few seconds."""
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=_SAMPLE_TOKENS, ignore_eos=True)
    prompts = [[1 + row % 7] for row in range(rows)]
    llm.generate(prompts[:1], SamplingParams(max_tokens=2))  # what is done only once
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    writing = time.perf_counter() - began
    texts = [each.token_ids for each in outputs]
    length = min(settings.max_length, 256, llm.max_model_len - 1)
    text = [token for each in texts for token in each]
    pieces = [tuple(text[i : i + length]) for i in range(0, len(text), length)]
    sources = pieces if llm.engine.target.reads_source else [()] * len(pieces)
    sample = [
        Conversation(piece, ((0, len(piece)),), source=source)
        for piece, source in zip(pieces, sources, strict=True)
        if len(piece) > 4
    ]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        kept = Path(folder) / "features"
        for _ in compute_features(llm.engine.target, sample, layers, kept, encoder=encoder):
            pass
        features = time.perf_counter() - began
        cache = FeatureCache(kept)
        data = TrainingSet(cache, length)
        one = every = _training_speed(new_trainee(), data, settings, 0.0)
        if settings.first_level_share:
            one = _training_speed(new_trainee(), data, settings, 1.0)
    written, computed = sum(map(len, texts)), sum(len(each.tokens) for each in sample)
    return Speeds(written / writing, computed / features, one, every)


def _training_speed(
    trainee: Trainee, data: TrainingSet, settings: TrainingSettings, first_level_share: float
) -> float:
    """Tokens per second of a step after a first one."""
    changed = {
        "epochs": 2,
        "max_steps": None,
        "average": 1,
        "evaluate_every": 1_000_000,
        "accumulation": 1,
        "first_level_share": first_level_share,
        "batch_tokens": min(settings.batch_tokens, sum(data.sizes)),
    }
    shorter = settings.model_copy(update=changed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(trainee, data, data, shorter, Path(folder), lambda _, __: None)
        steps = [step for step in trainer.run() if isinstance(step, Step)]
    torch.manual_seed(settings.seed)
    timed = steps[1:] or steps
    return sum(step.tokens for step in timed) / sum(step.seconds for step in timed)
