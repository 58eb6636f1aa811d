"""Training of Spec-Drafters: what is learnt is what is served, and glancing does as it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spec_drafters import random_transitions, spec_drafter_of
from tests.tiny_seq2seq import CONTEXT, TEXT, VOCAB_SIZE, tiny_seq2seq, tiny_source
from tests.training.world import Run, World, assert_alike, parts_of, weights
from tokenleap import ConfigError
from tokenleap.core.references import Source
from tokenleap.drafters.blocks import TokenTransitions
from tokenleap.drafters.spec_drafter import load_spec_drafter
from tokenleap.errors import CompatibilityError
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target
from tokenleap.training import spec_drafter
from tokenleap.training.conversations import Conversation
from tokenleap.training.distill import output_layer
from tokenleap.training.features import (
    Batch,
    FeatureCache,
    Features,
    collate,
    compute_features,
)
from tokenleap.training.method import TrainingSettings, training_method
from tokenleap.training.report import training_bytes
from tokenleap.training.spec_drafter import (
    MaskRows,
    SpecDrafterTrainee,
    SpecDrafterTraining,
    copy_target,
    mask_rows,
    mask_states,
    new_masked_lm,
    some_of,
    some_prefixes,
)
from tokenleap.training.trainer import Averages, Evaluation, Step

MASKS = 5
OUTPUTS = [[2, 20, 21, 22, 23, 24, 25, 26], [2, 30, 31], [2, 40, 41, 42, 43, 44]]
SOURCES = [list(tiny_source(length=length, seed=length).tokens) for length in (9, 4, 12)]


def trainee_of(name: str = "bart", **options: Any) -> SpecDrafterTrainee:
    lm, notes = spec_drafter_of(
        name,
        MASKS,
        encoder=options.get("encoder", "own"),
        fewer_masks=options.get("fewer_masks", False),
        transitions=options.get("transitions", False),
    )
    trainee = SpecDrafterTrainee(lm, notes, SpecDrafterTraining(num_masks=MASKS, **options))
    if trainee.transitions is not None:
        trainee.transitions = random_transitions(lm)
    return trainee


def features(tokens: Sequence[int], source: Sequence[int]) -> Features:
    size = len(tokens)
    return Features(
        torch.tensor(tokens),
        [(1, size)],
        torch.zeros(size, 0, 32, dtype=torch.int8),
        torch.zeros(size, 0, 1, dtype=torch.float16),
        torch.tensor(tokens)[:, None].expand(-1, 16),
        torch.zeros(size, 16),
        torch.tensor(source),
    )


def batch_of(num_levels: int = 1) -> Batch:
    pairs = [features(*each) for each in zip(OUTPUTS, SOURCES, strict=True)]
    return collate(pairs, num_levels, SpecDrafterTrainee.first_learnt)


def served(trainee: SpecDrafterTrainee, source: Sequence[int], prefix: Sequence[int]) -> Tensor:
    """[k, V] of a pass of the network that serves it."""
    passes = Passes(network_for(trainee.lm), CONTEXT, torch.float32, torch.device("cpu"))
    passes.add(0)
    passes.encode(0, Source(tuple(source)))
    return passes.fill([0], [prefix], [MASKS], VOCAB_SIZE)[0][:, :VOCAB_SIZE]


def with_transitions(trainee: SpecDrafterTrainee, logits: Tensor, labels: Tensor) -> Tensor:
    """[n, V] of a block's first logits, each after the label before it."""
    if trainee.transitions is None:
        return logits
    rows = output_layer(trainee.lm).weight[:VOCAB_SIZE]
    transitions = TokenTransitions(trainee.transitions.matrix, rows)
    return torch.cat([logits[:1], logits[1:] + transitions.added_after(labels[:-1])])


# What is learnt


@pytest.mark.parametrize("transitions", [False, True])
@pytest.mark.parametrize("name", TEXT)
@torch.inference_mode()
def test_it_learns_what_is_served(name: str, transitions: bool) -> None:
    """All prefixes of texts of different lengths: BART's drafter stands in for one of T5."""
    trainee = trainee_of(name, transitions=transitions).eval()
    batch = batch_of(MASKS)
    levels = list(trainee.outputs(batch, MASKS))
    for row, place in ((0, 0), (0, 6), (1, 1), (2, 3)):
        prefix, labels = OUTPUTS[row][: place + 1], OUTPUTS[row][place + 1 :][:MASKS]
        found = torch.stack([trainee.logits(each[row, place], 0) for each in levels])
        found = found[: len(labels)]  # after the text there is no token before one
        alone = served(trainee, SOURCES[row], prefix)[: len(labels)]
        expected = with_transitions(trainee, alone, torch.tensor(labels))
        most = 1e-3 if name.endswith("_wide") else 1e-4  # the native runtime rounds in other places
        if transitions:  # what all tokens get alike is left out when it serves
            found, expected = found.log_softmax(-1), expected.log_softmax(-1)
        torch.testing.assert_close(found, expected, rtol=0, atol=most)


@pytest.mark.parametrize("name", TEXT)
@torch.inference_mode()
def test_it_learns_what_is_served_with_the_targets_encoder(name: str, tmp_path: Path) -> None:
    """The drafter's decoder reads the encoder of the runtime, kept in half precision."""
    trainee = trainee_of(name, encoder="target").eval()
    target = Target(tiny_seq2seq(name))
    talks = [
        Conversation(tuple(tokens), ((1, len(tokens)),), source=tuple(source))
        for tokens, source in zip(OUTPUTS, SOURCES, strict=True)
    ]
    for _ in compute_features(target, talks, (), tmp_path / "cache", encoder=True):
        pass
    cache = FeatureCache(tmp_path / "cache")
    batch = collate([cache[number] for number in range(3)], MASKS, trainee.first_learnt)
    levels = list(trainee.outputs(batch, MASKS))
    passes = Passes(network_for(trainee.lm), CONTEXT, torch.float32, torch.device("cpu"))
    passes.add(0)
    for row, place in ((0, 0), (0, 6), (1, 1), (2, 3)):
        prefix = OUTPUTS[row][: place + 1]
        found = torch.stack([trainee.logits(each[row, place], 0) for each in levels])
        passes.read_encoded(0, target.encoded(0, Source(tuple(SOURCES[row]))).half().float())
        expected = passes.fill([0], [prefix], [MASKS], VOCAB_SIZE)[0][:, :VOCAB_SIZE]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_evaluations_are_about_every_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_drafter, "_PLACES", 60)  # several passes
    trainee = trainee_of().eval()
    learnt = trainee(batch := batch_of(3), 3)
    for row, (tokens, source) in enumerate(zip(OUTPUTS, SOURCES, strict=True)):
        for place in range(len(tokens) - 1):
            guesses = served(trainee, source, tokens[: place + 1]).argmax(-1).tolist()
            labels = tokens[place + 1 : place + 4]
            right = [guess == label for guess, label in zip(guesses, labels, strict=False)]
            assert learnt.right[row, : len(right), place].tolist() == right
            assert batch.levels.valid[row, :, place].sum() == len(labels)
    assert learnt.counts.tolist() == [7 + 2 + 5, 6 + 1 + 4, 5 + 0 + 3]


@pytest.mark.parametrize("options", [{}, {"prefixes": 3}, {"prefixes": 2, "transitions": True}])
def test_the_loss_is_that_of_all_masks_inside_the_text(options: dict[str, Any]) -> None:
    """Without glancing and smoothing: the mean cross-entropy after the prefixes drawn.

    Blocks after several prefixes of a text have the logits that each has alone.
    """
    options = {"glancing": (0.0, 0.0), "label_smoothing": 0.0, "dropout": 0.0, **options}
    trainee = trainee_of(**options)
    trainee.lm.config.dropout = 0.0
    modules: list[Any] = list(trainee.lm.modules())
    for module in modules:
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    batch = batch_of()
    torch.manual_seed(4)
    prefixes, drawn = some_prefixes(batch, options.get("prefixes", 1))
    torch.manual_seed(4)
    learnt = trainee.train()(batch, 1)
    losses, first = [], torch.zeros_like(drawn)
    for row, place in drawn.nonzero().tolist():
        tokens, size = OUTPUTS[row], int(prefixes[row, place])
        labels = torch.tensor(tokens[size : size + MASKS])
        with torch.inference_mode():
            alone = served(trainee, SOURCES[row], tokens[:size])[: len(labels)]
            logits = with_transitions(trainee, alone, labels)
        losses.append(F.cross_entropy(logits, labels, reduction="none"))
        first[row, place] = bool(logits[0].argmax() == labels[0])
    torch.testing.assert_close(learnt.losses[0], torch.cat(losses).mean(), rtol=0, atol=1e-4)
    assert torch.equal(learnt.right[:, 0], first)
    assert learnt.counts.tolist() == [len(losses)]


def test_blocks_of_fewer_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lengths are learnt, the number of masks stays below that of a whole block.

    Five masks are drawn with the lowest chance, 0.10: not in 60 batches, with one of 2e-3.
    """
    trainee = trainee_of(fewer_masks=True)
    shapes: list[tuple[int, int]] = []

    def counted(tokens: Tensor, prefixes: Tensor, count: int, mask: int) -> MaskRows:
        shapes.append((count, prefixes.shape[1]))
        return mask_rows(tokens, prefixes, count, mask)

    monkeypatch.setattr(spec_drafter, "mask_rows", counted)
    torch.manual_seed(0)
    trainee.train()
    assert all(trainee(batch_of(), 1).losses.isfinite().all() for _ in range(60))
    assert set(shapes) == {(1, 5), (2, 2), (3, 1), (4, 1), (5, 1)}
    shapes.clear()
    list(trainee.eval().outputs(batch_of(MASKS), MASKS))
    assert set(shapes) == {(MASKS, 1)}


def test_prefixes_are_uniform() -> None:
    """1,000 draws of two of up to seven lengths: six standard deviations are 0.1 or less."""
    torch.manual_seed(0)
    batch = batch_of()
    draws = [some_prefixes(batch, 2) for _ in range(1000)]
    for row, tokens in enumerate(OUTPUTS):
        lengths = [prefixes[row][drawn[row]].tolist() for prefixes, drawn in draws]
        assert all(len(set(each)) == 2 for each in lengths)
        shares = torch.bincount(torch.tensor(lengths).flatten(), minlength=8)[1:] / 1000
        expected = torch.zeros(7)
        expected[: len(tokens) - 1] = 2 / (len(tokens) - 1)
        assert (shares - expected).abs().max() < 6 * (0.25 / 1000) ** 0.5


def test_texts_with_fewer_prefixes() -> None:
    prefixes, drawn = some_prefixes(batch_of(), 5)
    assert drawn.sum(-1).tolist() == [5, 2, 5]
    assert sorted(prefixes[1][drawn[1]].tolist()) == [1, 2]


# Glancing


def test_so_many_places_are_chosen() -> None:
    torch.manual_seed(0)
    places = torch.rand(50, 2, 8) < 0.6
    counts = (places.sum(-1) * torch.rand(50, 2)).long()
    chosen = some_of(places, counts)
    assert torch.equal(chosen.sum(-1), counts)
    assert not (chosen & ~places).any()
    assert not torch.equal(chosen, some_of(places, counts))


def test_labels_are_shown_and_not_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a share of the wrong ones; they leave the loss."""
    trainee = trainee_of(glancing=(0.5, 0.3), prefixes=2)
    passes: list[MaskRows] = []

    def watched(lm: Any, rows: MaskRows, *source: Tensor) -> Tensor:
        passes.append(rows)
        return mask_states(lm, rows, *source)

    monkeypatch.setattr(spec_drafter, "mask_states", watched)
    seen: list[Tensor] = []
    loss = F.cross_entropy
    monkeypatch.setattr(
        F,
        "cross_entropy",
        lambda x, y, **_: (seen.append(y), loss(x, y))[1],  # type: ignore[func-returns-value]
    )
    trainee.train()(batch := batch_of(), 1)
    first, second = passes
    shown = first.tokens != second.tokens
    assert (first.tokens[shown] == VOCAB_SIZE).all()
    for row, column in (found := shown.nonzero().tolist()):
        assert second.tokens[row, column] == batch.tokens[row, first.positions[row, column]]
    inside = first.places <= batch.lengths[:, None, None]
    assert 0 < len(found) <= int(inside.sum()) / 2
    assert len(seen[0]) == int(inside.sum()) - len(found)


def test_fewer_and_fewer_are_shown() -> None:
    trainee = trainee_of()
    shares = []
    for step in (0, 50, 99):
        trainee.step = (step, 100)
        shares.append(trainee.shown)
    assert shares == pytest.approx([0.5, 0.4, 0.302])


# Training


SETTINGS = TrainingSettings(
    max_steps=24,
    evaluate_every=8,
    accumulation=1,
    batch_tokens=64,
    warmup_steps=4,
    average=2,
    mixed_precision="no",
    learning_rate=5e-3,
    vector_learning_rate=5e-3,
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Pairs whose output is the source with every token plus one."""
    generator, made = torch.Generator().manual_seed(0), []
    for number in range(20):
        source = torch.randint(5, 25, (6,), generator=generator).tolist()
        tokens = (2, *(token + 1 for token in source), 2)
        made.append(Conversation(tokens, ((1, len(tokens)),), number, source=tuple(source)))
    options: dict[str, Any] = {"num_masks": 3, "shape": "small", "dropout": 0.0}
    folder, target = tmp_path_factory.mktemp("pairs"), Target(tiny_seq2seq("bart"))
    return World(folder, "spec_drafter", learnt=(made[:16], made[16:]), target=target, **options)


def test_it_learns_and_ends_alike_after_an_interruption(pairs: World, tmp_path: Path) -> None:
    whole, stopped = (Run(pairs, tmp_path / name, SETTINGS) for name in ("whole", "stopped"))
    losses = [event.losses[0] for event in whole.whole() if isinstance(event, Step)]
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    stopped.interrupt(12)
    stopped.whole()
    assert_alike(stopped, whole)
    assert whole.whole() == []  # it is finished


def test_the_last_weights_are_averaged(pairs: World, tmp_path: Path) -> None:
    run, at = Run(pairs, tmp_path, SETTINGS), []
    for event in run.trainer().run():
        if isinstance(event, Evaluation):
            at.append(weights(run.trainee))
    *_, before, last, mean = at
    for name, each in mean.items():
        torch.testing.assert_close(each, (before[name] + last[name]) / 2)
    assert [each.step for each in run.made.history] == [8, 16, 24, 24]


def test_averages(tmp_path: Path) -> None:
    averages = Averages(tmp_path / "weights", 2)
    for step, value in ((5, 100.0), (20, 1.0), (100, 4.0)):
        averages.keep(step, {"weight": torch.full((3,), value)})
    averages.load_into(into := {"weight": torch.zeros(3)})
    assert torch.equal(into["weight"], torch.full((3,), 2.5))


def test_what_is_written_can_draft(pairs: World, tmp_path: Path) -> None:
    parts = parts_of(pairs.target)
    options = {"num_masks": 3, "shape": "small", "transitions": True}
    method = training_method("spec_drafter", options)
    assert method.plan.draft_vocab_size is None
    torch.manual_seed(0)
    trainee: Any = method.trainee(parts)
    assert not trainee.transitions.matrix.any()  # it begins without them
    trainee.transitions = random_transitions(trainee.lm)
    trainee.write(parts, tmp_path, {"seed": 0})
    scorer, passes = load_spec_drafter(tmp_path, pairs.target)
    assert scorer.most_depth == 3
    assert scorer.transitions is not None
    added = scorer.transitions.added_after(torch.tensor([5]))[0]
    rows = trainee.lm.get_output_embeddings().weight[:VOCAB_SIZE]
    expected = trainee.transitions(rows[5]) @ rows.T
    expected = expected - expected.mean()
    torch.testing.assert_close(added, expected, rtol=0.05, atol=0.05)  # it is written in bfloat16
    assert passes.max_model_len == CONTEXT + 3


def test_what_is_written_drafts_the_draft_vocabulary(pairs: World, tmp_path: Path) -> None:
    method = training_method("spec_drafter", {"num_masks": 3, "draft_vocab_size": 20})
    assert method.plan.draft_vocab_size == 20
    parts = replace(parts_of(pairs.target), draft_tokens=torch.arange(5, 45, 2))
    trainee: Any = method.trainee(parts)
    assert trainee.logits(torch.zeros(2, 32), 0).shape == (2, VOCAB_SIZE)  # all are learnt
    trainee.write(parts, tmp_path, {"seed": 0})
    scorer, _ = load_spec_drafter(tmp_path, pairs.target)
    assert scorer.token_ids is not None
    assert scorer.token_ids.tolist() == list(range(5, 45, 2))


@pytest.mark.parametrize("encoder", ["own", "target"])
@pytest.mark.parametrize("name", ["bart", "mbart", "marian", "m2m_100", "pegasus", "t5"])
def test_what_is_written_is_what_was_learnt(name: str, encoder: str, tmp_path: Path) -> None:
    """After steps that change every weight that learns: positions, too."""
    target = Target(tiny_seq2seq(name))
    method = training_method("spec_drafter", {"num_masks": MASKS, "encoder": encoder})
    trainee: Any = method.trainee(parts_of(target))
    learning = [weight for weight in trainee.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in learning]
    optimizer = torch.optim.SGD(learning, 0.3)
    pairs = [
        replace(features(*each), encoded=torch.randn(len(each[1]), 32).half())
        for each in zip(OUTPUTS, SOURCES, strict=True)
    ]
    batch = collate(pairs, 1, trainee.first_learnt)
    for _ in range(3):
        optimizer.zero_grad()
        trainee.train()(batch, 1).losses.sum().backward()
        optimizer.step()
    moved = [not torch.equal(*each) for each in zip(before, learning, strict=True)]
    names = [key for key, weight in trainee.lm.named_parameters() if weight.requires_grad]
    assert all(moved), [key for key, each in zip(names, moved, strict=True) if not each]
    assert any("embed_positions" in key for key in names) == (name != "m2m_100")
    trainee.write(parts_of(target), tmp_path, {})
    _scorer, passes = load_spec_drafter(tmp_path, target)
    trainee.eval().lm.to(torch.bfloat16).to(torch.float32)  # as it was written
    prefix = OUTPUTS[0][:4]
    rows = mask_rows(torch.tensor([prefix]), torch.tensor([[4]]), MASKS, VOCAB_SIZE)
    passes.add(0)
    with torch.inference_mode():
        if encoder == "own":
            passes.encode(0, Source(tuple(SOURCES[0])))
        else:
            passes.read_encoded(0, batch.encoded[0, : len(SOURCES[0])].float())
        states, mask = (each[:1, : len(SOURCES[0])] for each in trainee._encoded(batch))
        expected = trainee.logits(mask_states(trainee.lm, rows, states, mask)[0, 0], 0)
        found = passes.fill([0], [prefix], [MASKS], VOCAB_SIZE)[0][:, :VOCAB_SIZE]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


# Networks and settings


@pytest.mark.parametrize(
    ("shape", "layers"), [("full", (4, 2)), ("balanced", (3, 4)), ("small", (2, 2))]
)
def test_shapes(shape: str, layers: tuple[int, int]) -> None:
    target = tiny_seq2seq("bart").config
    for halved in (False, True):
        config: Any = new_masked_lm(target, VOCAB_SIZE, MASKS, shape, halved=halved).config
        assert (config.encoder_layers, config.decoder_layers) == layers
        assert config.d_model == (16 if halved else 32)


@pytest.mark.parametrize("name", ["bart", "m2m_100", "t5"])
def test_without_an_encoder_of_its_own(name: str) -> None:
    """It keeps the target's width."""
    fields = {"num_masks": MASKS, "encoder": "target", "size": 0.01}
    method = training_method("spec_drafter", fields)
    assert method.plan.reads_encoder
    trainee: Any = method.trainee(parts_of(Target(tiny_seq2seq(name))))
    config = trainee.lm.config
    assert (config.encoder_layers, config.decoder_layers, config.d_model) == (0, 2, 32)


@pytest.mark.parametrize(
    ("name", "shape", "copied"),
    [
        *((name, "full", (0, 2)) for name in ("bart", "m2m_100", "pegasus")),
        ("bart", "balanced", (0, 1, 2, None)),
    ],
)
def test_it_starts_from_the_target(name: str, shape: str, copied: tuple[int | None, ...]) -> None:
    """From its first encoder layers, its embeddings, and decoder layers from the first to the last;
    there is a row for the mask, and layers that the target has not stay random."""
    target = tiny_seq2seq(name, decoder_layers=3)
    lm = new_masked_lm(target.config, VOCAB_SIZE, MASKS, shape)
    before = {key: each.clone() for key, each in lm.state_dict().items()}
    copy_target(target, lm)
    given, own = target.state_dict(), lm.state_dict()
    embedding = "model.shared.weight"
    assert torch.equal(own[embedding][:-1], given[embedding])
    assert torch.equal(own[embedding][-1], before[embedding][-1])
    for layer in range(4 if shape == "full" else 3):
        key = f"model.encoder.layers.{layer}.fc1.weight"
        assert torch.equal(own[key], given[key] if layer < 2 else before[key])
    for layer, source in enumerate(copied):
        for part in ("fc1", "encoder_attn.q_proj", "self_attn.v_proj"):
            key = f"model.decoder.layers.{{}}.{part}.weight"
            found, expected = key.format(layer), before[key.format(layer)]
            assert torch.equal(
                own[found], expected if source is None else given[key.format(source)]
            )


def test_starting_from_t5_is_refused() -> None:
    target = tiny_seq2seq("t5")
    lm = new_masked_lm(target.config, VOCAB_SIZE, MASKS, "small")
    with pytest.raises(CompatibilityError, match="from_target: a drafter of T5"):
        copy_target(target, lm)


def test_memory_grows_with_the_masks() -> None:
    """With more prefixes of a text, more is kept for its gradients."""
    target = Target(tiny_seq2seq("bart"))
    settings = TrainingSettings(batch_tokens=1024, mixed_precision="no")
    found = []
    for prefixes in (1, 8):
        method = training_method("spec_drafter", {"num_masks": MASKS, "prefixes": prefixes})
        made = method.trainee(parts_of(target))
        small, large = (
            training_bytes(made, 0, 32, settings.model_copy(update={"batch_tokens": size})).memory
            for size in (1024, 2048)
        )
        found.append(large - small)
    assert found[1] > 1.2 * found[0]


def test_many_logits_are_learnt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and the gradients are those of one part."""
    found = []
    for most in (spec_drafter._LOGITS, 2 * VOCAB_SIZE):
        monkeypatch.setattr(spec_drafter, "_LOGITS", most)
        trainee = trainee_of(prefixes=2, dropout=0.0, glancing=(0.5, 0.5))
        torch.manual_seed(0)
        learnt = trainee.train()(batch_of(), 1)
        learnt.losses.sum().backward()
        gradients = [weight.grad for weight in trainee.parameters() if weight.grad is not None]
        found.append((learnt, gradients))
    (whole, expected), (parts, gradients) = found
    torch.testing.assert_close(parts.losses, whole.losses)
    assert torch.equal(parts.right, whole.right)
    for each, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-3, atol=1e-5)


def test_the_published_values_and_their_size() -> None:
    found = training_method("spec_drafter", {}).adapted(TrainingSettings())
    assert (found.max_steps, found.warmup_steps, found.accumulation) == (300_000, 10_000, 4)
    assert (found.learning_rate, found.betas, found.average) == (5e-4, (0.9, 0.999), 10)
    assert (found.schedule, found.max_grad_norm, found.weight_decay) == ("inverse_sqrt", 5.0, 0.01)
    small = training_method("spec_drafter", {"size": 0.01})
    found = small.adapted(TrainingSettings(learning_rate=1e-3))
    assert (found.max_steps, found.warmup_steps, found.learning_rate) == (3000, 100, 1e-3)
    found = small.adapted(TrainingSettings(epochs=2, warmup=0.1))
    assert (found.max_steps, found.warmup_steps, found.steps(10)) == (None, None, 6)


def test_options_that_contradict() -> None:
    with pytest.raises(ConfigError, match="max_steps: takes the place of epochs"):
        TrainingSettings(max_steps=5, epochs=2)
    with pytest.raises(ConfigError, match="warmup_steps: takes the place of warmup"):
        TrainingSettings(warmup_steps=5, warmup=0.1)
    with pytest.raises(ConfigError, match="size: the target's encoder_attention_heads is 3"):
        new_masked_lm(
            tiny_seq2seq("bart", encoder_attention_heads=3, d_model=24).config,
            *(VOCAB_SIZE, MASKS, "small"),
            halved=True,
        )
    with pytest.raises(CompatibilityError, match="reads audio"):
        new_masked_lm(tiny_seq2seq("whisper").config, VOCAB_SIZE, MASKS, "small")
