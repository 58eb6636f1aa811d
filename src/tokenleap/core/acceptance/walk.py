"""The walk shared by `typical`, `top_beta`, `lenient` and `distance`: the longest path wins.

These rules judge each drafted token on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from tokenleap.core.acceptance.base import Accepted, TargetDistributions
from tokenleap.core.config import Config

if TYPE_CHECKING:
    from tokenleap.core.distribution import Distribution
    from tokenleap.core.noise import StepNoise
    from tokenleap.core.tree import Draft

__all__ = ["BlockOptions", "accept_longest", "likelihoods"]


class BlockOptions(Config):
    """Options of rules that may accept more than what passes.

    Args:
        minimum_block: fewest tokens of a step, including the one after the accepted ones. Drafted
            tokens are kept untested until there are so many.
    """

    minimum_block: Annotated[int, Ge(1)] = 1


def likelihoods(p: TargetDistributions, node: int) -> Distribution:
    """The distribution after a node, in greedy decoding that at temperature 1.

    Its tokens with probability 0 are impossible: a mask or a truncation excludes them.
    """
    return p.untempered(node) if p.greedy else p[node]


def accept_longest(
    draft: Draft,
    p: TargetDistributions,
    noise: StepNoise,
    passes: Callable[[int, int], bool],
    reason: str,
    least: int = 0,
) -> Accepted:
    """Accept the longest path on which every token passes; on a tie the path drafted first.

    Args:
        draft: the verified draft.
        p: the target's distributions; the token after the path is drawn from p.
        noise: draws that token.
        passes: takes (node, token) and says whether the token passes as the successor of the node.
        reason: why tokens are rejected, for traces.
        least: fewest tokens to accept. If the path is shorter, it goes on with what was drafted
            first, as long as that is possible.
    """
    tree = draft.tree
    passed = {0}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent in passed and passes(parent, tree.tokens[node]):
            passed.add(node)
    last = max(sorted(passed), key=lambda node: tree.depths[node])
    while tree.depths[last] < least and tree.children[last]:
        first = tree.children[last][0]
        if likelihoods(p, last).prob(tree.tokens[first]) == 0:
            break
        last = first
        passed.add(last)
    rejected = tuple(child for child in tree.children[last] if child not in passed)
    token = noise.draw(p[last], tree.depths[last])
    return Accepted(tree.path(last), token, rejected, reason if rejected else "")
