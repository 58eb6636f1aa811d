"""The walk shared by rules that judge each drafted token on its own: the longest path wins."""

from __future__ import annotations

from collections.abc import Callable

from foretoken.acceptance.base import Accepted, TargetLaws
from foretoken.noise import StepNoise
from foretoken.tree import Draft

__all__ = ["accept_longest"]


def accept_longest(
    draft: Draft,
    p: TargetLaws,
    noise: StepNoise,
    passes: Callable[[int, int], bool],
    reason: str,
) -> Accepted:
    """Accept the longest path on which every token passes; the first drafted wins a tie.

    Args:
        draft: the verified draft.
        p: the target's laws; the token after the path is drawn from its law.
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
