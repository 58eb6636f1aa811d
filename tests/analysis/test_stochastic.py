"""Speculative execution of two functions: exact by enumeration, parallel by a rendezvous."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from tests.enumeration import ScriptedNoise, _AnswerNeeded
from tokenleap import ConfigError
from tokenleap.analysis import acceptance_probability
from tokenleap.analysis.formulas import Speculation, decide, expected_speedup
from tokenleap.core.distribution import Distribution
from tokenleap.core.noise import Noise

P = Distribution(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
WAIT = 20.0
ALARM = 1e-9
Call = Speculation[Any, Any]


@pytest.fixture
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def random_distribution(seed: int, zeros: int = 0, size: int = 5) -> Distribution:
    dice = torch.Generator().manual_seed(seed)
    probs = torch.rand(size, generator=dice, dtype=torch.float64) + 0.05
    probs[torch.randperm(size, generator=dice)[:zeros]] = 0
    return Distribution.of(probs / probs.sum())


def decisions(p: Distribution, q: Distribution, guessed: int) -> Iterator[tuple[int, bool, float]]:
    """Everything that can come of a guess, with its probability."""
    open_scripts: list[tuple[list[int], float]] = [([], 1.0)]
    while open_scripts:
        script, weight = open_scripts.pop()
        try:
            yield *decide(p, q, guessed, ScriptedNoise(script)), weight
        except _AnswerNeeded as question:
            for answer, probability in question.options:
                open_scripts.append(([*script, answer], weight * probability))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("p_zeros", "q_zeros"), [(0, 0), (2, 0), (0, 2), (3, 3), (4, 0), (0, 4)])
def test_exact_by_enumeration(seed: int, p_zeros: int, q_zeros: int) -> None:
    p, q = random_distribution(seed, p_zeros), random_distribution(seed + 50, q_zeros)
    found, accepted_mass = torch.zeros(5, dtype=torch.float64), 0.0
    for guessed in q.tokens.tolist():
        for choice, accepted, weight in decisions(p, q, guessed):
            found[choice] += q.prob(guessed) * weight
            accepted_mass += q.prob(guessed) * weight * accepted
    assert torch.allclose(found, p.dense(5), atol=1e-9)
    assert accepted_mass == pytest.approx(acceptance_probability(p.dense(5), q.dense(5)))
    assert accepted_mass == pytest.approx(p.overlap(q))


@pytest.mark.parametrize("q", [P, random_distribution(3, size=3), Distribution.one_hot(2)])
def test_calls_have_the_distribution_of_f(q: Distribution, threads: Executor) -> None:
    """End to end, by chi-square; a right implementation fails with probability `ALARM`."""
    call = Call(lambda _: P, lambda y: y * 10, lambda _: q, threads)
    samples = 1000
    counts: Counter[int] = Counter()
    for i in range(samples):
        result = call(None, Noise(7).at(i))
        assert result.value == result.choice * 10
        assert result.accepted <= (result.guess == result.choice)
        counts[result.choice] += 1
    expected = (P.probs * samples).tolist()
    distance = sum((counts[y] - e) ** 2 / e for y, e in enumerate(expected))
    assert chi2.sf(distance, df=2) > ALARM


def test_f_and_g_run_at_the_same_time(threads: Executor) -> None:
    """Each waits for the other: one after the other, they would wait until the barrier breaks."""
    meeting = threading.Barrier(2)

    def f(_: None) -> Distribution:
        meeting.wait(WAIT)
        return P

    def g(y: int) -> int:
        meeting.wait(WAIT)
        return y

    # q = p, so that the guess is always accepted and g runs once.
    assert Call(f, g, lambda _: P, threads)(None, Noise(0)).accepted


def test_a_rejected_guess_is_not_waited_for(threads: Executor) -> None:
    finished = threading.Event()

    def g(y: int) -> int:
        if y == 0:
            assert finished.wait(WAIT)
        return y

    call = Call(lambda _: Distribution.one_hot(1), g, lambda _: Distribution.one_hot(0), threads)
    result = call(None, Noise(0))
    assert (result.choice, result.value, result.guess, result.accepted) == (1, 1, 0, False)
    finished.set()


def test_reproducible_by_seed(threads: Executor) -> None:
    call = Call(lambda _: P, str, lambda _: random_distribution(1, size=3), threads)
    first = [call(None, Noise(5).at(i)) for i in range(20)]
    assert first == [call(None, Noise(5).at(i)) for i in range(20)]
    assert first != [call(None, Noise(6).at(i)) for i in range(20)]


def test_in_turn_is_the_baseline(threads: Executor) -> None:
    call = Call(lambda x: Distribution.one_hot(x), str, lambda _: P, threads)
    assert call.in_turn(2, Noise(0)) == (2, "2")


class _Broken(Exception):  # noqa: N818
    pass


def fail(*_: object) -> Distribution:
    raise _Broken


def test_errors_of_f_and_of_the_g_that_counts_are_raised(threads: Executor) -> None:
    with pytest.raises(_Broken):
        Call(fail, str, lambda _: P, threads)(None, Noise(0))
    with pytest.raises(_Broken):
        Call(lambda _: P, fail, lambda _: P, threads)(None, Noise(0))


def test_an_error_on_a_rejected_guess_is_not(threads: Executor) -> None:
    def g(y: int) -> int:
        return 10 // y

    call = Call(lambda _: Distribution.one_hot(2), g, lambda _: Distribution.one_hot(0), threads)
    assert call(None, Noise(0)).value == 5


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        (Distribution(torch.tensor([0.5, 0.6])), "probabilities must sum to 1, got a sum of 1.1"),
        (Distribution(torch.tensor([1.5, -0.5])), "probabilities must be between 0 and 1"),
        (Distribution(torch.tensor([math.nan, 1.0])), "probabilities must be between 0 and 1"),
        ([0.5, 0.5], "must return a Distribution, got list"),
    ],
)
def test_what_is_not_a_distribution_is_refused(
    distribution: Distribution, message: str, threads: Executor
) -> None:
    with pytest.raises(ConfigError, match=f"f: .*{message}"):
        Call(lambda _: distribution, str, lambda _: P, threads)(None, Noise(0))
    with pytest.raises(ConfigError, match=f"guess: .*{message}"):
        Call(lambda _: P, str, lambda _: distribution, threads)(None, Noise(0))


def test_expected_speedup() -> None:
    assert expected_speedup(1, 1, 1) == 2
    assert expected_speedup(0, 3, 1) == 1
    # Half the calls take 3 s, half take 4 s: 3.5 s against 4.
    assert expected_speedup(0.5, 3, 1) == pytest.approx(4 / 3.5)
    with pytest.raises(ConfigError, match="alpha: must be between 0 and 1"):
        expected_speedup(2, 1, 1)
    with pytest.raises(ConfigError, match="f_seconds: must be a finite number above 0"):
        expected_speedup(0.5, 0, 1)
