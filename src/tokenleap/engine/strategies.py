"""Builds a `Strategy` (drafter, controller, acceptance rule) from a `speculative_config`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from copy import copy
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable
from weakref import WeakKeyDictionary

from tokenleap import models
from tokenleap.config import SpeculativeConfig
from tokenleap.control import Controller, Fixed, controller_class
from tokenleap.control.lookup_models import HybridModel, LookupModel
from tokenleap.core.acceptance import AcceptanceRule
from tokenleap.core.acceptance.rules import Coupled
from tokenleap.core.grammar import Grammars
from tokenleap.drafters.base import Drafter, VocabularyOverlap
from tokenleap.drafters.beams import BeamDrafter, beam_drafter
from tokenleap.drafters.combine import Hybrid
from tokenleap.drafters.copying import with_prediction
from tokenleap.drafters.online import Learner, OnlineOptions
from tokenleap.drafters.options import LONGEST_PREDICTED
from tokenleap.drafters.spec import DrafterParts
from tokenleap.drafters.vocabulary import DraftModel
from tokenleap.engine.scheduler import KVBudget
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.models.loaded import checked_module
from tokenleap.models.resolver import packed_name
from tokenleap.runtime.choices import DRAFTING, OWN
from tokenleap.runtime.costs import CostCurve
from tokenleap.runtime.cpu import check_quantization
from tokenleap.runtime.kv_slab import SlabFull, is_out_of_memory
from tokenleap.runtime.packed import PackedModel, open_packed
from tokenleap.runtime.profiling import measure_costs
from tokenleap.runtime.target import Target
from tokenleap.speculation import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

Speculative: TypeAlias = SpeculativeConfig | Mapping[str, Any] | None
"""How one request speculates; None takes the `LLM`'s configuration."""

MAX_STRATEGIES = 64
"""Most strategies of requests that are kept. What was not used for longest is dropped, and built
again if needed."""


class StrategyFactory:
    """Builds the strategies of one target, one for each configuration.

    Attributes:
        default: the strategy of requests without one of their own.
        vocabulary_overlap: how the vocabulary of the last draft model compares with the target's;
            None without a draft model.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: PreTrainedTokenizerBase | None,
        grammars: Grammars,
        config: SpeculativeConfig,
        kv_budget: KVBudget,
        *,
        quantization: str | None,
        runtime: str,
        max_num_seqs: int,
    ) -> None:
        self.config = config
        self.default: Strategy
        self.most_kept = MAX_STRATEGIES
        self.vocabulary_overlap: VocabularyOverlap | None = None
        self._target, self._tokenizer, self._grammars = target, tokenizer, grammars
        self._kv_budget, self._max_num_seqs = kv_budget, max_num_seqs
        self._draft_models = DraftModels(target, kv_budget, quantization, runtime)
        self._costs = CostCurve(peers=target.peers)  # of the target, so all controllers share it
        self._built: list[tuple[SpeculativeConfig, Strategy]] = []
        self._beams = Strategy(BeamDrafter(), Fixed(0), Coupled())  # without proposals
        # By the strategy that they are made from, with which they are dropped.
        self._for_beams: WeakKeyDictionary[Strategy, Strategy] = WeakKeyDictionary()
        self._for_predictions: WeakKeyDictionary[Strategy, Strategy] = WeakKeyDictionary()

    def strategy(
        self, config: SpeculativeConfig, lent: list[Lent] | None = None
    ) -> Strategy | None:
        """The strategy of a configuration, built at its first use; None for the `LLM`'s default.

        Args:
            lent: what `lent_to` returned; models that are built in are taken out.
        """
        if config == self.config:
            return None
        if (strategy := self._known(config)) is not None:
            others = [built for built in self._built if built[1] is not strategy]
            self._built = [*others, (config, strategy)]  # the latest is last
            return strategy
        self._draft_models.lent = lent or []
        try:
            self._built.append((config, self.build(config)))
        finally:
            self._draft_models.lent = []
        del self._built[: -self.most_kept]
        return self._built[-1][1]

    def lent_to(self, config: SpeculativeConfig) -> list[Lent]:
        """Models of other `LLM`s that building a strategy will need; any thread may ask.

        It waits for their turns, so call it outside the own one: else two `LLM`s that lend to each
        other would wait for each other.
        """
        if config == self.config or self._known(config) is not None:
            return []
        return [(llm, llm.as_draft_model()) for llm in lenders(dict(config))]

    def _known(self, config: SpeculativeConfig) -> Strategy | None:
        return next((strategy for known, strategy in self._built if known == config), None)

    def for_beams(self, given: Strategy | None) -> Strategy:
        """The strategy of beam searches that take their proposals from this one's drafter."""
        if given is None:
            return self._beams
        if (known := self._for_beams.get(given)) is not None:
            return known
        length = given.controller.num_speculative_tokens
        # Beams are not judged by a rule: the search reads log-probabilities.
        made = Strategy(beam_drafter(given.drafter), Fixed(length), Coupled())
        self._for_beams[given] = made
        return made

    @property
    def costs(self) -> CostCurve:
        """Costs of the target's passes; all controllers share them."""
        return self._costs

    def for_prediction(self, config: SpeculativeConfig | None, strategy: Strategy) -> Strategy:
        """The strategy of requests with a prediction, which drafts from it first.

        Where the prediction is of no use, it drafts with the same drafter as `strategy`.
        """
        if strategy.drafter.traits.follows_prediction:
            return strategy
        if (known := self._for_predictions.get(strategy)) is not None:
            return known
        config = config or self.config
        drafter = with_prediction(strategy.drafter, strategy.controller.num_speculative_tokens)
        if not config.gamma:  # nothing was drafted, so there was no choice of how much
            config = SpeculativeConfig(method="prediction")
        controller = self._controller(config, drafter, strategy.rule, LONGEST_PREDICTED)
        made = Strategy(drafter, controller, strategy.rule, strategy.learner)
        self._measure_costs(controller)
        self._for_predictions[strategy] = made
        return made

    def kept(self) -> list[Strategy]:
        """The requests' strategies that are kept, with predictions and without."""
        return [*(strategy for _, strategy in self._built), *self._for_predictions.values()]

    def build(self, config: SpeculativeConfig) -> Strategy:
        """Build a strategy. If the configuration names no rule, it has the `LLM`'s."""
        rule = config.rule if config.names_rule else self.config.rule
        if rule.by_chance:
            _check_by_chance(rule, config)
        drafter = self.drafter(config, rule)
        same_bits = rule.ignores_draft_lengths and self._is_exact(drafter)
        if not same_bits or self._target.peers.size > 1:
            drafter.ignore_times()
        learner = None
        if config.online is not None:
            _check_alone(self._target)
            learner = learner_for(
                config.method_name, drafter, config.online, self._target, same_bits=same_bits
            )
        controller = self._controller(config, drafter, rule)
        strategy = Strategy(drafter, controller, rule, learner)
        self._kv_budget.share()
        self._measure_costs(strategy.controller)
        return strategy

    def drafter(self, config: SpeculativeConfig, rule: AcceptanceRule) -> Drafter:
        """Build a drafter for the target and this acceptance rule."""
        return self._drafter(config, self._target, rule.couples_draft, rule.counts_draws)

    def sharing_models(self) -> StrategyFactory:
        """A copy of this factory that loads every draft model only once.

        Drafters that share a draft model also share its KV rows. So only one of them may be in use
        at a time.
        """
        other = copy(self)
        other._draft_models = self._draft_models.once()
        other._built = []
        other._for_beams, other._for_predictions = WeakKeyDictionary(), WeakKeyDictionary()
        return other

    # Inside

    def _drafter(
        self, config: SpeculativeConfig, target: Target, coupled: bool, shares: bool
    ) -> Drafter:
        if config.drafter_spec.needs_source and not target.reads_source:
            raise CompatibilityError(
                f"method '{config.method_name}' drafts for encoder-decoders, and this model is "
                "decoder-only."
            )
        if config.drafter_spec.reads_no_source and target.reads_source:
            raise CompatibilityError(
                f"method '{config.method_name}' drafts for decoder-only models, and this model is "
                "an encoder-decoder: draft with 'blockwise' or 'medusa' heads, or 'spec_drafter'."
            )
        parts = DrafterParts(
            options=config.options,
            coupled=coupled,
            shares_nodes=shares,
            target=target,
            model=config.model,
            share_memory=self._kv_budget.add,
            tokenizer=self._tokenizer,
            grammars=self._grammars,
            load_model=lambda: self._draft_models.load(
                config.model, getattr(config.options, "draft_quantization", None)
            ),
            build=lambda inner, model, couples: self._drafter(
                _inner_config(inner), model, couples, shares
            ),
        )
        drafter = config.drafter_spec.build(parts)
        _check_layers(config.method_name, drafter, target)
        self.vocabulary_overlap = drafter.traits.vocabulary_overlap or self.vocabulary_overlap
        return drafter

    def _controller(
        self, config: SpeculativeConfig, drafter: Drafter, rule: AcceptanceRule, least: int = 0
    ) -> Controller:
        """The controller of a drafter, for drafts of `least` tokens or longer ones."""
        hybrid, traits = isinstance(drafter, Hybrid), drafter.traits
        if isinstance(config.controller, Controller):
            template = config.controller
            _check_controller(template, drafter)
        else:
            name = config.controller_under(rule)
            if config.controller is None and not self._is_exact(drafter):
                name = Fixed.name  # cost_model reads the clock, and draft lengths change bits here
            kind = controller_class(name, looks_up=traits.looks_up, hybrid=hybrid)
            options = None if config.controller is None else config.controller_options
            template = kind(config.gamma_under(name), options)
        length = max(template.num_speculative_tokens, least)
        controller = template.serving(
            self._costs,
            drafter.level_sizes(length),
            level_share=traits.level_share,
            stops_early=traits.stops_early,
            at_least=least,
        )
        if isinstance(drafter, Hybrid) and isinstance(controller, HybridModel):
            drafter.chooser = controller
        return controller

    def _is_exact(self, drafter: Drafter) -> bool:
        """Whether passes over this drafter's drafts have the same bits as plain ones."""
        return self._target.exact_trees if drafter.traits.drafts_trees else self._target.bit_exact

    def _measure_costs(self, controller: Controller) -> None:
        """Time passes, once for all controllers, if this controller chooses by their costs."""
        if not controller.needs_costs or not controller.num_speculative_tokens:
            return
        self.measure_costs()

    def measure_costs(self) -> None:
        """Time passes, unless that was done; to be called in a turn of the engine."""
        if self._costs.measured:
            return
        try:
            self._costs.start_from(measure_costs(self._target, self._max_num_seqs))
            one, eight = 1e3 * self._costs(1), 1e3 * self._costs(8)
            _log.info("a pass takes %.2f ms, one over 8 tokens %.2f ms", one, eight)
        except (SlabFull, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # The costs are learnt from the steps instead.


def _check_layers(method: str, drafter: Drafter, target: Target) -> None:
    """Refuse a drafter that needs hidden states of a layer that the model does not have."""
    if not drafter.traits.hidden_layers:
        return
    last = target.network.num_layers
    for layer in drafter.traits.hidden_layers:
        if not 0 <= layer <= last:
            raise CompatibilityError(
                f"method '{method}' reads the hidden states of layer {layer}, and this model has "
                f"layers 0 to {last} ({last} is what enters the final norm)."
            )


def _check_controller(given: Controller, drafter: Drafter) -> None:
    """Refuse a part of `cost_model` that was given for a drafter of another kind."""
    for kind, fits in (
        (LookupModel, drafter.traits.looks_up),
        (HybridModel, isinstance(drafter, Hybrid)),
    ):
        if isinstance(given, kind) and not fits:
            raise CompatibilityError(
                f"controller: {type(given).__name__} does not fit {type(drafter).__name__}: "
                f"give '{given.name}', which chooses its class by the drafter."
            )


def _check_by_chance(rule: AcceptanceRule, config: SpeculativeConfig) -> None:
    """Warn of a rule whose text is not the model's, and refuse to learn from that text."""
    if config.online is not None:
        raise ConfigError(
            f"online: under '{rule.name}' the text is not the model's, and teaches nothing: "
            "leave one of the two out."
        )
    _log.warning(
        "acceptance '%s' keeps drafted tokens by chance: the text is NOT the model's. It is for "
        "measuring speed.",
        rule.name,
    )


def _check_alone(target: Target) -> None:
    """Refuse what learns by the clock, and might learn other bits in every process."""
    if target.peers.size > 1:
        raise ConfigError(
            "online: a drafter learns while it serves in one process only, and this model runs in "
            f"{target.peers.size}: leave it out, or train the drafter before."
        )


def _inner_config(fields: Mapping[str, Any]) -> SpeculativeConfig:
    """The configuration of an inner drafter; all other choices belong to the outer one."""
    for name in ("num_speculative_tokens", "acceptance", "controller", "online"):
        if name in fields:
            raise ConfigError(f"{name} belongs to the outer speculative_config, not to {fields}.")
    return SpeculativeConfig.parse(fields)


# `DraftModels`: the draft models of a target, loaded by name or lent by another `LLM`.


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
        quantization: their quantization, unless the target's or a configuration says otherwise.

    Attributes:
        lent: what `LendsModel` returned beforehand, for the drafter that is being built.
    """

    def __init__(
        self, target: Target, kv_budget: KVBudget, quantization: str | None, runtime: str
    ) -> None:
        self._target, self._kv_budget = target, kv_budget
        self._quantization, self._runtime = quantization, runtime
        self.lent: list[Lent] = []
        self._loaded_once: dict[str, DraftModel] | None = None

    def once(self) -> DraftModels:
        """The same, but a model that is asked for again is the same one, on the same KV rows."""
        other = DraftModels(self._target, self._kv_budget, self._quantization, self._runtime)
        other._loaded_once = {}
        return other

    def load(self, model: Any, quantization: str | None) -> DraftModel:
        """A draft model."""
        if self._loaded_once is None:
            return self._new(model, quantization)
        key = f"{model if isinstance(model, str | Path) else id(model)} {quantization}"
        if key not in self._loaded_once:
            self._loaded_once[key] = self._new(model, quantization)
        return self._loaded_once[key]

    def _new(self, model: Any, quantization: str | None) -> DraftModel:
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
        """A draft model by its name, or a loaded one; and the name of its class."""
        tokenizer = None
        given, wanted = _by_packed_name(given, wanted)
        quantization = DRAFTING if wanted == "int4" else wanted or self._quantization
        asked = None if wanted == "none" else wanted
        check_quantization(asked, self._target.device, "draft_quantization")
        weights: PreTrainedModel | PackedModel
        if not isinstance(given, str | Path):
            weights = checked_module(given)
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
            weights = packed or models.load_model(folder, dtype, device)
        model = Target(
            weights, quantization=quantization, runtime=self._runtime, beside=self._target
        )
        return DraftModel(model, tokenizer, given), model.name


def _by_packed_name(given: Any, wanted: str | None) -> tuple[Any, str | None]:
    """The model and `draft_quantization` that a name of packed weights stands for."""
    if (packed := packed_name(given)) is None:
        return given, wanted
    held = None if packed.form == OWN else packed.quantization
    if wanted is not None and wanted != held:
        raise ConfigError(
            f"draft_quantization: {given} has {packed.form} weights, not {wanted}: leave it out, "
            f"or take {packed.source}."
        )
    return packed.source, held


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


# Finds the learner of a drafter that learns while it serves.
#
# The networks with their losses are in `training/`, which stands above the engine: it also trains
# by running it. So the learner is loaded by its name, and only if somebody asks for it.


_MODULE, _CLASS = "tokenleap.training.online", "OnlineLearner"


def learner_for(
    method: str, drafter: Drafter, options: OnlineOptions, target: Target, *, same_bits: bool
) -> Learner:
    """The learner of a drafter."""
    if drafter.traits.learnable is None:
        raise CompatibilityError(
            f"online: method '{method}' has nothing that learns while it serves: use 'eagle', "
            "'medusa', 'hydra', 'blockwise', 'mlp_speculator', a 'hybrid' with one of these, or "
            "'draft_model' with the target's vocabulary (not an LLM of a loaded module)."
        )
    if not same_bits and options.every is None:
        raise ConfigError(
            "online: with this target or acceptance rule, the output's bits depend on the drafts, "
            "and learning for a 'share' of the time would make them depend on the clock: set "
            "'every', or use the rule 'coupled' on a target that is bit-exact."
        )
    make = getattr(import_module(_MODULE), _CLASS)
    made: Learner = make(drafter.traits.learnable, options, target)
    return made
