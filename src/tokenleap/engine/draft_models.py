"""`DraftModels`: the draft models of a target, loaded by name or lent by another `LLM`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from transformers import PreTrainedModel

from tokenleap import models
from tokenleap.drafters.vocabulary import DraftModel
from tokenleap.engine.kv_budget import KVBudget
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.models.packed_names import packed_name
from tokenleap.runtime.choices import DRAFTING, OWN
from tokenleap.runtime.cpu import check_quantization
from tokenleap.runtime.packed import PackedModel, open_packed
from tokenleap.runtime.target import Target

__all__ = ["DraftModels", "LendsModel", "Lent", "LoadedOnce", "lenders"]


@runtime_checkable
class LendsModel(Protocol):
    """An `LLM`, whose model may also draft for another one."""

    def as_draft_model(self) -> DraftModel:
        """Its model with KV rows of its own; the weights are in memory once."""
        ...


Lent: TypeAlias = tuple[LendsModel, DraftModel]
"""An `LLM`, and its model as a draft model."""


class DraftModels:
    """Loads draft models and checks that they fit the target.

    Args:
        target: the model being accelerated.
        kv_budget: limits the KV of draft models, too.
        quantization: their quantization, unless the target's or a configuration says otherwise.
        runtime: their runtime.

    Attributes:
        lent: what `LendsModel` returned beforehand, for the drafter that is being built.
    """

    def __init__(
        self, target: Target, kv_budget: KVBudget, quantization: str | None, runtime: str
    ) -> None:
        self._target, self._kv_budget = target, kv_budget
        self._quantization, self._runtime = quantization, runtime
        self.lent: list[Lent] = []

    def load(self, model: Any, quantization: str | None) -> DraftModel:
        """A draft model with KV rows of its own.

        Args:
            model: its name or folder, a loaded module, or an `LLM`.
            quantization: its `draft_quantization`.

        Raises:
            ConfigError: a lent model has a quantization already.
            CompatibilityError: it does not read what the target reads, or not where.
        """
        if isinstance(model, LendsModel):
            if quantization is not None:
                raise ConfigError(
                    f"draft_quantization: the {type(model).__name__} that drafts keeps its own: "
                    "remove it."
                )
            draft, name = self._borrowed(model), type(model).__name__
        else:
            draft, name = self._loaded(model, quantization)
        _check_sources(name, draft.model, self._target)
        _check_device(draft.model, self._target)
        self._kv_budget.add(draft.model)
        return draft

    def _borrowed(self, llm: LendsModel) -> DraftModel:
        """The model of another `LLM`; each drafter has KV rows of its own."""
        for index, (lender, _) in enumerate(self.lent):
            if lender is llm:
                return self.lent.pop(index)[1]
        return llm.as_draft_model()

    def _loaded(
        self, given: str | Path | PreTrainedModel, wanted: str | None
    ) -> tuple[DraftModel, str]:
        """A draft model by its name, or a loaded one; and the name of its class.

        Args:
            given: the model.
            wanted: its `draft_quantization`.
        """
        tokenizer = None
        given, wanted = _by_packed_name(given, wanted)
        quantization = DRAFTING if wanted == "int4" else wanted or self._quantization
        asked = None if wanted == "none" else wanted
        check_quantization(asked, self._target.device, "draft_quantization")
        weights: PreTrainedModel | PackedModel
        if isinstance(given, PreTrainedModel):
            weights = module = given
        else:
            dtype, device = self._target.dtype, self._target.device
            tries = [quantization]
            if wanted is None and self._target.quantization in ("int4", OWN):
                tries.insert(0, DRAFTING)
            opened = (
                open_packed(given, dtype, device, quantization=each, runtime=self._runtime)
                for each in tries
            )
            packed = next(filter(None, opened), None)
            folder = packed.folder if packed else models.resolve(given)
            tokenizer = models.load_tokenizer(folder)
            module = packed.module if packed else models.load_model(folder, dtype, device)
            weights = packed or module
        model = Target(
            weights, quantization=quantization, runtime=self._runtime, beside=self._target
        )
        return DraftModel(model, tokenizer, given), type(module).__name__


def _by_packed_name(given: Any, wanted: str | None) -> tuple[Any, str | None]:
    """The model and `draft_quantization` that a name of packed weights stands for.

    Raises:
        ConfigError: the name contradicts `wanted`.
    """
    if (packed := packed_name(given)) is None:
        return given, wanted
    held = None if packed.form == OWN else packed.quantization
    if wanted is not None and wanted != held:
        raise ConfigError(
            f"draft_quantization: {given} has {packed.form} weights, not {wanted}: leave it out, "
            f"or take {packed.source}."
        )
    return packed.source, held


class LoadedOnce(DraftModels):
    """The same, but whoever asks again for a model gets the same one, on the same KV rows.

    So only one drafter of a model may be in use at a time.
    """

    def __init__(self, other: DraftModels) -> None:
        super().__init__(other._target, other._kv_budget, other._quantization, other._runtime)
        self._loaded_models: dict[str, DraftModel] = {}

    def load(self, model: Any, quantization: str | None) -> DraftModel:
        """See `DraftModels.load`."""
        key = f"{model if isinstance(model, str | Path) else id(model)} {quantization}"
        if key not in self._loaded_models:
            self._loaded_models[key] = super().load(model, quantization)
        return self._loaded_models[key]


def lenders(value: Any) -> Iterator[LendsModel]:
    """The `LLM`s in a configuration, at any depth."""
    if isinstance(value, LendsModel):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(lenders, value.values()))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(lenders, value))


def _check_device(model: Target, target: Target) -> None:
    if model.device != target.device:
        raise CompatibilityError(
            f"draft_model: it is on {model.device} and the target is on {target.device}: load both "
            "on one device."
        )
    if 1 < model.peers.size != target.peers.size:
        raise CompatibilityError(
            f"draft_model: it is spread over {model.peers.size} processes and the target is not: "
            "load it in one."
        )


def _check_sources(name: str, model: Target, target: Target) -> None:
    """Refuse a draft model that cannot read what the target reads."""
    own, theirs = model.source_network, target.source_network
    if (own is None) != (theirs is None):
        kinds = ("a decoder-only model", "an encoder-decoder")
        raise CompatibilityError(
            f"draft_model: {name} is {kinds[own is not None]} and the target is "
            f"{kinds[theirs is not None]}: a draft model must read the same source."
        )
    if own is None or theirs is None:
        return
    if own.num_bins != theirs.num_bins:
        raise CompatibilityError(
            f"draft_model: the encoder of {name} reads other features of audio than the target's: "
            "a draft model must read the same source."
        )
