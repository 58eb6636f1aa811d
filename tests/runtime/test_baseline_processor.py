"""The kernels compile and compute the same for processors without AVX2, and without tiles."""

from __future__ import annotations

import platform

import pytest
import torch

from tests.runtime.test_llama_family import scores
from tests.tiny import tiny_model
from tokenleap.runtime.llama import LlamaWeights
from tokenleap.runtime.native.network import NativeDecoder

BASELINE = ("-march=x86-64", "-mprefer-vector-width=128", "-O1")
"""SSE2, which every x86-64 processor has; the flags follow `-march=native`."""

WITHOUT_TILES = ("-mno-amx-tile", "-O1")
"""Where this processor has tiles, they multiply in bfloat16 (tiles.h)."""


@pytest.mark.slow
@pytest.mark.usefixtures("native_library")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86-64")
@pytest.mark.parametrize(
    ("flags", "quantization", "dtype"),
    [
        *(
            (BASELINE, quantization, dtype)
            for quantization in (None, "int8", "int4")
            for dtype in (torch.float32, torch.bfloat16)
        ),
        (WITHOUT_TILES, None, torch.bfloat16),
    ],
)
def test_the_same_logits_on_a_lesser_processor(
    flags: tuple[str, ...], quantization: str | None, dtype: torch.dtype
) -> None:
    model = tiny_model("llama", dtype=dtype)
    here = NativeDecoder(LlamaWeights(model), quantization)
    baseline = NativeDecoder(LlamaWeights(model), quantization, *flags)
    expected, found = scores(model, here).float(), scores(model, baseline).float()
    assert (found - expected).abs().mean() < 0.005 * expected.std()
