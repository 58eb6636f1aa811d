"""The C structures that `decoder.cpp` is called with.

Each has the fields of the structure in `pass.h` that has its name without the C in front.
"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)

from tokenleap.runtime.native.pack import CLinear

__all__ = [
    "CBlockChain",
    "CBuffers",
    "CDecoder",
    "CDraw",
    "CFusion",
    "CLayer",
    "CNorm",
    "CPass",
    "CSource",
    "CTree",
    "CTrees",
]


class CNorm(Structure):
    """`Norm` in rows.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class CLayer(Structure):
    """`Layer` in pass.h."""

    _fields_ = (
        ("qkv", CLinear * 3),
        ("output", CLinear),
        ("source_query", CLinear),
        ("source_output", CLinear),
        ("gate_up", CLinear * 2),
        ("down", CLinear),
        ("attention_norm", CNorm),
        ("source_norm", CNorm),
        ("mlp_norm", CNorm),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention_after", c_void_p),
        ("mlp_after", c_void_p),
        ("index", c_int32),
        ("attends", c_int32),
        ("computes", c_int32),
        ("window", c_int32),
        ("angles", c_int32),
        ("unused", c_int32),
    )


class CDecoder(Structure):
    """`Decoder` in pass.h."""

    _fields_ = (
        ("layers", POINTER(CLayer)),
        ("head", CLinear),
        ("norm", CNorm),
        ("embedding", c_void_p),
        ("more", c_void_p),
        ("vocabulary", c_int64),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("heads", c_int32),
        ("key_heads", c_int32),
        ("width", c_int32),
        ("intermediate", c_int32),
        ("is_bf16", c_int32),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("embedding_scale", c_float),
        ("residual_scale", c_float),
        ("logit_scale", c_float),
        ("logit_cap", c_float),
        ("score_cap", c_float),
        ("activation", c_int32),
        ("whole_norms", c_int32),
        ("ungated", c_int32),
        ("norms_sums", c_int32),
        ("position_embedding", c_void_p),
        ("embedded_positions", c_int64),
        ("unplaced_token", c_int64),
        ("distance_bias", c_void_p),
        ("distances_before", c_int64),
        ("distances_behind", c_int64),
        ("distance_bias_stride", c_int64),
        ("norm_before_residual", c_int32),
        ("norm_output", c_int32),
        ("embedding_norm", CNorm),
        ("state_norm", c_void_p),
        ("mix", CLinear),
    )


class CBuffers(Structure):
    """`Buffers` in pass.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_slots", c_int64),
        ("value_slots", c_int64),
    )


class CSource(Structure):
    """`Source` in pass.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("span", c_int64),
        ("positions", c_int64),
    )


class CPass(Structure):
    """`Pass` in pass.h."""

    _fields_ = (
        ("nodes", c_int32),
        ("scored", c_int32),
        ("threads", c_int32),
        ("most_seen", c_int32),
        ("angles", c_int64),
        ("tokens", c_void_p),
        ("states", c_void_p),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("slots", c_void_p),
        ("prefixes", c_void_p),
        ("tail_starts", c_void_p),
        ("tails", c_void_p),
        ("scored_nodes", c_void_p),
        ("buffers", c_void_p),
        ("sources", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("logits", c_void_p),
        ("argmax", c_void_p),
        ("hidden", c_void_p),
        ("hidden_slots", c_void_p),
        ("workspace", c_void_p),
    )


class CTree(Structure):
    """`Tree` in pass.h."""

    _fields_ = (
        ("least_token", c_double),
        ("least_path", c_double),
        ("depth", c_int32),
        ("nodes", c_int32),
        ("drafted", c_int32),
        ("undecided", c_int32),
    )


class CDraw(Structure):
    """`Draw` in pass.h."""

    _fields_ = (
        ("key", c_uint64 * 2),
        ("trial", c_uint64),
        ("stream", c_uint64),
        ("position", c_uint64),
        ("temperature", c_float),
        ("min_p", c_float),
        ("top_p", c_float),
        ("top_k", c_int32),
        ("coupled", c_int32),
        ("unused", c_int32),
    )


class CTrees(Structure):
    """`Trees` in pass.h."""

    _fields_ = (
        ("trees", POINTER(CTree)),
        ("token_ids", c_void_p),
        ("widths", c_void_p),
        ("levels", c_int32),
        ("beam", c_int32),
        ("most", c_int32),
        ("widest", c_int32),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("probabilities", c_void_p),
        ("draws", c_void_p),
        ("sources", c_void_p),
        ("shown", c_void_p),
    )


class CBlockChain(Structure):
    """`BlockChain` in block_chain.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("added", c_void_p),
        ("rows", c_void_p),
        ("tokens", c_void_p),
        ("probabilities", c_void_p),
        ("levels", c_int32),
        ("vocabulary", c_int32),
        ("stride", c_int32),
        ("size", c_int32),
        ("is_bf16", c_int32),
        ("candidates", c_int32),
        ("most", c_float),
    )


class CFusion(Structure):
    """`Fusion` in pass.h."""

    _fields_ = (
        ("fc", CLinear),
        ("norms", c_void_p),
        ("hidden", c_void_p),
        ("inputs", c_void_p),
        ("states", c_void_p),
        ("layers", c_int32),
        ("nodes", c_int32),
        ("threads", c_int32),
        ("is_bf16", c_int32),
        ("epsilon", c_float),
    )
