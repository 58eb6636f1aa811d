"""`References`: texts beside the prompt that drafts may quote, such as retrieved documents."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["NO_REFERENCES", "References"]

Index = TypeVar("Index")


@dataclass(frozen=True, eq=False)
class References:
    """Texts in the target's tokens; the target does not read them.

    The requests that were made with the same texts share one object, which belongs to them: it is
    freed with the last of them, and with it everything that drafters have indexed of it.

    Args:
        texts: the token ids of each text.
    """

    texts: tuple[tuple[int, ...], ...] = ()
    _indexes: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.texts)

    def indexed(self, key: Hashable, build: Callable[[], Index]) -> Index:
        """What a drafter searches in place of the texts, built at the first call.

        Args:
            key: identifies the index; it names the kind of index and the options it depends on.
            build: makes the index.
        """
        if key not in self._indexes:
            self._indexes[key] = build()
        index: Index = self._indexes[key]
        return index


NO_REFERENCES = References()
"""The references of a request without any."""
