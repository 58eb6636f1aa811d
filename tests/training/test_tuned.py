"""Methods that change the target: a copy of it learns, and what is written drafts better."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.heads import STATE_NETS
from tests.tiny import tiny_model
from tests.training.world import (
    Run,
    World,
    assert_same,
    computed,
    cycles,
    new_trainee,
    parts_of,
    refused,
    tiny_target,
    weights,
)
from tokenleap import LLM, CompatibilityError, SamplingParams
from tokenleap.drafters.heads.layouts import StateFolder
from tokenleap.drafters.heads.probe import look
from tokenleap.runtime.target import Target
from tokenleap.training import report
from tokenleap.training import trainee as trainee_module
from tokenleap.training.distill import DistillTrainee
from tokenleap.training.features import collate
from tokenleap.training.method import (
    TrainingSettings,
    training_class,
    training_method,
    training_methods,
)
from tokenleap.training.report import (
    Perplexity,
    Served,
    advice,
    perplexity,
    served_alike,
    training_bytes,
    usage_text,
)
from tokenleap.training.state_heads import TunedTrainee
from tokenleap.training.trainee import LOSSES, at_roots
from tokenleap.training.trainer import Evaluation, Step, Trainer, optimizers_of
from tokenleap.training.tuned import TargetTrainee

FAST: dict[str, Any] = {"target_learning_rate": 6e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "early_exit": {},
    "pad": {},
    "medusa_2": FAST,
    "blockwise_tuned": {"target_learning_rate": 3e-3, "num_heads": 2, "inner_size": 64},
}
LEARNING = TrainingSettings(
    batch_tokens=288,
    optimizer="adamw",
    learning_rate=8e-3,
    vector_learning_rate=8e-3,
    mixed_precision="no",
    evaluate_every=1000,
)


@dataclass(frozen=True)
class Tuned:
    """A training with its world, and the folder that it wrote."""

    world: World
    before: Mapping[str, Tensor]
    steps: list[Step]
    trainee: Any
    folder: Path

    @property
    def drafting(self) -> dict[str, Any]:
        return {**self.world.method.serving(self.folder), "controller": "fixed"}


@pytest.fixture(scope="module", params=OPTIONS)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    name, place = request.param, tmp_path_factory.mktemp(request.param)
    world = World(place, name, tokens=16, loss="ce", **OPTIONS[name])
    before = {key: tensor.clone() for key, tensor in lm_of(world.target).state_dict().items()}
    trainee, folder = world.trainee(), place / "new"
    epochs = {"early_exit": 16, "blockwise_tuned": 70}.get(name, 40)
    settings = world.method.adapted(LEARNING.model_copy(update={"epochs": epochs}))
    parts = parts_of(world.target)
    trainer = Trainer(
        trainee,
        world.training,
        world.held_out,
        settings,
        place / "run",
        lambda best, _: best.write(parts, folder, {"seed": 7}),
    )
    steps = [event for event in trainer.run() if isinstance(event, Step)]
    return Tuned(world, before, steps, trainee, folder)


def lm_of(target: Target) -> Any:
    assert target.reload is not None
    return target.reload()


def own_lm(trainee: Any) -> Any:
    return trainee.own.lm if isinstance(trainee, TunedTrainee) else trainee.lm


def accepted(llm: LLM, config: Mapping[str, Any]) -> float:
    """The mean acceptance length; the output is that of plain decoding."""
    params = SamplingParams(temperature=0, max_tokens=24)
    prompts = [list(talk.tokens[:6]) for talk in cycles(3, seed=5, tokens=16)]
    plain = llm.generate(prompts, params)
    drafted = llm.generate(prompts, params, speculative_config=dict(config))
    for one, other in zip(plain, drafted, strict=True):
        assert one.token_ids == other.token_ids
        assert other.metrics.drafter_failure is None
    counts = [each.metrics for each in drafted]
    return 1 + sum(m.num_accepted_tokens for m in counts) / sum(m.num_drafts for m in counts)


# What a training brings


def test_it_learns_and_drafts_for_the_new_model(tuned: Tuned, tmp_path: Path) -> None:
    """More of the new model's drafts are accepted than of the same kind for the old one."""
    losses = [step.losses[0] for step in tuned.steps]
    third = len(losses) // 3
    assert sum(losses[-third:]) < 0.7 * sum(losses[:third])
    new = accepted(LLM(str(tuned.folder), dtype="float32"), tuned.drafting)
    assert new > 1.7
    parts = parts_of(tuned.world.target)
    old = tmp_path / "old"
    tuned.world.trainee().write(parts, old, {})
    config = {**tuned.world.method.serving(old), "controller": "fixed"}
    assert accepted(LLM(str(old), dtype="float32"), config) < new - 0.5


def test_the_target_stays_as_it_was(tuned: Tuned) -> None:
    assert_same(lm_of(tuned.world.target).state_dict(), dict(tuned.before))
    assert not any(weight.requires_grad for weight in tuned.world.target.vocabulary_weights or ())
    changed = own_lm(tuned.trainee).state_dict()
    assert any(not torch.equal(changed[name], each) for name, each in tuned.before.items())


def test_the_folder_is_a_model(tuned: Tuned) -> None:
    again = AutoModelForCausalLM.from_pretrained(tuned.folder, dtype=torch.float32)
    for name, tensor in own_lm(tuned.trainee).state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), name
    notes = json.loads((tuned.folder / "config.json").read_text())["tokenleap"]
    assert (notes["target"], notes["seed"]) == ("tiny", 7)


def test_the_heads_are_those_of_the_new_model(tuned: Tuned) -> None:
    if not isinstance(tuned.trainee, TunedTrainee):
        pytest.skip("it drafts for itself")
    config = tuned.world.method.serving(tuned.folder)
    kind = STATE_NETS[config["method"]][0]
    file = StateFolder.read(config["model"], kind.METHOD)
    assert file.verifier.name_or_path == str(tuned.folder)
    lm: Any = AutoModelForCausalLM.from_pretrained(tuned.folder, dtype=torch.float32)
    net: Any = file.load(Target(lm)).float()
    tokens = tuned.world.held_out[0].tokens
    trained: Any = deepcopy(tuned.trainee).eval()
    count = trained.max_levels
    batch = collate([tuned.world.held_out[0]], count)
    for weight in trained.parameters():
        weight.data = weight.data.bfloat16().float()  # as in a file
    with torch.no_grad():
        hidden = lm.get_decoder()(input_ids=tokens.unsqueeze(0)).last_hidden_state[0]
        found = [trained.logits(out, k) for k, out in enumerate(trained.outputs(batch, count))]
        for place in (0, 3, 9):
            root = int(batch.roots[0, place])
            expected = net(hidden[root], tokens[root + 1 : root + 1 + count])
            for level, each in enumerate(found):
                torch.testing.assert_close(each[0, place], expected[level], atol=1e-3, rtol=1e-3)


def test_heads_for_the_new_model_are_refused_by_the_old_one(tuned: Tuned, tmp_path: Path) -> None:
    """Even under its name: their probe is that of the copy."""
    if not isinstance(tuned.trainee, TunedTrainee):
        pytest.skip("it drafts for itself")
    world = tuned.world
    seen = look(world.target, world.held_out[0].tokens.tolist())
    notes = tuned.trainee.probe(seen)
    tuned.trainee.write(parts_of(world.target), tmp_path, notes)
    config = world.method.serving(tmp_path)
    LLM(str(tmp_path), speculative_config=config)
    with pytest.raises(CompatibilityError, match="this is another model"):
        LLM(lm_of(world.target), speculative_config=config)
    assert "probe" not in json.loads((tmp_path / "config.json").read_text())["tokenleap"]


# How it is trained


def test_logits_that_are_computed_twice_give_the_same_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainee_module, "_PLACES", 7)
    target = tiny_target()
    cache = computed(target, cycles(3), (), tmp_path)
    batch = collate([cache[number] for number in range(3)], 1)
    found = []
    for kind in (DistillTrainee, TargetTrainee):
        made = kind(tiny_model(head_dim=32), target.vocab_size, LOSSES["kl"])
        learnt = made(batch, 1)
        learnt.losses.sum().backward()
        found.append((learnt, {name: p.grad for name, p in made.named_parameters()}))
    (kept, expected), (twice, gradients) = found
    torch.testing.assert_close(twice.losses, kept.losses)
    assert torch.equal(twice.right, kept.right)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-4)


def test_the_heads_learn_first(tmp_path: Path) -> None:
    world = World(tmp_path, "medusa_2", count=12, heads_first=0.5, **FAST)
    run = Run(world, tmp_path / "run")
    trainer = run.trainer()
    before, events = weights(run.trainee), trainer.run()
    half = trainer.total_steps // 2
    seen = 0
    for event in events:
        seen += isinstance(event, Step)
        if seen == half:
            break
    found = weights(run.trainee)
    changed = {name for name, each in found.items() if not torch.equal(each, before[name])}
    assert changed
    assert all(name.startswith("net.") for name in changed)
    list(events)
    last = weights(run.trainee)
    assert any(not torch.equal(each, found[name]) for name, each in last.items() if "own" in name)


def test_a_batch_of_blockwise_heads_learns_one_of_their_losses(tmp_path: Path) -> None:
    """Each of them is drawn sometimes: 80 draws miss one of 5 with a chance below 1e-7."""
    world = World(tmp_path, "blockwise_tuned", count=2)
    made: Any = world.trainee()
    for weight in made.net.parameters():
        weight.data += 0.1 * torch.randn_like(weight)  # new heads are all alike
    batch = collate([world.training[0]], 4)
    with torch.no_grad():
        heads = made.eval()(batch, 4).losses.tolist()
        states = at_roots(made.own.states(batch.tokens), batch.roots + 1)
        own = made.own.level(states, 0, batch)[0].item()
        made.train()
        drawn = [made(batch, 4).losses.tolist() for _ in range(80)]
    assert all(rest == [0, 0, 0] for _, *rest in drawn)
    wanted = [own, *heads]
    found = {min(range(5), key=lambda n: abs(wanted[n] - each[0])) for each in drawn}
    assert found == set(range(5))
    assert all(min(abs(loss - each[0]) for loss in wanted) < 1e-5 for each in drawn)


def test_learning_rates() -> None:
    """With heads, the target has its own."""
    made: Any = new_trainee(training_method("medusa_2", {}), tiny_target())
    muon, adamw, slow = optimizers_of(made, TrainingSettings())
    groups = [{id(w) for g in each.param_groups for w in g["params"]} for each in (muon, adamw)]
    (group,) = slow.param_groups
    assert group["lr"] == 1e-4
    own = {id(weight) for weight in group["params"]}
    assert own == {id(weight) for weight in made.own.lm.parameters()}
    assert not own & (groups[0] | groups[1])
    assert own | groups[0] | groups[1] == {id(weight) for weight in made.parameters()}


# What is said about it


def test_perplexity_is_that_of_the_model() -> None:
    target, talks = tiny_target(), [*cycles(2), *cycles(1, length=9, prompt=0)]
    logprobs: list[Tensor] = []
    for talk in talks:
        tokens = torch.tensor(talk.tokens)
        with torch.no_grad():
            found = lm_of(target)(input_ids=tokens.unsqueeze(0)).logits[0].log_softmax(-1)
        ((first, stop),) = talk.answers
        places = torch.arange(max(1, first), stop)
        logprobs.append(found[places - 1, tokens[places]])
    expected = (-torch.cat(logprobs).mean()).exp().item()
    assert perplexity(target, talks) == pytest.approx(expected, rel=1e-3)


def test_both_perplexities(tuned: Tuned, tmp_path: Path) -> None:
    lm_of(tuned.world.target).save_pretrained(tmp_path)
    old = LLM(str(tmp_path), max_model_len=100, dtype="float32")
    new = served_alike(old, tuned.folder)
    assert (new.max_model_len, new.dtype, new.runtime) == (100, torch.float32, old.runtime)
    found = Perplexity.of(old, new, cycles(3, seed=9, tokens=16))
    assert found.new < found.target / 4  # which had never seen the cycles


def test_how_it_is_used() -> None:
    new = Path("new")
    assert usage_text({"method": "eagle", "model": "x"}, None) == "--method eagle --draft-model x"
    assert usage_text({"method": "pad"}, new) == "--model new --method pad"
    more = {"method": "early_exit", "exit_layer": 1}
    told = usage_text(more, new)
    assert (
        told == """--model new --speculative-config '{"method": "early_exit", "exit_layer": 1}'"""
    )


def test_it_is_told_that_the_model_has_become_worse() -> None:
    best = Evaluation(1, 1.0, (0.6, 0.6), (1.6, 2.0), best=True)
    served = Served(1, 2.0, (0.6, 0.6), 0.1, 1.3)
    assert not advice(1.0, best, served, Perplexity(2.0, 2.1))
    (told,) = advice(1.0, best, served, Perplexity(2.0, 2.3))
    assert "perplexity is 2.30, the target's 2.00" in told


@pytest.mark.parametrize(
    ("method", "told"),
    [("eagle", "learn more levels"), ("spec_drafter", "learn for more epochs")],
)
def test_it_is_told_what_makes_later_positions_better(method: str, told: str) -> None:
    best = Evaluation(1, 1.0, (0.6, 0.3), (1.6, 1.8), best=True)
    served = Served(1, 1.8, (0.6, 0.3), 0.1, 1.3)
    (found,) = advice(1.0, best, served, deeper=training_class(method).deeper)
    assert found == f"Later positions are much worse than the first: {told}."


def test_memory_is_known_beforehand() -> None:
    """Weights, gradients and moments; and activations, which grow with the batch."""
    made: Any = new_trainee(training_method("medusa_2", {}), tiny_target())
    of_own = sum(weight.numel() for weight in made.own.parameters())
    of_matrices = sum(weight.numel() for weight in made.matrices)
    total = sum(weight.numel() for weight in made.parameters())
    sizes = [training_bytes(made, 0, 64, sized(n)) for n in (1, 2, 3)]
    moments = 2 * total - of_matrices
    assert of_own < total
    assert sizes[0].disk == 2 * 4 * (total + moments)
    batch = sizes[1].memory - sizes[0].memory
    # Angles and masks are those of all conversations.
    assert 0 <= sizes[0].memory - batch - 4 * (2 * total + moments) < 0.1 * batch
    assert sizes[2].memory - sizes[1].memory == batch
    # At least the states between the layers are kept, of the copy as well.
    assert batch > 512 * 64 * 4 * 2
    alone = training_method("medusa_2", {}).model_copy(update={"heads_first": 2.0})
    heads_only = new_trainee(alone, tiny_target())  # in the last step, too
    of_heads = [training_bytes(heads_only, 0, 64, sized(n)).memory for n in (1, 2)]
    assert of_heads[1] - of_heads[0] < batch / 2


def test_copies_of_weights_do_not_grow_with_the_batch() -> None:
    """bf16 keeps copies of the matrices: memory is more by these, and activations are smaller."""
    made: Any = new_trainee(training_method("medusa_2", {}), tiny_target())
    in_float32 = [training_bytes(made, 0, 64, sized(n)).memory for n in (1, 2)]
    in_bf16 = [training_bytes(made, 0, 64, sized(n, "bf16")).memory for n in (1, 2)]
    assert in_bf16[1] - in_bf16[0] < 1.1 * (in_float32[1] - in_float32[0])
    copies = 2 * sum(weight.numel() for weight in made.parameters() if weight.dim() == 2)
    constant = [2 * one - two for one, two in (in_float32, in_bf16)]
    assert 0.5 * copies < constant[1] - constant[0] < 2 * copies


def test_what_is_measured_is_where_the_drafter_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device "meta", which refuses tensors of others."""
    seen: list[torch.device] = []

    def forward(self: Any, batch: Any, num_levels: int) -> None:
        tensors = (*batch[:5], *batch.levels)
        seen.extend(each.device for each in tensors)

    made = new_trainee(training_method("medusa", {}), tiny_target())
    monkeypatch.setattr(type(made), "forward", forward)
    monkeypatch.setattr(report, "optimizers_of", lambda *_: [])
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    training_bytes(made.to("meta"), 1, 64, TrainingSettings())
    assert len(seen) == 2 * 10
    assert set(seen) == {torch.device("meta")}


def sized(count: int, mixed_precision: Literal["no", "bf16"] = "no") -> TrainingSettings:
    return TrainingSettings(batch_tokens=count * 512, mixed_precision=mixed_precision)


# Wrong use


@pytest.mark.parametrize("method", OPTIONS)
def test_a_target_that_cannot_be_loaded_again(method: str) -> None:
    parts = replace(parts_of(tiny_target()), reload=None)
    with refused(CompatibilityError, match="not a loaded model"):
        training_method(method, {}).trainee(parts)


def test_methods_say_whether_they_change_the_target() -> None:
    assert {name for name, kind in training_methods().items() if kind.tunes_target} == set(OPTIONS)
