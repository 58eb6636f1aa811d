"""`ModuleNetwork`: runs any Transformers causal LM, on packed linear layers where available."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenleap.errors import CompatibilityError
from tokenleap.runtime.attention import padded_rows, slab_attention
from tokenleap.runtime.cpu import Int8Linear, PackedLinear, decoder_layers, pack, share
from tokenleap.runtime.inputs import FULL, PassInputs, Window, extended, resized, windows_by_kind
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.network import Need, PassOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModuleNetwork:
    """A Transformers module, its own copy of the tree (see `share`), which it changes."""

    name: str = "module"
    exact_trees = False
    pads_rows = True

    def __init__(self, model: PreTrainedModel, least_nodes: int = 1) -> None:
        self.least_nodes = least_nodes
        model.train(False)
        self._bias = rebuild(model)
        if self._bias is None:
            from transformers import AttentionInterface

            AttentionInterface.register("tokenleap", slab_attention)
            model.set_attn_implementation("tokenleap")
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
        return cls(pack(model, linear), linear.LEAST_ROWS)

    @classmethod
    def sharing(cls, model: PreTrainedModel) -> ModuleNetwork:
        return cls(share(model))

    @classmethod
    def compiled(cls, model: PreTrainedModel) -> ModuleNetwork:
        """A network whose MLPs run under `torch.compile`; attention's shapes change too often."""
        network = cls(share(model))
        network.name = "compiled"
        for layer in decoder_layers(network._model):
            getattr(layer, _name_of(layer, "mlp")).compile(dynamic=True)
        return network

    @property
    def num_layers(self) -> int:
        return int(self._model.config.get_text_config().num_hidden_layers)

    def forward(self, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        keep = {"logits_to_keep": 1} if self._skips_logits and not need.logits else {}
        bias = nullcontext() if self._bias is None else self._bias.of(inputs)
        with bias, _recorded(self._model, need.hidden) as hidden:
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
        other = copy(self)
        other._windows = {kind: resized(window, size) for kind, window in self._windows.items()}
        return other

    def extend(self, rows: Tensor) -> int:
        embedding, first = extended(self._model.get_input_embeddings(), rows)
        self._model.set_input_embeddings(embedding)
        return first

    def first_layers(self, count: int) -> Self:
        model = share(self._model)
        del decoder_layers(model)[count:]
        model.config.get_text_config().num_hidden_layers = count
        return self._like(model)

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Self:
        model = share(self._model)
        layers = decoder_layers(model)
        for kind, indices in (("attention", attention), ("mlp", mlp)):
            for index in indices:
                layer = layers[index]
                setattr(layer, _name_of(layer, kind), Skipped(returns_weights=kind == "attention"))
        return self._like(model)

    def _like(self, model: PreTrainedModel) -> Self:
        """A network of this kind on a copy of its module, which has lost some parts."""
        return type(self)(model, self.least_nodes)


@contextmanager
def _recorded(model: PreTrainedModel, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Layer id (see `Need`) -> [B, N, E], which the pass fills in."""
    found: dict[int, Tensor] = {}
    stack: Sequence[nn.Module] = list(decoder_layers(model)) if layers else ()

    def entering(layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[layer] = args[0] if args else kwargs["hidden_states"]

    def leaving(layer: int, _: nn.Module, __: Any, output: Any) -> None:
        found[layer] = output[0] if isinstance(output, tuple) else output

    hooks = [
        stack[layer].register_forward_pre_hook(partial(entering, layer), with_kwargs=True)
        if layer < len(stack)
        else stack[-1].register_forward_hook(partial(leaving, layer))
        for layer in layers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class Skipped(nn.Module):
    """Replaces a sublayer and adds nothing to the residual stream."""

    KINDS: ClassVar[dict[str, tuple[str, ...]]] = {
        "attention": ("self_attn", "attn", "attention"),
        "mlp": ("mlp", "feed_forward"),
    }
    """The names that architectures give to the sublayers."""

    def __init__(self, *, returns_weights: bool) -> None:
        super().__init__()
        self._returns_weights = returns_weights

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor, None]:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self._returns_weights else nothing


def _name_of(layer: nn.Module, kind: str) -> str:
    names = Skipped.KINDS[kind]
    for name in names:
        if hasattr(layer, name):
            return name
    raise CompatibilityError(
        f"{type(layer).__name__} has no submodule named {' or '.join(names)} to skip or compile."
    )


# Attention over the KV slab for modules without Transformers' attention interface.
#
# Bloom, Falcon and MPT compute attention themselves, with masks and ALiBi biases that the model
# makes from the places of tokens in the cache. In a network's own copy of the module tree,
# `rebuild` wraps their attention modules: the projections stay, and `slab_attention` attends, with
# biases by the positions of nodes and of what they see. So token trees get the biases of their
# paths.
#
# ALiBi: Press, Smith and Lewis, "Train Short, Test Long". The biases are rounded as Transformers'
# modules round them.


Alibi: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Biases [H, B, R, S] of H heads by the ranks [B, R, S] of what nodes see (`PassInputs.ranks`), and
the nodes' positions [B, R]."""


class Bias:
    """The bias that all attention modules of a model add to the scores of a pass."""

    def __init__(self, alibi: Alibi | None) -> None:
        self._alibi = alibi
        self.mask: Tensor | None = None

    @contextmanager
    def of(self, inputs: PassInputs) -> Iterator[None]:
        """Have what the modules read during a pass, [B, 1 or H, padded_rows(N), S]."""
        self.mask = self._made(inputs)
        try:
            yield
        finally:
            self.mask = None

    def _made(self, inputs: PassInputs) -> Tensor:
        if self._alibi is None:
            return inputs.mask
        padding = padded_rows(inputs.nodes) - inputs.nodes
        biases = self._alibi(inputs.ranks, F.pad(inputs.positions, (0, padding)))
        biases = biases.transpose(0, 1) + inputs.mask  # [B, H, R, S]
        # Only the CPU's attention takes float32 masks in any dtype.
        return biases.float() if biases.device.type == "cpu" else biases.to(inputs.dtype)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """[B, H, N, D] over [B, G, S, D] -> [B, N, H * D]."""
        output, _ = slab_attention(_NOWHERE, query, keys, values, self.mask, scaling=scaling)
        return output.flatten(2)


_NOWHERE = nn.Module()


def rebuild(model: PreTrainedModel) -> Bias | None:
    """Wrap the attention modules of a model, if Tokenleap has to compute their attention."""
    wrapped = next((m.bias for m in model.modules() if isinstance(m, _Wrapped)), None)
    if wrapped is not None:  # a copy of a network's own copy
        return wrapped
    prepare = _PREPARE.get(model.config.model_type)
    if prepare is None:
        return None
    wrapper, bias = prepare(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == wrapper.WRAPS:
                setattr(module, name, wrapper(child, bias))
    return bias


class _Wrapped(nn.Module):
    WRAPS: str  # name of the module's class

    def __init__(self, module: nn.Module, bias: Bias) -> None:
        super().__init__()
        self.module: Any = module
        self.bias = bias


class _Bloom(_Wrapped):
    WRAPS = "BloomAttention"

    def forward(
        self, states: Tensor, residual: Tensor, *, layer_past: Any, **_: Any
    ) -> tuple[Tensor, None]:
        own = self.module
        qkv = own.query_key_value(states)  # [B, N, H * 3 * D]
        query, keys, values = qkv.unflatten(2, (own.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        keys, values = layer_past.update(keys, values, own.layer_idx)
        mixed = self.bias.attend(query, keys, values, own.inv_norm_factor)
        return own.dense(mixed) + residual, None


class _Mpt(_Wrapped):
    WRAPS = "MptAttention"

    def forward(self, states: Tensor, *, past_key_values: Any, **_: Any) -> tuple[Tensor, None]:
        own = self.module
        qkv = own.Wqkv(states)  # [B, N, 3 * H * D]
        if own.clip_qkv:
            qkv = qkv.clamp(-own.clip_qkv, own.clip_qkv)
        query, keys, values = qkv.unflatten(2, (3, own.n_heads, -1)).permute(2, 0, 3, 1, 4)
        keys, values = past_key_values.update(keys, values, own.layer_idx)
        return own.out_proj(self.bias.attend(query, keys, values, own.softmax_scale)), None


class _Falcon(_Wrapped):
    WRAPS = "FalconAttention"

    def forward(
        self, states: Tensor, *, layer_past: Any, position_embeddings: Any, **_: Any
    ) -> tuple[Tensor, None]:
        from transformers.models.falcon import modeling_falcon as falcon

        own, turn = self.module, cast("Any", falcon.apply_rotary_pos_emb)
        groups = own.num_kv_heads
        # Each key head has its queries before it and its values after it: [B, G, N, H / G + 2, D].
        qkv = own.query_key_value(states).unflatten(2, (groups, -1, own.head_dim)).transpose(1, 2)
        query = qkv[..., :-2, :].transpose(2, 3).flatten(1, 2)
        keys, values = qkv[..., -2, :], qkv[..., -1, :]
        if not own.config.alibi:
            query, keys = turn(query, keys, *position_embeddings)
        keys, values = layer_past.update(keys, values, own.layer_idx)
        return own.dense(self.bias.attend(query, keys, values, own.inv_norm_factor)), None


def _prepare_bloom(model: Any) -> tuple[type[_Wrapped], Bias]:
    from transformers.models.bloom import modeling_bloom as bloom

    body = model.transformer
    # The model's own biases come from a mask without a tree, and are not read.
    body.build_alibi_tensor = lambda *_, **__: None
    return _Bloom, Bias(_rounded(bloom.build_alibi_tensor, body.num_heads, model.dtype))


def _prepare_falcon(model: Any) -> tuple[type[_Wrapped], Bias]:
    from transformers.models.falcon import modeling_falcon as falcon

    body, config = model.transformer, model.config
    if not config.alibi:
        return _Falcon, Bias(None)
    body.use_alibi = False  # as for Bloom
    biases = _rounded(falcon.build_alibi_tensor, body.num_heads, model.dtype)
    scaling = (config.hidden_size // body.num_heads) ** -0.5
    return _Falcon, Bias(lambda ranks, positions: biases(ranks, positions) * scaling)


def _prepare_mpt(model: Any) -> tuple[type[_Wrapped], Bias]:
    from transformers.models.mpt import modeling_mpt as mpt

    heads = model.transformer.num_heads

    def alibi(ranks: Tensor, positions: Tensor) -> Tensor:
        build: Any = mpt.build_mpt_alibi_tensor
        slopes: Tensor = -build(heads, 2, device=ranks.device)[:, 0, 0]
        return slopes[:, None, None, None] * (ranks - positions[..., None])

    return _Mpt, Bias(alibi)


def _rounded(build: Callable[..., Tensor], heads: int, dtype: torch.dtype) -> Alibi:
    """Biases that depend on positions in the text alone, looked up in what a model builds."""

    def alibi(ranks: Tensor, _: Tensor) -> Tensor:
        places = torch.ones(1, ranks.shape[2], dtype=torch.long, device=ranks.device)
        return build(places, heads, dtype)[:, 0][:, ranks]

    return alibi


_PREPARE: dict[str, Callable[[Any], tuple[type[_Wrapped], Bias]]] = {
    "bloom": _prepare_bloom,
    "falcon": _prepare_falcon,
    "mpt": _prepare_mpt,
}
"""Makes a model ready for its wrapped modules, by `model_type`."""
