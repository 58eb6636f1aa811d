"""What is trained is what serves: the same logits, from the same features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import CompatibilityError, ConfigError
from foretoken.core.config import Config
from foretoken.drafters.heads.checkpoint import read_checkpoint
from foretoken.drafters.heads.eagle import load_head
from foretoken.runtime.target import Target
from foretoken.training.batches import Batch, collate
from foretoken.training.choices import TRAINABLE
from foretoken.training.eagle import EagleTrainee
from foretoken.training.features import Features, dequantize
from foretoken.training.methods import TRAINING_METHODS, training_method
from foretoken.training.settings import TrainingSettings
from foretoken.training.state_heads import StateTrainee
from foretoken.training.trainee import Trainee
from tests.drafters.heads.test_eagle import LEVELS, drafted, levels
from tests.drafters.heads.test_state_head import grown, head_of
from tests.heads import STATE_NETS
from tests.training.world import (
    computed,
    cycles,
    new_trainee,
    parts_of,
    random_features,
    tiny_target,
)

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in TRAINING_METHODS if name != "distill"},
    "eagle as in EAGLE-3": ("eagle", {"fc_norm": False, "norm_output": False, "qk_norm": True}),
    "eagle, three layers": ("eagle", {"layers": (2, 0, 1), "intermediate_size": 80}),
    "medusa, two blocks": ("medusa", {"num_layers": 2}),
    "hydra, two layers": ("hydra", {"num_layers": 2}),
    "mlp_speculator, untied": ("mlp_speculator", {"tie_weights": False}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def test_the_names_are_those_of_the_help_page() -> None:
    assert tuple(TRAINING_METHODS) == TRAINABLE


@torch.no_grad()
def logits_of(trainee: Trainee, batch: Batch, num_levels: int = LEVELS) -> list[Tensor]:
    """[B, Q, Vd] of each level."""
    trainee.eval()
    return [
        trainee.logits(outputs, level)
        for level, outputs in enumerate(trainee.outputs(batch, num_levels))
    ]


def features_of(layers: int) -> list[Features]:
    answers = ([(6, 21)], [(0, 9), (15, 30)])
    return [
        random_features(each[-1][1], each, layers, seed=seed) for seed, each in enumerate(answers)
    ]


@pytest.mark.parametrize("form", [name for name, (method, _) in FORMS.items() if method == "eagle"])
@torch.no_grad()
def test_levels_of_eagle_are_those_of_its_network(form: str, target: Target) -> None:
    """A batch with padding and few roots, against every pair of each conversation alone."""
    method = training_method("eagle", FORMS[form][1])
    trainee = new_trainee(method, target, spread=0.1, stride=2)
    assert isinstance(trainee, EagleTrainee)
    given = features_of(len(method.layers(2)))
    batch = collate(given, LEVELS)
    found = logits_of(trainee, batch)
    for row, each in enumerate(given):
        pad = each.tokens[:1].expand(LEVELS + 1)  # the oracle wants tokens behind every pair
        hidden = dequantize(each.hidden, each.scales)
        expected = levels(
            trainee.net,
            torch.cat([hidden, hidden[:1].expand(LEVELS + 1, -1, -1)]),
            torch.cat([each.tokens, pad]),
        )
        for level in range(LEVELS):
            valid = batch.levels.valid[row, level]
            roots = batch.roots[row][valid]
            torch.testing.assert_close(
                found[level][row][valid], expected[level][roots], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("form", [name for name, (method, _) in FORMS.items() if method != "eagle"])
@torch.no_grad()
def test_levels_of_heads_without_attention_are_those_of_their_network(
    form: str, target: Target
) -> None:
    name, options = FORMS[form]
    trainee = new_trainee(training_method(name, options), target, spread=0.1, stride=2)
    assert isinstance(trainee, StateTrainee)
    assert target.final_norm is not None
    given = features_of(1)
    batch = collate(given, LEVELS)
    found = logits_of(trainee, batch)
    for row, each in enumerate(given):
        normed = target.final_norm(dequantize(each.hidden, each.scales)[:, 0])
        complete = batch.levels.valid[row].all(0)
        for place in complete.nonzero().flatten().tolist():
            root = int(batch.roots[row, place])
            expected = trainee.net(normed[root], each.tokens[root + 1 : root + 1 + LEVELS])
            for level in range(LEVELS):
                torch.testing.assert_close(
                    found[level][row, place], expected[level], atol=1e-4, rtol=1e-4
                )


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_training_and_serving_have_the_same_logits(
    form: str, target: Target, tmp_path: Path
) -> None:
    """From the features in the cache, through the head's folder."""
    name, options = FORMS[form]
    method = training_method(name, options)
    trainee = new_trainee(method, target, spread=0.1, stride=2)
    layers = method.layers(2)
    (talk,) = cycles(1, length=24)
    features = computed(target, [talk], layers, tmp_path / "cache")[0]
    found = logits_of(trainee, collate([features], LEVELS))
    method.write(trainee, parts_of(target, 2), tmp_path / "head", {})
    hidden = dequantize(features.hidden, features.scales)  # [n, A, E]
    for root in (3, 9, 20):  # tokens that a draft starts from; the pair before each is its root
        expected = served(name, tmp_path / "head", target, hidden, layers, talk.tokens, root)
        place = root - 1 - 2  # the first pair in front of the answer is the third
        for level in range(min(LEVELS, len(talk.tokens) - 1 - root)):
            torch.testing.assert_close(
                found[level][0, place], expected[level], atol=2e-3, rtol=1e-3
            )


def served(
    method: str,
    folder: Path,
    target: Target,
    hidden: Tensor,
    layers: tuple[int, ...],
    tokens: tuple[int, ...],
    root: int,
) -> list[Tensor]:
    """Logits of a chain of the text's own tokens behind a root, from what serves."""
    text = [*tokens, *[0] * LEVELS]
    if method in STATE_NETS:
        head = head_of(method, folder, target)
        chain = [[token] for token in text[root + 1 : root + LEVELS]]
        return [level[0, 0] for level in grown(head, hidden[:, 0], [text[: root + 1]], chain)]
    eagle, _ = load_head(read_checkpoint(folder), target)
    by_layer = {layer: hidden[:, index] for index, layer in enumerate(layers)}
    return drafted(eagle, by_layer, text, root)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "gemma", "phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_heads_for_other_architectures(
    method: str, dtype: torch.dtype, architecture: str, tmp_path: Path
) -> None:
    other = tiny_target(architecture, dtype=dtype)
    kind = training_method(method, {})
    trainee = new_trainee(kind, other)
    cache = computed(other, cycles(2), kind.layers(2), tmp_path / "cache")
    learnt = trainee(collate([cache[0], cache[1]], 4), 4)
    learnt.losses.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainee.parameters())


# Options


@pytest.mark.parametrize("name", ["levels", "first_level_share"])
def test_settings_that_a_head_cannot_follow_are_refused(name: str) -> None:
    medusa = training_method("medusa", {"num_heads": 3})
    with pytest.raises(ConfigError, match=f"{name}: .* set num_heads"):
        medusa.adapted(TrainingSettings.model_validate({name: 1}))
    adapted = medusa.adapted(TrainingSettings())
    assert (adapted.levels, adapted.first_level_share) == (3, 0)
    eagle = training_method("eagle", {})
    assert eagle.adapted(TrainingSettings(levels=2)) == TrainingSettings(levels=2)


def test_no_option_has_the_name_of_a_setting() -> None:
    for method in TRAINING_METHODS.values():
        assert not set(method.Options.field_names()) & set(TrainingSettings.field_names())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'eagle'"):
        training_method("eagel", {})
    with pytest.raises(ConfigError, match="layers: this model has layers 0 to 2"):
        training_method("eagle", {"layers": (0, 3)}).layers(2)
    with pytest.raises(ConfigError, match="layers: name each once"):
        training_method("eagle", {"layers": (1, 1)}).layers(2)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 30])
def test_the_default_layers_exist(num_layers: int) -> None:
    layers = training_method("eagle", {}).layers(num_layers)
    assert layers == tuple(sorted(set(layers)))
    assert all(0 <= layer < num_layers for layer in layers)
    if num_layers == 30:
        assert layers == (2, 15, 27)


def test_a_target_whose_final_norm_is_unknown(target: Target) -> None:
    parts = parts_of(target)
    parts = type(parts)(**{**vars(parts), "final_norm": None})
    with pytest.raises(CompatibilityError, match="train 'eagle'"):
        training_method("hydra", {}).trainee(parts)
    training_method("eagle", {}).trainee(parts)


def test_every_method_says_what_it_is() -> None:
    for name, method in TRAINING_METHODS.items():
        assert method.name == name
        assert method.summary
        assert issubclass(method.Options, Config)
