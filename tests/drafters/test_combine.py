"""Merged drafts keep their q; the switch finds the better drafter; a cascade keeps its q."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.control.worlds import request_of
from tests.drafting import drafter_of
from tests.enumeration import (
    chains,
    distance,
    independent,
    most_likely,
    output_distribution,
    random_distributions,
    trees,
)
from tests.invariants.test_controllers import outcome
from tests.invariants.test_shared_nodes import shared_trees
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import tiny_model
from tokenleap import ConfigError, SamplingParams, SpeculativeConfig
from tokenleap.control import Budget
from tokenleap.control.features import by_match, by_rank
from tokenleap.core.acceptance import RULES
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.combine import Ensemble, Switch, graft, merge
from tokenleap.drafters.lookups import NgramDrafter, NoDrafter
from tokenleap.drafters.options import NgramOptions, SwitchOptions, write_drafters

NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
NOTHING = ({"method": "none"}, {"method": "none"})
"""Options of two drafters that a test makes itself."""


def test_merging_deterministic_drafts() -> None:
    first = Draft.deterministic(chain([0, 1, 2, 3]))
    second = Draft.deterministic(chain([0, 1, 5]))
    third = Draft.deterministic(TokenTree((0, 7, 1), (-1, 0, 0)))
    merged = merge([first, second, third], limit=9)
    assert merged.tree == TokenTree((0, 1, 7, 2, 5, 3), (-1, 0, 0, 1, 1, 3))
    assert merge([first, second], limit=2).tree == chain([0, 1, 2])
    assert merge([Draft.empty(0), second], limit=9).tree == second.tree


def test_drawn_nodes_are_never_merged() -> None:
    distribution = Distribution.of(random_distributions(3, 1)(()).probs)
    drawn = Draft(chain([0, 1]), (distribution,))
    assert merge([drawn, drawn], limit=9).tree == TokenTree((0, 1, 1), (-1, 0, 0))
    certain = Draft.deterministic(chain([0, 1]))
    assert merge([drawn, certain], limit=9).tree == chain([0, 1])
    assert merge([certain, drawn], limit=9).tree.num_drafted == 2


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("limit", [2, 3, 9])
def test_merged_drafts_are_lossless(rule: str, limit: int) -> None:
    """Enumerated: a sampled chain, another sampled chain, and the likeliest tokens of a third."""
    p, q1, q2, q3 = (random_distributions(3, seed) for seed in (1, 2, 3, 4))

    def merged() -> Iterator[tuple[Draft, float]]:
        for first, w1 in chains(q1, 2):
            for second, w2 in chains(q2, 1):
                for third, w3 in trees(q3, most_likely, 2, 1):
                    yield merge([first, second, third], limit), w1 * w2 * w3

    outcomes = output_distribution(RULES[rule](), merged(), p, length=3)
    assert sum(outcomes.values()) == pytest.approx(1)
    assert distance(outcomes, p, 3) < 1e-6


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("limit", [2, 9])
@pytest.mark.parametrize("looked_up", [0, 1, 2])
def test_features_do_not_order_sampled_nodes(looked_up: int, limit: int, shared: bool) -> None:
    """A hybrid's draft in an ensemble: two draws of one q, onto which a lookup was grafted."""
    p, q = random_distributions(3, 1), random_distributions(3, 2)
    found = Draft.deterministic(chain([0, looked_up]), by_match(3, 1))
    lookup = Draft.deterministic(chain([0, looked_up]), by_match(2, 1))

    def merged() -> Iterator[tuple[Draft, float]]:
        drawn = shared_trees(q, 2, 1) if shared else trees(q, independent, 2, 1)
        for tree, weight in drawn:
            grafted = graft(tree, found, 8, siblings=True)
            yield merge([lookup, grafted], limit, shared=shared), weight

    outcomes = output_distribution(RULES["rejection"](), merged(), p, length=2)
    assert distance(outcomes, p, 2) < 1e-6


def test_lookups_are_merged_by_their_odds() -> None:
    """The likeliest nodes come first, and what both found has the better features."""
    longest = Draft.deterministic(chain([0, 1, 2, 3]), by_match(4, 3))
    tree = TokenTree((0, 1, 5, 2), (-1, 0, 0, 1))
    ranked = Draft.deterministic(tree, (by_rank(0), by_rank(7), by_rank(0)))
    merged = merge([longest, ranked], 4)
    assert merged.tree == TokenTree((0, 1, 2, 3, 5), (-1, 0, 1, 2, 0))
    assert merged.features == (*by_match(4, 3), by_rank(7))
    assert merge([longest, ranked], 3).tree == chain([0, 1, 2, 3])
    assert merge([ranked, longest], 4).features == merged.features
    alone = merge([longest, Draft.empty(0)], 4)
    assert (alone.tree, alone.features) == (longest.tree, longest.features)
    drawn = Draft(chain([0, 4]), (Distribution(torch.ones(9) / 9),))
    assert merge([longest, drawn], 4).features == ()


def test_an_ensemble_of_lookups_looks_up() -> None:
    lookup, other = NgramDrafter(NgramOptions()), NoDrafter()
    assert Ensemble([lookup, lookup]).traits.looks_up
    assert not Ensemble([lookup, other]).traits.looks_up


def test_the_switch_settles_on_the_better_drafter() -> None:
    """One that yields five tokens a step against one that yields one, at the same cost."""
    switch = Switch([NoDrafter(), NoDrafter()], SwitchOptions(drafters=NOTHING, try_every=8))
    request, used = request_of(), []
    for _ in range(64):
        switch.propose([request], [Budget(4, 4)])
        current = switch._choices[request.key].current
        used.append(current)
        result: Outcome = outcome(request, 4, 4 if current == 1 else 0)
        slow = 1.0 if used.index(current) == len(used) - 1 else 0.001  # it reads the text first
        switch.observe([result], StepTimes(slow, 0.01, 0.0))
    assert used[:4] == [0, 0, 1, 1]  # each is tried, and then timed
    assert used[16:].count(1) > 40


def test_the_switch_chooses_and_credits_in_drafting_steps_only() -> None:
    """Every second step a controller allows no draft; tries are every fourth of the others.

    Plain steps are cheaper, and would favour the drafter that is chosen in them.
    """
    switch = Switch([NoDrafter(), NoDrafter()], SwitchOptions(drafters=NOTHING, try_every=4))
    request, used = request_of(), []
    for step in range(64):
        drafting = step % 2 == 0
        switch.propose([request], [Budget(4, 4) if drafting else Budget(4, 0)])
        choice = switch._choices[request.key]
        arms = [arm.mean for arm in choice.arms]
        current, passed = choice.current, 4 if drafting and choice.current == 1 else 0
        result: Outcome = outcome(request, 4 * drafting, passed)
        switch.observe([result], StepTimes(0.001 * drafting, 0.01 if drafting else 1e-6, 0.0))
        if drafting:
            used.append(current)
        else:
            assert [arm.mean for arm in choice.arms] == arms
            assert current == used[-1]
    assert used[:4] == [0, 0, 1, 1]
    assert used[4:] == [(number // 4) % 2 if number % 4 == 0 else 1 for number in range(5, 33)]


def test_a_switched_drafter_sees_plain_steps_too() -> None:
    """`lookahead` learns from every pass, and must have been asked before."""
    llm = tiny_llm(
        tiny_model(),
        "switch",
        drafters=[{"method": "lookahead"}, {"method": "ngram"}],
        controller={"rule": "batch", "lengths": {1: 0}},
    )
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=8))
    assert output.metrics.drafter_failure is None
    drafter: Any = drafter_of(llm)
    assert output.metrics.num_drafts == 0
    assert not drafter._choices


def test_a_cascade_of_the_target_itself_is_always_accepted() -> None:
    """Its q is exactly the middle model's, whatever the inner drafter guesses."""
    model = tiny_model()
    for rule in ("rejection", "block", "coupled"):
        llm = tiny_llm(model, "cascade", rule, model=model)
        (output,) = llm.generate([PROMPTS[0]], SamplingParams(seed=3, max_tokens=25))
        assert output.metrics.acceptance_rate == 1.0
        assert output.metrics.mean_acceptance_length == 5.0


@pytest.mark.parametrize("inner", [1, 8])
def test_a_cascade_stays_within_the_middle_models_context(inner: int) -> None:
    """Learned positions have no row for a token beyond it."""
    model = tiny_model("gpt2", n_positions=32)
    llm = tiny_llm(
        model,
        "cascade",
        model=tiny_model("gpt2", n_positions=24, seed=1),
        drafter={"method": "random"},
        inner_num_speculative_tokens=inner,
    )
    params = SamplingParams(temperature=0, max_tokens=None)
    (output,) = llm.generate([PROMPTS[0]], params)
    (plain,) = tiny_llm(model).generate([PROMPTS[0]], params)
    assert output.token_ids == plain.token_ids
    assert output.metrics.num_drafts > 0


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("early_exit", "coupled"),
        ("layer_skip", "rejection"),
        ("suffix", "coupled"),
        ("ngram_table", "rejection"),
        ("cascade", "coupled"),
    ],
)
def test_a_cascade_over_any_drafter(method: str, rule: str) -> None:
    """The middle model's own layers, for one, draft for the middle model."""
    params = SamplingParams(temperature=0 if rule == "rejection" else 0.7, seed=3, max_tokens=20)
    plain = tiny_llm(tiny_model()).generate(PROMPTS, params)
    inner = {"model": tiny_model(seed=2), "drafter": NGRAM} if method == "cascade" else {}
    llm = tiny_llm(tiny_model(), "cascade", rule, drafter={"method": method, **inner})
    assert [o.token_ids for o in llm.generate(PROMPTS, params)] == [o.token_ids for o in plain]


def test_a_cascade_stops_where_it_is_not_sure() -> None:
    controller = {"rule": "confidence", "threshold": 1.0, "step": 0}
    llm = tiny_llm(tiny_model(), "cascade", controller=controller)
    params = SamplingParams(seed=1, temperature=1.5, max_tokens=30)
    (output,) = llm.generate([PROMPTS[0]], params)
    assert max(len(step.drafted) for step in output.trace) == 1


def test_a_greedy_cascade_stops_where_its_middle_model_alone_would() -> None:
    """By the model's probabilities: q is one-hot."""
    controller = {"rule": "confidence", "threshold": 0.08, "step": 0}
    params = SamplingParams(temperature=0, max_tokens=40)
    drafted = {}
    for method in ("draft_model", "cascade"):
        llm = tiny_llm(tiny_model(), method, gamma=6, controller=controller)
        (output,) = llm.generate([PROMPTS[0]], params)
        drafted[method] = [step.drafted for step in output.trace]
    assert drafted["cascade"] == drafted["draft_model"]
    assert len({len(tokens) for tokens in drafted["cascade"][:-6]}) > 1


def test_a_cascade_saves_passes_of_the_middle_model() -> None:
    """Against the same draft model alone, on greedy text that repeats itself."""
    params = SamplingParams(temperature=0, max_tokens=60)
    passes = {}
    for name, method in (("alone", "draft_model"), ("cascade", "cascade")):
        llm = tiny_llm(tiny_model("phi"), method, model=tiny_model("phi"))
        llm.generate([PROMPTS[0]], params)
        drafter = drafter_of(llm)
        middle = drafter._model if method == "cascade" else drafter._scorer._model  # type: ignore[attr-defined]
        passes[name] = middle.num_passes
    assert passes["cascade"] < passes["alone"]


@pytest.mark.parametrize("method", ["ensemble", "switch", "horizontal_cascade", "cascade"])
def test_an_inner_model_without_a_method_is_a_draft_model(method: str) -> None:
    """In every option that configures another drafter, as in the outer configuration."""

    def fields(inner: dict[str, Any]) -> dict[str, Any]:
        if method == "cascade":
            return {"drafter": inner}
        tokens = {"tokens": [2, 2]} if method == "horizontal_cascade" else {}
        return {"drafters": [inner, NGRAM], **tokens}

    model = tiny_model(seed=1)
    params = SamplingParams(temperature=0, max_tokens=12)
    runs = []
    for inner in ({"model": model}, {"method": "draft_model", "model": model}):
        (output,) = tiny_llm(tiny_model(), method, **fields(inner)).generate([PROMPTS[0]], params)
        runs.append((output.metrics.drafter_failure, [step.drafted for step in output.trace]))
    if method != "switch":  # which chooses by the clock
        assert runs[0] == runs[1]
    assert runs[0][0] is None
    with pytest.raises(ConfigError, match="a drafter needs a 'method'") as caught:
        tiny_llm(tiny_model(), method, **fields({"prompt_lookup_min": 1}))
    assert "\n" not in str(caught.value)


def test_a_folder_of_drafters_inside_a_combination(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny_model(seed=1).save_pretrained(tmp_path / name)
    write_drafters(tmp_path, ["one", "two"])
    inner = {"method": "ensemble", "drafters": str(tmp_path)}
    config = SpeculativeConfig.parse({"method": "switch", "drafters": [inner, NGRAM]})
    assert config.controller_name == "cost_model"


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("ensemble", {"drafters": [{"method": "ngram"}]}, "drafters"),
        ("ensemble", {"drafters": [{"method": "ngram"}, {"method": "nope"}]}, "unknown method"),
        (
            "switch",
            {"drafters": [{"method": "ngram", "acceptance": "block"}, {"method": "ngram"}]},
            "acceptance belongs to the outer speculative_config",
        ),
        ("cascade", {"drafter": {"method": "ngram", "windw": 3}}, "no field 'windw'"),
    ],
)
def test_wrong_combinations(method: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_llm(tiny_model(), method, **fields)
    assert message in str(caught.value)
