"""Options and settings of all methods: documented, and refused where they have no meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.world import parts_of, refused, tiny_target
from tokenleap.errors import ConfigError
from tokenleap.training.method import TrainingSettings, training_method, training_methods
from tokenleap.training.run import TrainingFolder
from tokenleap.training.tuned import TUNING_RATES

EAGLES = ("eagle", "eagle1")
DECIDED = ("levels", "first_level_share", "decay")
TEXT = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")


def test_every_method_is_in_the_first_table() -> None:
    for name, method in training_methods().items():
        assert f"| `{name}` | {method.summary} |" in TEXT


def test_the_size_of_features_is_the_documented_one() -> None:
    from tokenleap.training.features import bytes_per_token

    for layers, size in ((1, 64), (3, 576), (2, 4096)):
        assert bytes_per_token(layers, size) == layers * (size + 2 * size // 32) + 100


def test_no_option_has_the_name_of_a_setting() -> None:
    for name, kind in training_methods().items():
        assert kind.name == name
        assert not set(kind.field_names()) & set(TrainingSettings.field_names())


def test_an_unknown_method() -> None:
    with pytest.raises(ConfigError, match="did you mean 'eagle'"):
        training_method("eagel", {})


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("eagle", {"start": "some/folder", "layers": [1]}, "layers: the head in 'start' decides"),
        ("eagle", {"start": "some/folder", "fc_norm": True}, "fc_norm: the head in 'start'"),
        ("eagle", {"start": "some/folder", "norm_output": True}, "norm_output: the head in"),
        ("distill", {"start": "target", "hidden_size": 64}, "hidden_size: with start 'target'"),
        ("distill", {"start": "some/folder", "num_layers": 1}, "num_layers: with start 'some/fo"),
        ("distill", {"start": ""}, "start: "),
        ("distill", {"loss": "mse"}, "loss: "),
        ("distill", {"num_layers": 0}, "num_layers: "),
        ("distill", {"answers": "student"}, "answers: "),
        ("distill", {"on_policy_share": 0.5}, "on_policy_share: .* with answers 'teacher'"),
        ("distill", {"answers": "on_policy", "on_policy_share": 0.5}, "on_policy_share: has no"),
        ("distill", {"answers": "fixed", "refresh_every": 5}, "refresh_every: has no meaning"),
        ("distill", {"answers": "mixed", "on_policy_share": 1.0}, "on_policy_share: "),
        ("distill", {"answers": "mixed", "refresh_every": 0}, "refresh_every: "),
        ("distill", {"answers": "on_policy", "loss": "ce"}, "loss: 'ce' learns the tokens of"),
        ("boost", {"drafters": 1}, "drafters: "),
        ("boost", {"sample_length": 0}, "sample_length: "),
        ("boost", {"answers": "mixed"}, "answers"),
        ("early_exit", {"exits": "gradual", "rotation": 2}, "rotation: the exits are 'gradual'"),
        ("pass", {"num_tokens": 16}, "num_tokens"),
        ("spec_drafter", {"from_target": True, "size": 0.1}, "from_target: needs the target's"),
    ],
)
def test_wrong_options(method: str, options: dict[str, Any], message: str) -> None:
    with refused(ConfigError, match=f"^.*{message}"):
        training_method(method, options)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("eagle", {"layers": (0, 3)}, "layers: this model has layers 0 to 2"),
        ("eagle", {"layers": (1, 1)}, "layers: name each once"),
        ("parallel", {"mask_token_id": 96}, "mask_token_id: must be 0 to 95 for this model"),
        ("early_exit", {"exit_layer": 2}, "exit_layer: must be below the 2 layers"),
        ("early_exit", {"rotation": 2}, "rotation: must be below the 2 layers"),
        ("pad", {"pad_token_id": 96}, "pad_token_id: must be 0 to 95"),
    ],
)
def test_options_that_the_target_refuses(
    method: str, options: dict[str, Any], message: str
) -> None:
    with refused(ConfigError, match=message):
        training_method(method, options).trainee(parts_of(tiny_target()))


@pytest.mark.parametrize(
    ("method", "setting", "message"),
    [
        *((each, {"levels": 1, "decay": 0.5}, "decay: .* several levels") for each in EAGLES),
        *((each, {"levels": 1, "first_level_share": 0.5}, "first_.* remove it") for each in EAGLES),
        ("parallel", {"levels": 3}, "levels: 'parallel' learns all levels .* set depths"),
        ("medusa", {"levels": 1}, "levels: .* set num_heads"),
        ("medusa", {"first_level_share": 1}, "first_level_share: .* set num_heads"),
        *(("distill", {name: 1}, f"{name}: a draft model learns all levels") for name in DECIDED),
        ("early_exit", {"levels": 2}, "levels: all levels of a draft come from the same exit"),
        ("early_exit", {"decay": 0.5}, "decay: all levels"),
        ("pad", {"levels": 2}, "levels: .* set num_pads"),
        ("pass", {"levels": 1}, "levels: .* set num_tokens"),
        ("pass", {"first_level_share": 1}, "first_level_share: .* set num_tokens"),
        ("pass", {"optimizer": "adamw"}, "optimizer: .* set vector_learning_rate"),
        ("pass", {"learning_rate": 0.1}, "learning_rate: .* set vector_learning_rate"),
        ("pass", {"weight_decay": 0}, "weight_decay: .* set vector_learning_rate"),
        ("medusa_2", {"levels": 2}, "levels: .* set num_heads"),
        ("blockwise_tuned", {"decay": 0.5}, "decay: .* one loss at a time"),
        ("spec_drafter", {"levels": 2}, "levels: a block of masks is learnt at once"),
    ],
)
def test_settings_that_a_method_cannot_follow(method: str, setting: Any, message: str) -> None:
    with refused(ConfigError, match=f"^{message}"):
        training_method(method, {}).adapted(TrainingSettings.model_validate(setting))


@pytest.mark.parametrize(
    ("method", "options", "given", "adapted"),
    [
        ("eagle", {}, {"levels": 2, "decay": 0.5}, {"levels": 2, "decay": 0.5}),
        ("eagle", {}, {"levels": 1}, {"levels": 1, "first_level_share": 0, "decay": 1}),
        ("eagle1", {}, {}, {"levels": 1, "first_level_share": 0, "decay": 1}),
        ("medusa", {"num_heads": 3}, {}, {"levels": 3, "first_level_share": 0}),
        ("distill", {}, {}, {"levels": 1, "first_level_share": 0}),
        ("pass", {"num_tokens": 3}, {}, {"levels": 3, "first_level_share": 0}),
        ("pad", {}, {}, TUNING_RATES),
        ("early_exit", {}, {"learning_rate": 0.5}, {**TUNING_RATES, "learning_rate": 0.5}),
    ],
)
def test_settings_that_a_method_decides(
    method: str, options: dict[str, Any], given: dict[str, Any], adapted: dict[str, Any]
) -> None:
    found = training_method(method, options).adapted(TrainingSettings.model_validate(given))
    assert {name: getattr(found, name) for name in adapted} == adapted


@pytest.mark.parametrize("text", ["[", "[]"])
def test_damaged_settings_of_a_folder(text: str, tmp_path: Path) -> None:
    folder = TrainingFolder(tmp_path)
    folder.claim({"dtype": "float32"})
    folder.check({"dtype": "float32"})
    (folder.work / "settings.json").write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.json is damaged: .*: delete "):
        folder.check({"dtype": "float32"})
