"""A trie of all substrings of texts, up to a maximum length, with their counts.

The drafter `suffix` looks up its continuations here (see `suffix_candidates`). Three properties
keep the trie small and fast in Python:

- A string that occurs once has no nodes of its own. It is a *leaf*: a text and a position in it.
  A leaf grows with its text at no cost. It becomes a node when the string occurs a second time.
- A growing text updates only the nodes of its current repeated suffixes (its `cursors`), at most
  `max_depth` of them. These are also the matches that the drafter needs.
- A text can be removed: the trie walks the same nodes that adding the text has changed.
"""

from __future__ import annotations

from itertools import count
from typing import TypeAlias

__all__ = ["Leaf", "Node", "Place", "SuffixTrie", "Text"]


class Node:
    """A string that occurs, or has occurred, at least twice.

    Attributes:
        count: its occurrences.
        followed: its occurrences that have a successor: the sum of the children's counts.
        children: next token -> place of the longer string, in order of their first occurrence.
        source: key of the text that contained it last.
    """

    __slots__ = ("children", "count", "followed", "source")

    def __init__(self) -> None:
        self.count = 0
        self.followed = 0
        self.children: dict[int, Place] = {}
        self.source = -1


class Text:
    """A text in the trie.

    Attributes:
        key: identifies it in `Node.source`.
        tokens: its tokens so far.
        cursors: nodes of its suffixes of length 0, 1, 2, ..., up to the longest that is a node.
    """

    __slots__ = ("cursors", "key", "tokens")

    def __init__(self, key: int, root: Node) -> None:
        self.key = key
        self.tokens: list[int] = []
        self.cursors = [root]


Leaf: TypeAlias = tuple[Text, int]
"""A string that occurs once: its text, and the position behind its occurrence."""

Place: TypeAlias = Node | Leaf
"""A string in the trie."""


class SuffixTrie:
    """All substrings of at most `max_depth` tokens of any number of texts.

    Only the text that was opened last may grow.

    Args:
        max_depth: longest substring, in tokens.

    Attributes:
        root: the node of the empty string.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._keys = count()
        self.root = Node()

    def open(self) -> Text:
        """Add an empty text. Earlier texts must not grow any more."""
        return Text(next(self._keys), self.root)

    def append(self, text: Text, token: int) -> None:
        """Append one token to a text."""
        text.tokens.append(token)
        end = len(text.tokens)
        cursors = [self.root]
        for node in text.cursors[: self._max_depth]:
            node.followed += 1
            child = node.children.get(token)
            if child is None:
                node.children[token] = (text, end)
                continue
            if not isinstance(child, Node):
                child = node.children[token] = self._node_of_leaf(child, depth=len(cursors))
            child.count += 1
            child.source = text.key
            cursors.append(child)
        text.cursors = cursors

    def _node_of_leaf(self, leaf: Leaf, depth: int) -> Node:
        """A node for a leaf of `depth` tokens, whose string is about to occur a second time."""
        text, position = leaf
        node = Node()
        node.count = 1
        if depth < self._max_depth and position < len(text.tokens):
            node.followed = 1
            node.children[text.tokens[position]] = (text, position + 1)
        return node

    def remove(self, text: Text) -> None:
        """Remove a text, which must not grow any more."""
        for start in range(len(text.tokens)):
            self._remove_from(text.tokens[start : start + self._max_depth])

    def _remove_from(self, tokens: list[int]) -> None:
        node = self.root
        for token in tokens:
            node.followed -= 1
            child = node.children[token]
            if not isinstance(child, Node):
                del node.children[token]
                return
            child.count -= 1
            if not child.count:
                del node.children[token]
                return
            node = child

    def longest(self, tokens: list[int]) -> int:
        """Length of the longest suffix of `tokens` that occurs, at most `max_depth`; 0 if none."""
        # If a suffix occurs, all shorter suffixes occur. This allows a binary search.
        low, high = 0, min(len(tokens), self._max_depth)
        while low < high:
            middle = (low + high + 1) // 2
            if self._descend(tokens, middle) is not None:
                low = middle
            else:
                high = middle - 1
        return low

    def find(self, tokens: list[int], length: int) -> Place:
        """The place of the suffix of `tokens` with this length; it must occur."""
        place = self._descend(tokens, length)
        assert place is not None, "no longer than `longest`"
        return place

    def _descend(self, tokens: list[int], length: int) -> Place | None:
        """The place of the suffix of `tokens` with this length; None if it does not occur."""
        place: Place | None = self.root
        for index in range(len(tokens) - length, len(tokens)):
            if not isinstance(place, Node):
                break
            place = place.children.get(tokens[index])
        else:
            return place
        if place is None:
            return None
        text, position = place
        end = position + len(tokens) - index
        return (text, end) if text.tokens[position:end] == tokens[index:] else None
