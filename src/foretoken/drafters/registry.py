"""Method names and what they stand for: the only place that knows drafters by name.

A new drafter is one file and one entry here; the law suite runs over every entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.config import Config, nearest
from foretoken.drafters.base import Drafter
from foretoken.drafters.draft_model import DraftModelDrafter, DraftModelOptions
from foretoken.drafters.ngram import NgramDrafter, NgramOptions
from foretoken.drafters.ngram_table import NgramTableDrafter, NgramTableOptions
from foretoken.drafters.none import NoDrafter
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.target import Target

__all__ = ["METHODS", "DrafterParts", "DrafterSpec", "drafter_spec"]


@dataclass(frozen=True)
class DrafterParts:
    """What a constructor may use.

    Args:
        options: the method's own options.
        coupled: whether the acceptance rule wants drafts drawn with the target's noise.
        load_model: loads the draft model and checks its vocabulary; only for methods that
            declare `takes_model`.
    """

    options: Any
    coupled: bool
    load_model: Callable[[], Target]


@dataclass(frozen=True)
class DrafterSpec:
    """One method: its options, its constructor, its defaults."""

    options: type[Config]
    build: Callable[[DrafterParts], Drafter]
    default_num_speculative_tokens: int
    takes_model: bool = False
    summary: str = ""


class NoOptions(Config):
    """A method without options of its own."""


METHODS: dict[str, DrafterSpec] = {
    "none": DrafterSpec(
        NoOptions, lambda _: NoDrafter(), 0, summary="no speculation: the baseline"
    ),
    "draft_model": DrafterSpec(
        DraftModelOptions,
        lambda parts: DraftModelDrafter(parts.load_model(), parts.options, coupled=parts.coupled),
        5,
        takes_model=True,
        summary="a smaller model with the same vocabulary",
    ),
    "ngram": DrafterSpec(
        NgramOptions,
        lambda parts: NgramDrafter(parts.options),
        5,
        summary="prompt lookup: what followed the last tokens before",
    ),
    "ngram_table": DrafterSpec(
        NgramTableOptions,
        lambda parts: NgramTableDrafter(parts.options, coupled=parts.coupled),
        4,
        summary="successor frequencies of short contexts",
    ),
}


def drafter_spec(method: str) -> DrafterSpec:
    """The entry of this method.

    Raises:
        ConfigError: no method has this name.
    """
    if method not in METHODS:
        raise ConfigError(f"unknown method '{method}': {nearest(method, list(METHODS))}")
    return METHODS[method]
