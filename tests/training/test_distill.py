"""Draft models learn from the target, and what is written drafts with identical output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.cli.conftest import ascii_tokenizer, save_tiny
from tests.tiny import tiny_model
from tests.training.world import computed, cycles, parts_of, refused
from tokenleap import LLM, CompatibilityError, ConfigError, ModelError, SamplingParams
from tokenleap.models import load_model
from tokenleap.runtime.target import Target
from tokenleap.training.distill import DistillTrainee
from tokenleap.training.features import TrainingSet, collate
from tokenleap.training.method import TrainingSettings, training_method
from tokenleap.training.trainee import HeadParts
from tokenleap.training.trainer import Trainer, optimizers_of

LEVELS = 4
SHORT = TrainingSettings(epochs=60, batch_tokens=128, learning_rate=1e-2, mixed_precision="no")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its tokenizer."""
    made = save_tiny(tmp_path_factory.mktemp("target"))
    settings = {"eos_token_id": 96, "temperature": 0.6}
    (made / "generation_config.json").write_text(json.dumps(settings))
    return made


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    model = load_model(folder, torch.float32, torch.device("cpu"))
    return Target(model, reload=lambda: model)


@pytest.fixture
def parts(target: Target, folder: Path) -> HeadParts:
    return replace(parts_of(target), name=str(folder))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokenizer, and more padding."""
    made = tmp_path_factory.mktemp("other")
    tiny_model("phi", seed=3, vocab_size=104).save_pretrained(made)
    ascii_tokenizer().save_pretrained(made)
    return made


def made(parts: HeadParts, options: Mapping[str, Any], seed: int = 0) -> DistillTrainee:
    torch.manual_seed(seed)
    trainee = training_method("distill", options).trainee(parts)
    assert isinstance(trainee, DistillTrainee)
    return trainee


def lm_logits(trainee: DistillTrainee, tokens: Tensor) -> Tensor:
    """[n, V] from the model's own forward pass."""
    lm: Any = trainee.lm
    logits: Tensor = lm(input_ids=tokens.unsqueeze(0)).logits[0]
    return logits


@pytest.mark.parametrize("start", ["scratch", "target", "other"])
@torch.no_grad()
def test_levels_are_the_logits_at_shifted_positions(
    start: str, target: Target, parts: HeadParts, other: Path, tmp_path: Path
) -> None:
    """A batch with padding, against every conversation alone."""
    trainee = made(parts, {"start": str(other) if start == "other" else start}).eval()
    talks = [*cycles(1, length=17), *cycles(1, length=24, seed=5, prompt=9)]
    cache = computed(target, talks, (), tmp_path / "cache")
    batch = collate([cache[0], cache[1]], LEVELS)
    found = [trainee.logits(out, k) for k, out in enumerate(trainee.outputs(batch, LEVELS))]
    checked = 0
    for row, talk in enumerate(talks):
        expected = lm_logits(trainee, torch.tensor(talk.tokens))[:, : target.vocab_size]
        for level in range(LEVELS):
            valid = batch.levels.valid[row, level]
            at = batch.roots[row][valid] + 1 + level
            assert torch.equal(
                torch.tensor(talk.tokens)[at + 1], batch.levels.labels[row, level][valid]
            )
            torch.testing.assert_close(found[level][row][valid], expected[at], atol=1e-4, rtol=1e-4)
            checked += len(at)
    assert checked > 80


@pytest.mark.parametrize("start", ["target", "other"])
def test_every_start_is_learnt_from(
    start: str, target: Target, parts: HeadParts, other: Path, tmp_path: Path
) -> None:
    """All of its weights change, and the held-out text is drafted better than at the start."""
    options = {"start": str(other) if start == "other" else start}
    data, held_out = (
        TrainingSet(computed(target, each, (), tmp_path / name), 64)
        for name, each in (("train", cycles(12)), ("held_out", cycles(4, seed=1)))
    )
    method = training_method("distill", {**options, "loss": "ce"})
    trainee = made(parts, {**options, "loss": "ce"})
    before = {name: weight.clone() for name, weight in trainee.lm.named_parameters()}
    settings = method.adapted(SHORT.model_copy(update={"epochs": 30, "evaluate_every": 1}))
    trainer = Trainer(trainee, data, held_out, settings, tmp_path / "run", lambda *_: None)
    for _ in zip(range(30), trainer.run(), strict=False):
        pass
    history = trainer.history
    assert history[-1].by_position[0] > history[0].by_position[0] + 0.2
    for name, weight in trainee.lm.named_parameters():
        assert not torch.equal(weight, before[name]), name


@pytest.mark.parametrize("start", ["scratch", "target", "other"])
def test_what_is_written_drafts(
    start: str,
    folder: Path,
    parts: HeadParts,
    other: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"start": str(other) if start == "other" else start}
    method, out = training_method("distill", options), tmp_path / "draft"
    trainee = made(parts, options)
    capsys.readouterr()
    trainee.write(parts, out, {"seed": 7, "step": 1})
    assert capsys.readouterr().err == ""  # no progress bar of Transformers
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["tokenleap"] == {"target": str(folder), "seed": 7, "step": 1}
    generation = "generation_config.json"
    assert (out / generation).read_bytes() == (folder / generation).read_bytes()
    assert not [each.name for each in out.iterdir() if each.name.startswith(".")]
    again = load_model(out, torch.float32, torch.device("cpu"))
    for name, tensor in trainee.lm.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), name

    params = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=3, max_tokens=24)]
    prompts = [[1, 2, 3, 4], [7, 9, 11]]
    serving = {**method.serving(out), "controller": "fixed"}
    assert serving["method"] == "draft_model"
    llm = LLM(str(folder), speculative_config=serving)
    assert llm.vocabulary_overlap is not None
    assert llm.vocabulary_overlap.way == "same"
    for plain, drafted in zip(
        LLM(str(folder)).generate(prompts, params), llm.generate(prompts, params), strict=True
    ):
        assert drafted.token_ids == plain.token_ids
        assert drafted.metrics.drafter_failure is None
        assert drafted.metrics.num_draft_tokens > 0


def test_all_layers_of_the_target_are_the_target(
    target: Target, parts: HeadParts, folder: Path
) -> None:
    tokens = torch.tensor([5, 1, 8, 2, 40])
    whole = load_model(folder, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        found = lm_logits(made(parts, {"start": "target", "num_layers": 2}), tokens)
        expected = whole(input_ids=tokens.unsqueeze(0)).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    first = made(parts, {"start": "target", "num_layers": 1}).lm.state_dict()
    assert len(first) < len(whole.state_dict())
    for name, tensor in first.items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def test_sizes_from_scratch(parts: HeadParts) -> None:
    config = made(parts, {}).lm.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 1, 2)
    assert config.intermediate_size == 128
    assert config.eos_token_id == parts.config.eos_token_id
    sizes = {"hidden_size": 96, "num_layers": 3, "num_heads": 2, "intermediate_size": 80}
    config = made(parts, sizes).lm.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (96, 3, 2)
    assert config.intermediate_size == 80


def test_embeddings_are_no_matrices(parts: HeadParts, other: Path) -> None:
    """Muon would make all of their rows change equally, however rare the token."""
    for start in ("scratch", "target", str(other)):
        trainee = made(parts, {"start": start})
        names = {id(weight): name for name, weight in trainee.named_parameters()}
        chosen = {names[id(weight)] for weight in trainee.matrices}
        assert any("q_proj" in name for name in chosen)
        assert not any("embed" in name or "output" in name for name in chosen)
        assert set(names) == {id(weight) for weight in trainee.lm.parameters()}
        muon, adamw = optimizers_of(trainee, TrainingSettings())
        assert {names[id(w)] for group in muon.param_groups for w in group["params"]} == chosen
        others = {names[id(w)] for group in adamw.param_groups for w in group["params"]}
        assert chosen | others == set(names.values())
        assert not chosen & others


def test_a_folder_that_cannot_be_written_keeps_the_model_before(
    parts: HeadParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "draft"
    made(parts, {}).write(parts, out, {})
    before = {each.name: each.read_bytes() for each in out.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with refused(ModelError, match=r"draft cannot be written: .*No space left"):
        made(parts, {}, seed=1).write(parts, out, {})
    assert {each.name: each.read_bytes() for each in out.iterdir()} == before


def test_a_target_without_a_folder(target: Target, tmp_path: Path) -> None:
    """It has no tokenizer to write, and nothing to start from but random weights."""
    parts = replace(parts_of(target), name="nonesuch")
    made(parts, {}).write(parts, tmp_path / "draft", {})
    names = {each.name for each in (tmp_path / "draft").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    with pytest.raises(ModelError, match="no model 'nonesuch'"):
        made(parts, {"start": "target"})


# Wrong use


@pytest.mark.parametrize("kind", ["tokens", "size"])
def test_another_vocabulary(kind: str, parts: HeadParts, tmp_path: Path) -> None:
    """Other tokens, or another size where there is no tokenizer to compare."""
    tiny_model(vocab_size=97 if kind == "tokens" else 96).save_pretrained(tmp_path)
    if kind == "tokens":
        tokenizer = ascii_tokenizer()
        tokenizer.add_tokens(["<|more|>"])
        tokenizer.save_pretrained(tmp_path)
    with refused(CompatibilityError, match=r"start: .* another vocabulary"):
        made(parts, {"start": str(tmp_path)})


def test_logits_that_are_not_of_the_output_layer(parts: HeadParts, tmp_path: Path) -> None:
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        logits_scaling=4.0,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(CompatibilityError, match="changes the logits of its output layer"):
        made(parts, {"start": str(tmp_path)})


def test_conversations_longer_than_its_context(
    target: Target, parts: HeadParts, tmp_path: Path
) -> None:
    tiny_model("gpt2", vocab_size=97, n_positions=16).save_pretrained(tmp_path / "gpt2")
    trainee = made(parts, {"start": str(tmp_path / "gpt2")})
    cache = computed(target, cycles(1, length=17), (), tmp_path / "cache")
    with pytest.raises(ConfigError, match="max_length: the draft model takes 16 tokens"):
        trainee(collate([cache[0]], 1), 1)


def test_what_is_not_there_is_refused(parts: HeadParts) -> None:
    with pytest.raises(ConfigError, match="num_layers: the target has 2 layers, got 3"):
        made(parts, {"start": "target", "num_layers": 3})
    with pytest.raises(ModelError, match="no model 'smolm2'"):
        made(parts, {"start": "smolm2"})
