"""Self-drafting: the target drafts for itself, with some of its layers left out.

`early_exit` keeps the first layers (Elhoushi et al., "LayerSkip"; Kangaroo without its adapter).
`layer_skip` leaves out chosen attention and MLP sublayers (Zhang et al., "Draft & Verify"). There
is no second model and no second cache. Drafting reads the target's own KV of the context and
writes behind it, and verification then overwrites these slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenleap.core.tree import TokenTree
from tokenleap.drafters.options.models import EarlyExitOptions, LayerSkipOptions
from tokenleap.drafters.saturation import SaturatingLayers
from tokenleap.drafters.scorer import GrowingScorer, Scorer, TargetScorer
from tokenleap.errors import ConfigError
from tokenleap.runtime.network import (
    GrownTree,
    GrowthLimit,
    GrowthPlan,
    Network,
    PassOutput,
)
from tokenleap.runtime.target import Target

__all__ = [
    "EarlyExitOptions",
    "LayerSkipOptions",
    "SharedLayers",
    "exit_early",
    "leave_out",
    "skip_layers",
]


class SharedLayers(TargetScorer, GrowingScorer):
    """A part of the target as drafting model, on the target's own KV (see `Scorer`).

    Args:
        target: the target.
        network: the network that drafts: a part of the target's layers.
    """

    def __init__(self, target: Target, network: Network) -> None:
        super().__init__(target.with_network(network))

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """One pass of the remaining layers; see `Scorer.verify`."""
        return self._target.verify(keys, trees, num_computed)

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        """See `GrowingScorer`."""
        return self._target.grow(keys, pending, plan, limits)


def exit_early(target: Target, options: EarlyExitOptions) -> Scorer:
    """The target's first layers with its final norm and head, as a drafting model.

    Args:
        target: the target.
        options: see `EarlyExitOptions`.

    Raises:
        ConfigError: `exit_layer`, or one of `exit_layers`, is not below the number of layers.
        CompatibilityError: the network cannot go on from a layer, for `exit_layers`.
    """
    layers = target.network.num_layers
    if options.exit_layers is not None:
        if options.exit_layers[-1] >= layers:
            raise ConfigError(
                f"exit_layers: must be 1 to {layers - 1} for this model of {layers} layers, got "
                f"{options.exit_layers[-1]}."
            )
        return SaturatingLayers(target, options.exit_layers, options.exit_confidence)
    count = layers // 2 if options.exit_layer is None else options.exit_layer
    if not 1 <= count < layers:
        raise ConfigError(
            f"exit_layer: must be 1 to {layers - 1} for this model of {layers} layers, got {count}."
        )
    return SharedLayers(target, target.network.first_layers(count))


def skip_layers(target: Target, options: LayerSkipOptions) -> SharedLayers:
    """The target without the chosen sublayers, as a drafting model.

    Args:
        target: the target.
        options: see `LayerSkipOptions`.

    Raises:
        ConfigError: a layer does not exist.
        CompatibilityError: the layers of this architecture have no separate attention or MLP, or
            the file was made for a model with another number of layers.
    """
    skipped = options.skipped(target.network.num_layers)
    return SharedLayers(target, leave_out(target.network, skipped))


def leave_out(network: Network, skipped: Mapping[str, Sequence[int]]) -> Network:
    """A network without some sublayers, over the same weights.

    Args:
        network: the whole network.
        skipped: layers (from 0) under "skip_attention" and "skip_mlp".

    Raises:
        ConfigError: a layer does not exist.
        CompatibilityError: the layers of this architecture have no separate attention or MLP.
    """
    for field, indices in skipped.items():
        for index in indices:
            if not 0 <= index < network.num_layers:
                raise ConfigError(
                    f"{field}: must be 0 to {network.num_layers - 1} for this model of "
                    f"{network.num_layers} layers, got {index}."
                )
    return network.without(skipped["skip_attention"], skipped["skip_mlp"])
