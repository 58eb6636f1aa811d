"""This library as a contestant: what is left for a prompt, and what is refused."""

from __future__ import annotations

import pytest

from tokenleap import ConfigError
from tokenleap.bench.contestants import BASELINE, OWN, Contestant, Setting
from tokenleap.bench.own import OwnRunner


def test_a_prompt_leaves_room_for_the_output(folder: str) -> None:
    runner = OwnRunner(BASELINE, Setting(folder, max_tokens=20, max_prompt_tokens=16))
    long = "abcdefgh" * 10
    whole = runner._llm.encode(long)
    assert len(whole) > 40
    assert runner.encode([long], 256) == [[*whole[:8], *whole[-8:]]]
    assert runner.encode([long], 30) == [[*whole[:5], *whole[-5:]]]
    assert runner.encode([long], 22) == [[whole[0], whole[-1]]]
    assert runner.encode(["ab"], 256) == [runner._llm.encode("ab")]


@pytest.mark.parametrize("context", [21, 20, 10])
def test_an_output_that_leaves_no_room_for_a_prompt(folder: str, context: int) -> None:
    runner = OwnRunner(BASELINE, Setting(folder, max_model_len=context, max_tokens=20))
    with pytest.raises(ConfigError) as caught:
        runner.encode(["abc"], context)
    assert str(caught.value) == (
        f"max_tokens 20 leaves no room for a prompt in a context of {context}: lower it, or raise "
        "max_model_len."
    )


def test_the_control_is_sampled_with_its_seed(folder: str) -> None:
    setting = Setting(folder, max_tokens=20)
    ngram = {"method": "ngram", "controller": "fixed"}
    runners = [
        OwnRunner(Contestant("x", OWN, config), setting) for config in (BASELINE.config, ngram)
    ]
    ids, others = runners[0].control([3, 4], 60)
    assert len(ids) == len(set(ids)) == 40
    assert ids != others
    plain, drafted = (runner.generate([ids], 20, 1.5, [3])[0]["token_ids"] for runner in runners)
    assert plain == drafted
    assert plain != runners[0].generate([ids], 20)[0]["token_ids"]
