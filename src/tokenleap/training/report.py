"""A training in words and numbers: the estimate beforehand, its course, and the final report."""

from __future__ import annotations

import csv
import io
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from tokenleap.core.files import write_whole
from tokenleap.core.params import SamplingParams
from tokenleap.errors import TrainingError
from tokenleap.llm import LLM, Prompt
from tokenleap.outputs import Metrics
from tokenleap.runtime.network import Need
from tokenleap.runtime.target import Target
from tokenleap.training.collect import Diversity
from tokenleap.training.conversations import Conversation
from tokenleap.training.features import (
    TOP_K,
    FeatureCache,
    Features,
    TrainingSet,
    collate,
    compute_features,
    passes,
    quantize,
)
from tokenleap.training.method import Plan, TrainingMethod, TrainingSettings
from tokenleap.training.trainee import Trainee
from tokenleap.training.trainer import Evaluation, Step, Trainer, optimizers_of


class Reporter(Protocol):
    def say(self, text: str) -> None: ...

    def stage(self, doing: str, total: int) -> AbstractContextManager[Callable[[int, str], None]]:
        """A part of the work. Yields a function that is told how much is done, with a remark."""
        ...


@dataclass(frozen=True)
class TrainingReport:
    """The result of a training.

    Args:
        coverage: share of the held-out answers' tokens that are in the draft vocabulary.
        perplexity: of the new model, if one was written in place of the target.
    """

    training: Diversity
    held_out: Diversity
    coverage: float
    best: Evaluation
    served: Served
    advice: tuple[str, ...] = field(default=())
    perplexity: Perplexity | None = None

    def text(self, out: Path) -> str:
        """How good the drafter in a folder is, in lines."""
        served = self.served
        positions = " ".join(f"{share:.0%}" for share in served.by_position)
        lines = [
            f"{out}: {served.mean_length:.2f} tokens a pass with chains of "
            f"{len(served.by_position)} on {served.prompts} held-out prompts (acceptance by "
            f"position {positions}); a draft level takes {served.draft_share:.0%} of a pass; "
            f"{served.speed_up:.2f} times the speed of plain decoding with the default controller."
        ]
        if changed := self.perplexity:
            lines.append(
                f"{out} is a new model, and its output is not the target's: drafts are lossless "
                "with respect to the new one only. Its perplexity on the held-out answers is "
                f"{changed.new:.3f}, the target's {changed.target:.3f}."
            )
        return "\n".join([*lines, *self.advice])

    def write(self, path: Path) -> None:
        text = json.dumps(asdict(self), indent=2) + "\n"
        write_whole(path, lambda to: to.write_text(text))


def step_text(step: Step) -> str:
    shares = " ".join(f"{share:.0%}" for share in step.accuracy)
    return f"loss {step.losses[0]:.2f}, right {shares}"


def evaluation_text(found: Evaluation) -> str:
    positions = " ".join(f"{share:.0%}" for share in found.by_position)
    lengths = " ".join(f"{length:.2f}" for length in found.mean_lengths)
    star = " (best)" if found.best else ""
    return (
        f"step {found.step}: loss {found.loss:.3f}; held out: acceptance by position {positions}; "
        f"mean acceptance length of chains 1 to {len(found.mean_lengths)}: {lengths}{star}"
    )


def usage_text(config: Mapping[str, Any], new_target: Path | None) -> str:
    """The options of the command line for a `speculative_config`."""
    of_target = f"--model {new_target} " if new_target else ""
    if not config.keys() <= {"method", "model"}:
        return f"{of_target}--speculative-config '{json.dumps(config)}'"
    drafter = f" --draft-model {config['model']}" if "model" in config else ""
    return f"{of_target}--method {config['method']}{drafter}"


def advice(
    coverage: float,
    best: Evaluation,
    served: Served,
    changed: Perplexity | None = None,
    deeper: str = TrainingMethod.deeper,
) -> Sequence[str]:
    """The advice if acceptance is low, or if the new model has become worse."""
    found = []
    if coverage < 0.95:
        found.append(
            f"The draft vocabulary covers only {coverage:.0%} of the target's text: raise "
            "draft_vocab_size."
        )
    if served.mean_length < best.score - 0.25:
        found.append(
            f"The engine accepts {served.mean_length:.2f} tokens a pass where the simulation says "
            f"{best.score:.2f}: few prompts were measured, or their first tokens are harder."
        )
    first, *later = best.by_position
    if first < 0.5:
        found.append("The first position is right too rarely: learn more tokens, or more epochs.")
    if later and later[0] < first - 0.15:
        found.append(f"Later positions are much worse than the first: {deeper}.")
    if served.speed_up < 1.02:
        found.append("It hardly pays on this machine; the default controller will rarely use it.")
    if changed and changed.new > 1.1 * changed.target:
        found.append(
            f"The new model's perplexity is {changed.new:.2f}, the target's {changed.target:.2f}: "
            "learn at a lower rate, or from more tokens."
        )
    return found


# What a trained drafter brings, measured by the engine that serves it.


_TOKENS = 96


@dataclass(frozen=True)
class Served:
    """Drafts of a fixed length, and the default controller, on held-out prompts.

    Args:
        mean_length: mean acceptance length of chains of as many tokens as were asked for.
        by_position: how often each of their positions was accepted, given those before.
        draft_share: time of drafting a level, as a share of a plain pass.
        speed_up: median over the prompts: tokens per second with the default controller, over
            those of plain decoding.
    """

    prompts: int
    mean_length: float
    by_position: tuple[float, ...]
    draft_share: float
    speed_up: float


def measure(
    llm: LLM,
    config: Mapping[str, Any],
    prompts: Sequence[Prompt],
    length: int,
    nodes_per_token: int = 1,
) -> Served:
    """Measure a drafter, in turn with plain decoding."""
    fixed = {**config, "num_speculative_tokens": length * nodes_per_token, "controller": "fixed"}
    ratios, plain_metrics, drafted = [], [], []
    for number, prompt in enumerate([prompts[0], *prompts]):
        params = SamplingParams(temperature=0, max_tokens=_TOKENS)
        (plain,) = llm.generate([prompt], params)
        (chain,) = llm.generate([prompt], params, speculative_config=fixed)
        (default,) = llm.generate([prompt], params, speculative_config=config)
        if failure := chain.metrics.drafter_failure or default.metrics.drafter_failure:
            raise TrainingError(f"the trained drafter cannot draft: {failure}")
        if llm.engine.target.bit_exact and not plain.token_ids == chain.token_ids:
            raise TrainingError("the output with the trained drafter differs from plain decoding.")
        if not number:
            continue  # the first run builds the drafters and measures the costs of passes
        ratios.append(_decoding(default.metrics) / _decoding(plain.metrics))
        plain_metrics.append(plain.metrics)
        drafted.append(chain.metrics)
    counts = [(*m.accepted_per_position, *[0] * length) for m in drafted]
    passed = [sum(each[i] for each in counts) for i in range(length)]
    drafts = sum(m.num_drafts for m in drafted)
    levels = max(1, sum(m.num_draft_tokens for m in drafted) / nodes_per_token)
    plain_pass = sum(m.verify_seconds for m in plain_metrics) / max(
        1, sum(m.target_passes for m in plain_metrics)
    )
    reached = [drafts, *passed]
    return Served(
        len(prompts),
        1 + sum(m.num_accepted_tokens - m.num_cut_drafts for m in drafted) / max(1, drafts),
        tuple(n / max(1, of) for n, of in zip(passed, reached, strict=False)),
        sum(m.draft_seconds for m in drafted) / levels / plain_pass,
        median(ratios),
    )


def _decoding(metrics: Metrics) -> float:
    return metrics.generated_tokens / max(1e-9, metrics.step_seconds)


# The model that a training wrote in place of the target: served as the target is, and compared.
#
# It writes something else than the target, and no drafter can make up for what it lost. So its
# perplexity on the held-out answers is set beside the target's:
#
#     exp(-mean over all tokens of log p(token | tokens before)).
#
# The target wrote these answers, half of them by its most probable tokens, so its own is low.


_CONVERSATIONS = 64
"""Most conversations that are compared."""


@dataclass(frozen=True)
class Perplexity:
    target: float
    new: float

    @classmethod
    def of(cls, target: LLM, new: LLM, held_out: Sequence[Conversation]) -> Perplexity:
        chosen = held_out[:_CONVERSATIONS]
        return cls(*(perplexity(each.engine.target, chosen) for each in (target, new)))


def served_alike(llm: LLM, folder: Path) -> LLM:
    """A model in a folder, with the options with which another one is served."""
    options = llm.engine.options
    return LLM(
        folder,
        speculative_config={"method": "none"},
        dtype=llm.dtype,
        device=llm.device,
        max_model_len=options.max_model_len,
        max_num_seqs=1,
        quantization=options.quantization,
        runtime=options.runtime,
    )


def perplexity(target: Target, conversations: Sequence[Conversation]) -> float:
    """A model's perplexity on the parts of conversations that are to be learnt."""
    found = []
    for each in conversations:
        logprobs = _logprobs(target, each.tokens)
        found += [logprobs[max(0, first - 1) : stop - 1] for first, stop in each.answers]
    return float((-torch.cat(found).mean()).exp())


@torch.inference_mode()
def _logprobs(target: Target, tokens: Sequence[int]) -> Tensor:
    """[n - 1] the log-probability of every token but the first one."""
    following, found, at = torch.tensor(tokens[1:]), [], 0
    for output in passes(target, tokens[:-1], Need()):
        logits = output.scores.float().cpu()
        chosen = following[at : at + len(logits)].unsqueeze(-1)
        found.append(logits.log_softmax(-1).gather(1, chosen).squeeze(-1))
        at += len(logits)
    return torch.cat(found)


# How long a training will take on this machine, and how much memory and disk: measured beforehand.
#
# Every part is run for a few seconds: the target writes, its features are computed, and the drafter
# makes two steps of one level and two of all levels. The numbers of tokens do the rest.


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
    trainee: Trainee,
    num_layers: int,
    hidden_size: int,
    settings: TrainingSettings,
    *,
    encoder: bool = False,
) -> TrainingBytes:
    weights = sum(weight.numel() for weight in trainee.parameters() if weight.requires_grad)
    moments = sum(
        weight.numel() * (1 if isinstance(each, torch.optim.Muon) else 2)
        for each in optimizers_of(trainee, settings)
        for group in each.param_groups
        for weight in group["params"]
    )
    trainee.step = (1, 1)  # in the last step, nothing is left out any more
    # What grows is counted by texts: some drafters have as many masks for a text of any length.
    text = _text_of(min(_SAMPLE, settings.max_length), num_layers, hidden_size, encoder=encoder)
    one, two = (_kept_bytes(trainee, [text] * count, settings) for count in (1, 2))
    batch = settings.batch_tokens * (two - one) // len(text.tokens)
    copies = max(0, 2 * one - two)
    states = 4 * (2 * weights + moments)
    return TrainingBytes(states + copies + batch, 2 * 4 * (weights + moments))


def _text_of(size: int, num_layers: int, hidden_size: int, *, encoder: bool) -> Features:
    hidden, scales = quantize(torch.zeros(size, num_layers, hidden_size))
    tokens = torch.zeros(size, dtype=torch.long)
    top = tokens.unsqueeze(-1).expand(-1, TOP_K)
    encoded = torch.zeros(size, hidden_size if encoder else 0).half()
    return Features(tokens, [(0, size)], hidden, scales, top, top.float(), tokens, encoded)


def _kept_bytes(trainee: Trainee, texts: Sequence[Features], settings: TrainingSettings) -> int:
    """Bytes of the tensors that a step keeps for the gradients of some texts.

    With mixed precision there are copies of weights among them, which do not grow with these.
    """
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
    batch = send_to_device(collate(texts, levels, trainee.first_learnt), device)
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast(device.type, dtype, enabled=enabled),
    ):
        torch.manual_seed(settings.seed)  # both sizes draw the same
        trainee(batch, settings.levels)
    return sum(kept.values())


_SAMPLE_TOKENS = 48
_DEPTH = 512
"""Most tokens before those that are written: their KV is read in every pass."""
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
    writing_hours: float
    feature_hours: float
    training_hours: float
    disk_bytes: int
    training_bytes: TrainingBytes

    @property
    def hours(self) -> float:
        return self.writing_hours + self.feature_hours + self.training_hours

    @property
    def text(self) -> str:
        parts = (
            f"{_time(self.writing_hours)} to write the text",
            f"{_time(self.feature_hours)} for its features ({_size(self.disk_bytes)} of disk)",
            f"{_time(self.training_hours)} to train",
        )
        needed = self.training_bytes
        return (
            f"This will take about {_time(self.hours)} here: {', '.join(parts)}. Training needs "
            f"{_size(needed.memory)} of memory besides the target, and {_size(needed.disk)} of "
            "disk."
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _time(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(60 * hours))} min"


def estimate(
    speeds: Speeds,
    answer_tokens: int,
    tokens_to_write: int,
    token_bytes: int,
    settings: TrainingSettings,
    plan: Plan,
    needed: TrainingBytes,
) -> Estimate:
    """On-policy text is written anew for every epoch, as slowly as the target's."""
    tokens = _PROMPT_SHARE * answer_tokens
    prompt_tokens = (_PROMPT_SHARE - 1) * tokens_to_write
    learnt_tokens = settings.epochs * tokens
    own_tokens = plan.on_policy.share * learnt_tokens if plan.on_policy else 0.0
    if settings.max_steps is not None:
        learnt_tokens = settings.max_steps * settings.accumulation * settings.batch_tokens
    first = settings.first_level_share
    per_token = first / speeds.one_level + (1 - first) / speeds.all_levels
    written = (_WRITTEN_SHARE * tokens_to_write + own_tokens) / speeds.writing
    return Estimate(
        (written + prompt_tokens / speeds.features) / 3600,
        (tokens + own_tokens) / speeds.features / 3600,
        plan.num_drafters * learnt_tokens * per_token / 3600,
        round(tokens * token_bytes),
        TrainingBytes(needed.memory, plan.num_drafters * needed.disk),
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
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=_SAMPLE_TOKENS, ignore_eos=True)
    room = max(0, min(settings.max_length // 2, _DEPTH, llm.max_model_len - _SAMPLE_TOKENS - 1))
    before = [1] * (0 if llm.engine.target.reads_source else room)
    prompts = [[*before, 1 + row % 7] for row in range(rows)]
    llm.generate(prompts[:1], SamplingParams(max_tokens=2))  # also keeps the KV of `before`
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


# The course of a training as `curves.csv` and `curves.png`, and such files of other courses.


@dataclass(frozen=True)
class Panel:
    """One diagram of a picture: names and values of its lines; a single line has no legend."""

    title: str
    x_title: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def save_curves(folder: Path, history: Sequence[Evaluation]) -> None:
    save_table(folder / "curves.csv", *_table(history))
    save_panels(folder / "curves.png", _panels(history))


def save_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([header, *rows])
    write_whole(path, lambda beside: beside.write_text(text.getvalue()))


def save_panels(path: Path, panels: Sequence[Panel]) -> None:
    write_whole(path, lambda beside: _draw(beside, panels))


def _table(history: Sequence[Evaluation]) -> tuple[list[str], list[list[object]]]:
    levels = range(1, 1 + max((len(each.by_position) for each in history), default=0))
    header = [
        *("step", "loss", "best"),
        *(f"acceptance_{level}" for level in levels),
        *(f"mean_acceptance_length_{level}" for level in levels),
    ]
    rows: list[list[object]] = []
    for each in history:
        numbers = [each.loss, *each.by_position, *each.mean_lengths]
        loss, *others = (f"{number:.4f}" for number in numbers)
        rows.append([each.step, loss, int(each.best), *others])
    return header, rows


def _panels(history: Sequence[Evaluation]) -> list[Panel]:
    steps = [each.step for each in history]
    levels = range(len(history[0].by_position) if history else 0)
    positions = {f"{level + 1}": [e.by_position[level] for e in history] for level in levels}
    lengths = {f"{level + 1}": [e.mean_lengths[level] for e in history] for level in levels}
    return [
        Panel("Loss of the first level", "step", steps, {"": [each.loss for each in history]}),
        Panel("Acceptance by position, held out", "step", steps, positions),
        Panel("Mean acceptance length of chains", "step", steps, lengths),
    ]


def _draw(path: Path, panels: Sequence[Panel]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        for name, values in panel.lines.items():
            axes.plot(panel.x, values, label=name)
        axes.set_title(panel.title)
        axes.set_xlabel(panel.x_title)
        axes.grid(alpha=0.3)
        if len(panel.lines) > 1:
            axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
