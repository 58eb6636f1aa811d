"""Makes the C structures of a decoder's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from tokenleap.runtime.llama import JointInput
from tokenleap.runtime.native.c_structures import CDecoder, CLayer, CNorm
from tokenleap.runtime.native.kept_weights import KeptWeights
from tokenleap.runtime.native.pack import CLinear, Format, PackedWeights
from tokenleap.runtime.native.packed import PackedDecoder, PackedLayer

__all__ = ["structures"]


def structures(packed: PackedDecoder, kept: KeptWeights) -> tuple[CDecoder, list[CLayer]]:
    """The structures of a decoder, to which its layers are not joined yet.

    Args:
        packed: its weights.
        kept: keeps the memory that the structures point to.
    """
    made = _Structures(packed, kept)
    layers = [made.layer(index) for index in range(packed.sizes.num_layers)]
    return made.decoder(), layers


class _Structures:
    def __init__(self, packed: PackedDecoder, kept: KeptWeights) -> None:
        self._packed, self._sizes, self._kept = packed, packed.sizes, kept

    def decoder(self) -> CDecoder:
        """Everything but the layers."""
        sizes = self._sizes
        traits = asdict(sizes.traits)
        del traits["learnt_scale"]  # rows have it already (`Network.extend`)
        return CDecoder(
            head=self._linear(self._packed.head()),
            norm=CNorm(self._float(sizes.norm)),
            embedding=self._kept.share(sizes.embedding.contiguous()).data_ptr(),
            vocabulary=len(sizes.embedding),
            hidden_size=sizes.hidden_size,
            heads=sizes.heads,
            key_heads=sizes.key_heads,
            width=sizes.width,
            intermediate=sizes.inner_size,
            is_bf16=sizes.embedding.dtype == torch.bfloat16,
            epsilon=sizes.epsilon,
            scaling=sizes.scaling,
            unplaced_token=-1,
            **traits,
            **self._joint(),
        )

    def _joint(self) -> dict[str, Any]:
        """The fields of `CDecoder` for a drafting head's input."""
        if (mix := self._packed.mix()) is not None:
            return {"mix": self._linear(mix)}
        joint = self._sizes.joint
        if not isinstance(joint, JointInput):
            return {}
        return {
            "embedding_norm": CNorm(self._float(joint.embedding_norm)),
            "state_norm": self._float(joint.state_norm),
            "norm_before_residual": joint.norm_before_residual,
            "norm_output": joint.norm_output,
        }

    def layer(self, index: int) -> CLayer:
        """A layer."""
        weights = self._packed.layer(index)
        window = weights.window
        assert window is None or not window.chunked, "no model of the Llama family has chunks"
        return CLayer(
            qkv=(CLinear * 3)(*self._beside(weights.qkv)),
            output=self._linear(weights.output),
            gate_up=(CLinear * 2)(*self._beside(weights.gate_up)),
            down=self._linear(weights.down),
            attention_norm=CNorm(self._float(weights.attention_norm)),
            query_norm=self._float(weights.query_norm),
            key_norm=self._float(weights.key_norm),
            mlp_norm=CNorm(self._float(weights.mlp_norm)),
            attention_after=self._float(weights.attention_after),
            mlp_after=self._float(weights.mlp_after),
            index=index,
            attends=True,
            computes=True,
            window=0 if window is None else window.size,
            angles=self._angles(weights),
        )

    def _angles(self, weights: PackedLayer) -> int:
        """The layer's table of rotary angles, or -1."""
        if not weights.rotates:
            return -1
        return int(self._sizes.local_rotary is not None and weights.window is not None)

    def _beside(self, parts: Sequence[PackedWeights]) -> list[CLinear]:
        """Linear layers that read the same input rows, which have what all formats need."""
        rows = max(part.format for part in parts)
        assert len(parts) == 1 or min(part.format for part in parts) > Format.BFLOAT16
        made = [self._linear(part) for part in parts]
        for layer in made:
            layer.rows = rows
        return made

    def _linear(self, packed: PackedWeights) -> CLinear:
        if packed.bias is not None:
            self._kept.keep(packed.bias)
        return replace(packed, weight=self._kept.share(packed.weight)).c

    def _float(self, weight: Tensor | None) -> int | None:
        return None if weight is None else self._kept.keep(weight.float().contiguous()).data_ptr()
