"""Which requests a draft model has KV memory for, if `kv_cache_memory` limits it, and their rows.

Drafters with a model of their own call `rows_that_fit` before they compute anything. The oldest
requests are drafted for. The others get empty drafts in this step: they run slower, and their
output does not change (invariant 3). A request that is too long to fit even alone gets none either.
If a step needs more memory than was estimated here, the slab raises `OverBudget`, and the engine
runs that step without drafts.

A draft model that is an encoder-decoder reads the request's source once, when its row is opened; or
what the target's encoder made of it. What its decoder reads of the source is counted into the same
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from tokenleap.core.source import Source
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.rows import Rows

__all__ = ["most_tokens", "open_row", "rows_that_fit"]


def most_tokens(model: Passes, source: Source | None) -> int:
    """Most tokens of a row that reads this source; 0 if it is too long for the model's encoder."""
    network = None if source is None else model.source_network
    if network is None or source is None:
        return model.most_tokens
    if network.source_limit is not None and len(source) > network.source_limit:
        return 0
    return model.most_tokens_beside(network.state_bytes(source))


def open_row(model: Passes, key: int, source: Source | None, encoded: Tensor | None = None) -> None:
    """Open a row of the draft model, which reads the source if there is one.

    Args:
        model: the draft model.
        key: the row.
        source: None of a decoder-only model.
        encoded: [n, E] what another model's encoder made of the source; None runs the draft
            model's own.

    Raises:
        SlabFull: there is no room for the row or for the source. Then there is no row.
    """
    model.add(key)
    if source is None:
        return
    try:
        if encoded is None:
            model.encode(key, source)
        else:
            model.read_encoded(key, encoded)
    except Exception:
        model.remove(key)
        raise


def rows_that_fit(
    model: Rows,
    wanted: Mapping[int, int],
    held: Mapping[int, int],
    states: Mapping[int, int] | None = None,
) -> tuple[set[int], list[int]]:
    """Choose the requests whose rows fit into the model's memory together.

    Args:
        model: the draft model.
        wanted: request key -> tokens of its row after drafting; the oldest request first.
        held: request key -> tokens of the rows that exist, including those of preempted requests.
        states: request key -> bytes of the row's state, of all these rows; None if they have none.

    Returns:
        The keys to draft for, and the keys of rows to free first. The tokens of a freed row are
        computed again when its request is admitted again.
    """
    sizes = states or {}
    in_use = sum(sizes.get(key, 0) for key in held)

    def fit(keys: Collection[int], longest: int) -> bool:
        added = sum(sizes.get(key, 0) for key in keys) - in_use
        return model.has_room(len(keys), longest, added)

    wanted = {key: tokens for key, tokens in wanted.items() if fit([key], tokens)}
    admitted = list(wanted)
    while admitted and not fit(admitted, max(wanted[key] for key in admitted)):
        admitted.pop()
    others = [key for key in held if key not in admitted]
    lengths = [*(wanted[key] for key in admitted), *(held[key] for key in others)]
    fits = fit([*admitted, *others], max(lengths, default=0))
    return set(admitted), [] if fits else others
