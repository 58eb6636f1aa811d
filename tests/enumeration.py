"""Exact output distributions: every draft and every outcome of the rule, with its probability.

A rule asks chance two kinds of questions (`StepNoise`). `ScriptedNoise` answers them from a script
and reports what it could have answered after the script's end, so that all answers can be tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from tokenleap.core.acceptance import AcceptanceRule, Accepted
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import Draft, TokenTree

Context = tuple[int, ...]
DistributionOf = Callable[[Context], Distribution]
Outcomes = dict[Context, float]
T = TypeVar("T")


class _AnswerNeeded(Exception):  # noqa: N818 - not an error, a question
    def __init__(self, options: list[tuple[int, float]]) -> None:
        self.options = options


class ScriptedNoise:
    """Answers from a script; past its end it raises what could be answered."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)

    def _answer(self, options: list[tuple[int, float]]) -> int:
        if not self._script:
            raise _AnswerNeeded([option for option in options if option[1] > 0])
        return self._script.pop(0)

    def accepts(self, probability: float, depth: int, trial: int = 0) -> bool:
        probability = min(1.0, max(0.0, probability))
        return bool(self._answer([(1, probability), (0, 1 - probability)]))

    def draw(self, distribution: Distribution, depth: int) -> int:
        return self._answer(
            list(zip(distribution.tokens.tolist(), distribution.probs.tolist(), strict=True))
        )


class TableDistributions:
    """p at every node of a tree, looked up by the node's own path."""

    greedy = False

    def __init__(self, distribution_of: DistributionOf, tree: TokenTree) -> None:
        self._distribution_of = distribution_of
        self._tree = tree

    def __getitem__(self, node: int) -> Distribution:
        return self._distribution_of(tuple(self._tree.path_tokens(node)))

    def untempered(self, node: int) -> Distribution:
        return self[node]


def decisions(
    rule: AcceptanceRule, draft: Draft, distribution_of: DistributionOf
) -> Iterator[tuple[Accepted, float]]:
    """Everything the rule can decide about a draft, with its probability."""
    distributions = TableDistributions(distribution_of, draft.tree)
    return answers(lambda noise: rule.accept(draft, distributions, noise))


def answers(ask: Callable[[ScriptedNoise], T]) -> Iterator[tuple[T, float]]:
    """Everything that `ask` can return for any noise, with its probability."""
    open_scripts: list[tuple[list[int], float]] = [([], 1.0)]
    while open_scripts:
        script, weight = open_scripts.pop()
        try:
            yield ask(ScriptedNoise(script)), weight
        except _AnswerNeeded as question:
            for answer, probability in question.options:
                open_scripts.append(([*script, answer], weight * probability))


def output_distribution(
    rule: AcceptanceRule,
    drafts: Iterator[tuple[Draft, float]],
    distribution_of: DistributionOf,
    length: int,
) -> Outcomes:
    """Distribution of the first `length` tokens: one speculative step, then plain decoding."""
    outcomes: Outcomes = defaultdict(float)
    for draft, draft_weight in drafts:
        for accepted, weight in decisions(rule, draft, distribution_of):
            tokens = (*draft.tree.path_tokens(accepted.last), accepted.token)
            for rest, rest_weight in continuations(distribution_of, tokens, length):
                outcomes[rest] += draft_weight * weight * rest_weight
    return dict(outcomes)


def continuations(
    distribution_of: DistributionOf, tokens: Context, length: int
) -> Iterator[tuple[Context, float]]:
    """`tokens` cut or continued by plain decoding to `length`, with probabilities."""
    if len(tokens) >= length:
        yield tokens[:length], 1.0
        return
    distribution = distribution_of(tokens)
    for token, probability in zip(
        distribution.tokens.tolist(), distribution.probs.tolist(), strict=True
    ):
        for rest, weight in continuations(distribution_of, (*tokens, token), length):
            yield rest, probability * weight


def distance(outcomes: Outcomes, distribution_of: DistributionOf, length: int) -> float:
    """Largest difference of any outcome's probability from plain decoding."""
    exact = dict(continuations(distribution_of, (), length))
    keys = set(exact) | set(outcomes)
    return max(abs(exact.get(key, 0.0) - outcomes.get(key, 0.0)) for key in keys)


def random_distributions(
    vocab_size: int, seed: int, sharpness: float = 1.5, zeros: int = 0
) -> DistributionOf:
    """A random distribution per context, fixed by the seed; `zeros` tokens are impossible."""

    @cache
    def distribution_of(context: Context) -> Distribution:
        code = seed
        for token in context:
            code = code * (vocab_size + 1) + token + 1
        generator = torch.Generator().manual_seed(code)
        logits = sharpness * torch.randn(vocab_size, dtype=torch.float64, generator=generator)
        if zeros:
            logits[torch.randperm(vocab_size, generator=generator)[:zeros]] = -torch.inf
        return Distribution.of(logits.softmax(-1))

    return distribution_of


# Drafts: each function yields every draft its drafter can make, with its probability.


def chains(q_of: DistributionOf, gamma: int) -> Iterator[tuple[Draft, float]]:
    """Chains of length gamma sampled from q."""
    for tokens, weight in continuations(q_of, (), gamma):
        tree = TokenTree((0, *tokens), tuple(range(-1, gamma)))
        yield Draft(tree, tuple(q_of(tokens[:i]) for i in range(gamma))), weight


Siblings = Callable[
    [Distribution, int], Iterator[tuple[tuple[int, ...], tuple[Distribution, ...], float]]
]


def independent(
    q: Distribution, width: int
) -> Iterator[tuple[tuple[int, ...], tuple[Distribution, ...], float]]:
    """Siblings drawn independently."""
    options = list(zip(q.tokens.tolist(), q.probs.tolist(), strict=True))
    for choice in product(options, repeat=width):
        weight = float(torch.tensor([w for _, w in choice], dtype=torch.float64).prod())
        yield tuple(t for t, _ in choice), (q,) * width, weight


def without_replacement(
    q: Distribution, width: int
) -> Iterator[tuple[tuple[int, ...], tuple[Distribution, ...], float]]:
    """Siblings drawn without replacement: each distribution excludes the earlier siblings."""
    if width == 0:
        yield (), (), 1.0
        return
    for token, weight in zip(q.tokens.tolist(), q.probs.tolist(), strict=True):
        left = q.normalised(_without(q, token))
        for tokens, distributions, rest in without_replacement(left, width - 1):
            yield (token, *tokens), (q, *distributions), weight * rest


def _without(q: Distribution, token: int) -> Tensor:
    probs = torch.where(q.tokens == token, 0.0, q.probs)
    return probs / probs.sum()


def most_likely(
    q: Distribution, width: int
) -> Iterator[tuple[tuple[int, ...], tuple[Distribution, ...], float]]:
    """The top-k tokens: not drawn at random, so every distribution is one-hot."""
    tokens = tuple(q.tokens[q.probs.topk(width).indices].tolist())
    yield tokens, tuple(Distribution.one_hot(token) for token in tokens), 1.0


def trees(
    q_of: DistributionOf, siblings: Siblings, width: int, depth: int
) -> Iterator[tuple[Draft, float]]:
    """Complete trees of the given width and depth."""
    start = TokenTree((0,), (-1,))
    yield from _grow(q_of, siblings, width, depth, start, (), 1.0, [0])


def _grow(
    q_of: DistributionOf,
    siblings: Siblings,
    width: int,
    depth: int,
    tree: TokenTree,
    distributions: tuple[Distribution, ...],
    weight: float,
    open_nodes: list[int],
) -> Iterator[tuple[Draft, float]]:
    while open_nodes and tree.depths[open_nodes[0]] >= depth:
        open_nodes = open_nodes[1:]
    if not open_nodes:
        yield Draft(tree, distributions), weight
        return
    node, rest = open_nodes[0], open_nodes[1:]
    for tokens, new_distributions, choice_weight in siblings(
        q_of(tuple(tree.path_tokens(node))), width
    ):
        grown = TokenTree((*tree.tokens, *tokens), (*tree.parents, *(node for _ in tokens)))
        added = list(range(len(tree), len(grown)))
        yield from _grow(
            q_of,
            siblings,
            width,
            depth,
            grown,
            (*distributions, *new_distributions),
            weight * choice_weight,
            [*rest, *added],
        )
