"""`start`: a head that learns on begins as the head that is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.heads.folders import change_tensors
from tests.heads import feature_config, tiny_config, tiny_net
from tests.tiny import tiny_model
from tests.training.world import parts_of, random_features, tiny_target
from tokenleap import CompatibilityError, ConfigError, ModelError
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.layouts import Verifier, write_head
from tokenleap.runtime.target import Target
from tokenleap.training.batches import collate
from tokenleap.training.eagle import EagleTrainee
from tokenleap.training.methods import training_method

VERIFIER = Verifier("tiny", ("LlamaForCausalLM",), 2)
FORM: dict[str, Any] = {"aux_layers": (2, 1), "fc_norm": False, "norm_output": False}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def head(tmp_path: Path, target: Target) -> tuple[Path, EagleNet]:
    """A head of another form than the default, over every second token."""
    assert target.reload is not None
    net = tiny_net(tiny_config(**FORM), target.reload())
    for weight in net.parameters():  # as in a file
        weight.data = weight.data.bfloat16().float()
    write_head(tmp_path, net, VERIFIER, {})
    return tmp_path, net


@torch.no_grad()
def test_it_begins_with_the_head_and_a_vocabulary_of_its_own(
    head: tuple[Path, EagleNet], target: Target
) -> None:
    folder, net = head
    method = training_method("eagle", {"start": str(folder)})
    assert method.layers(2) == (2, 1)
    trainee = method.trainee(parts_of(target)).eval()  # it drafts every token
    assert isinstance(trainee, EagleTrainee)
    batch = collate([random_features(20, [(5, 20)], 2)], 2)
    both = net.draft_tokens
    for outputs in trainee.outputs(batch, 2):
        wider, narrow = trainee.net.logits(outputs), net.logits(outputs)
        torch.testing.assert_close(wider[..., both], narrow)
    theirs = EagleTrainee(net, lambda logits, teacher: logits.sum(-1), 0.0).eval()
    for ours, expected in zip(trainee.outputs(batch, 2), theirs.outputs(batch, 2), strict=True):
        assert torch.equal(ours, expected)


def test_without_it_the_weights_are_random(target: Target) -> None:
    torch.manual_seed(0)
    first = training_method("eagle", {}).trainee(parts_of(target))
    second = training_method("eagle", {}).trainee(parts_of(target))
    assert not torch.equal(first.matrices[0], second.matrices[0])


def test_a_model_with_a_head_in_the_package_is_known_by_its_alias() -> None:
    method = training_method("eagle", {"start": "smollm2-135m"})
    assert method.layers(30) == (2, 15, 27)


@pytest.mark.parametrize("options", [{"layers": [1]}, {"fc_norm": True}, {"norm_output": True}])
def test_the_head_decides_on_its_form(options: Mapping[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}: the head in 'start' decides"):
        training_method("eagle", {"start": "somewhere", **options})


def test_what_cannot_learn_on_is_refused(
    head: tuple[Path, EagleNet], target: Target, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        training_method("eagle", {"start": "nowhere"}).layers(2)

    folder, net = head
    rows = {"lm_head.weight": net.head + 1}
    change_tensors(folder, lambda tensors: tensors.update(rows))
    with pytest.raises(CompatibilityError, match="output rows of its own"):
        training_method("eagle", {"start": str(folder)}).trainee(parts_of(target))

    other = tmp_path / "deeper"
    write_head(other, net, Verifier("deep", (), 7), {})
    with pytest.raises(CompatibilityError, match="7 layers"):
        training_method("eagle", {"start": str(other)}).trainee(parts_of(target))

    first = tmp_path / "first"
    eagle1 = tiny_net(feature_config(), tiny_model())
    write_head(first, eagle1, VERIFIER, {})
    with pytest.raises(CompatibilityError, match="EAGLE-1"):
        training_method("eagle", {"start": str(first)}).layers(2)
