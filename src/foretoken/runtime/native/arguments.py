"""The C structures that `decoder.cpp` is called with, and the arrays that they point to.

`decoder.py` fills them. Each has the fields of the structure of the same name in `pass.h`, without
the C in front.
"""

from __future__ import annotations

from array import array
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from itertools import chain, repeat

from foretoken.runtime.inputs import PassInputs
from foretoken.runtime.native.pack import CLinear

__all__ = ["CBuffers", "CDecoder", "CLayer", "CPass", "NodeArrays"]


class CLayer(Structure):
    """`Layer` in pass.h."""

    _fields_ = (
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("index", c_int32),
        ("attends", c_int32),
        ("computes", c_int32),
        ("unused", c_int32),
    )


class CDecoder(Structure):
    """`Decoder` in pass.h."""

    _fields_ = (
        ("layers", POINTER(CLayer)),
        ("head", CLinear),
        ("norm", c_void_p),
        ("embedding", c_void_p),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("heads", c_int32),
        ("key_heads", c_int32),
        ("width", c_int32),
        ("intermediate", c_int32),
        ("is_bf16", c_int32),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("norm_before_residual", c_int32),
        ("norm_output", c_int32),
        ("embedding_norm", c_void_p),
        ("state_norm", c_void_p),
    )


class CBuffers(Structure):
    """`Buffers` in pass.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_slots", c_int64),
        ("value_slots", c_int64),
    )


class CPass(Structure):
    """`Pass` in pass.h."""

    _fields_ = (
        ("nodes", c_int32),
        ("need_logits", c_int32),
        ("threads", c_int32),
        ("most_seen", c_int32),
        ("tokens", c_void_p),
        ("states", c_void_p),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("slots", c_void_p),
        ("prefixes", c_void_p),
        ("tail_starts", c_void_p),
        ("tails", c_void_p),
        ("buffers", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("logits", c_void_p),
        ("argmax", c_void_p),
        ("hidden", c_void_p),
        ("hidden_slots", c_void_p),
        ("workspace", c_void_p),
    )


class NodeArrays:
    """The nodes of all rows, as the arrays that `Pass` points to."""

    def __init__(self, inputs: PassInputs) -> None:
        rows = [row for row in inputs.rows if len(row)]
        self._tokens = array("q", chain.from_iterable(row.tokens for row in rows))
        numbers = [range(row.start, row.start + len(row)) for row in rows]
        self._ints = {
            "positions": array("i", chain.from_iterable(row.positions for row in rows)),
            "prefixes": array("i", chain.from_iterable(row.prefixes for row in rows)),
            "slots": array("i", chain.from_iterable(numbers)),
            "rows": array("i"),
            "tails": array("i"),
        }
        starts = array("i", [0])
        for index, row in enumerate(inputs.rows, inputs.first):
            self._ints["rows"].extend(repeat(index, len(row)))
            if row.tails:
                for tail in row.tails:
                    self._ints["tails"].extend(tail)
                    starts.append(len(self._ints["tails"]))
            else:
                starts.extend(repeat(starts[-1], len(row)))
        self._ints["tail_starts"] = starts

    def __len__(self) -> int:
        return len(self._tokens)

    def addresses(self) -> dict[str, int]:
        """Field of `Pass` -> address of its array; valid as long as this object lives."""
        found = {name: numbers.buffer_info()[0] for name, numbers in self._ints.items()}
        return {"tokens": self._tokens.buffer_info()[0], **found}
