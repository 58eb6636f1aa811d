"""Features: what training needs of the target's passes, computed once and kept on disk.

For every token: the hidden states of the layers that a drafter reads, and the target's most
probable next tokens. The passes are those of the runtime that will serve the drafter, so it learns
from the features it will see. Hidden states are kept in int8 with a scale per group, which is far
more exact than the noise that training adds to them.

A cache is a folder of raw arrays, mapped into memory when they are read, and `index.json`, which is
written last. A folder without it is incomplete and is made anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler
from typing_extensions import TypedDict

from tokenleap.core.files import read_json, validated, write_whole
from tokenleap.core.references import Source as EncoderSource
from tokenleap.core.tree import chain
from tokenleap.errors import DataError
from tokenleap.runtime.network import Need, PassOutput
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target
from tokenleap.training.conversations import Conversation

TOP_K = 16
"""Most probable next tokens that are kept of the target's distribution."""

INDEX = "index.json"
ENCODED, _ENCODED_KIND = "encoded", "float16"
"""The file of what the encoder returned, with its own number of rows: those of the sources."""

_GROUP = 32
"""Numbers of a hidden state that share a scale, as in GGUF's Q8_0."""


@dataclass(frozen=True)
class Features:
    """One conversation of n tokens, with what the target's passes show of it.

    Args:
        tokens: [n].
        hidden: [n, A, E] hidden states of A layers in int8; A may be 0.
        scales: [n, A, G] their scales.
        top_tokens: [n, K] the most probable tokens after each token, the best first.
        top_logprobs: [n, K] their log-probabilities at temperature 1.
        source: [s] what an encoder-decoder read; empty for other models.
        encoded: [s, E] what its encoder made of that, in half precision; empty if no drafter reads
            it.
    """

    tokens: Tensor
    answers: Sequence[tuple[int, int]]
    hidden: Tensor
    scales: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor
    source: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    encoded: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float16))


def _groups(hidden_size: int) -> int:
    return hidden_size // gcd(hidden_size, _GROUP)


def bytes_per_token(num_layers: int, hidden_size: int, *, encoder: bool = False) -> int:
    """Bytes of a cache for each token; with `encoder`, of sources that are as long as outputs."""
    columns = _columns(num_layers, hidden_size).values()
    own = sum(prod(shape) * np.dtype(kind).itemsize for kind, shape in columns)
    return own + (hidden_size * np.dtype(_ENCODED_KIND).itemsize if encoder else 0)


def _columns(num_layers: int, hidden_size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """File name -> type and shape of what is kept of a token."""
    states = {
        "hidden": ("int8", (num_layers, hidden_size)),
        "scales": ("float16", (num_layers, _groups(hidden_size))),
    }
    return {
        "tokens": ("int32", ()),
        **(states if num_layers else {}),  # nothing of no layers
        "top_tokens": ("int32", (TOP_K,)),
        "top_logprobs": ("float16", (TOP_K,)),
    }


def quantize(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """[..., E] -> int8 [..., E] and float16 scales [..., G]."""
    grouped = torch.unflatten(hidden.float(), -1, (_groups(hidden.shape[-1]), -1))
    scales = (grouped.abs().amax(-1) / 127).clamp(min=1e-6).half()
    codes = (grouped / scales.float().unsqueeze(-1)).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(-2), scales


def dequantize(hidden: Tensor, scales: Tensor) -> Tensor:
    """The hidden states [..., E] in float32 from int8 [..., E] and their scales [..., G]."""
    grouped = hidden.float().reshape(*scales.shape, -1)
    return (grouped * scales.float().unsqueeze(-1)).flatten(-2)


def noisy(hidden: Tensor, noise: float) -> Tensor:
    """Hidden states [..., E] with noise whose standard deviation is a share of their size."""
    if not noise:
        return hidden
    size = hidden.pow(2).mean(-1, keepdim=True).sqrt()
    return hidden + noise * size * torch.randn_like(hidden)


_PER_TEXT = ("lengths", "answers", "sources")
_Whole = Annotated[int, Ge(0), Le(2**40)]


class _Index(TypedDict):
    """The content of `index.json`; the lists have an entry for each conversation."""

    layers: list[int]
    hidden_size: Annotated[_Whole, Gt(0)]
    lengths: list[_Whole]
    answers: list[list[tuple[_Whole, _Whole]]]
    sources: NotRequired[list[list[int]]]
    encoded: NotRequired[bool]


class FeatureCache:
    def __init__(self, folder: Path) -> None:
        try:
            self.index: Mapping[str, Any] = validated(_Index, read_json(folder / INDEX))
            self._starts = [0, *np.cumsum(self.index["lengths"]).tolist()]
            sizes = [len(source) for source in self.index.get("sources", ())]
            self._source_starts = [0, *np.cumsum(sizes, dtype=int).tolist()]
            self._arrays = {
                name: np.memmap(folder / name, dtype=kind, mode="r", shape=shape)
                for name, (kind, shape) in array_shapes(self.index).items()
            }
            numbers = {len(self.index[name]) for name in _PER_TEXT if name in self.index}
            if numbers != {len(self)}:
                raise ValueError("it tells of other conversations")
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            raise DataError(
                f"{folder}: the features are incomplete: delete the folder, and compute them anew."
            ) from None

    @property
    def lengths(self) -> Sequence[int]:
        lengths: Sequence[int] = self.index["lengths"]
        return lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Features:
        read = {name: self._rows(name, number) for name in self._arrays}
        size, none = self.index["hidden_size"], (len(read["tokens"]), 0)
        return Features(
            tokens=read["tokens"].long(),
            answers=self.index["answers"][number],
            hidden=read.get("hidden", torch.zeros(*none, size, dtype=torch.int8)),
            scales=read.get("scales", torch.zeros(*none, _groups(size), dtype=torch.float16)),
            top_tokens=read["top_tokens"].long(),
            top_logprobs=read["top_logprobs"].float(),
            source=torch.tensor(self.source(number), dtype=torch.long),
            encoded=read.get(ENCODED, torch.zeros(0, 0, dtype=torch.float16)),
        )

    def _rows(self, name: str, number: int) -> Tensor:
        starts = self._source_starts if name == ENCODED else self._starts
        rows = self._arrays[name][starts[number] : starts[number + 1]]
        return torch.from_numpy(np.array(rows))

    def source(self, number: int) -> Sequence[int]:
        """The source of an encoder-decoder's conversation; empty for other models."""
        sources: Sequence[Sequence[int]] | None = self.index.get("sources")
        return () if sources is None else sources[number]

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """[V] how often the target wrote each token."""
        counts = np.zeros(vocab_size, np.int64)
        for start, answers in zip(self._starts, self.index["answers"], strict=False):
            for first, stop in answers:
                part = self._arrays["tokens"][start + first : start + stop]
                counts += np.bincount(part, minlength=vocab_size)
        return counts


def array_shapes(index: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """File name -> type and shape of the arrays of a cache with this `index.json`."""
    total, columns = sum(index["lengths"]), _columns(len(index["layers"]), index["hidden_size"])
    shapes = {name: (kind, (total, *shape)) for name, (kind, shape) in columns.items()}
    if index.get(ENCODED):
        rows = sum(len(source) for source in index["sources"])
        shapes[ENCODED] = (_ENCODED_KIND, (rows, index["hidden_size"]))
    return shapes


# Computing features: one pass of the target over each conversation, chunk by chunk.


_CHUNK = 256
"""Tokens of a pass."""


def compute_features(
    target: Target,
    conversations: Sequence[Conversation],
    layers: Sequence[int],
    folder: Path,
    *,
    encoder: bool = False,
) -> Iterator[int]:
    """Fill a cache; a complete one for these conversations and layers stays as it is."""
    _check_ids(conversations, target)
    index: dict[str, Any] = {
        "layers": list(layers),
        "hidden_size": target.hidden_size,
        "lengths": [len(each.tokens) for each in conversations],
        "answers": [each.answers for each in conversations],
    }
    if any(each.source for each in conversations):
        index["sources"] = [each.source for each in conversations]
    if encoder:
        index[ENCODED] = True
    text = json.dumps(index)
    if _is_complete(folder, text):
        return
    arrays = _new_arrays(folder, array_shapes(index))
    at = read = 0
    for each in conversations:
        stop = at + len(each.tokens)
        arrays["tokens"][at:stop] = each.tokens
        if encoder:
            found = _encoded(target, each)
            arrays[ENCODED][read : read + len(found)] = found.half().cpu().numpy()
            read += len(found)
        for name, tensor in _features(target, each, layers).items():
            arrays[name][at:stop] = tensor.numpy()
        at = stop
        yield at
    for array in arrays.values():
        array.flush()
    write_whole(folder / INDEX, lambda path: path.write_text(text))


def _check_ids(conversations: Sequence[Conversation], target: Target) -> None:
    """Refuse what native code would read outside its tables."""
    readers = target.source_network
    sources = 0 if readers is None else readers.source_vocab_size
    for each in conversations:
        for tokens, size in ((each.tokens, target.vocab_size), (each.source, sources)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < size:
                raise DataError(
                    f"a conversation has token ids outside the vocabulary of {size}: it was "
                    "written by another model; delete the training's folder."
                )


def _is_complete(folder: Path, index: str) -> bool:
    """Whether a cache has this index, and all that the index says."""
    try:
        FeatureCache(folder)
    except DataError:
        return False
    return (folder / INDEX).read_text() == index


def _new_arrays(
    folder: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, np.memmap[Any, Any]]:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        return {name: _allocated(folder / name, *each) for name, each in shapes.items()}
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        size = sum(prod(shape) * np.dtype(kind).itemsize for kind, shape in shapes.values())
        raise DataError(
            f"{folder}: the features take {size / 1e9:.2f} GB: {error.strerror}: learn fewer "
            "tokens, or choose another disk."
        ) from None


def _allocated(path: Path, kind: str, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """A new array on disk whose space is there: writing beyond a full disk would be a signal."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, prod(shape) * np.dtype(kind).itemsize))
    return np.memmap(path, dtype=kind, mode="r+", shape=shape)


def _features(
    target: Target, conversation: Conversation, layers: Sequence[int]
) -> dict[str, Tensor]:
    need = Need(hidden=tuple(sorted(layers)))
    outputs = passes(target, conversation.tokens, need, conversation.source)
    parts = [_kept(output, layers) for output in outputs]
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


@torch.inference_mode()
def _encoded(target: Target, conversation: Conversation) -> Tensor:
    """[s, E] what the target's encoder makes of a source."""
    assert target.source_network is not None, "the method is for encoder-decoders"
    return target.source_network.encoded(EncoderSource(tuple(conversation.source)))


def passes(
    target: Target, tokens: Sequence[int], need: Need, source: Sequence[int] = ()
) -> Iterator[PassOutput]:
    """The outputs of a target's passes over a text, chunk by chunk."""
    target.add(INTERNAL_KEY)
    try:
        if source:
            target.encode(INTERNAL_KEY, EncoderSource(tuple(source)))
        for start in range(0, len(tokens), _CHUNK):
            chunk = chain(tokens[start : start + _CHUNK])
            (output,) = target.verify([INTERNAL_KEY], [chunk], need=need)
            yield output
            target.commit(INTERNAL_KEY, range(len(chunk)))
    finally:
        target.remove(INTERNAL_KEY)


@torch.inference_mode()
def _kept(output: PassOutput, layers: Sequence[int]) -> dict[str, Tensor]:
    logits = output.scores.float()
    values, tokens = logits.topk(min(TOP_K, logits.shape[-1]))
    missing = TOP_K - values.shape[-1]  # of a vocabulary smaller than that
    logprobs = F.pad(values - logits.logsumexp(-1, keepdim=True), (0, missing), value=-1e4)
    kept = {"top_tokens": F.pad(tokens.int(), (0, missing)), "top_logprobs": logprobs.half()}
    if layers:
        hidden = torch.stack([output.hidden[layer] for layer in layers], dim=1)
        kept["hidden"], kept["scales"] = quantize(hidden)
    return kept


# The draft vocabulary of a head: what the target writes most often.


def draft_vocabulary(
    training: FeatureCache,
    held_out: FeatureCache,
    ends: Collection[int],
    size: int | None,
    vocab_size: int,
) -> tuple[torch.Tensor, float]:
    """[Vd] tokens that a head can draft, ascending; and their share of what is held out."""
    counts = training.counts(vocab_size)
    counts[list(ends)] = np.iinfo(np.int64).max
    most = np.argsort(-counts, kind="stable")[:size]
    tokens = np.sort(most)
    others = held_out.counts(vocab_size)
    coverage = float(others[tokens].sum() / max(1, others.sum()))
    return torch.from_numpy(tokens), coverage


FIRST_LEARNT = 2
"""The first token that a draft can guess: a pair comes before it."""


_WINDOW = 32
"""Batches whose conversations are sorted by length together."""


class Levels(NamedTuple):
    """Examples to learn: L levels of the drafts of Q roots in each of B conversations.

    Args:
        inputs: [B, L, Q] the last token before the one to guess.
        labels: [B, L, Q] the token to guess.
        teacher_tokens: [B, L, Q, K] the target's most probable tokens there.
        teacher_logprobs: [B, L, Q, K] their log-probabilities.
        valid: [B, L, Q] whether there is something to learn; false after an answer's end, and for
            padding.
    """

    inputs: Tensor
    labels: Tensor
    teacher_tokens: Tensor
    teacher_logprobs: Tensor
    valid: Tensor


class Batch(NamedTuple):
    """B conversations of at most T pairs.

    Args:
        hidden: [B, T, A, E] the target's hidden states at position t, in int8.
        scales: [B, T, A, G] their scales.
        tokens: [B, T + 1] all tokens.
        lengths: [B] pairs of each conversation.
        roots: [B, Q] the pairs from which drafts start, ascending; padded with 0.
        sources: [B, S] what an encoder-decoder read, padded with 0; S is 0 for other models.
        source_lengths: [B].
        encoded: [B, S, E] what its encoder made of them, in half precision; S is 0 if no drafter
            reads it.
    """

    hidden: Tensor
    scales: Tensor
    tokens: Tensor
    lengths: Tensor
    roots: Tensor
    levels: Levels
    sources: Tensor = torch.zeros(0, 0, dtype=torch.long)
    source_lengths: Tensor = torch.zeros(0, dtype=torch.long)
    encoded: Tensor = torch.zeros(0, 0, 0, dtype=torch.float16)

    @property
    def next_tokens(self) -> Tensor:
        """[B, T] the token at t + 1."""
        return self.tokens[:, 1:]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class Examples(Dataset[Features]):
    """Conversations that have something to learn."""

    sizes: Sequence[int]

    def __len__(self) -> int:
        return len(self.sizes)


class Joined(Examples):
    """Some of these and some of those conversations."""

    def __init__(self, *parts: tuple[Examples, Sequence[int]]) -> None:
        self._places = [(examples, number) for examples, numbers in parts for number in numbers]
        self.sizes = [examples.sizes[number] for examples, number in self._places]

    def __getitem__(self, index: int) -> Features:
        examples, number = self._places[index]
        features: Features = examples[number]
        return features


class Current(Examples):
    """The examples that are learnt now."""

    def __init__(self, now: Examples) -> None:
        self.use(now)

    def use(self, now: Examples) -> None:
        self._now, self.sizes = now, now.sizes

    def __getitem__(self, index: int) -> Features:
        features: Features = self._now[index]
        return features


class TrainingSet(Examples):
    """The conversations of a cache that have something to learn in their first tokens.

    Args:
        length: most tokens of a conversation; the rest is cut off.
        answers: for each conversation of the cache, [start, stop) of each part to learn; None for
            all of its answers.
    """

    def __init__(
        self,
        cache: FeatureCache,
        length: int,
        answers: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self._cache, self._length = cache, length
        self._answers = cache.index["answers"] if answers is None else answers
        sizes = [min(size, length) for size in cache.lengths]
        self._numbers = [
            number
            for number, parts in enumerate(self._answers)
            if any(max(first, FIRST_LEARNT) < min(stop, sizes[number]) for first, stop in parts)
        ]
        self._kept = [sizes[number] for number in self._numbers]
        self.sizes = [max(sizes[number], len(cache.source(number))) for number in self._numbers]

    def __getitem__(self, index: int) -> Features:
        each, size = self._cache[self._numbers[index]], self._kept[index]
        names = ("tokens", "hidden", "scales", "top_tokens", "top_logprobs")
        cut: dict[str, Any] = {name: getattr(each, name)[:size] for name in names}
        return replace(each, answers=self._parts(index), **cut)

    def _parts(self, index: int) -> list[tuple[int, int]]:
        """[start, stop) of each part to learn of a conversation."""
        size = self._kept[index]
        parts = self._answers[self._numbers[index]]
        return [(first, min(stop, size)) for first, stop in parts if first < size]

    @property
    def num_learnt(self) -> int:
        parts = (part for index in range(len(self)) for part in self._parts(index))
        return sum(max(0, stop - max(FIRST_LEARNT, first)) for first, stop in parts)

    def only(self, parts: Mapping[int, Sequence[tuple[int, int]]]) -> TrainingSet:
        answers: list[Sequence[tuple[int, int]]] = [()] * len(self._cache)
        for index, chosen in parts.items():
            answers[self._numbers[index]] = chosen
        return TrainingSet(self._cache, self._length, answers)


class BatchSampler(Sampler[list[int]]):
    """Batches of similar conversations, in an order that follows from seed and epoch.

    Args:
        sizes: tokens of each conversation; they may be replaced between two epochs.
        batch_tokens: most tokens of a batch, padding included; a longer conversation has a batch of
            its own.
        seed: of the order; None keeps the conversations sorted by length.
        multiple_of: the number of batches is a multiple of this, so that as many processes get
            the same number; what is left over is skipped in this epoch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_tokens: int,
        seed: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        self.sizes, self._batch_tokens, self._seed = sizes, batch_tokens, seed
        self._multiple_of = multiple_of
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def __len__(self) -> int:
        return len(self._batches())

    def _batches(self) -> list[list[int]]:
        numbers = list(range(len(self.sizes)))
        if self._seed is None:
            return self._filled(sorted(numbers, key=self.sizes.__getitem__))
        order = random.Random(self._seed * 1_000_003 + self._epoch)
        order.shuffle(numbers)
        mean = sum(self.sizes) / max(1, len(self.sizes))
        window = max(1, round(_WINDOW * self._batch_tokens / max(1, mean)))
        batches: list[list[int]] = []
        for start in range(0, len(numbers), window):
            part = sorted(numbers[start : start + window], key=self.sizes.__getitem__)
            batches += self._filled(part)
        order.shuffle(batches)
        return batches[: len(batches) - len(batches) % self._multiple_of]

    def _filled(self, numbers: Sequence[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        for number in numbers:
            fits = batches and (len(batches[-1]) + 1) * self.sizes[number] <= self._batch_tokens
            if fits:
                batches[-1].append(number)
            else:
                batches.append([number])
        return batches


def collate(conversations: Sequence[Features], num_levels: int, first: int = FIRST_LEARNT) -> Batch:
    """One batch of these conversations, to learn `num_levels` levels of drafting.

    Args:
        first: see `Trainee.first_learnt`. The roots of the batch are so many tokens before
            the first ones that their drafts guess.
    """
    made = [_pairs(each, num_levels, first) for each in conversations]
    columns = dict(zip(Batch._fields, map(list, zip(*made, strict=True)), strict=True))
    levels = columns.pop("levels")
    numbers = {name: torch.cat(columns.pop(name)) for name in ("lengths", "source_lengths")}
    return Batch(
        levels=Levels(*(_padded_roots(each) for each in zip(*levels, strict=True))),
        **numbers,
        **{name: pad_sequence(each, batch_first=True) for name, each in columns.items()},
    )


def _padded_roots(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [L, Q, ...] with different Q as one [B, L, Q, ...]."""
    return pad_sequence([each.transpose(0, 1) for each in tensors], batch_first=True).transpose(
        1, 2
    )


def _pairs(each: Features, num_levels: int, first_learnt: int) -> Batch:
    """One conversation, without the axis of conversations."""
    size = len(each.tokens)
    learnt = torch.zeros(size + num_levels, dtype=torch.bool)
    for first, stop in each.answers:
        learnt[first:stop] = True
    roots = learnt[first_learnt:size].nonzero().flatten()
    level = torch.arange(num_levels)[:, None]
    ahead = roots + first_learnt + level  # [L, Q] positions of the labels
    at = ahead.clamp(max=size - 1)
    levels = Levels(
        inputs=each.tokens[at - 1],
        labels=each.tokens[at],
        teacher_tokens=each.top_tokens[at - 1],
        teacher_logprobs=each.top_logprobs[at - 1],
        valid=learnt[ahead].cumprod(0).bool(),
    )
    return Batch(
        hidden=each.hidden[:-1],
        scales=each.scales[:-1],
        tokens=each.tokens,
        lengths=torch.tensor([size - 1]),
        roots=roots,
        levels=levels,
        sources=each.source,
        source_lengths=torch.tensor([len(each.source)]),
        encoded=each.encoded,
    )
