from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.public_seq2seq import (
    converted_fairseq,
    converted_stress,
    fairseq_words,
    joint_vocabulary,
)
from torch import nn

from tokenleap import LLM, SamplingParams, models

E, V = 32, 20


class Marker(nn.Module):
    """`nn.Transformer` between an embedding and an output layer, as the stress marker has it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(V, E), torch.randn(1, 16, E)
        self.transformer = nn.Transformer(E, 8, 4, 4, 64, batch_first=True)
        self.output_proj = nn.Linear(E, V)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        rows: Any = self.table(tokens)
        found: torch.Tensor = rows * E**0.5 + self.positions[:, : tokens.shape[1]]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        own = {n: w for n, w in self.state_dict().items() if not n.startswith("table")}
        embedding = {"embed.char_embed.weight": self.table.weight.detach()}
        return {**own, **embedding, "embed.pos_encoding": self.positions}


@torch.inference_mode()
def test_a_transformer_of_pytorch() -> None:
    torch.manual_seed(0)
    marker = Marker().train(False)
    source, text = torch.randint(0, V, (1, 12)), torch.randint(0, V, (1, 7))
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    states = marker.transformer(marker.embed(source), marker.embed(text), tgt_mask=mask)
    model: Any = converted_stress(marker.weights())
    found = model(input_ids=source, decoder_input_ids=text).logits
    torch.testing.assert_close(found, marker.output_proj(states), rtol=0, atol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain, copied = (
        LLM(model, speculative_config=config).generate([source[0].tolist()], params)[0].token_ids
        for config in ({"method": "none"}, {"method": "copy", "copy_insertions": True})
    )
    assert plain == copied


def test_a_checkpoint_of_fairseq(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes need not be there. Source tokens are read, and never written."""
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for side, rows in (("encoder", 16), ("decoder", 24)):
        weights[f"{side}.embed_tokens.weight"] = torch.randn(rows, E)
        weights[f"{side}.version"] = torch.tensor([3.0])
        attentions = ["self_attn", *(["encoder_attn"] if side == "decoder" else [])]
        layer = f"{side}.layers.0"
        sizes = {
            f"{layer}.{a}.{p}_proj": (E, E) for a in attentions for p in ("q", "k", "v", "out")
        }
        sizes |= {f"{layer}.fc1": (64, E), f"{layer}.fc2": (E, 64)}
        norms = [f"{layer}.{a}_layer_norm" for a in (*attentions, "final")]
        for name, shape in sizes.items():
            weights[f"{name}.weight"] = torch.randn(shape) * E**-0.5
            weights[f"{name}.bias"] = torch.randn(shape[0])
        for name in (*norms, f"{side}.layer_norm"):
            weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.rand(E), torch.randn(E)
    weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    module: Any = ModuleType("fairseq_options")
    exec("class Options: pass", module.__dict__)
    module.Options.__module__ = "fairseq_options"
    monkeypatch.setitem(sys.modules, "fairseq_options", module)
    torch.save({"args": module.Options(), "model": weights}, tmp_path / "best.pt")
    monkeypatch.delitem(sys.modules, "fairseq_options")

    converted_fairseq(tmp_path / "best.pt", tmp_path / "model")
    model: Any = models.load_model(tmp_path / "model", torch.float32, torch.device("cpu"))
    assert model.get_output_embeddings().weight[24:].abs().max() == 0
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=40, ignore_eos=True)
    llm = LLM(model)
    (output,) = llm.generate([[28, 30, 2]], params)
    assert max(output.token_ids) < 24
    with torch.inference_mode():
        one, other = (
            model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[2, 5]])).logits
            for source in ([28, 30, 2], [35, 31, 2])
        )
    assert not torch.allclose(one, other, atol=1e-2)


def test_words_and_their_numbers(tmp_path: Path) -> None:
    for name, words in (("source", "a b@@ c"), ("target", "x y z x1 x2")):
        lines = [f"{word} 7\n" for word in words.split()]
        (tmp_path / name).write_text("".join(lines))
    reads, writes = joint_vocabulary(tmp_path / "source", tmp_path / "target")
    assert writes == {"x": 4, "y": 5, "z": 6, "x1": 7, "x2": 8}
    assert reads == {"a": 20, "b@@": 21, "c": 22}  # after 16 rows of outputs
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nl o\nlo w</w>\ne r</w>\n")
    assert fairseq_words("low lower", codes) == ["low", "lo@@", "w@@", "er"]
