"""The trie of `suffix` against counting afresh: growing, removing, matching."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drafting import request_of
from tokenleap.control import Budget
from tokenleap.drafters.options import SuffixOptions
from tokenleap.drafters.suffix import Node, Place, SuffixDrafter, SuffixTrie, Text, successors

texts = st.lists(st.lists(st.integers(0, 2), max_size=25), max_size=4)


def fill(trie: SuffixTrie, tokens: list[int]) -> Text:
    text = trie.open()
    for token in tokens:
        trie.append(text, token)
    return text


def expected_counts(listed: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    """Occurrences of every substring of at most `depth` tokens."""
    return Counter(
        tuple(text[start:end])
        for text in listed
        for start in range(len(text))
        for end in range(start + 1, min(len(text), start + depth) + 1)
    )


def counts(trie: SuffixTrie, depth: int) -> Counter[tuple[int, ...]]:
    """The same as the trie has it."""
    found: Counter[tuple[int, ...]] = Counter()

    def visit(place: Place, string: tuple[int, ...]) -> None:
        if string:
            found[string] = place.count if isinstance(place, Node) else 1
        if len(string) == depth:
            return
        if isinstance(place, Node):
            for token, child in place.children.items():
                visit(child, (*string, token))
        elif place[1] < len(place[0].tokens):
            text, end = place
            visit((text, end + 1), (*string, text.tokens[end]))

    visit(trie.root, ())
    return found


@given(listed=texts, depth=st.integers(1, 6))
def test_every_substring_is_counted(listed: list[list[int]], depth: int) -> None:
    trie = SuffixTrie(depth)
    for tokens in listed:
        fill(trie, tokens)
    assert counts(trie, depth) == expected_counts(listed, depth)


@given(listed=texts, depth=st.integers(1, 6), data=st.data())
def test_a_removed_text_leaves_no_trace(
    listed: list[list[int]], depth: int, data: st.DataObject
) -> None:
    trie = SuffixTrie(depth)
    kept: list[tuple[Text, list[int]]] = []
    for tokens in listed:
        kept.append((fill(trie, tokens), tokens))
        if data.draw(st.booleans()):
            text, _ = kept.pop(data.draw(st.integers(0, len(kept) - 1)))
            trie.remove(text)
        assert counts(trie, depth) == expected_counts([t for _, t in kept], depth)
    for text, _ in kept:
        trie.remove(text)
    assert not trie.root.children
    assert trie.root.followed == 0


@pytest.mark.parametrize("seed", range(20))
def test_cursors_are_the_suffixes_that_occurred_before(seed: int) -> None:
    dice = random.Random(seed)
    trie, tokens = SuffixTrie(6), []
    text = trie.open()
    for _ in range(60):
        tokens.append(dice.randrange(3))
        trie.append(text, tokens[-1])
        known = expected_counts([tokens], 6)
        repeated = [n for n in range(1, 7) if known[tuple(tokens[-n:])] > 1 and n <= len(tokens)]
        assert len(text.cursors) - 1 == len(repeated)
        for length in repeated:
            node, string = text.cursors[length], tuple(tokens[-length:])
            assert node.count == known[string]
            if length < 6:  # the last occurrence has no successor yet
                assert node.followed == known[string] - 1
                shares = {token: share for token, share, _ in successors(node)}
                assert sum(shares.values()) == pytest.approx(1)
                for token, share in shares.items():
                    assert share == pytest.approx(known[(*string, token)] / node.followed)


@given(listed=texts, tokens=st.lists(st.integers(0, 2), max_size=8), depth=st.integers(2, 6))
def test_matches_are_the_suffixes_that_occur(
    listed: list[list[int]], tokens: list[int], depth: int
) -> None:
    trie = SuffixTrie(depth)
    for text in listed:
        fill(trie, text)
    known = expected_counts(listed, depth)
    occurring = [n for n in range(1, len(tokens) + 1) if known[tuple(tokens[-n:])]]
    assert trie.longest(tokens) == len(occurring)
    for length in occurring:
        place = trie.find(tokens, length)
        occurrences = place.count if isinstance(place, Node) else 1
        assert occurrences == known[tuple(tokens[-length:])]


@given(listed=texts, depth=st.integers(1, 6), data=st.data())
def test_tokens_that_are_taken_back_leave_no_trace(
    listed: list[list[int]], depth: int, data: st.DataObject
) -> None:
    """The text grows, is cut, and grows again, beside others that are complete."""
    trie, cut = SuffixTrie(depth), SuffixTrie(depth)
    for tokens in listed[1:]:
        fill(trie, tokens)
        fill(cut, tokens)
    whole: list[int] = []
    text = cut.open()
    for _ in range(3):
        more = data.draw(st.lists(st.integers(0, 2), max_size=12))
        cut.extend(text, more)
        whole += more
        length = data.draw(st.integers(0, len(whole)))
        cut.cut(text, length)
        del whole[length:]
        assert counts(cut, depth) == expected_counts([*listed[1:], whole], depth)
    fill(trie, whole)
    for string in expected_counts([whole], depth):  # what follows is in the same order, too
        if len(string) < depth:
            found = [list(successors(each.find(list(string), len(string)))) for each in (cut, trie)]
            tokens, others = ([token for token, *_ in each] for each in found)
            assert tokens == others


def test_a_rewound_drafter_drafts_what_a_new_one_does() -> None:
    drafter, request = SuffixDrafter(SuffixOptions()), request_of([1, 2, 3, 4, 1, 2])
    drafter.draft(request, Budget(4, 4))
    request.token_ids = [1, 2, 3, 4, 1, 2, 3, 9]
    drafter.draft(request, Budget(4, 4))
    request.token_ids = [1, 2, 3, 4, 1, 2, 3]
    drafter.rewind(request)
    assert drafter.draft(request, Budget(4, 4)).tree.tokens == (3, 4, 1, 2, 3)
