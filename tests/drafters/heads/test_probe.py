"""A head tells the model that it was trained for, and the layers that it is to read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.drafters.heads.test_eagle import CONFIGS, levels
from tests.heads import (
    feature_config,
    save_head,
    state_config,
    state_net,
    tiny_config,
    tiny_net,
)
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tokenleap import LLM, CompatibilityError, TokenleapError
from tokenleap.drafters.heads import probe
from tokenleap.drafters.heads.eagle import check_folder, load_parts, record_probe
from tokenleap.drafters.heads.layouts import EagleFolder
from tokenleap.drafters.heads.probe import Probe, accepted, look, our_text
from tokenleap.drafters.heads.shipped import shipped_head
from tokenleap.runtime.target import Target

TEXT = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0)).tolist()
LAYERS = (0, 1, 2)


def recorded(folder: Path, share: float | None = None, config: Any = None) -> Path:
    """A random head with a record of its target, which it predicts by chance."""
    model = tiny_model()
    net = tiny_net(config or tiny_config(), model)
    seen = look(Target(model), TEXT, net.config.aux_layers)
    found = Probe.of(seen, net)
    save_head(folder, net, **Probe(found.tokens, found.follows, share or found.accepted).note())
    return folder


def load(
    folder: Path, method: str = "eagle", model: PreTrainedModel | None = None, **f: Any
) -> LLM:
    config = {"method": method, "model": str(folder)}
    return LLM(model or tiny_model(), speculative_config=config, **f)


@pytest.mark.parametrize("form", CONFIGS)
def test_what_is_counted_are_first_levels(form: str, tmp_path: Path) -> None:
    model = tiny_model(head_dim=32)
    net = tiny_net(CONFIGS[form], model)
    layers = net.config.aux_layers
    target = Target(model)
    seen = look(target, TEXT, layers)
    hidden = torch.stack([seen.hidden[layer] for layer in layers], 1)
    pad = torch.zeros(10, dtype=torch.long)
    first, *_ = levels(net, torch.cat([hidden, hidden[:10]]), torch.cat([torch.tensor(TEXT), pad]))
    drafted = net.draft_tokens[first[: len(TEXT) - 1].argmax(-1)]
    share = (drafted == seen.follows[1:]).float().mean()
    assert accepted(net, seen, layers) == pytest.approx(float(share))
    assert target.num_rows == 0


@pytest.mark.parametrize(
    "fields", [{}, {"runtime": "torch"}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str
)
def test_other_runtimes_and_dtypes_are_the_same_model(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    folder, given = recorded(tmp_path), dict(fields)
    kind = getattr(torch, given.pop("dtype", "float32"))
    load(folder, model=tiny_model(dtype=kind), **given)


def test_another_model_of_the_same_sizes_is_refused(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    with pytest.raises(CompatibilityError, match="trained for tiny, and this is another") as caught:
        load(folder, model=tiny_model(seed=1))
    assert "\n" not in str(caught.value)
    assert "agree on" in str(caught.value)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_heads_without_attention_tell_it_too(method: str, tmp_path: Path) -> None:
    model = tiny_model()
    note = Probe.of(look(Target(model), TEXT)).note()
    save_head(tmp_path, state_net(method, state_config(method), model), **note)
    load(tmp_path, method)
    with pytest.raises(CompatibilityError, match="this is another"):
        load(tmp_path, method, tiny_model(seed=1))


@pytest.mark.parametrize(
    "damage",
    [
        None,
        3,
        {"tokens": "1 2"},
        {"tokens": "1 2", "follows": "1"},
        {"tokens": "1 2 3", "follows": "1 2"},
        {"tokens": "1 999", "follows": "1 2"},
        {"tokens": "1 x", "follows": "1 2"},
        {"tokens": "1 2", "follows": "1 2", "accepted": 2},
    ],
    ids=str,
)
def test_a_damaged_record(damage: Any, tmp_path: Path) -> None:
    save_head(tmp_path, tiny_net(tiny_config(), tiny_model()), probe=damage)
    with pytest.raises(TokenleapError, match=r"config\.json: ") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


# Layers


def pretend(monkeypatch: pytest.MonkeyPatch, right: Sequence[int], share: float) -> None:
    """A head that predicts a share of the tokens from these layers, and few from others."""

    def counted(net: Any, seen: Any, layers: Sequence[int]) -> float:
        return share if tuple(layers) == tuple(right) else 0.02

    monkeypatch.setattr(probe, "accepted", counted)


@pytest.mark.parametrize("record", [False, True])
def test_wrong_layers_are_told(
    record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the record, or by our text for a head of somebody else."""
    folder = recorded(tmp_path, 0.6)
    if not record:
        save_head(folder, tiny_net(tiny_config(), tiny_model()))
    pretend(monkeypatch, (0, 1, 0), 0.6)
    with pytest.warns(RuntimeWarning, match=r"\[0, 1, 2\].* 2%.*\[0, 1, 0\] .* 60%") as caught:
        load(folder, tokenizer=tiny_tokenizer())
    (warning,) = caught
    assert "\n" not in str(warning.message)


@pytest.mark.parametrize("config", [tiny_config(), feature_config()], ids=["EAGLE-3", "EAGLE-1"])
def test_what_predicts_far_less_than_it_did_is_told(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(tmp_path, 0.6, config)
    pretend(monkeypatch, (), 0)
    with pytest.warns(RuntimeWarning, match="its weights may be damaged"):
        load(folder)


def test_nobody_chooses_the_layers_of_eagle_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(tmp_path, 0.6, feature_config())
    pretend(monkeypatch, (0,), 0.6)
    with pytest.warns(RuntimeWarning, match="its weights may be damaged"):
        load(folder)


@pytest.mark.parametrize("found", [0.31, 0.6])
def test_a_head_that_is_as_good_as_it_was_is_not_compared(
    found: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(tmp_path, 0.6)
    pretend(monkeypatch, LAYERS, found)
    load(folder)


@pytest.mark.parametrize("config", [tiny_config(), feature_config()], ids=["EAGLE-3", "EAGLE-1"])
def test_a_bad_head_of_somebody_else_is_nobody_s_business(config: Any, tmp_path: Path) -> None:
    save_head(tmp_path, tiny_net(config, tiny_model()))
    load(tmp_path, tokenizer=tiny_tokenizer())


def test_without_a_text_nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_head(tmp_path, tiny_net(tiny_config(), tiny_model()))
    monkeypatch.setattr(probe, "look", None)
    load(tmp_path)  # no tokenizer
    load(tmp_path, tokenizer=tiny_tokenizer(), max_model_len=40)  # the text is longer


# Recording


def test_a_record_is_added(tmp_path: Path) -> None:
    model, folder = tiny_model(), tmp_path / "head"
    save_head(folder, tiny_net(tiny_config(), model), seed=3)
    before = json.loads((folder / "config.json").read_text())
    target, tokenizer = Target(model), tiny_tokenizer()
    found = check_folder(folder, target, tokenizer)
    record_probe(folder, found)
    after = json.loads((folder / "config.json").read_text())
    assert after.pop("tokenleap") == {**before.pop("tokenleap"), **found.note()}
    assert after == before
    assert [int(t) for t in found.tokens.split()] == our_text(tokenizer)
    load(folder)
    other = tiny_model(seed=1)
    with pytest.raises(CompatibilityError, match="this is another"):
        check_folder(folder, Target(other), tokenizer)
    with pytest.raises(CompatibilityError, match="no tokenizer"):
        check_folder(folder, target, None)


@pytest.mark.model
def test_the_shipped_head_finds_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given three wrong ones; and nothing is wrong with those that it has."""
    monkeypatch.setattr(probe, "_TRIED", 6)  # besides the usual ones
    head = shipped_head("smollm2-135m")
    assert head is not None
    assert "probe" in EagleFolder.read(head, "eagle").notes
    llm = LLM("smollm2-135m", speculative_config={"method": "none"}, dtype="bfloat16")
    target, tokenizer = llm.engine.target, llm.tokenizer
    # Warnings are errors.
    net, _, _ = load_parts(EagleFolder.read(head, "eagle"), target, tokenizer)
    wrong = tmp_path / "wrong"
    shutil.copytree(head, wrong)
    fields = json.loads((wrong / "config.json").read_text())
    fields["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    (wrong / "config.json").write_text(json.dumps(fields))
    with pytest.warns(RuntimeWarning, match=r"\[\d, 1\d, 2\d\] it would predict"):
        load_parts(EagleFolder.read(wrong, "eagle"), target, tokenizer)
    seen = look(target, our_text(tokenizer), net.config.aux_layers)
    assert accepted(net, seen, net.config.aux_layers) > 0.3
