"""Lookahead decoding: the window is a tree, and what it learns is drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.drafting import draft_of, drafter_of, tokens_of
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.core.references import Source
from tokenleap.drafters.lookahead import LookaheadDrafter, Pool, Window
from tokenleap.drafters.options import LookaheadOptions
from tokenleap.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=60)


def request_of(tokens: list[int], source: Source | None = None) -> Request:
    params = SamplingParams(temperature=0, seed=1)  # the window begins at random
    return Request(tokens, params, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT, source=source)


def options(**fields: Any) -> LookaheadOptions:
    return LookaheadOptions(window_size=3, ngram_size=4, **fields)


def test_the_pool_keeps_the_latest() -> None:
    pool = Pool(max_ngrams=2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7], [2, 1, 1]):
        pool.add(ngram)
    assert list(pool.after(1)) == [(6, 7), (2, 3)]
    assert list(pool.after(2)) == [(1, 1)]
    assert list(pool.after(9)) == []


def test_rows_move_up_and_stay_aligned() -> None:
    """Token j of row r stands r + j + 1 after the root, also after several were accepted."""
    window = Window(request_of([1, 2]), options())
    text = {position: 50 + position for position in range(40)}  # what the target would say

    def guesses(length: int) -> list[int]:
        return [text[length + column + len(window.rows)] for column in range(3)]

    length = 2
    for accepted in (1, 1, 1, 1, 1, 3, 1, 1, 1, 1):
        found = guesses(length)
        length += accepted
        window.advance(length, found)
    for row, tokens in enumerate(window.rows):
        known = tokens if row < 2 else tokens[:3]
        assert known == [text[length + row + column] for column in range(3)]


def test_an_encoder_decoder_starts_from_its_source() -> None:
    """The pool has the source's n-grams, and the window its tokens that can be written."""
    source = Source((7, 8, 9, 10, VOCAB_SIZE + 1))
    drafter = LookaheadDrafter(options())
    draft = draft_of(drafter, request_of([7], source), 64)
    assert draft.tree.tokens[:4] == (7, 8, 9, 10)
    assert set(draft.tree.tokens) == {7, 8, 9, 10}
    audio = request_of([7], Source())
    assert set(draft_of(drafter, audio, 64).tree.tokens) == {7}


def test_the_draft_holds_ngrams_and_the_whole_window() -> None:
    drafter = LookaheadDrafter(options(pool_from_prompt=True))
    request = request_of([7, 8, 9, 10, 7])
    draft = draft_of(drafter, request, 64)
    assert draft.tree.path_tokens(3) == [8, 9, 10]  # the prompt's n-gram that begins with 7
    assert draft.tree.num_drafted >= 3 + 3  # and a window of one row so far
    assert tokens_of(drafter, request, 2) == [8, 9]


def test_without_the_prompt_the_pool_begins_empty() -> None:
    drafter = LookaheadDrafter(options(pool_from_prompt=False))
    assert len(tokens_of(drafter, request_of([7, 8, 9, 10, 7]), 64)) <= 3


def test_what_the_window_finds_is_accepted() -> None:
    """A tiny greedy model repeats itself, so that its n-grams come again."""
    llm = tiny_llm(tiny_model(), "lookahead", gamma=None, pool_from_prompt=False)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert sum(o.metrics.num_accepted_tokens for o in outputs) > 20
    assert [o.token_ids for o in outputs] == [
        o.token_ids for o in tiny_llm(tiny_model()).generate(PROMPTS, GREEDY)
    ]


def test_new_rows_are_what_the_target_says_below_the_window() -> None:
    model = tiny_model()
    llm = LLM(model, speculative_config={"method": "lookahead", "window_size": 2, "ngram_size": 3})
    request = request_of(list(PROMPTS[0]))
    llm.engine._scheduler.add(request)
    drafter: Any = drafter_of(llm)
    window = Window(request, LookaheadOptions(window_size=2, ngram_size=3))
    paths = [path for path, _ in window.columns()]
    llm.engine._scheduler.step()
    after = drafter._windows[request.key].rows
    for column, path in enumerate(paths):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*PROMPTS[0], *path]])).logits[0, -1]
        advanced = len(request.output_ids)
        if column - advanced >= 0:
            assert after[1][column - advanced] == int(logits.argmax())
    llm.engine._scheduler.abort([request])


def test_it_sees_outcomes_of_drafts_it_did_not_make() -> None:
    """Merged with others' drafts, or cut: it reads what is there."""
    config = {
        "method": "ensemble",
        "drafters": [{"method": "lookahead"}, {"method": "ngram", "prompt_lookup_min": 1}],
    }
    for gamma in (1, 4, 30):
        llm = LLM(tiny_model(), speculative_config={**config, "num_speculative_tokens": gamma})
        outputs = llm.generate(PROMPTS, GREEDY)
        plain = LLM(tiny_model()).generate(PROMPTS, GREEDY)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="ngram_size"):
        LookaheadOptions(ngram_size=1)
    assert LookaheadOptions(window_size=2, ngram_size=3, max_ngrams=4)
