"""The trained network is the served one: the same logits, from the same features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.heads.folders import change_tensors
from tests.drafters.heads.test_eagle import LEVELS, drafted, levels
from tests.drafters.heads.test_parallel import block_of, expected_block
from tests.drafters.heads.test_state_head import head_of
from tests.heads import STATE_NETS, feature_config, tiny_config, tiny_net
from tests.tiny import tiny_model
from tests.training.world import (
    computed,
    cycles,
    new_trainee,
    parts_of,
    random_features,
    tiny_target,
)
from tokenleap import LLM, CompatibilityError, ModelError
from tokenleap.drafters.heads.eagle import load_head
from tokenleap.drafters.heads.eagle_net import EagleNet
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.layouts import EagleFolder, write_head
from tokenleap.drafters.heads.probe import look
from tokenleap.runtime.target import Target
from tokenleap.training.eagle import Eagle1Trainee, EagleTrainee, ParallelTrainee
from tokenleap.training.features import Batch, Features, collate, dequantize
from tokenleap.training.method import training_method, training_methods
from tokenleap.training.state_heads import StateTrainee
from tokenleap.training.trainee import Trainee

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in training_methods()
        if training_method(name, {}).read_layers(2)  # the others read tokens only
    },
    "eagle as in EAGLE-3": ("eagle", {"fc_norm": False, "norm_output": False, "qk_norm": True}),
    "eagle, three layers": ("eagle", {"layers": (2, 0, 1), "intermediate_size": 80}),
    "parallel, one layer": ("parallel", {"num_layers": 1, "depths": 5, "fc_norm": False}),
    "parallel, three layers": ("parallel", {"num_layers": 3, "mask_token_id": 5, "qk_norm": True}),
    "medusa, two blocks": ("medusa", {"num_layers": 2}),
    "hydra, two layers": ("hydra", {"num_layers": 2}),
    "mlp_speculator, untied": ("mlp_speculator", {"tie_weights": False}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


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


@pytest.mark.parametrize(
    "form", [name for name, (method, _) in FORMS.items() if method in {"eagle", "eagle1"}]
)
@torch.no_grad()
def test_levels_of_eagle_are_those_of_its_network(form: str, target: Target) -> None:
    """A batch with padding and few roots, against every pair of each conversation alone."""
    method = training_method(*FORMS[form])
    trainee = new_trainee(method, target, spread=0.1, stride=2)
    assert isinstance(trainee, EagleTrainee)
    given = features_of(len(method.read_layers(2)))
    batch = collate(given, LEVELS)
    found = logits_of(trainee, batch)
    for row, each in enumerate(given):
        pad = each.tokens[:1].expand(LEVELS + 1)  # the oracle wants tokens after every pair
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


@pytest.mark.parametrize(
    "form", [name for name, (method, _) in FORMS.items() if method in STATE_NETS]
)
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


@pytest.mark.parametrize(
    "form", [name for name, (method, _) in FORMS.items() if method == "parallel"]
)
@torch.no_grad()
def test_levels_of_parallel_are_those_of_its_network(form: str, target: Target) -> None:
    """A batch with padding, against plain attention over each draft alone."""
    method = training_method("parallel", FORMS[form][1])
    trainee = new_trainee(method, target, spread=0.1, stride=2)
    assert isinstance(trainee, ParallelTrainee)
    given = features_of(len(method.read_layers(2)))
    batch = collate(given, LEVELS)
    found = logits_of(trainee, batch)
    for row, each in enumerate(given):
        hidden = dequantize(each.hidden, each.scales)
        for place in batch.levels.valid[row, 0].nonzero().flatten().tolist():
            root = int(batch.roots[row, place])
            expected = expected_block(trainee.net, hidden, each.tokens, root, LEVELS)
            for level in range(int(batch.levels.valid[row, :, place].sum())):
                torch.testing.assert_close(
                    found[level][row, place], expected[level], atol=1e-4, rtol=1e-4
                )


def test_deep_levels_are_learnt_from_some_drafts(target: Target) -> None:
    """Level k from a share of 0.7^k of them, and at least 0.2; always from the drafts above it."""
    method = training_method("parallel", {})
    trainee = new_trainee(method, target, spread=0.1)
    assert isinstance(trainee, ParallelTrainee)
    layers = len(method.read_layers(2))
    given = [random_features(120, [(8, 112)], layers), random_features(60, [(4, 60)], layers)]
    batch = collate(given, 8)
    roots = batch.levels.valid[:, 0].sum(-1)
    torch.manual_seed(1)
    thinned = trainee._thinned(batch)
    kept = thinned.levels.valid
    assert not (kept[:, 1:] & ~kept[:, :-1]).any()
    for level in range(8):
        most = (roots * max(0.7**level, 0.2)).ceil()
        counts = kept[:, level].sum(-1)
        assert (counts <= most).all()
        assert (counts >= most - level).all()  # drafts at the end of an answer are not so deep
    for row in range(2):  # each place is still the one that it was, with the same labels
        places = {int(root): place for place, root in enumerate(batch.roots[row, : roots[row]])}
        assert sorted(thinned.roots[row, : roots[row]].tolist()) == sorted(places)
        for place in range(int(roots[row])):
            before = places[int(thinned.roots[row, place])]
            labels = thinned.levels.labels[row, :, place]
            assert torch.equal(labels, batch.levels.labels[row, :, before])
    trainee.train()
    torch.manual_seed(1)
    learnt = trainee(batch, 8)
    assert torch.equal(learnt.counts, kept.sum((0, 2)))
    trainee.eval()
    assert torch.equal(trainee(batch, 8).counts, batch.levels.valid.sum((0, 2)))


@torch.no_grad()
def test_what_is_left_out_does_not_change_the_rest(target: Target) -> None:
    method = training_method("parallel", {"noise": 0})
    trainee = new_trainee(method, target, spread=0.1)
    assert isinstance(trainee, ParallelTrainee)
    batch = collate(features_of(len(method.read_layers(2))), 6)
    thinned = trainee._thinned(batch)
    whole = list(trainee.outputs(batch, 6))
    for level, outputs in enumerate(trainee.outputs(thinned, 6)):
        assert outputs.shape == whole[level].shape
        for row, place in thinned.levels.valid[:, level].nonzero().tolist():
            before = int((batch.roots[row] == thinned.roots[row, place]).nonzero()[0])
            torch.testing.assert_close(
                outputs[row, place], whole[level][row, before], atol=1e-5, rtol=1e-5
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
    layers = method.read_layers(2)
    (talk,) = cycles(1, length=24)
    features = computed(target, [talk], layers, tmp_path / "cache")[0]
    found = logits_of(trainee, collate([features], LEVELS))
    trainee.write(parts_of(target, 2), tmp_path / "head", {})
    hidden = dequantize(features.hidden, features.scales)  # [n, A, E]
    for root in (3, 9, 20):  # tokens that a draft starts from; the pair before each is its root
        expected = served(name, tmp_path / "head", target, hidden, layers, talk.tokens, root)
        place = root - 1 - 2  # the first pair before the answer is the third
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
    """Logits of a chain of the text's own tokens after a root, from what serves."""
    text = [*tokens, *[0] * LEVELS]
    by_layer = {layer: hidden[:, index] for index, layer in enumerate(layers)}
    if method in STATE_NETS:
        return drafted(head_of(method, folder, target), by_layer, text, root)
    if method == "parallel":
        return block_of(folder, target, by_layer, text, root)
    eagle, _ = load_head(EagleFolder.read(folder, "eagle"), target)
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
    cache = computed(other, cycles(2), kind.read_layers(2), tmp_path / "cache")
    learnt = trainee(collate([cache[0], cache[1]], 4), 4)
    learnt.losses.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainee.parameters())


# Options


def test_the_token_of_masks(target: Target) -> None:
    parts = parts_of(target)
    for chosen, expected in ((7, 7), (None, parts.config.pad_token_id or 0)):
        net: Any = training_method("parallel", {"mask_token_id": chosen}).trainee(parts)
        assert net.net.config.mask_token_id == expected


@pytest.mark.parametrize("num_layers", [1, 2, 3, 30])
def test_the_default_layers_exist(num_layers: int) -> None:
    layers = training_method("eagle", {}).read_layers(num_layers)
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


# EAGLE-1


@torch.no_grad()
def test_the_loss_of_eagle1_is_that_of_the_authors(target: Target) -> None:
    """Smooth L1 of the features after each place, and a tenth of the tokens' loss."""
    method = training_method("eagle1", {"noise": 0})
    trainee = new_trainee(method, target, spread=0.1)
    assert isinstance(trainee, Eagle1Trainee)
    assert target.final_norm is not None
    given = features_of(1)
    batch = collate(given, LEVELS)
    outputs = list(trainee.outputs(batch, LEVELS))
    found = trainee(batch, LEVELS).losses
    alone = {"noise": 0, "feature_weight": 0, "token_weight": 1}
    tokens_only = training_method("eagle1", alone)
    tokens = new_trainee(tokens_only, target, spread=0.1)(batch, LEVELS).losses
    for level in range(LEVELS):
        missed = [
            (outputs[level][row, place] - target.final_norm(hidden[int(root) + 1 + level, 0])).abs()
            for row, each in enumerate(given)
            for hidden in [dequantize(each.hidden, each.scales)]
            for place, root in enumerate(batch.roots[row])
            if batch.levels.valid[row, level, place]
        ]
        error = torch.stack(missed)
        smooth = torch.where(error < 1, error**2 / 2, error - 0.5).mean()
        torch.testing.assert_close(found[level], smooth + 0.1 * tokens[level])


@torch.no_grad()
def test_features_get_uniform_noise_that_is_wider_in_short_texts(target: Target) -> None:
    trainee = new_trainee(training_method("eagle1", {"noise": 0.2}), target)
    assert isinstance(trainee, Eagle1Trainee)
    batch = collate([random_features(size, [(2, size)]) for size in (257, 129)], 1)
    trainee.eval()
    still = trainee.fused(batch)
    trainee.train()
    added = trainee.fused(batch) - still
    for row, width in ((0, 0.4), (1, 0.8)):
        noise = added[row, : int(batch.lengths[row])]
        assert noise.abs().max() <= width / 2 + 1e-5  # float32
        assert abs(float(noise.std()) - width / 12**0.5) < 0.02 * width  # 8,192 draws or more


@pytest.mark.parametrize("form", ["eagle", "eagle1", "parallel", "hydra"])
def test_a_head_records_its_target(form: str, target: Target, tmp_path: Path) -> None:
    """Another target of the same sizes is refused."""
    method, parts = training_method(form, {}), parts_of(target)
    trainee = new_trainee(method, target)
    seen = look(target, list(range(40)), method.read_layers(2))
    notes = trainee.probe(seen)
    trainee.write(parts, tmp_path, notes)
    config = method.serving(tmp_path)
    LLM(tiny_model(head_dim=32), speculative_config=config)
    with pytest.raises(CompatibilityError, match="trained for tiny, and this is another model"):
        LLM(tiny_model(head_dim=32, seed=1), speculative_config=config)
    assert (notes["probe"]["accepted"] is None) == (form == "hydra")


VERIFIER = Verifier("tiny", ("LlamaForCausalLM",), 2)
FORM: dict[str, Any] = {"aux_layers": (2, 1), "fc_norm": False, "norm_output": False}


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
    assert method.read_layers(2) == (2, 1)
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
    assert method.read_layers(30) == (2, 15, 27)


def test_what_cannot_learn_on_is_refused(
    head: tuple[Path, EagleNet], target: Target, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        training_method("eagle", {"start": "nowhere"}).read_layers(2)

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
        training_method("eagle", {"start": str(first)}).read_layers(2)
