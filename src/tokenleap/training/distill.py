"""Training of draft models: DistillSpec (Zhou et al., arXiv 2310.08461).

    loss = E[D(p, q)]

for the target's distribution p and the draft model's q after every token before a part to
learn. D is one of `LOSSES`; the paper recommends to try several, since the best one depends on task
and temperature. The answers are those that the target writes (`teacher`), those of the draft model
(`on_policy`, see `OnPolicyRounds`), some of both (`mixed`), or the user's own (`fixed`). p is that
of the target, even if the draft model wrote the text.

The draft model is a causal LM with the target's vocabulary. It reads nothing of the target but its
tokens, so one pass over a conversation gives all levels: level k of the draft at root r is its
distribution at position r + 1 + k. Level 0 is learnt. The others are the same distributions at
other places, and are for evaluation only.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from accelerate.utils import send_to_device
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import FiniteFloat, model_validator
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tokenleap import models
from tokenleap.core.files import write_whole
from tokenleap.drafters.heads.probe import Seen
from tokenleap.drafters.online import LossName
from tokenleap.errors import CompatibilityError, ConfigError, ModelError, TrainingError, in_one_line
from tokenleap.llm import LLM
from tokenleap.models.load import silent
from tokenleap.models.support import check_supported, context_length
from tokenleap.training.conversations import (
    Conversation,
    ConversationFile,
    Talk,
    answered_by,
    opening,
    usual_temperature,
)
from tokenleap.training.features import (
    FIRST_LEARNT,
    Batch,
    BatchSampler,
    Examples,
    FeatureCache,
    Joined,
    TrainingSet,
    collate,
    compute_features,
)
from tokenleap.training.method import OnPolicy, Plan, TrainingMethod, TrainingSettings
from tokenleap.training.trainee import (
    LOSSES,
    HeadParts,
    Loss,
    Trainee,
    at_level,
    llama_fields,
)

SCRATCH, TARGET = "scratch", "target"
_SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size")


class DistillTrainee(Trainee):
    """A draft model that is being trained.

    Args:
        lm: the draft model, with the target's tokens and perhaps other padding after them.
    """

    def __init__(self, lm: PreTrainedModel, vocab_size: int, loss: Loss) -> None:
        own_size = int(lm.config.get_text_config().vocab_size)
        super().__init__(torch.arange(min(vocab_size, own_size)), vocab_size, loss)
        self._own_size, self._context = own_size, context_length(lm.config, None)
        self._lm = [lm]  # in a list: the modules are its parts, in which tied rows occur once
        self.decoder, rows = decoder(lm), output_layer(lm)
        if len(list(rows.parameters())) > 1 or rows.weight is not embedding(lm).weight:
            self.output_layer = rows
        self.tables = (embedding(lm).weight, rows.weight)
        self.notes: Mapping[str, Any] = {}

    @property
    def lm(self) -> PreTrainedModel:
        return self._lm[0]

    def outputs(self, batch: Batch, num_levels: int) -> Iterator[Tensor]:
        length = batch.tokens.shape[1]
        if length > self._context:
            raise ConfigError(
                f"max_length: the draft model takes {self._context} tokens: set it to at most this."
            )
        # A token of the target's padding may be beyond the draft model's.
        tokens = batch.tokens.clamp(max=self._own_size - 1)
        # Padding is after all tokens, which do not see it, so there is no mask.
        states = self.states(tokens)
        for level in range(num_levels):
            yield at_level(states, batch, level)

    def states(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """[B, T] tokens -> [B, T, E] hidden states after the final norm."""
        found: Tensor = self.decoder(input_ids=tokens, use_cache=False, **arguments)[0]
        return found

    def logits(self, outputs: Tensor, level: int) -> Tensor:
        return lm_logits(self.lm, outputs, len(self.draft_tokens))

    def probe(self, seen: Seen) -> Mapping[str, Any]:
        """Nothing: it reads tokens only."""
        return {}

    def write(self, parts: HeadParts, folder: Path, notes: Mapping[str, Any]) -> None:
        write_lm(self.lm, parts.name, folder, {**notes, **self.notes})


class _DraftModelTraining(TrainingMethod):
    """Methods that train draft models.

    Args:
        start: `scratch` for random weights, `target` for the target's first `num_layers` layers
            with its embedding, final norm and output rows, or a folder or alias of a model with the
            target's tokenizer.
        hidden_size: of a model from scratch; None means half of the target's, in multiples of
            64.
        num_layers: decoder layers, from `scratch` or of the `target`; None means an eighth of the
            target's.
        num_heads: of a model from scratch; None means heads of the target's size.
        intermediate_size: of a model from scratch; None keeps the target's proportion.
        loss: of the drafter's distribution against the target's (docs/training.md).
    """

    start: Annotated[str, MinLen(1)] = SCRATCH
    hidden_size: Annotated[int, Ge(1)] | None = None
    num_layers: Annotated[int, Ge(1)] | None = None
    num_heads: Annotated[int, Ge(1)] | None = None
    intermediate_size: Annotated[int, Ge(1)] | None = None
    loss: LossName = "kl"

    @model_validator(mode="after")
    def _sizes_are_not_given(self) -> Self:
        usable = {SCRATCH: _SIZES, TARGET: ("num_layers",)}.get(self.start, ())
        for name in _SIZES:
            if getattr(self, name) is not None and name not in usable:
                raise ValueError(
                    f"{name}: with start '{self.start}', the model that is there decides: remove "
                    "it, or start from 'scratch'."
                )
        return self

    def adapted(self, settings: TrainingSettings) -> TrainingSettings:
        reason = "a draft model learns all levels of a draft at once: remove it."
        return settings.decided(reason, levels=1, first_level_share=0.0, decay=1.0)

    def trainee(self, parts: HeadParts) -> Trainee:
        return DistillTrainee(self._lm(parts), parts.vocab_size, LOSSES[self.loss])

    def _lm(self, parts: HeadParts) -> PreTrainedModel:
        if self.start == SCRATCH:
            sizes = (getattr(self, name) for name in _SIZES)
            return new_lm(parts.config.get_text_config(), *sizes)
        if self.start == TARGET:
            return first_layers(parts.name, self.num_layers)
        return loaded(self.start, parts.vocab_size, target_tokenizer(parts.name))


class DistillTraining(_DraftModelTraining):
    """One draft model.

    Args:
        answers: what is learnt: those that the target writes (`teacher`), those that the draft
            model writes (`on_policy`), some of both (`mixed`), or those in the user's files
            (`fixed`).
        on_policy_share: of `mixed`: the share of the conversations that the draft model answers.
        refresh_every: of `on_policy` and `mixed`: steps after which the draft model writes again.
    """

    name: ClassVar[str] = "distill"
    summary: ClassVar[str] = "a small model with the target's vocabulary (DistillSpec)"

    answers: Literal["teacher", "on_policy", "mixed", "fixed"] = "teacher"
    on_policy_share: Annotated[FiniteFloat, Gt(0), Lt(1)] = 0.5
    refresh_every: Annotated[int, Ge(1)] = 100

    @model_validator(mode="after")
    def _the_draft_model_writes(self) -> Self:
        if self.loss == "ce" and self.answers in ("on_policy", "mixed"):
            raise ValueError(
                "loss: 'ce' learns the tokens of the text, and the draft model would learn its "
                "own: choose another loss."
            )
        usable = {"mixed": ("on_policy_share", "refresh_every"), "on_policy": ("refresh_every",)}
        for name in ("on_policy_share", "refresh_every"):
            if name in self.model_fields_set and name not in usable.get(self.answers, ()):
                raise ValueError(
                    f"{name}: has no meaning with answers '{self.answers}': remove it, or set "
                    "answers to 'mixed'."
                )
        return self

    @property
    def plan(self) -> Plan:
        shares = {"on_policy": 1.0, "mixed": self.on_policy_share}
        share = shares.get(self.answers)
        return Plan(
            given_answers=self.answers == "fixed",
            on_policy=None if share is None else OnPolicy(share, self.refresh_every),
        )

    def serving(self, folder: Path) -> dict[str, Any]:
        return {"method": "draft_model", "model": str(folder)}


class BoostTraining(_DraftModelTraining):
    """Several draft models; each learns what those before it missed.

    Args:
        drafters: most draft models; there are fewer if nothing is missed any more.
        sample_length: tokens of a sample, which a drafter has to get right together.
    """

    name: ClassVar[str] = "boost"
    summary: ClassVar[str] = "several small models, each tuned on what the others miss (SpecInfer)"

    drafters: Annotated[int, Ge(2), Le(8)] = 2
    sample_length: Annotated[int, Ge(1)] = 4

    @property
    def plan(self) -> Plan:
        return Plan(
            num_drafters=self.drafters,
            sample_length=self.sample_length,
            nodes_per_token=self.drafters,
        )

    def serving(self, folder: Path) -> dict[str, Any]:
        return {"method": "ensemble", "drafters": str(folder)}


# Causal LMs that become draft models: made, checked, and written.


_GENERATION = "generation_config.json"
_SCRATCH = ": start from 'scratch'"


def new_lm(
    target: PreTrainedConfig,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    intermediate_size: int | None = None,
) -> PreTrainedModel:
    """A Llama with random weights, tied embeddings, and the target's vocabulary and context.

    By default it has half of the target's width, in multiples of 64, and an eighth of its layers,
    with its head size and the proportion of its MLPs.
    """
    width = target.hidden_size
    head_dim = getattr(target, "head_dim", None) or width // target.num_attention_heads
    hidden_size = hidden_size or max(64, width // 128 * 64)
    proportion = (getattr(target, "intermediate_size", None) or 4 * width) / width
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 64 * max(1, round(hidden_size * proportion / 64)),
        num_hidden_layers=num_layers or _layers_like(target),
        num_attention_heads=num_heads or max(1, hidden_size // head_dim),
        head_dim=head_dim,
        **llama_fields(target),
        tie_word_embeddings=True,
        **_special_tokens(target),
    )
    return _made(LlamaForCausalLM, config)


def _layers_like(target: PreTrainedConfig) -> int:
    return int(max(1, target.num_hidden_layers // 8))


def _special_tokens(config: PreTrainedConfig) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name, None) for name in names}


def _made(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    lm: PreTrainedModel = kind(config).float()
    return lm


def first_layers(name: str, num_layers: int | None) -> PreTrainedModel:
    whole = models.load_model(models.resolve(name), torch.float32, torch.device("cpu"))
    config = deepcopy(whole.config)
    text = config.get_text_config()
    wanted, there = num_layers or _layers_like(text), text.num_hidden_layers
    if wanted > there:
        raise ConfigError(f"num_layers: the target has {there} layers, got {wanted}.")
    text.num_hidden_layers = wanted
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = kinds[:wanted]
    lm = _made(type(whole), config)
    missing = lm.load_state_dict(whole.state_dict(), strict=False).missing_keys
    assert not missing, missing
    return checked(lm, f"start: {name}", _SCRATCH)


def loaded(
    name: str, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedModel:
    folder = models.resolve(name)
    own = models.load_tokenizer(folder)
    lm = models.load_model(folder, torch.float32, torch.device("cpu"))
    if own is None or tokenizer is None:
        same = lm.config.get_text_config().vocab_size == vocab_size
    else:  # padding after the last token may differ
        same = own.get_vocab() == tokenizer.get_vocab()
    if not same:
        raise CompatibilityError(
            f"start: {name} has another vocabulary than the target: start from a model with the "
            "target's tokenizer, or from 'scratch'."
        )
    return checked(lm.requires_grad_(True), f"start: {name}", _SCRATCH)


@torch.no_grad()
def checked(lm: PreTrainedModel, name: str, advice: str = "") -> PreTrainedModel:
    """The same model, if it can draft, and its logits are its output layer's."""
    check_supported(lm, context_length(lm.config, None))
    tokens = torch.arange(4, device=lm.device).unsqueeze(0)
    lm.train(False)
    states = decoder(lm)(input_ids=tokens, use_cache=False).last_hidden_state
    if not torch.allclose(lm(input_ids=tokens).logits, output_layer(lm)(states), atol=1e-4):
        raise CompatibilityError(
            f"{name} changes the logits of its output layer, which is not supported{advice}."
        )
    return lm


def decoder(lm: Any) -> Any:
    return lm.get_decoder()


def embedding(lm: Any) -> Any:
    return lm.get_input_embeddings()


def output_layer(lm: Any) -> Any:
    return lm.get_output_embeddings()


def lm_logits(lm: PreTrainedModel, outputs: Tensor, size: int) -> Tensor:
    """[N, E] -> [N, size] in float32, without those of padding after the vocabulary."""
    logits: Tensor = output_layer(lm)(outputs)
    return logits[..., :size].float()


def target_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a target; None if it has none, or no folder."""
    folder = _folder(name)
    return models.load_tokenizer(folder) if folder else None


def _folder(name: str) -> Path | None:
    try:
        return models.resolve(name)
    except ModelError:
        return None


def write_lm(
    lm: PreTrainedModel,
    target: str,
    folder: Path,
    notes: Mapping[str, Any],
    more: Sequence[Callable[[Path], None]] = (),
) -> None:
    """Write a model in bfloat16, with the tokenizer and the generation config of the target.

    Each file appears complete or not at all, `config.json` last.
    """
    beside = folder / ".writing"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        _save(lm, target, beside, notes)
        for write in more:
            write(beside)
        for file in sorted(beside.iterdir(), key=lambda path: path.name == "config.json"):
            file.replace(folder / file.name)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be written: {in_one_line(error)}.") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _save(lm: PreTrainedModel, target: str, folder: Path, notes: Mapping[str, Any]) -> None:
    copy: Any = deepcopy(lm)
    copy.to(device="cpu", dtype=torch.bfloat16)
    copy.config.tokenleap = {"target": target, **notes}
    own = lm.config.get_text_config()
    generation: Any = GenerationConfig  # which has no type hints
    copy.generation_config = generation(**_special_tokens(own))
    with silent():  # it would write into the progress of training
        copy.save_pretrained(folder, max_shard_size="1000GB")  # one file, whole or not there
    if (tokenizer := target_tokenizer(target)) is not None:
        tokenizer.save_pretrained(folder)
    given = _folder(target)
    if given and (given / _GENERATION).is_file():
        shutil.copyfile(given / _GENERATION, folder / _GENERATION)


# On-policy text: what the draft model writes while it learns (DistillSpec, section 4.1).
#
# While it drafts, a draft model continues its own tokens. So it also learns from its own answers to
# the prompts, with the target's distribution p after every token. The paper samples every batch
# anew. Here the steps are cut into rounds: where a round begins, the draft model, as it then is,
# answers the next prompts, and the passes of the runtime that serves compute p. Half of the answers
# are greedy, as those of the target (`conversations.py`).
#
# The text of a round follows from the seed and the weights with which the round begins. Those are
# in a checkpoint, and the text stays on disk until the next round, so a run that was stopped learns
# from the same text.


class OnPolicyRounds:
    """Answers of the draft model beside those that are there; other ones every so many `steps`.

    Args:
        plan: how many of them the draft model writes, and how often.
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
        """Prepare a round: called at its first step, and again if training continues there."""
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
        """The examples of a round, which was prepared, perhaps by another process."""
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
        return random.Random(f"writer {self._seed} {index}").random() < self._share

    # Writing

    def _write(self, number: int, trainee: DistillTrainee) -> None:
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
            return answered_by(self._writer(trainee.lm), talks)

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


# Several draft models: the samples of the text that those before did not get right.


_BATCH_TOKENS = 4096


def missed_by(folder: Path, parts: HeadParts, data: TrainingSet, length: int) -> TrainingSet:
    lm = loaded(str(folder), parts.vocab_size, target_tokenizer(parts.name))
    trainee = DistillTrainee(lm, parts.vocab_size, LOSSES["ce"]).to(parts.embedding.device)
    return missed(trainee, data, length)


@torch.no_grad()
def missed(trainee: Trainee, data: TrainingSet, sample_length: int) -> TrainingSet:
    """The samples in which a drafter does not get every token right."""
    left = {}
    for index, right in _right_tokens(trainee.eval(), data):
        if parts := missed_parts(right, data[index].answers, sample_length):
            left[index] = parts
    return data.only(left)


def missed_parts(
    right: Sequence[bool], parts: Sequence[tuple[int, int]], sample_length: int
) -> list[tuple[int, int]]:
    """[start, stop) of the samples that are not all right; neighbours become one part."""
    found: list[tuple[int, int]] = []
    for first, end in parts:
        for start in range(max(first, FIRST_LEARNT), end, sample_length):
            stop = min(start + sample_length, end)
            if all(right[start:stop]):
                continue
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    return found


def _right_tokens(trainee: Trainee, data: TrainingSet) -> Iterator[tuple[int, list[bool]]]:
    """(index, for each token whether it is the most probable one) of each conversation."""
    device = next(trainee.parameters()).device
    for numbers in BatchSampler(data.sizes, _BATCH_TOKENS):
        batch: Batch = send_to_device(collate([data[number] for number in numbers], 1), device)
        hits = trainee(batch, 1).right[:, 0]
        for row, number in enumerate(numbers):
            places = batch.roots[row][hits[row]] + FIRST_LEARNT
            right = torch.zeros(data.sizes[number], dtype=torch.bool)
            right[places.cpu()] = True
            yield number, right.tolist()
