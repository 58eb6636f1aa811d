"""Bytes by shapes: what they say is what packing keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.heads import published_medusa
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap.bench.machine import BYTES, weight_bytes
from tokenleap.runtime.choices import QUANTIZATIONS
from tokenleap.runtime.llama import LinearWeights
from tokenleap.runtime.native.pack import Format, pack


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_weight(quantization: str) -> None:
    layer = LinearWeights(torch.randn(64, 96), None)
    packed = pack(layer, Format[quantization.upper()]).weight
    assert packed.numel() * packed.element_size() == 64 * 96 * BYTES[quantization]


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_pass(tmp_path: Path, tied: bool) -> None:
    """Matrices are quantized, the head to int8, norms not at all.

    An embedding that is only looked up does not count.
    """
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    named = dict(model.named_parameters())
    if not tied:
        del named["model.embed_tokens.weight"]
    head = model.get_output_embeddings().weight.numel()  # type: ignore[no-untyped-call]
    matrices = sum(p.numel() for p in named.values() if p.dim() > 1)
    others = sum(p.numel() for p in named.values() if p.dim() == 1)
    assert weight_bytes(tmp_path, 2) == 2 * (matrices + others)
    for quantization, each in BYTES.items():
        expected = (matrices - head) * each + head * BYTES["int8"] + 2 * others
        assert weight_bytes(tmp_path, 2, quantization) == expected


def test_the_weights_of_a_published_head(tmp_path: Path) -> None:
    folder = published_medusa(tmp_path / "head", size=32)
    assert weight_bytes(folder, 4) == 2 * 4 * (32 * 32 + 32 + 32 * VOCAB_SIZE)
