"""`medusa`: the published layouts, and the mathematics of a head."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.drafters.heads.folders import (
    Fault,
    assert_drafts,
    assert_refused,
    config,
    deleted,
    load_head,
    text,
)
from tests.tiny import tiny_model
from tokenleap import LLM, TokenleapError
from tokenleap.drafters.heads.layouts import StateFolder

E, V, HEADS = 64, 96, 3
NAMED = {"base_model_name_or_path": "lab/tiny"}
FASTER = {**NAMED, "medusa_num_heads": HEADS}


def fasterdecoding(layers: int = 1, heads: int = HEADS) -> dict[str, Tensor]:
    """Tensors of FasterDecoding's layout."""
    torch.manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(E, E) / 8
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(E)
        tensors[f"{head}.{layers}.weight"] = torch.randn(V, E) / 8
    return tensors


def write(folder: Path, name: str, tensors: Any, fields: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    if name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def read(folder: Path) -> StateFolder:
    return StateFolder.read(folder, "medusa")


def logits_of(file: StateFolder, hidden: Tensor) -> Tensor:
    """[heads, V or Vd] of one hidden state [E]."""
    weights = tiny_model().get_input_embeddings().weight.detach()  # type: ignore[operator]
    rows = tiny_model().get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    net = file.net(weights, rows)
    found: Tensor = net(hidden, torch.zeros(file.config.num_heads, dtype=torch.long)).detach()
    return found


def expected(tensors: dict[str, Tensor], hidden: Tensor, layers: int = 1) -> Tensor:
    """The published head, written out."""
    found = []
    for head in range(HEADS):
        x = hidden
        for layer in range(layers):
            inner = tensors[f"{head}.{layer}.linear.weight"] @ x
            x = x + F.silu(inner + tensors[f"{head}.{layer}.linear.bias"])
        found.append(tensors[f"{head}.{layers}.weight"] @ x)
    return torch.stack(found)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("layers", [1, 2])
def test_fasterdecoding(name: str, layers: int, prefix: str, tmp_path: Path) -> None:
    tensors = fasterdecoding(layers)
    fields = {**NAMED, "medusa_num_heads": HEADS, "medusa_num_layers": layers}
    named = {prefix + key: tensor for key, tensor in tensors.items()}
    file = read(write(tmp_path, name, named, fields))
    assert file.verifier.name_or_path == "lab/tiny"
    hidden = torch.randn(E)
    torch.testing.assert_close(logits_of(file, hidden), expected(tensors, hidden, layers))


def test_more_heads_than_the_configuration_says(tmp_path: Path) -> None:
    """As in the published Vicuna heads, whose configuration says 2 of 5."""
    fields = {**NAMED, "medusa_num_heads": 2}
    file = read(write(tmp_path, "medusa_lm_head.pt", fasterdecoding(), fields))
    assert file.config.num_heads == HEADS


def vllm(rows: int = V, *, bias: bool = True) -> dict[str, Tensor]:
    """The same head in vLLM's layout, its output layers cut to the first `rows` tokens."""
    found: dict[str, Tensor] = {}
    for name, tensor in fasterdecoding().items():
        head, layer, *part = name.split(".")
        if layer == "1":
            found[f"lm_heads.{head}.weight"] = tensor[:rows].clone()
        elif bias or part[-1] == "weight":
            found[f"blocks.{head}.layers.0.{part[-1]}"] = tensor
    return found


def vllm_fields(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "hidden_size": E,
        "vocab_size": V,
        "num_heads": HEADS,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        **fields,
    }


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm(prefix: str, tmp_path: Path) -> None:
    named = {prefix + key: tensor for key, tensor in vllm().items()}
    file = read(write(tmp_path, "model.safetensors", named, vllm_fields()))
    hidden = torch.randn(E)
    torch.testing.assert_close(logits_of(file, hidden), expected(fasterdecoding(), hidden))


@pytest.mark.parametrize("whole", [True, False], ids=["whole rows", "rows of the map"])
def test_vllm_truncated(whole: bool, tmp_path: Path) -> None:
    """The map may be in any order; the head drafts the same tokens with the same logits."""
    token_map = torch.tensor([7, 3, 90, 41])
    tensors = {**vllm(), "token_map": token_map}
    if not whole:
        for head in range(HEADS):
            rows = tensors[f"lm_heads.{head}.weight"]
            tensors[f"lm_heads.{head}.weight"] = rows[token_map].clone()
    fields = vllm_fields(truncated_vocab_size=4)
    file = read(write(tmp_path, "model.safetensors", tensors, fields))
    assert file.draft_tokens.tolist() == [3, 7, 41, 90]
    hidden = torch.randn(E)
    every = expected(fasterdecoding(), hidden)
    torch.testing.assert_close(logits_of(file, hidden), every[:, [3, 7, 41, 90]])


def test_vllm_with_the_target_s_own_output_layer(tmp_path: Path) -> None:
    tensors = {name: x for name, x in vllm().items() if not name.startswith("lm_heads")}
    tensors["lm_head.weight"] = torch.full((V, E), torch.nan)  # not read
    fields = vllm_fields(original_lm_head=True)
    file = read(write(tmp_path, "model.safetensors", tensors, fields))
    rows = tiny_model().get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    hidden = torch.randn(E)
    given = {**fasterdecoding(), **{f"{head}.1.weight": rows for head in range(HEADS)}}
    torch.testing.assert_close(logits_of(file, hidden), expected(given, hidden))


@pytest.mark.parametrize("tree", [None, [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]], ids=str)
@pytest.mark.parametrize("layout", ["fasterdecoding", "vllm"])
def test_published_heads_draft(layout: str, tree: Any, tmp_path: Path) -> None:
    """Chains, and Medusa's product tree: all nodes of a depth have the same children."""
    if layout == "vllm":
        folder = write(tmp_path, "model.safetensors", vllm(), vllm_fields())
    else:
        folder = write(tmp_path, PT, fasterdecoding(), FASTER)
    output = assert_drafts(folder, "medusa", [1, 2, 3], **({} if tree is None else {"tree": tree}))
    step = next(iter(output.trace))
    assert len(step.drafted) == (3 if tree is None else 6)
    if tree is not None:
        assert step.drafted[2] == step.drafted[4]  # the best child of both nodes of depth 1


class Foreign:
    """Something that a pickle could run."""

    def __reduce__(self) -> Any:
        return print, ("loaded",)


PT = "medusa_lm_head.pt"


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = torch.load(folder / PT, weights_only=True)
    edit(tensors)
    torch.save(tensors, folder / PT)


FAULTS: dict[str, Fault] = {
    "no weights": (deleted(PT), "medusa_lm_head.pt does not exist"),
    "truncated": (lambda f: (f / PT).write_bytes((f / PT).read_bytes()[:-900]), "cannot be read"),
    "empty": (text("", PT), "cannot be read"),
    "text": (text("version https://git-lfs", PT), "cannot be read"),
    "a pickle that runs": (lambda f: torch.save({"x": Foreign()}, f / PT), "never loaded; save"),
    "a bare pickle": (
        lambda f: (f / PT).write_bytes(pickle.dumps({"x": 1})),
        "cannot be read|than",
    ),
    "no tensors": (lambda f: torch.save([1, 2], f / PT), "something else than tensors"),
    "a number for all": (
        lambda f: change(f, lambda t: t.update({"0.1.weight": torch.zeros(()).expand(96, 64)})),
        "'0.1.weight' has other numbers than the file holds",
    ),
    "a sparse tensor": (
        lambda f: change(f, lambda t: t.update({"0.1.weight": torch.ones(96, 64).to_sparse()})),
        "'0.1.weight' has other numbers than the file holds",
    ),
    "no output layer": (lambda f: change(f, lambda t: t.pop("0.1.weight")), "output layer is miss"),
    "a head less": (lambda f: change(f, lambda t: t.pop("2.1.weight")), "'lm_heads.2.weight' is"),
    "two blocks": (config(medusa_num_layers=2), "output layer is missing"),
    "no number": (config(medusa_num_heads="x"), "medusa_num_heads: .*integer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_fasterdecoding_s_layout(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, PT, fasterdecoding(), FASTER)
    assert_refused(folder, FAULTS[fault], partial(load_head, method="medusa"))
    assert "loaded" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        (None, "'token_map' of the 4 draft tokens is missing"),
        ([1, 2, 3], "4 different token ids"),
        ([1, 2, 3, 3], "4 different token ids"),
        ([1, 2, 3, 96], "below 96"),
        ([-1, 2, 3, 4], "below 96"),
        ([0.5, 2.0, 3.0, 4.0], "4 different token ids"),
    ],
)
def test_faults_of_vllm_s_map(token_map: Any, message: str, tmp_path: Path) -> None:
    tensors = vllm()
    if token_map is not None:
        tensors["token_map"] = torch.tensor(token_map)
    write(tmp_path, "model.safetensors", tensors, vllm_fields(truncated_vocab_size=4))
    with pytest.raises(TokenleapError, match=message):
        read(tmp_path)


def test_another_target_is_refused(tmp_path: Path) -> None:
    write(tmp_path, PT, fasterdecoding(), FASTER)
    with pytest.raises(TokenleapError, match="trained for lab/tiny with a vocabulary of 96"):
        LLM(tiny_model(vocab_size=100), speculative_config={"method": "medusa", "model": tmp_path})
