"""The walk shared by `typical`, `top_beta` and `lenient`: the longest accepted path wins.

These rules judge each drafted token on its own.
"""

from __future__ import annotations

from collections.abc import Callable

from foretoken.core.acceptance.base import Accepted, TargetDistributions
from foretoken.core.noise import StepNoise
from foretoken.core.tree import Draft

__all__ = ["accept_longest"]


def accept_longest(
    draft: Draft,
    p: TargetDistributions,
    noise: StepNoise,
    passes: Callable[[int, int], bool],
    reason: str,
) -> Accepted:
    """Accept the longest path on which every token passes; on a tie the path drafted first.

    Args:
        draft: the verified draft.
        p: the target's distributions; the token after the path is drawn from p.
        noise: draws that token.
        passes: takes (node, token) and says whether the token passes as the successor of the node.
        reason: why tokens are rejected, for traces.
    """
    tree = draft.tree
    passed = {0}
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent in passed and passes(parent, tree.tokens[node]):
            passed.add(node)
    last = max(sorted(passed), key=lambda node: tree.depths[node])
    rejected = tuple(child for child in tree.children[last] if child not in passed)
    token = noise.draw(p[last], tree.depths[last])
    return Accepted(tree.path(last), token, rejected, reason if rejected else "")
