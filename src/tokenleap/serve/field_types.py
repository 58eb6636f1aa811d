"""Types of fields that several bodies have: lists that end at their first error, texts, prompts."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

from annotated_types import Ge, MaxLen
from pydantic import FailFast, Tag
from pydantic_core import PydanticCustomError

from tokenleap.serve.body import by_kind

__all__ = ["Items", "JSONObject", "Prompts", "Text", "Texts", "TokenIds", "few"]

T = TypeVar("T")


class FirstError(FailFast):
    """A list ends at its first error, where pydantic would collect one for each item."""

    def __hash__(self) -> int:  # unions need it
        return hash(self.fail_fast)


Items: TypeAlias = Annotated[list[T], MaxLen(10_000), FirstError()]
JSONObject: TypeAlias = dict[str, Any]
Text: TypeAlias = Annotated[str, MaxLen(1000)]
Texts: TypeAlias = Annotated[list[Text], MaxLen(64), FirstError()]
TokenIds: TypeAlias = Annotated[list[Annotated[int, Ge(0)]], FirstError()]


def few(value: Any) -> Any:
    """Refuse a large object before it is read: pydantic would collect an error for each item."""
    if isinstance(value, dict) and len(value) > 1024:
        raise PydanticCustomError("too_long", "it must have at most 1024 items")
    return value


def _kind_of_prompt(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, str):
        return "<texts>"
    return "<lists>" if isinstance(first, list) else "<ids>"


Prompts: TypeAlias = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Items[str], Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[Items[TokenIds], Tag("<lists>")],
    by_kind(_kind_of_prompt, "a string, token ids, or a list of these"),
]
