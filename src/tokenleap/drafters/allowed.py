"""What bad words and a model's own rules leave of a tree of most probable tokens."""

from __future__ import annotations

from tokenleap.request import Request
from tokenleap.runtime.network import GrownTree

__all__ = ["allowed_part"]


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
