"""`Pooling`: how a folder says that the hidden states of a text become its embedding.

sentence-transformers writes it: `modules.json` lists the steps, `1_Pooling/config.json` says which
states are taken, and `sentence_bert_config.json` how long a text may be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from tokenleap.core.files import read_json, validated
from tokenleap.errors import CompatibilityError, ModelError, PromptError, RequestError

MODULES = "modules.json"

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The older fields and the names in newer files, in the order in which several are joined."""


@dataclass(frozen=True)
class _Module:
    path: str
    type: str


@dataclass(frozen=True)
class Pooling:
    """How a text's states become its embedding.

    Args:
        modes: which are taken; the vectors of several are joined.
        normalized: whether the result has length 1.
        most_tokens: most tokens of a text; None if only the context limits them.
    """

    modes: tuple[str, ...]
    normalized: bool
    most_tokens: int | None = None

    @staticmethod
    def of(folder: Path | None) -> Pooling:
        """The pooling of a model's folder; None is a model without one.

        Raises:
            CompatibilityError: the folder describes none, or one that is not supported.
            ModelError: its description cannot be read.
        """
        if folder is None or not (folder / MODULES).is_file():
            raise CompatibilityError(
                f"this model makes no embeddings: its folder has no {MODULES} "
                "(sentence-transformers' pooling); choose a model that was trained for them."
            )
        steps = _read(folder / MODULES, list[_Module])
        kinds = [step.type.rpartition(".")[2] for step in steps]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise CompatibilityError(
                f"{MODULES} has the steps {', '.join(kinds)[:200]}: embeddings are made by "
                "Transformer, Pooling and, at the end, Normalize."
            )
        text = folder / "sentence_bert_config.json"
        limits = _read(text, dict[str, Any]) if text.is_file() else {}
        most = limits.get("max_seq_length")
        if limits.get("do_lower_case") or not (most is None or (type(most) is int and most > 0)):
            raise CompatibilityError(
                "sentence_bert_config.json: only max_seq_length is supported, a number of tokens."
            )
        config = _read(folder / _inside(steps[1].path) / "config.json", dict[str, Any])
        return Pooling(_modes(config), len(kinds) == 3, most)

    def check_length(self, tokens: int) -> None:
        """Refuse a text that is too long for the pooling."""
        if self.most_tokens is not None and tokens > self.most_tokens:
            raise PromptError(
                f"the text has {tokens} tokens, which leaves no room in the context of "
                f"{self.most_tokens} (max_seq_length): shorten it."
            )


def _inside(path: str) -> Path:
    """A path of `modules.json`, which does not lead out of the model's folder."""
    found = Path(path)
    if found.is_absolute() or ".." in found.parts:
        raise ModelError(f"{MODULES}: {path[:100]} is outside the model's folder")
    return found


def _read(path: Path, kind: Any) -> Any:
    try:
        return validated(kind, read_json(path))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path.name}: {error}") from error


def _modes(config: dict[str, Any]) -> tuple[str, ...]:
    given = config.get("pooling_mode")
    if given is None:
        wanted = [mode for field, mode in _MODES.items() if config.get(field)]
    else:
        wanted = [given] if isinstance(given, str) else list(given)
    if not wanted or not set(wanted) <= set(_MODES.values()):
        raise CompatibilityError(
            f"the pooling {wanted} is not supported: known are {', '.join(_MODES.values())}."
        )
    return tuple(wanted)


class Pooler:
    """Makes embeddings of one model.

    Args:
        norm: the model's norm before the output layer, after which its last hidden states are.
        width: numbers of a hidden state.

    Attributes:
        size: numbers of an embedding.
    """

    def __init__(self, pooling: Pooling, norm: nn.Module, width: int) -> None:
        self.pooling = pooling
        self.size = width * len(pooling.modes)
        self._norm = copy.deepcopy(norm).float()

    def begin(self) -> Pooled:
        """An embedding to be made."""
        return Pooled(self.pooling, self._norm)


class Pooled:
    """The embedding of one text, whose states come in pieces; sums are kept, and not the states."""

    def __init__(self, pooling: Pooling, norm: Callable[[Tensor], Tensor]) -> None:
        self._pooling, self._norm = pooling, norm
        self._sums = not {"cls", "max", "lasttoken"}.issuperset(pooling.modes)

    @torch.inference_mode()
    def add(self, start: int, states: Tensor) -> None:
        """Take the states [n, E] that enter the final norm, of the tokens from `start` on.

        A text that has lost its row is read from its beginning again. Tokens are added one by one,
        so that not even the last bit depends on the pieces.
        """
        states = self._norm(states.float())
        if start == 0:
            self._length, self._first, self._most = 0, states[0].clone(), states[0]
            self._sum = torch.zeros_like(states[0], dtype=torch.float64)
            self._weighted = torch.zeros_like(self._sum)
        assert start == self._length, "texts are read in order"
        self._length += len(states)
        self._last = states[-1].clone()
        self._most = torch.maximum(self._most, states.amax(dim=0))
        for place, state in enumerate(states.double() if self._sums else (), start + 1):
            self._sum += state
            self._weighted.add_(state, alpha=place)

    @torch.inference_mode()
    def vector(self) -> Tensor:
        """The embedding [modes * E] in float32, on the CPU.

        Raises:
            RequestError: the model overflowed.
        """
        made = [self._part(mode).float() for mode in self._pooling.modes]
        vector = torch.cat(made).cpu()
        if not vector.isfinite().all():
            raise RequestError(
                "the embedding is not finite, because the model overflows in this dtype: use "
                "float32 or bfloat16."
            )
        return normalize(vector, dim=0) if self._pooling.normalized else vector

    def _part(self, mode: str) -> Tensor:
        length = self._length
        if mode in ("cls", "max", "lasttoken"):
            return {"cls": self._first, "max": self._most, "lasttoken": self._last}[mode]
        if mode == "weightedmean":
            return self._weighted / (length * (length + 1) / 2)
        return self._sum / (length if mode == "mean" else length**0.5)


def shortened(vectors: Sequence[Tensor], dimensions: int | None) -> list[Tensor]:
    """The first `dimensions` numbers of each vector, with length 1 again; None keeps all.

    Models that were trained for it (Matryoshka) keep most of the meaning there.
    """
    if dimensions is None:
        return list(vectors)
    return [normalize(each[:dimensions], dim=0) for each in vectors]
