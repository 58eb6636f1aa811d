"""A fake target and drafter with known costs and known acceptance, for controllers to learn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenleap import SamplingParams
from tokenleap.control import Controller, CostCurve
from tokenleap.control.cost_model import CostModel
from tokenleap.core.acceptance import Accepted
from tokenleap.core.sampler import TreeDistributions
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome
from tokenleap.request import Request
from tokenleap.runtime.network import PassOutput

__all__ = [
    "World",
    "acceptance_rates",
    "cheap",
    "cpu",
    "flat",
    "judged",
    "learn",
    "measured",
    "outcome",
    "request_of",
    "stairs",
    "steep",
    "tree_of",
]


# Seconds of a pass, by positions


def flat(positions: int) -> float:
    return 0.01


def cpu(positions: int) -> float:
    return 0.01 * (1 + 0.045 * (positions - 1))


def cheap(positions: int) -> float:
    return 0.01 * (1 + 0.01 * positions)


def stairs(positions: int) -> float:
    return 0.01 if positions <= 4 else 0.02


def steep(positions: int) -> float:
    return 0.01 * positions


def measured(seconds: Callable[[int], float], *, pads_rows: bool = False) -> CostCurve:
    points = {size: seconds(size) for size in (1, 2, 4, 8, 16, 32, 64)}
    return CostCurve(points, pads_rows=pads_rows)


# Requests and what comes of them


def request_of(max_tokens: int = 10**6) -> Request:
    return Request([1, 2], SamplingParams(max_tokens=max_tokens), vocab_size=9, max_model_len=10**7)


def tree_of(sizes: Sequence[int]) -> TokenTree:
    """So many nodes at each level, all of them children of the first one above."""
    parents, first = [-1], 0
    for size in sizes:
        parents += [first] * size
        first = len(parents) - size
    return TokenTree((0,) * len(parents), tuple(parents))


def outcome(request: Request, sizes: Sequence[int], passed: int) -> Outcome:
    """A tree of which the first node was kept at so many levels."""
    path = tuple(1 + sum(sizes[:level]) for level in range(passed))
    return judged(request, Draft.deterministic(tree_of(sizes)), path)


def judged(request: Request, draft: Draft, path: Sequence[int], token: int = 0) -> Outcome:
    """The outcome of keeping this path of a draft, and of this token after it."""
    tree = draft.tree
    rejected = tree.children[path[-1] if path else 0]
    decision = Accepted(tuple(path), token, rejected, "rejected" if rejected else "")
    logits = torch.zeros(1, 9).expand(len(tree), 9)
    distributions = TreeDistributions(logits, tree, request.sampler, request.output_ids)
    return Outcome(request, draft, decision, (), PassOutput(logits), distributions)


def learn(
    controller: Controller, outcomes: Sequence[Outcome], draft_seconds: float, verify: float
) -> None:
    """Tell the controller of a pass that took so many seconds, as the loop does."""
    if controller.resting:
        controller.costs.settle()
        return
    positions = sum(len(outcome.draft.tree) for outcome in outcomes)
    controller.costs.observe(positions, verify, len(outcomes))
    controller.observe(outcomes, draft_seconds)


def acceptance_rates(model: CostModel, request: Request) -> list[float]:
    """For each level, the rate by which the model chooses how deep the request drafts."""
    return model._estimates.history(request).acceptance_rates(model._estimates.acceptance_rates)


@dataclass(frozen=True)
class World:
    """Costs and gains of a step.

    Args:
        seconds: of a pass, by positions.
        sizes: nodes of a draft, by level.
        odds: probability that a level is passed, given that the one above was.
        level_seconds: of drafting a level.
        guesses: how often the drafter has one.
    """

    seconds: Callable[[int], float]
    sizes: Sequence[int]
    odds: Sequence[float]
    level_seconds: float = 0.0
    guesses: float = 1.0

    def rate(self, depth: int) -> float:
        """Tokens per second of always drafting so deep."""
        passed, tokens = 1.0, 1.0
        for odds in self.odds[:depth]:
            passed *= odds
            tokens += self.guesses * passed
        plain, drafted = self.seconds(1), self.seconds(1 + sum(self.sizes[:depth]))
        drafting = depth * self.level_seconds
        return tokens / (self.guesses * (drafting + drafted) + (1 - self.guesses) * plain)

    @property
    def best(self) -> int:
        """The depth of most tokens per second, by trying all."""
        return max(range(len(self.sizes) + 1), key=self.rate)

    def steps(self, controller: Controller, count: int, seed: int = 0) -> list[int]:
        """The depths a controller chooses for one request."""
        dice, request, depths = random.Random(seed), request_of(), []
        for _ in range(count):
            (budget,) = controller.budgets([request], 1)
            depths.append(budget.depth)
            depth = min(budget.depth, len(self.sizes)) if dice.random() < self.guesses else 0
            passed = 0
            while passed < depth and dice.random() < self.odds[passed]:
                passed += 1
            sizes = self.sizes[:depth]
            times = (depth * self.level_seconds, self.seconds(1 + sum(sizes)))
            learn(controller, [outcome(request, sizes, passed)], *times)
        return depths

    def share_of_best(self, depths: Sequence[int]) -> float:
        """The rate of these steps over the best one."""
        seconds = sum(1 / self.rate(depth) for depth in depths) / len(depths)
        return 1 / seconds / self.rate(self.best)
