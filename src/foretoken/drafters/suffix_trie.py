"""A trie of all substrings of texts up to a length, with how often each occurs.

What `suffix` looks its continuations up in. Three things keep it small and fast in Python:

- What occurs once is not spelled out: a *leaf* is a text and a position in it, and grows with the
  text for nothing. It becomes a node when the same string comes a second time.
- A text that grows touches only the nodes of its current repeated suffixes (its `cursors`), at
  most `max_depth` of them, and these are the matches a drafter asks for.
- A text can be taken out again, by walking the way it came in.
"""

from __future__ import annotations

from itertools import count
from typing import TypeAlias

__all__ = ["Leaf", "Node", "Place", "SuffixTrie", "Text"]


class Node:
    """A string that occurs, or did occur, at least twice.

    Attributes:
        count: occurrences.
        followed: occurrences that have a successor; the children's counts add up to it.
        children: what follows, by token.
        source: key of the text that came by last.
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
        key: names it in `Node.source`.
        tokens: its tokens so far.
        cursors: nodes of its suffixes of length 0, 1, 2, ... as far as these are nodes.
    """

    __slots__ = ("cursors", "key", "tokens")

    def __init__(self, key: int, root: Node) -> None:
        self.key = key
        self.tokens: list[int] = []
        self.cursors = [root]


Leaf: TypeAlias = tuple[Text, int]
"""A string that occurs once: the text, and the position after the occurrence in it."""

Place: TypeAlias = Node | Leaf


class SuffixTrie:
    """Substrings of at most `max_depth` tokens, of any number of texts; one grows at a time."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._keys = count()
        self.root = Node()

    def open(self) -> Text:
        """A new text, empty so far. The texts before it must not grow any more."""
        return Text(next(self._keys), self.root)

    def append(self, text: Text, token: int) -> None:
        """Let a text grow by one token."""
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
                child = node.children[token] = self._second(child, depth=len(cursors))
            child.count += 1
            child.source = text.key
            cursors.append(child)
        text.cursors = cursors

    def _second(self, leaf: Leaf, depth: int) -> Node:
        """The node of a string that is about to occur a second time."""
        text, position = leaf
        node = Node()
        node.count = 1
        if depth < self._max_depth and position < len(text.tokens):
            node.followed = 1
            node.children[text.tokens[position]] = (text, position + 1)
        return node

    def remove(self, text: Text) -> None:
        """Take a text out; only one that has ceased to grow."""
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
        """Length of the longest suffix of `tokens` that occurs; 0 if none does."""
        # Whatever occurs has suffixes that occur, so that one can search by halves.
        low, high = 0, min(len(tokens), self._max_depth)
        while low < high:
            middle = (low + high + 1) // 2
            if self._descend(tokens, middle) is not None:
                low = middle
            else:
                high = middle - 1
        return low

    def find(self, tokens: list[int], length: int) -> Place:
        """The suffix of this length, which occurs."""
        place = self._descend(tokens, length)
        assert place is not None, "no longer than `longest`"
        return place

    def _descend(self, tokens: list[int], length: int) -> Place | None:
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
