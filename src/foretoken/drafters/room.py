"""Whom a draft model has memory for, where it is limited (`kv_cache_memory`).

What does not fit is found out before any work: the oldest requests are drafted for, and the others
go without drafts, which changes their speed and nothing else (invariant 3), as does one that is too
long to fit all by itself. Should more be needed than was reckoned with, the slab says so
(`OverBudget`), and the engine has everyone go without for that step.
"""

from __future__ import annotations

from collections.abc import Mapping

from foretoken.runtime.target import Target

__all__ = ["shared_out"]


def shared_out(
    model: Target, wanted: Mapping[int, int], held: Mapping[int, int]
) -> tuple[set[int], list[int]]:
    """Whose rows the model's memory holds together.

    Args:
        model: the draft model.
        wanted: tokens by key, what is to be drafted included; the oldest request first.
        held: tokens by key of the rows there are, those of preempted requests among them.

    Returns:
        The keys to draft for, and rows to be freed for them: their tokens are computed again when
        their turn comes.
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
