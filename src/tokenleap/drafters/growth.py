"""`Growth`: the tree that is being drafted for one request, by `ModelDrafter`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, groupby
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from tokenleap.control import Budget
from tokenleap.core.distribution import Distribution, LazyDistribution, Limits, OneHots
from tokenleap.core.noise import Noise
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.drafters.shapes import Node, Shape
from tokenleap.request import Request
from tokenleap.runtime.growth_plan import GrowthDraw
from tokenleap.runtime.network import GrownTree


@dataclass
class Growth:
    """The tree being drafted for one request."""

    request: Request
    budget: Budget
    pending: list[int]
    nodes: list[Node] = field(default_factory=list)
    """All drafted nodes, parents first."""
    scored: list[Node] = field(default_factory=list)
    """Nodes that the model has scored or scores in the next pass."""
    frontier: list[Node | None] = field(default_factory=lambda: [None])
    """Nodes that get children after the next pass; None is the root."""
    draws: list[tuple[Node, Distribution]] = field(default_factory=list)
    """All draws in order, where draws of the same token share a node."""
    num_computed: int = 0
    """Nodes of `tree()` that earlier passes computed."""
    at_once: GrowthDraw | None = None
    """How one call draws the tokens; None if it takes the most probable ones."""
    grown: GrownTree | None = None
    """A tree of one-hot q that one call grew. It takes the place of `nodes`."""

    def tree(self) -> TokenTree:
        """The pending tokens as a chain, and the scored nodes below its last token, the root."""
        root = len(self.pending) - 1
        index = {id(node): root + 1 + i for i, node in enumerate(self.scored)}
        parents = [index[id(n.parent)] if n.parent else root for n in self.scored]
        tokens = (*self.pending, *(node.token for node in self.scored))
        return TokenTree(tokens, (*range(-1, root), *parents))

    def output_to(self, node: Node | None) -> list[int]:
        """All output tokens on the path to a node: the committed ones and the drafted ones."""
        path: list[int] = []
        while node is not None:
            path.append(node.token)
            node = node.parent
        return [*self.request.output_ids, *reversed(path)]

    @property
    def size(self) -> int:
        """The size that counts against the budget's number of nodes.

        It is the number of draws: which draws belong to the draft must not depend on their tokens
        (invariant 2), whether these are equal or not.
        """
        return max(len(self.nodes), len(self.draws))

    def draft(self, shape: Shape) -> Draft:
        limit = self.budget.nodes
        if self.grown is not None:
            return _one_hot_draft(self.request.root, self.grown, shape, limit)
        draws = self.draws[:limit]
        nodes = list(dict.fromkeys(node for node, _ in draws)) or self._kept(shape, limit)
        index = {id(node): i for i, node in enumerate(nodes, 1)}
        parents = [index[id(node.parent)] if node.parent else 0 for node in nodes]
        tree = TokenTree((self.request.root, *(n.token for n in nodes)), (-1, *parents))
        if draws:
            return Draft.drawn(tree, [(index[id(node)], q) for node, q in draws])
        one_hot = self.at_once is None or shape.prunes
        q = OneHots(tree.tokens[1:]) if one_hot else tuple(node.distribution for node in nodes)
        has_probs = one_hot or not shape.branches
        return Draft(tree, q, path_probs=tuple(n.path_prob for n in nodes) if has_probs else ())

    def _kept(self, shape: Shape, limit: int) -> list[Node]:
        path_probs = [node.path_prob for node in self.nodes]
        depths = [node.depth for node in self.nodes]
        return [self.nodes[index] for index in shape.kept(path_probs, depths, limit)]

    def children(self, node: Node | None, drawn: Sequence[Drawn], *, shared: bool) -> list[Node]:
        """New nodes below a node, not yet added to the tree."""
        ranks = () if node is None else node.ranks
        path_prob = 1.0 if node is None else node.path_prob
        children = []
        for rank, (token, distribution, token_prob) in enumerate(drawn):
            child = Node(token, distribution, node, (*ranks, rank), path_prob * token_prob)
            child.stopped = self.budget.stops_below(token_prob, child.path_prob)
            children.append(child)
        return self._without_repeats(children) if shared else children

    def _without_repeats(self, drawn: Sequence[Node]) -> list[Node]:
        """One node for each token that was drawn for a node; `draws` gets all draws."""
        nodes: dict[int, Node] = {}
        for node in drawn:
            self.draws.append((nodes.setdefault(node.token, node), node.distribution))
        return list(nodes.values())


def _one_hot_draft(root: int, grown: GrownTree, shape: Shape, limit: int) -> Draft:
    """What `Growth.draft` makes of nodes with one-hot q, without making the nodes."""
    path_probs, depths = list[float](), list[int]()
    for parent, probability in zip(grown.parents, grown.probabilities, strict=True):
        inner = parent >= 0
        path_probs.append(path_probs[parent] * probability if inner else probability)
        depths.append(depths[parent] + 1 if inner else 1)
    kept = shape.kept(path_probs, depths, limit)
    place = {-1: 0, **{node: index for index, node in enumerate(kept, 1)}}
    tokens = tuple(grown.tokens[node] for node in kept)
    parents = (-1, *(place[grown.parents[node]] for node in kept))
    probs = tuple(path_probs[node] for node in kept)
    return Draft(TokenTree((root, *tokens), parents), OneHots(tokens), path_probs=probs)


class GrowingChain:
    """A chain that is being drafted. It ends with its budget, and below an improbable token.

    Attributes:
        tokens: drafted so far, and `q` and `path_probs` as in `Draft`.
    """

    def __init__(self, root: int, budget: Budget) -> None:
        self._root, self.budget = root, budget
        self.tokens: list[int] = []
        self.q: list[Distribution] = []
        self.path_probs: list[float] = []
        self.ended = not budget.chain

    @property
    def path_prob(self) -> float:
        return self.path_probs[-1] if self.path_probs else 1.0

    def draw(self, q: Distribution, noise: Noise) -> None:
        """Append a token drawn from this distribution."""
        token = noise.draw(q, len(self.tokens))
        self.add(token, q, q.prob(token))

    def add(self, token: int, q: Distribution, probability: float) -> None:
        """Append a token with the distribution that it was drawn from."""
        path_prob = probability * self.path_prob
        self.tokens.append(token)
        self.q.append(q)
        self.path_probs.append(path_prob)
        full = len(self.tokens) == self.budget.chain
        self.ended = full or self.budget.stops_below(probability, path_prob)

    def draft(self, *, with_probs: bool = True) -> Draft:
        """The chain; `path_probs` are for controllers that learn where to end drafts."""
        probs = tuple(self.path_probs) if with_probs else ()
        return Draft(chain([self._root, *self.tokens]), tuple(self.q), path_probs=probs)


# How `ModelDrafter` chooses the children of one node: the most probable tokens, or drawn ones.
#
# The native runtime draws the same tokens (`runtime/native/drawing.h`); `grown_draws` reads them.


Drawn: TypeAlias = tuple[int, Distribution, float]
"""A drafted token, the q it was drawn from, and its probability."""

_CLARITY = 0.7
"""Of 0.7, 1 and 2, this had the most accepted tokens. `CLARITY` in drawing.h."""

_RIVALS = 4
"""`RIVALS` in drawing.h."""


def most_probable(distribution: Distribution, width: int) -> list[Drawn]:
    """The `width` most probable tokens with their q (one-hot) and their probability."""
    best = distribution.probs.topk(min(width, len(distribution.probs)))
    tokens = distribution.tokens[best.indices].tolist()
    return [
        (token, Distribution.one_hot(token), probability)
        for token, probability in zip(tokens, best.values.tolist(), strict=True)
    ]


def most_probable_below(
    logits: Tensor, widths: Sequence[int], token_ids: Tensor | None
) -> list[list[Drawn]] | None:
    """`most_probable` for the distributions of many nodes at once.

    Args:
        logits: [n, V] of the nodes, or [n, Vd] of `token_ids`.
        token_ids: [Vd] the tokens that logits stand for; None if these are all tokens.

    Returns:
        [n] the children; None if there are NaNs among them, which are no probabilities.
    """
    best = logits.float().softmax(-1).topk(min(max(widths), logits.shape[-1]))
    if best.values.isnan().any():
        return None
    tokens = best.indices if token_ids is None else token_ids[best.indices]
    return [
        [
            (token, Distribution.one_hot(token), probability)
            for token, probability in zip(of_node[:width], values[:width], strict=True)
            if probability > 0
        ]
        for of_node, values, width in zip(
            tokens.tolist(), best.values.tolist(), widths, strict=True
        )
    ]


def distinct(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """`width` draws without replacement: the q of each excludes its earlier siblings."""
    tokens = noise.draw_distinct(distribution, depth, width)
    return _one_by_one(tokens, [distribution.prob(token) for token in tokens], distribution)


def independent(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """`width` independent draws with a shared q, which may be equal."""
    tokens = [noise.draw(distribution, depth, trial) for trial in range(width)]
    return [(token, distribution, distribution.prob(token)) for token in tokens]


def coupled_draws(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """The same draws as `distinct` with the target's own noise; their probability is `clarity`."""
    tokens, shares = _with_clarity(distribution, noise, depth, width)
    return _one_by_one(tokens, shares, distribution)


def _one_by_one(
    tokens: Sequence[int],
    probabilities: Sequence[float],
    whole: Distribution,
    without: Callable[[Distribution, int], Distribution] = Distribution.without,
) -> list[Drawn]:
    """Siblings that were drawn without replacement: the q of each excludes the earlier ones."""
    drawn, left = list[Drawn](), whole
    for token, probability in zip(tokens, probabilities, strict=True):
        drawn.append((token, left, probability))
        if len(drawn) < len(tokens):
            left = without(left, token)
    return drawn


def clearest(distribution: Distribution, noise: Noise, depth: int, width: int) -> list[Drawn]:
    """The same for trees whose nodes are dropped because of their tokens.

    The rule `coupled` alone allows that: it compares tokens and reads no q. So q is one-hot here.
    """
    drawn = zip(*_with_clarity(distribution, noise, depth, width), strict=True)
    return [(token, Distribution.one_hot(token), share) for token, share in drawn if share > 0]


def _with_clarity(
    distribution: Distribution, noise: Noise, depth: int, width: int
) -> tuple[list[int], list[float]]:
    """The tokens of `distinct`, and how clearly the noise decides for each if it is the target's.

    The target draws the token with the largest `log p + noise`, and log p is near log q. So the
    token with the largest `log q + noise` is probably drawn if the others are far behind, however
    small its q is. The measure, `clarity`, is a share: that of the exponential of `_CLARITY` times
    its score in the sum over the best `width` tokens, or the best `_RIVALS`.
    """
    if distribution.certain is not None:
        return [distribution.certain], [1.0]
    scores = torch.from_numpy(noise.scores(distribution, depth))
    best = scores.topk(min(max(width, _RIVALS), len(scores)))
    places = best.indices[:width].to(distribution.probs.device)
    shares: list[float] = (best.values * _CLARITY).softmax(-1).tolist()
    return distribution.tokens[places].tolist(), shares[:width]


def named(distribution: Distribution, token_ids: Tensor | None) -> Distribution:
    """A distribution over places in `token_ids` as one over the target's tokens."""
    return distribution if token_ids is None else distribution.renamed(token_ids)


def spread(logits: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """[V] logits from those [Vd] of `token_ids`; -inf for all others."""
    of_all = logits.new_full((vocab_size,), -torch.inf)
    of_all[token_ids] = logits
    return of_all


def excludes_all(logits: Tensor) -> bool:
    """Whether logits [V] allow no token at all, so that there is no q."""
    return bool(logits.max() == -torch.inf)


def truncates(limits: Limits) -> bool:
    return limits.min_p > 0 or limits.top_k > 0 or limits.top_p < 1


def grown_draws(
    tree: GrownTree, draw: GrowthDraw, q_of: Callable[[Tensor], Distribution]
) -> Iterator[tuple[int, list[Drawn]]]:
    """The siblings of a tree that was drawn in one call, parents first.

    No q is computed before it is read. Under `coupled`, only `trace=True` reads any.
    """
    nodes = range(len(tree.tokens))
    for parent, siblings in groupby(nodes, tree.parents.__getitem__):
        yield parent, _without_replacement(tree, list(siblings), draw, q_of)


def _without_replacement(
    tree: GrownTree,
    siblings: Sequence[int],
    draw: GrowthDraw,
    q_of: Callable[[Tensor], Distribution],
) -> list[Drawn]:
    assert tree.logits is not None
    truncated = truncates(draw.limits)
    reads_q = truncated and not draw.coupled
    row, first = tree.logits[tree.rows[siblings[0]]], siblings[0]
    known = None if truncated else (tree.tokens[first], tree.shown[first])
    whole: Distribution = LazyDistribution(lambda: q_of(row), known)
    tokens = [tree.tokens[node] for node in siblings]
    shown = [tree.probabilities[node] for node in siblings]
    probabilities = [whole.prob(token) for token in tokens] if reads_q else shown
    return _one_by_one(tokens, probabilities, whole, _without)


def _without(distribution: Distribution, token: int) -> Distribution:
    return LazyDistribution(lambda: distribution.without(token))


# Best-first expansion: the most probable nodes of a tree whose path probabilities are known.
#
# `suffix`, `rest` and `recycle` draft with it (the greedy expansion of Oliaro et al.,
# "SuffixDecoding"). No node is more probable than its parent. Repeatedly taking the most probable
# node whose parent was taken therefore gives the most probable nodes of the whole tree.


Place = TypeVar("Place")


def best_first_nodes(
    start: Place,
    successors: Callable[[Place], Iterable[tuple[int, float, Place]]],
    max_nodes: int,
    budget: Budget,
    min_path_prob: float = 0.0,
) -> Iterator[tuple[int, int, float, Place]]:
    """Yield the most probable nodes, parents first.

    Of equally probable nodes, the one that `successors` gave first comes first.
    """
    order = count()
    frontier: list[tuple[float, int, int, int, int, bool, Place]] = []

    def expand(place: Place, parent: int, depth: int, parent_path_prob: float) -> None:
        for token, token_prob, child in successors(place):
            path_prob = parent_path_prob * token_prob
            is_leaf = depth >= budget.depth or budget.stops_below(token_prob, path_prob)
            if path_prob >= min_path_prob:
                heappush(frontier, (-path_prob, next(order), depth, parent, token, is_leaf, child))

    expand(start, -1, 1, 1.0)
    for node in range(max_nodes):
        if not frontier:
            return
        negative_prob, _, depth, parent, token, is_leaf, place = heappop(frontier)
        yield parent, token, -negative_prob, place
        if not is_leaf:
            expand(place, node, depth + 1, -negative_prob)


# What bad words and a model's own rules leave of a tree of most probable tokens.


def allowed_part(request: Request, tree: GrownTree) -> GrownTree:
    """The tree without what bad words and the model's own rules forbid, and what is below.

    Every q is one-hot, so this changes no distribution.
    """
    sampler = request.sampler
    if not sampler.has_masks:
        return tree
    output, num_output = request.output_ids, len(request.output_ids)
    place = {-1: -1}  # node of the grown tree -> node that is kept
    path = list[int]()  # the grown nodes down to the last one
    tokens, parents, probabilities = list[int](), list[int](), list[float]()
    for node, parent in enumerate(tree.parents):
        if (path[-1] if path else -1) != parent:
            path = _path_to(tree, parent)
            output = [*output[:num_output], *(tree.tokens[above] for above in path)]
        token = tree.tokens[node]
        if parent in place and sampler.keeps(token, output):
            place[node] = len(tokens)
            tokens.append(token)
            parents.append(place[parent])
            probabilities.append(tree.probabilities[node])
        path.append(node)
        output.append(token)
    return GrownTree(tokens, parents, probabilities)


def _path_to(tree: GrownTree, node: int) -> list[int]:
    """The nodes down to this one; none for the root, which is -1."""
    path = list[int]()
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]
