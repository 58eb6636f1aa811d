"""Which requests a draft model has KV memory for, if `kv_cache_memory` limits it.

Drafters with a model of their own call `rows_that_fit` before they compute anything. The oldest
requests are drafted for. The others get empty drafts in this step: they run slower, and their
output does not change (invariant 3). A request that is too long to fit even alone gets none either.
If a step needs more memory than was estimated here, the slab raises `OverBudget`, and the engine
runs that step without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping

from foretoken.runtime.rows import Rows

__all__ = ["rows_that_fit"]


def rows_that_fit(
    model: Rows, wanted: Mapping[int, int], held: Mapping[int, int]
) -> tuple[set[int], list[int]]:
    """Choose the requests whose rows fit into the model's memory together.

    Args:
        model: the draft model.
        wanted: request key -> tokens of its row after drafting; the oldest request first.
        held: request key -> tokens of the rows that exist, including those of preempted requests.

    Returns:
        The keys to draft for, and the keys of rows to free first. The tokens of a freed row are
        computed again when its request is admitted again.
    """
    wanted = {key: tokens for key, tokens in wanted.items() if model.has_room(1, tokens)}
    tokens = list(wanted.values())
    count = len(tokens)
    while count and not model.has_room(count, max(tokens[:count])):
        count -= 1
    admitted = set(list(wanted)[:count])
    others = [key for key in held if key not in admitted]
    longest = max([*tokens[:count], *(held[key] for key in others)], default=0)
    return admitted, [] if model.has_room(count + len(others), longest) else others
