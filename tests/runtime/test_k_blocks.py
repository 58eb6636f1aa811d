"""Kernels of K-quants compute products of quantized numbers, with the same bits for any rows."""

from __future__ import annotations

from array import array
from ctypes import byref

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.runtime.test_llama_family import PORTABLE
from tokenleap.runtime.native.build import library
from tokenleap.runtime.native.network import checked
from tokenleap.runtime.native.pack import K_FORMATS, PackedWeights, pack_k_blocks
from tokenleap.runtime.native.structures import CFusion, KeptWeights

pytestmark = pytest.mark.usefixtures("native_library")

SIZES = {Kind.Q4_K: 144, Kind.Q5_K: 176, Kind.Q6_K: 210}
SIZE = 512


def random_blocks(kind: Kind) -> tuple[Tensor, Tensor]:
    """The bytes [SIZE, bytes of a row] of a random layer, and its values [SIZE, SIZE]."""
    random = np.random.default_rng(int(kind))
    blocks = random.integers(0, 256, (SIZE * SIZE // 256, SIZES[kind])).astype(np.uint8)
    scales = blocks[:, -2:] if kind is Kind.Q6_K else blocks[:, :4]
    scales.view(np.float16)[:] = random.uniform(-1e-3, 1e-3, scales.view(np.float16).shape)
    rows = blocks.reshape(SIZE, -1)
    return torch.from_numpy(rows), torch.from_numpy(gguf.dequantize(rows, kind).copy())


def product(packed: PackedWeights, inputs: Tensor, *flags: str) -> Tensor:
    """[n, SIZE] the layer's outputs."""
    native = checked(library(*flags))
    count = len(inputs)
    outputs = torch.empty(count, SIZE)
    kept = KeptWeights()
    fc = kept.linear(packed)
    rows = torch.empty(count * native.tokenleap_row_bytes(byref(fc)), dtype=torch.uint8)
    addresses = array("Q", [row.data_ptr() for row in inputs])
    arguments = CFusion(
        fc=fc,
        norms=None,
        hidden=addresses.buffer_info()[0],
        inputs=rows.data_ptr(),
        states=outputs.data_ptr(),
        layers=1,
        nodes=count,
        threads=1,
        is_bf16=False,
        epsilon=0.0,
    )
    native.tokenleap_fuse(byref(arguments))
    return outputs


def rounded(inputs: Tensor) -> Tensor:
    """Inputs as the kernels round them: int8 in groups of 32."""
    groups = inputs.view(len(inputs), -1, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales).round() * scales).view_as(inputs)


@pytest.mark.parametrize("flags", [(), PORTABLE], ids=["processor", "portable"])
@pytest.mark.parametrize("kind", K_FORMATS)
def test_products_of_their_own_numbers(kind: Kind, flags: tuple[str, ...]) -> None:
    rows, values = random_blocks(kind)
    packed = pack_k_blocks(kind, rows, SIZE)
    assert packed is not None
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(13, SIZE, generator=generator)
    expected = rounded(inputs).double() @ values.double().T
    found = product(packed, inputs, *flags)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    for count in (1, 2, 5, 7, 12):
        assert torch.equal(product(packed, inputs[:count], *flags), found[:count])
    assert torch.equal(found, product(packed, inputs))  # whatever the processor


@pytest.mark.parametrize("kind", K_FORMATS)
def test_a_factor_that_is_not_finite_is_refused(kind: Kind) -> None:
    rows, _ = random_blocks(kind)
    place = slice(208, 210) if kind is Kind.Q6_K else slice(0, 2)
    rows[5, place] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    assert pack_k_blocks(kind, rows, SIZE) is None
