"""The walk shared by rules that judge each drafted token on its own: the longest path wins."""

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
    """Accept the longest path on which every token passes; the first drafted wins a tie.

    Args:
        draft: the verified draft.
        p: the target's distributions; the token after the path is drawn from its distribution.
        noise: for that draw.
        passes: whether `token` passes as the successor of `node`.
        reason: what to report for tokens that do not.
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
