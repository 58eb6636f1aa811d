"""The horizontal cascade: each drafter continues the ones before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.drafting import request_of
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import tiny_model
from tokenleap import CompatibilityError, ConfigError, SamplingParams, SpeculativeConfig
from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution, LazyDistribution
from tokenleap.core.noise import Stream
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.combine import HorizontalCascade
from tokenleap.drafters.options import HorizontalOptions
from tokenleap.request import Request

PARAMS = SamplingParams(temperature=0, max_tokens=40)


class Counting(Drafter):
    """Drafts root + step, root + 2 step, ... and writes down what it was shown."""

    def __init__(self, step: int, most: int = 99, sure: float = 1.0) -> None:
        self._step = step
        self._most = most
        self._sure = sure
        self.shown: list[list[int]] = []
        self.rewound = 0

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = []
        for request, budget in zip(batch, budgets, strict=True):
            self.shown.append(list(request.token_ids))
            tokens, path_prob = [request.root], 1.0
            for _ in range(min(self._most, budget.chain)):
                tokens.append(tokens[-1] + self._step)
                path_prob *= self._sure
                if budget.stops_below(self._sure, path_prob):
                    break
            distributions = tuple(_unsure(token, self._sure) for token in tokens[1:])
            drafts.append(Draft(chain(tokens), distributions))
        return drafts

    def rewind(self, request: Request) -> None:
        self.rewound += 1


def _unsure(token: int, probability: float) -> Distribution:
    if probability == 1:
        return Distribution.one_hot(token)
    return Distribution(
        torch.tensor([probability, 1 - probability]), torch.tensor([token, token + 1])
    )


def cascade(*drafters: Drafter, tokens: Sequence[int]) -> HorizontalCascade:
    configs = tuple({"method": "test"} for _ in drafters)
    return HorizontalCascade(drafters, HorizontalOptions(drafters=configs, tokens=tuple(tokens)))


def tokens_of(drafter: Drafter, request: Request, budget: Budget) -> list[int]:
    (draft,) = drafter.propose([request], [budget])
    return list(draft.tree.tokens[1:])


def test_positions_are_shared_out_in_order() -> None:
    first, second = Counting(1), Counting(10)
    drafter = cascade(first, second, tokens=[2, 3])
    assert tokens_of(drafter, request_of([1, 2]), Budget(9, 9)) == [3, 4, 14, 24, 34]
    assert second.shown == [[1, 2, 3, 4]]
    assert tokens_of(drafter, request_of([1, 2]), Budget(3, 9)) == [3, 4, 14]
    assert tokens_of(drafter, request_of([1, 2]), Budget(2, 9)) == [3, 4]


def test_the_next_goes_on_where_one_has_nothing_to_say() -> None:
    drafter = cascade(Counting(1, most=0), Counting(10), tokens=[2, 2])
    assert tokens_of(drafter, request_of([5]), Budget(9, 9)) == [15, 25]


def test_doubt_ends_the_whole_chain() -> None:
    drafter = cascade(Counting(1, sure=0.6), Counting(10), tokens=[3, 2])
    request = request_of([5])
    assert tokens_of(drafter, request, Budget(9, 9, min_token_prob=0.7)) == [6]
    assert tokens_of(drafter, request, Budget(9, 9, min_path_prob=0.3)) == [6, 7, 8]
    assert tokens_of(drafter, request, Budget(9, 9, min_path_prob=0.1)) == [6, 7, 8, 18, 28]


def test_what_was_only_drafted_is_taken_back() -> None:
    second = Counting(10)
    drafter = cascade(Counting(1), second, tokens=[2, 2])
    request = request_of([1])
    tokens_of(drafter, request, Budget(4, 4))
    request.token_ids += [2, 3]  # just what was drafted before the second one's turn
    tokens_of(drafter, request, Budget(4, 4))
    assert second.rewound == 0
    request.token_ids += [9]
    tokens_of(drafter, request, Budget(4, 4))
    assert second.rewound == 1


def test_the_distribution_of_every_token_is_its_drafters() -> None:
    drafter = cascade(Counting(1, sure=0.6), Counting(10), tokens=[1, 1])
    (draft,) = drafter.propose([request_of([5])], [Budget(4, 4)])
    assert draft.q_of(1).prob(6) == pytest.approx(0.6)
    assert draft.q_of(2).certain == 16


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_models_then_ngrams(rule: str) -> None:
    """The first sees committed tokens only, the second what the first has drafted as well."""
    model = tiny_model(num_hidden_layers=4)
    stages = [{"method": "early_exit"}, {"method": "ngram", "prompt_lookup_min": 1}]
    llm = tiny_llm(model, "horizontal_cascade", rule, 6, drafters=stages, tokens=[2, 4])
    outputs = llm.generate(PROMPTS, PARAMS)
    plain = tiny_llm(model).generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


class Noisy(Drafter):
    """Drafts one drawn token, and writes down where its noise comes from."""

    def __init__(self) -> None:
        self.counters: list[list[int]] = []

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        for request in batch:
            noise = request.noise.at(len(request.token_ids)).drafting(coupled=False)
            self.counters.append(noise.counter(Stream.DRAFT, 0))
        return [Draft.deterministic(chain([request.root, 5])) for request in batch]


def test_each_step_has_its_own_noise() -> None:
    """Also where a position is drafted again, after a shorter draft of the stage before."""
    last = Noisy()
    drafter = cascade(Counting(1), last, tokens=[1, 1])
    drafter.propose([request_of([5])], [Budget(2, 2)])
    shorter = cascade(Counting(1, most=0), last, tokens=[1, 1])
    shorter.propose([request_of([5, 6])], [Budget(2, 2)])
    first, second = last.counters
    assert first[2] == second[2]  # the same position
    assert first != second


def refused(drafters: list[dict[str, Any]], tokens: list[int]) -> None:
    tiny_llm(tiny_model(), "horizontal_cascade", drafters=drafters, tokens=tokens)


def test_what_does_not_fit() -> None:
    ngram, exit_early = {"method": "ngram"}, {"method": "early_exit"}
    with pytest.raises(CompatibilityError, match="can only come first"):
        refused([ngram, exit_early], [1, 1])
    with pytest.raises(CompatibilityError, match="'lookahead' proposes trees"):
        refused([ngram, {"method": "lookahead"}], [1, 1])
    with pytest.raises(ConfigError, match="one number per drafter, got 1 for 2"):
        refused([ngram, ngram], [3])
    with pytest.raises(ConfigError, match="tokens: input should be less than or equal to 256"):
        refused([ngram, ngram], [1000, 1])
    long = {"drafters": [ngram, ngram], "tokens": [150, 150]}
    with pytest.raises(ConfigError, match="would draft 300 tokens with these options, more than"):
        SpeculativeConfig.parse({"method": "horizontal_cascade", **long})


class Sure(Drafter):
    """Drafts one token of this path probability; its q must not be computed."""

    def __init__(self, path_prob: float) -> None:
        self._path_prob = path_prob

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        def refused() -> Distribution:
            raise AssertionError("q was computed")

        q = (LazyDistribution(refused),)
        return [Draft(chain([r.root, 5]), q, path_probs=(self._path_prob,)) for r in batch]


@pytest.mark.parametrize(("path_prob", "length"), [(0.6, 2), (0.4, 1)])
def test_a_chain_ends_by_the_drafters_own_probabilities(path_prob: float, length: int) -> None:
    """These decide where the drafter itself stops, and q need not be known."""
    drafter = cascade(Sure(path_prob), Counting(1, most=1), tokens=(1, 1))
    (draft,) = drafter.propose([request_of([1, 2])], [Budget(2, 2, min_token_prob=0.5)])
    assert draft.tree.num_drafted == length
