"""`ModuleNetwork`: runs any Transformers causal LM, on packed linear layers where available."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import nullcontext
from copy import copy
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tokenleap.errors import CompatibilityError
from tokenleap.runtime.attention import IMPLEMENTATION
from tokenleap.runtime.cpu import Int8Linear, PackedLinear, pack
from tokenleap.runtime.embedding import extended
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.network import Need, PassOutput
from tokenleap.runtime.own_attention import rebuild
from tokenleap.runtime.share import decoder_layers, share
from tokenleap.runtime.windows import FULL, Window, resized, windows_by_kind

__all__ = ["ModuleNetwork"]


class ModuleNetwork:
    """A Transformers module (see `Network`).

    Args:
        model: this network's own copy of the module tree (see `share`). It is changed.
        least_nodes: see `Network.least_nodes`.
    """

    name = "module"
    exact_trees = False

    def __init__(self, model: PreTrainedModel, least_nodes: int = 1) -> None:
        self.least_nodes = least_nodes
        model.train(False)
        self._bias = rebuild(model)
        if self._bias is None:
            model.set_attn_implementation(IMPLEMENTATION)
        self._model = model
        config = model.config.get_text_config()
        self._windows: dict[str, Window | None] = dict(windows_by_kind(config))
        self._kinds = {FULL, *(getattr(config, "layer_types", None) or ())}
        self._hybrid = getattr(config, "layer_types", None) is not None
        self._skips_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def packed(
        cls, model: PreTrainedModel, linear: type[PackedLinear | Int8Linear] = PackedLinear
    ) -> ModuleNetwork:
        """A network on faster linear layers (see `pack`)."""
        return cls(pack(model, linear), linear.LEAST_ROWS)

    @classmethod
    def sharing(cls, model: PreTrainedModel) -> ModuleNetwork:
        """A network on the model's own linear layers."""
        return cls(share(model))

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self._model.config.get_text_config().num_hidden_layers)

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        """See `Network.forward`; padding is computed, too."""
        keep = {"logits_to_keep": 1} if self._skips_logits and not need.logits else {}
        bias = nullcontext() if self._bias is None else self._bias.of(inputs)
        with bias, _HiddenStates(self._model, need.hidden) as hidden:
            output = self._model(
                input_ids=inputs.tokens,
                position_ids=inputs.positions,
                attention_mask=self._mask(inputs),
                past_key_values=slab,
                use_cache=True,
                **keep,
            )
        flat = {layer: inputs.flat(states) for layer, states in hidden.items()}
        if not need.logits:
            return PassOutput(None, hidden=flat)
        logits = inputs.flat(output.logits)
        return PassOutput(
            logits if need.last is None else logits[inputs.last_nodes(need.last)], hidden=flat
        )

    def _mask(self, inputs: PassInputs) -> Tensor | dict[str, Tensor]:
        """The mask, as modules take it from `generate()`: one, or one by kind of layers."""
        if not self._windows:
            return inputs.mask
        if self._hybrid:
            return {kind: inputs.mask_within(self._windows.get(kind)) for kind in self._kinds}
        (window,) = self._windows.values()
        return inputs.mask_within(window)

    def narrowed(self, size: int) -> ModuleNetwork:
        """See `WindowedNetwork.narrowed`."""
        other = copy(self)
        other._windows = {kind: resized(window, size) for kind, window in self._windows.items()}
        return other

    def extend(self, rows: Tensor) -> int:
        """See `Network.extend`."""
        embedding, first = extended(self._model.get_input_embeddings(), rows)
        self._model.set_input_embeddings(embedding)
        return first

    def first_layers(self, count: int) -> Self:
        """See `Network.first_layers`.

        Raises:
            CompatibilityError: the module has no list of its layers.
        """
        model = share(self._model)
        del decoder_layers(model)[count:]
        model.config.get_text_config().num_hidden_layers = count
        return self._like(model)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Self:
        """See `Network.without`.

        Raises:
            CompatibilityError: no submodule of a layer is known to be its attention or its MLP.
        """
        model = share(self._model)
        layers = decoder_layers(model)
        for kind, indices in (("attention", attention), ("mlp", mlp)):
            for index in indices:
                _skip(layers[index], Skipped.KINDS[kind])
        return self._like(model)

    def _like(self, model: PreTrainedModel) -> Self:
        """A network of this kind on a copy of its module, which has lost some parts."""
        return type(self)(model, self.least_nodes)


class _HiddenStates:
    """Records the hidden states of layers while a module runs.

    Args:
        model: the module.
        layers: layer ids (see `Need`). If there are none, no hooks are installed.
    """

    def __init__(self, model: PreTrainedModel, layers: Collection[int]) -> None:
        self._model, self._layers = model, layers
        self._hooks: list[RemovableHandle] = []
        self._found: dict[int, Tensor] = {}

    def __enter__(self) -> dict[int, Tensor]:
        """Layer id -> [B, N, E]; the pass fills it in."""
        if self._layers:
            stack = decoder_layers(self._model)
            for layer in self._layers:
                if layer < len(stack):
                    note = self._entering(layer)
                    hook = stack[layer].register_forward_pre_hook(note, with_kwargs=True)
                else:
                    hook = stack[-1].register_forward_hook(self._leaving(layer))
                self._hooks.append(hook)
        return self._found

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entering(self, layer: int) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._found[layer] = args[0] if args else kwargs["hidden_states"]

        return note

    def _leaving(self, layer: int) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            self._found[layer] = output[0] if isinstance(output, tuple) else output

        return note


class Skipped(nn.Module):
    """Replaces a sublayer and adds nothing to the residual stream.

    Args:
        returns_weights: whether to return a pair of output and attention weights.
    """

    KINDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "attention": ("self_attn", "attn", "attention"),
        "mlp": ("mlp", "feed_forward"),
    }
    """The names that architectures give to the sublayers."""

    def __init__(self, *, returns_weights: bool) -> None:
        super().__init__()
        self._returns_weights = returns_weights

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor, None]:
        """Zeros of the input's shape."""
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self._returns_weights else nothing


def _skip(layer: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(layer, name):
            setattr(layer, name, Skipped(returns_weights=names[0] == "self_attn"))
            return
    raise CompatibilityError(
        f"{type(layer).__name__} has no submodule named {' or '.join(names)} that could be skipped."
    )
