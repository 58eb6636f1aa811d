"""The kernels compile and compute the same for a processor without AVX2."""

from __future__ import annotations

import platform

import pytest
import torch

from foretoken.runtime.llama import LlamaWeights
from foretoken.runtime.native.decoder import NativeDecoder
from tests.runtime.test_lean import scores
from tests.tiny import tiny_model

BASELINE = ("-march=x86-64", "-mprefer-vector-width=128", "-O1")
"""SSE2, which every x86-64 processor has; the flags follow `-march=native`."""


@pytest.mark.slow
@pytest.mark.usefixtures("native_library")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86-64")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_logits_without_avx2(quantization: str | None, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    here = NativeDecoder(LlamaWeights(model), quantization)
    baseline = NativeDecoder(LlamaWeights(model), quantization, *BASELINE)
    expected, found = scores(model, here).float(), scores(model, baseline).float()
    assert (found - expected).abs().mean() < 0.005 * expected.std()
