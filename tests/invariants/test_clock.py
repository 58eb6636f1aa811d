"""Where the output's bits depend on the drafts, the clock decides nothing.

Every run has a clock of its own, which shows random times. What is drafted must not depend on it.
"""

from __future__ import annotations

import random
from time import perf_counter, sleep
from typing import Any

import pytest

from tests.matrix import PROMPTS, SPECULATIVE, fits, tiny_llm
from tests.measurements import USUAL, measure_with
from tests.tiny import tiny_model
from tokenleap import SamplingParams
from tokenleap.core import clock as clock_module
from tokenleap.runtime import target
from tokenleap.runtime.passes import Passes

NGRAMS: list[dict[str, Any]] = [
    {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "ngram_table"},
    {"method": "random"},
]
SWITCH = {"method": "switch", "drafters": NGRAMS, "try_every": 3}
SWITCHES: dict[str, dict[str, Any]] = {
    "switch": {"drafters": NGRAMS, "try_every": 3},
    "ensemble": {"drafters": [SWITCH, NGRAMS[0]]},
    "horizontal_cascade": {"drafters": [SWITCH, NGRAMS[0]], "tokens": [2, 2]},
    "cascade": {"drafter": SWITCH},
}


def drafted(
    monkeypatch: pytest.MonkeyPatch, clock: int, method: str, rule: str, **fields: Any
) -> list[tuple[tuple[int, ...], int]]:
    """Drafted and added tokens of every step, under the default controller and a clock."""
    dice, now = random.Random(clock), 0.0

    def random_time() -> float:
        nonlocal now
        now += 10 ** dice.uniform(-6, -1)
        return now

    with monkeypatch.context() as patched:
        patched.setattr(clock_module, "now", random_time)
        measure_with(patched, USUAL)
        llm = tiny_llm(tiny_model(), method, rule, controller=None, **fields)
        outputs = llm.generate(PROMPTS[:3], SamplingParams(seed=5, max_tokens=40, top_k=4))
    return [(step.drafted, step.token) for output in outputs for step in output.trace]


@pytest.mark.parametrize("method", ["draft_model", "hybrid", "suffix"])
def test_the_suite_drafts_alike_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Under the clock of all tests, passes that take as long as they like change nothing."""
    forward, runs = Passes._forward, []
    for seed in (1, 2):
        dice = random.Random(seed)

        def delayed(*arguments: Any, dice: random.Random = dice) -> Any:
            sleep(dice.uniform(0, 2e-3))
            return forward(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(Passes, "_forward", delayed)
            llm = tiny_llm(tiny_model(), method, controller=None)
            outputs = llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=24))
            runs.append([(step.drafted, step.token) for each in outputs for step in each.trace])
    assert runs[0] == runs[1]


@pytest.mark.usefixtures("real_clock")
def test_elsewhere_the_machine_is_timed() -> None:
    began = perf_counter()
    (output,) = tiny_llm(tiny_model()).generate([PROMPTS[0]], SamplingParams(max_tokens=8))
    assert 0 < output.metrics.seconds < perf_counter() - began


CHOOSING = (*SWITCHES, "hybrid", "draft_model", "suffix")
"""Methods with a choice that may be timed, and one of each kind of default controller."""


@pytest.mark.parametrize(
    "method",
    [
        name if name in CHOOSING else pytest.param(name, marks=pytest.mark.slow)
        for name in SPECULATIVE
        if fits(name, "rejection")
    ],
)
def test_drafts_do_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    fields = SWITCHES.get(method, {})
    runs = [drafted(monkeypatch, clock, method, "rejection", **fields) for clock in (1, 2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", ["switch", "hybrid", "draft_model"])
def test_nor_on_a_target_whose_bits_depend_on_the_drafts(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(target, "probe", lambda *_, **__: False)
    fields = SWITCHES.get(method, {})
    runs = [drafted(monkeypatch, clock, method, "coupled", **fields) for clock in (1, 2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", ["switch", "draft_model"])
def test_elsewhere_they_may(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Else the tests above would show nothing. The tokens stay the same."""
    fields = SWITCHES.get(method, {})
    runs = [drafted(monkeypatch, clock, method, "coupled", **fields) for clock in (1, 2)]
    assert runs[0] != runs[1]
