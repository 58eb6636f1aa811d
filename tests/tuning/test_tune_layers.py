"""The search against synthetic objectives, and what it searches with against stepwise drafting."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tiny import tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams
from tokenleap.analysis import improvement_on_curve
from tokenleap.analysis.measure import Laboratory
from tokenleap.runtime.module import Skipped
from tokenleap.tuning import tune_layers
from tokenleap.tuning.tune_layers import (
    KINDS,
    Deadline,
    LayerLaboratory,
    LayerSearch,
    Run,
    SkipSet,
    Sublayer,
    layers_of,
)

CURVE = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.6)
ENDLESS = 1e9


class Synthetic:
    """Harms that multiply, pairs that harm more together, costs that add; every call takes 1 s.

    The speed-up is theorem 3.8's, so that the optimum is known.
    """

    verify_cost = CURVE

    def __init__(self, num_layers: int, seed: int, harm: float = 0.25, pairs: int = 0) -> None:
        dice = random.Random(seed)
        self.every = [Sublayer(kind, layer) for layer in range(num_layers) for kind in KINDS]
        self.harms = {sublayer: harm * dice.random() ** 2 for sublayer in self.every}
        self.pairs = [frozenset(dice.sample(self.every, 2)) for _ in range(pairs)]
        self.shares = {"attention": 0.5 / num_layers, "mlp": 0.4 / num_layers}
        self.now = 0.0
        self.measured: list[tuple[SkipSet, int]] = []

    def clock(self) -> float:
        return self.now

    def alpha(self, skip: SkipSet) -> float:
        self.now += 1
        kept = math.prod(1 - self.harms[sublayer] for sublayer in skip)
        return kept * math.prod(0.8 for pair in self.pairs if pair <= skip)

    def cost(self, skip: SkipSet) -> float:
        self.now += 1
        return 1 - sum(self.shares[sublayer.kind] for sublayer in skip)

    def measure(self, skip: SkipSet, gamma: int) -> Run:
        self.measured.append((skip, gamma))
        return Run(100 * self.speedup(skip, gamma), 100)

    def speedup(self, skip: SkipSet, gamma: int) -> float:
        return improvement_on_curve(self.alpha(skip), gamma, self.cost(skip), CURVE)

    def subsets(self) -> Iterator[SkipSet]:
        for size in range(1, len(self.every) + 1):
            yield from map(frozenset, itertools.combinations(self.every, size))

    def optimum(self) -> float:
        gammas = range(1, len(CURVE))
        return max(self.speedup(skip, gamma) for skip in self.subsets() for gamma in gammas)


def search(objective: Synthetic, seconds: float = ENDLESS, trials: int = 60) -> LayerSearch:
    deadline = Deadline(seconds, objective.clock)
    found = LayerSearch(objective, len(objective.every) // 2, deadline, trials)
    found.run()
    return found


def best_of(found: LayerSearch) -> float:
    assert found.best is not None
    return found.best.ratio


# The search


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_of_all_subsets_is_found(seed: int) -> None:
    objective = Synthetic(3, seed)
    assert best_of(search(objective)) == pytest.approx(objective.optimum())


@pytest.mark.parametrize("seed", range(8))
def test_pairs_that_harm_together_are_seen(seed: int) -> None:
    """Each alone looks harmless, so that the order misleads; the beam measures them together."""
    objective = Synthetic(4, seed, pairs=8)
    assert best_of(search(objective)) >= 0.99 * objective.optimum()


def test_without_a_beam_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above notices a worse search."""
    monkeypatch.setattr(tune_layers, "BEAM", 1)
    monkeypatch.setattr(tune_layers, "TRIES", 1)
    objectives = [Synthetic(4, seed, pairs=8) for seed in range(8)]
    assert any(best_of(search(objective)) < 0.99 * objective.optimum() for objective in objectives)


class Planted(Synthetic):
    """30 layers; what is harmless is known."""

    def __init__(self) -> None:
        super().__init__(30, seed=0)
        self.harmless = frozenset(random.Random(1).sample(self.every, 20))
        self.harms = {sublayer: 0.3 * (sublayer not in self.harmless) for sublayer in self.every}


def test_exactly_the_harmless_are_left_out() -> None:
    found = search(Planted())
    assert found.best is not None
    assert found.best.estimate.skip == Planted().harmless
    assert found.best.estimate.alpha == 1


@pytest.mark.parametrize("seconds", [100, 150, 1000])
def test_a_short_time_makes_longer_strides(seconds: int) -> None:
    objective = Planted()
    best = search(objective, seconds).best
    assert best is not None
    assert len(best.estimate.skip) > 5
    assert objective.now < seconds + 20  # what has been begun is finished


def test_no_time_at_all_gives_something() -> None:
    objective = Planted()
    found = search(objective, 0)
    assert found.best is not None
    assert len(objective.measured) == 1
    assert len(found.estimates) == 1


@pytest.mark.parametrize("trials", [1, 2, 7, 30])
def test_runs_are_bounded_and_the_better_half_runs_again(trials: int) -> None:
    objective = Synthetic(6, 0)
    found = search(objective, trials=trials)
    assert 1 <= len(objective.measured) <= trials
    assert sum(len(trial.runs) for trial in found.trials) == len(objective.measured)
    if trials == 30:
        runs = sorted((len(trial.runs) for trial in found.trials), reverse=True)
        assert runs[0] >= 3 > runs[-1] == 1
        assert found.best is not None
        assert len(found.best.runs) == runs[0]


def test_it_says_what_it_is_doing() -> None:
    objective = Synthetic(6, 0)
    found = LayerSearch(objective, 6, Deadline(ENDLESS, objective.clock), 5)
    told: list[str] = []
    found.report = told.append
    found.run()
    assert told[:2] == ["Timing passes", "Leaving out one sublayer, 1 of 12"]
    assert "Leaving out 7 of 12 sublayers" in told
    assert told[-1].startswith(f"Run {len(objective.measured)} of at most 5, best so far 1.")


def test_the_clock_decides_and_not_the_theory() -> None:
    class Slow(Synthetic):
        def measure(self, skip: SkipSet, gamma: int) -> Run:
            run = super().measure(skip, gamma)
            return Run(run.drafted / gamma, run.plain)

    predicted, measured = search(Synthetic(6, 0, harm=0.1)).best, search(Slow(6, 0, harm=0.1)).best
    assert predicted is not None
    assert measured is not None
    assert measured.gamma < predicted.gamma


def test_what_was_run_survives_an_interrupt() -> None:
    class Interrupted(Synthetic):
        def measure(self, skip: SkipSet, gamma: int) -> Run:
            if len(self.measured) == 3:
                raise KeyboardInterrupt
            return super().measure(skip, gamma)

    objective = Interrupted(6, 0)
    found = LayerSearch(objective, 6, Deadline(ENDLESS, objective.clock), 60)
    assert not found.trials
    with pytest.raises(KeyboardInterrupt):
        found.run()
    assert found.best is not None
    assert (found.best.estimate.skip, found.best.gamma) in objective.measured


def test_larger_sets_are_left_alone_once_none_can_pay() -> None:
    """Of two, alpha is below the cost of an empty stack: corollary 3.9."""
    objective = Synthetic(6, 0)
    objective.harms = dict.fromkeys(objective.every, 0.8)
    found = search(objective)
    assert max(len(skip) for skip in found.estimates) == 2
    assert best_of(found) < 1


# Measuring

PROMPTS = [[1, 2, 3, 4], [7], list(range(20)) * 16]
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=24, repetition_penalty=1.3)
SKIP = frozenset([Sublayer("attention", 1), Sublayer("mlp", 2), Sublayer("attention", 2)])


def model(**fields: Any) -> Any:
    return tiny_model(num_hidden_layers=4, max_position_embeddings=1024, **fields)


@pytest.fixture(scope="module")
def laboratory() -> LayerLaboratory:
    return LayerLaboratory(LLM(model(initializer_range=0.12)))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_alpha_is_that_of_drafting_at_every_position_in_turn(
    laboratory: LayerLaboratory, params: SamplingParams
) -> None:
    """One pass over a text against one draft per token of it, prompts beyond a chunk included."""
    laboratory.calibrate(PROMPTS, params)
    config = {"method": "layer_skip", "acceptance": "rejection", **layers_of(SKIP)}
    stepwise = Laboratory(LLM(model(initializer_range=0.12), speculative_config=config))
    found = stepwise.assumptions(PROMPTS, params, 1)
    assert laboratory.positions == found.positions == 72
    assert 0.05 < found.alpha < 0.95
    assert laboratory.alpha(SKIP) == pytest.approx(found.alpha, abs=1e-5)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_leaving_out_nothing_agrees_always(
    laboratory: LayerLaboratory, params: SamplingParams
) -> None:
    laboratory.calibrate(PROMPTS, params)
    assert laboratory.alpha(frozenset()) == pytest.approx(1, abs=1e-4)
    assert laboratory.alpha(SKIP) < 0.95


def test_calibration_ends_when_told(laboratory: LayerLaboratory) -> None:
    laboratory.calibrate(PROMPTS, GREEDY, lambda: True)
    assert laboratory.num_texts == 1
    assert len(laboratory.verify_cost) == 11
    assert laboratory.verify_cost[0] == 1


def test_outputs_of_one_token_are_refused(laboratory: LayerLaboratory) -> None:
    with pytest.raises(ConfigError, match="every output ends at its first token"):
        laboratory.calibrate(PROMPTS, GREEDY.model_copy(update={"max_tokens": 1}))


def test_a_pass_without_sublayers_costs_less() -> None:
    """Of 16 wide layers nothing but the head is left, which is small."""
    model = tiny_model(num_hidden_layers=16, hidden_size=128, intermediate_size=512)
    deep = LayerLaboratory(LLM(model))
    deep.calibrate(PROMPTS[:1], GREEDY)
    every = frozenset(Sublayer(kind, layer) for layer in range(16) for kind in KINDS)
    assert deep.cost(every) < 0.6


def test_a_run_generates_the_same_with_and_without(
    laboratory: LayerLaboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    laboratory.calibrate(PROMPTS[:2], SAMPLED)
    outputs: list[list[int]] = []
    drafts: list[int] = []
    proceed = laboratory._continue

    def watched(*arguments: Any) -> Any:
        request = proceed(*arguments)
        outputs.append(request.output_ids)
        drafts.append(request.metrics.num_drafts)
        return request

    monkeypatch.setattr(laboratory, "_continue", watched)
    run = laboratory.measure(SKIP, 3)
    assert run.drafted > 0 < run.plain
    assert outputs[0] == outputs[1] != outputs[2] == outputs[3]
    assert [count > 0 for count in drafts] == [False, True, True, False]


def test_the_search_leaves_the_model_as_it_was() -> None:
    whole = model()
    before = {name: weight.clone() for name, weight in whole.state_dict().items()}
    llm = LLM(whole)
    lab = LayerLaboratory(llm)
    lab.calibrate(PROMPTS[:2], GREEDY)
    LayerSearch(lab, lab.num_layers, Deadline(ENDLESS), 4).run()
    assert all(torch.equal(before[name], weight) for name, weight in whole.state_dict().items())
    again = llm.generate(PROMPTS[:2], GREEDY)
    fresh = LLM(model()).generate(PROMPTS[:2], GREEDY)
    assert [out.token_ids for out in again] == [out.token_ids for out in fresh]


def test_layers_without_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Skipped.KINDS, "mlp", ("no_such_part",))
    with pytest.raises(CompatibilityError, match="has no submodule named no_such_part"):
        LayerLaboratory(LLM(tiny_model("phi")))
    with pytest.raises(CompatibilityError, match="this is an encoder-decoder"):
        LayerLaboratory(LLM(tiny_seq2seq()))
