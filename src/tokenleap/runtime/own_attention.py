"""Attention over the KV slab for modules without Transformers' attention interface.

Bloom, Falcon and MPT compute attention themselves, with masks and ALiBi biases that the model makes
from the places of tokens in the cache. In a network's own copy of the module tree, `rebuild` wraps
their attention modules: the projections stay, and `slab_attention` attends, with biases by the
positions of nodes and of what they see. So token trees get the biases of their paths.

ALiBi: Press, Smith and Lewis, "Train Short, Test Long". The biases are rounded as Transformers'
modules round them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokenleap.runtime.attention import padded_rows, slab_attention
from tokenleap.runtime.inputs import PassInputs

__all__ = ["Bias", "rebuild"]

Alibi: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Biases [H, B, R, S] of H heads by the ranks [B, R, S] of what nodes see (`PassInputs.ranks`), and
the nodes' positions [B, R]."""


class Bias:
    """What all attention modules of a model add to the scores of a pass.

    Args:
        alibi: the model's ALiBi biases; None if it has none.
    """

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
    """Wrap the attention modules of a model, if Tokenleap has to compute their attention.

    Args:
        model: a network's own copy (see `share`). It is changed.

    Returns:
        What the wrapped modules read; None if the model's own modules do.
    """
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
    """Computes what an attention module does, with its projections.

    Args:
        module: the attention module.
        bias: shared by all layers.
    """

    WRAPS: str
    """Name of the module's class."""

    def __init__(self, module: nn.Module, bias: Bias) -> None:
        super().__init__()
        self.module: Any = module
        self.bias = bias


class _Bloom(_Wrapped):
    WRAPS = "BloomAttention"

    def forward(
        self, states: Tensor, residual: Tensor, *, layer_past: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """See `BloomAttention.forward`."""
        own = self.module
        qkv = own.query_key_value(states)  # [B, N, H * 3 * D]
        query, keys, values = qkv.unflatten(2, (own.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        keys, values = layer_past.update(keys, values, own.layer_idx)
        mixed = self.bias.attend(query, keys, values, own.inv_norm_factor)
        return own.dense(mixed) + residual, None


class _Mpt(_Wrapped):
    WRAPS = "MptAttention"

    def forward(self, states: Tensor, *, past_key_values: Any, **_: Any) -> tuple[Tensor, None]:
        """See `MptAttention.forward`."""
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
        """See `FalconAttention.forward`."""
        from transformers.models.falcon import modeling_falcon as falcon

        own, turn = self.module, cast("Any", falcon.apply_rotary_pos_emb)
        groups = own.num_kv_heads
        # Each key head has its queries before it and its values behind it: [B, G, N, H / G + 2, D].
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
    # The model's own biases come from a mask without a tree, and nobody reads them.
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
