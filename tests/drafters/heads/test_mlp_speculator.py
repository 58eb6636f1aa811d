"""`mlp_speculator`: IBM's layout, and the mathematics of its states."""

from __future__ import annotations

import json
import math
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
from tests.heads import state_config, state_net
from tests.tiny import tiny_model
from tokenleap.drafters.heads.layouts import StateFolder
from tokenleap.drafters.heads.state_net import MlpSpeculatorConfig

E, INNER, V, K = 64, 80, 96, 3


def fields_of(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": E,
        "inner_dim": INNER,
        "vocab_size": V,
        "n_predict": K,
        "n_candidates": 5,
        "top_k_tokens_per_head": [4, 3, 2],
        "tie_weights": False,
        "scale_input": False,
        **fields,
    }


def tensors(inner: int = INNER) -> dict[str, Tensor]:
    """One set of weights for each depth."""
    torch.manual_seed(1)
    found: dict[str, Tensor] = {}
    for depth in range(K):
        found[f"emb.{depth}.weight"] = torch.randn(V, inner) / 9
        found[f"proj.{depth}.weight"] = torch.randn(inner, inner if depth else E) / 9
        found[f"head.{depth}.weight"] = torch.randn(V, inner)
        found[f"ln.{depth}.weight"] = torch.randn(inner)
        found[f"ln.{depth}.bias"] = torch.randn(inner)
    return found


def tied(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights at every depth, but for the first projection."""
    sources = {f"proj.{depth}.weight": "proj.1.weight" for depth in range(1, K)}
    sources["proj.0.weight"] = "proj.0.weight"
    return {
        name: given[sources.get(name, f"{name.split('.')[0]}.0.{name.split('.')[2]}")].clone()
        for name in given
    }


def write(folder: Path, given: dict[str, Tensor], **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(given, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields_of(**fields)))
    return folder


def expected(given: dict[str, Tensor], hidden: Tensor, tokens: list[int], scaled: bool) -> Tensor:
    """The computation of IBM's implementation, written out; [K, V]."""

    def normed(x: Tensor) -> Tensor:
        return x * (x.pow(2).mean() + 1e-6).rsqrt()

    inner = len(given["ln.0.weight"])
    state_weight = 0.5 ** (0.5 / K)
    emb_weight = math.sqrt((1 - state_weight**2) * (inner / 2))
    state = normed(hidden) / 2**0.5 if scaled else hidden
    found = []
    for depth, token in enumerate(tokens):
        state = given[f"proj.{depth}.weight"] @ state
        state = state + emb_weight / state_weight * given[f"emb.{depth}.weight"][token]
        state = normed(state) * given[f"ln.{depth}.weight"] + given[f"ln.{depth}.bias"]
        state = F.gelu(state)
        found.append(given[f"head.{depth}.weight"] @ state)
    return torch.stack(found)


def assert_computes(folder: Path, given: dict[str, Tensor], scaled: bool = False) -> None:
    """That the head of a folder computes what is expected of these weights."""
    net = StateFolder.read(folder, "mlp_speculator").net(*[torch.empty(0, E)] * 2)
    hidden, tokens = torch.randn(E), [5, 17, 60]
    found = net(hidden, torch.tensor(tokens)).detach()
    torch.testing.assert_close(found, expected(given, hidden, tokens, scaled), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["", "speculator."])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("form", ["untied", "tied, repeated", "tied, once"])
def test_the_published_layout(form: str, scaled: bool, prefix: str, tmp_path: Path) -> None:
    every = tensors() if form == "untied" else tied(tensors())
    first = ("emb.0", "head.0", "ln.0", "proj.0", "proj.1")
    kept = {name: x for name, x in every.items() if "once" not in form or name.startswith(first)}
    folder = write(
        tmp_path,
        {prefix + name: tensor for name, tensor in kept.items()},
        tie_weights=form != "untied",
        scale_input=scaled,
    )
    assert_computes(folder, every, scaled)


def test_an_inner_size_of_0_is_the_hidden_size(tmp_path: Path) -> None:
    assert_computes(write(tmp_path, tensors(E), inner_dim=0), tensors(E))


def shards(folder: Path, **map_of: str) -> Path:
    """The weights in two files with an index."""
    write(folder, tensors())
    (folder / "model.safetensors").unlink()
    every = tensors()
    parts: dict[str, dict[str, Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, tensor) in enumerate(every.items()):
        parts[list(parts)[number % 2]][name] = tensor
    for name, part in parts.items():
        save_file(part, folder / name)
    weight_map = {tensor: name for name, part in parts.items() for tensor in part} | map_of
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_several_files(tmp_path: Path) -> None:
    assert_computes(shards(tmp_path), tensors())


@pytest.mark.parametrize("tree", [None, [2, 2, 1], "dynamic"], ids=str)
def test_a_published_head_drafts(tree: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, tensors())
    assert_drafts(folder, "mlp_speculator", [1, 2, 3], **({} if tree is None else {"tree": tree}))


FAULTS: dict[str, Fault] = {
    "no sizes": (
        text('{"model_type": "mlp_speculator"}'),
        "vocab_size: field required|emb_dim: field required",
    ),
    "no heads": (config(n_predict=0), "n_predict"),
    "a head more": (config(n_predict=4), "is missing"),
    "a head less": (config(n_predict=2), "is not part of"),
    "another inner size": (config(inner_dim=60), "belong together"),
    "another target": (config(emb_dim=60), "hidden size 60"),
    "no weights": (deleted("model.safetensors"), "does not exist"),
    "a shard that is missing": (
        lambda f: (shards(f) / "b.safetensors").unlink(),
        "lacks 1 of its 2 weight files, b.safetensors",
    ),
    "a shard elsewhere": (lambda f: shards(f, x="../a.safetensors"), "should match pattern"),
    "no map": (
        lambda f: (shards(f) / "model.safetensors.index.json").write_text("{}"),
        "weight_map",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(fault: str, tmp_path: Path) -> None:
    assert_refused(
        write(tmp_path, tensors()), FAULTS[fault], partial(load_head, method="mlp_speculator")
    )


def test_the_target_s_embedding_has_the_hidden_size() -> None:
    assert state_config("mlp_speculator").fault() is None
    fault = state_config("mlp_speculator", inner_size=80).fault()
    assert fault is not None
    assert "inner_size" in fault


def test_the_target_s_embedding_has_the_scale_of_published_ones() -> None:
    """The mixture does not depend on how large the target's embeddings are."""
    given = state_config("mlp_speculator")
    assert isinstance(given, MlpSpeculatorConfig)
    net = state_net("mlp_speculator", given, tiny_model())
    hidden, tokens = torch.randn(2, E), torch.tensor([3, 4])
    before = net.start(hidden, tokens)
    net.embedding = net.embedding * 7
    torch.testing.assert_close(net.start(hidden, tokens), before, atol=1e-4, rtol=1e-4)
