"""The progress bar of `generate`: where it is shown, and what it says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.serving import assert_empty, bits
from tests.tiny import tiny_model
from tokenleap import LLM, RequestError, SamplingParams
from tokenleap import llm as module
from tokenleap.engine.jobs import Job, JobSpec, specs_of

PROMPTS = [[1, 2, 3], [4, 5], [6]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model())


class Bar:
    """tqdm's interface, as far as it is used; records what happens to it."""

    made: list[Bar]

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.done = [0]
        self.texts: list[str] = []
        self.closed = False
        type(self).made.append(self)

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        assert not refresh
        self.texts.append(text)

    def update(self, count: int) -> None:
        assert not self.closed
        self.done.append(self.done[-1] + count)

    def refresh(self) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    monkeypatch.setattr(module, "EVERY_SECONDS", 0)
    Bar.made = []
    return Bar.made


def test_a_bar_of_the_users_own(llm: LLM, made: list[Bar]) -> None:
    shown = llm.generate(PROMPTS, PARAMS, use_tqdm=Bar)
    assert [bits(each) for each in shown] == [bits(each) for each in llm.generate(PROMPTS, PARAMS)]
    (bar,) = made
    assert bar.fields["total"] == 3
    assert bar.fields["desc"] == "Processed prompts"
    assert len(bar.done) > 6  # one per step
    assert bar.done == sorted(bar.done)
    assert bar.done[-1] == 3
    assert bar.texts[0].startswith("input: ")
    assert not bar.texts[-1].endswith("output: 0.0 tokens/s")
    assert bar.closed


def test_it_is_closed_after_an_error(
    llm: LLM, made: list[Bar], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no disk")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "prefill", broken)
        with pytest.raises(RequestError):
            llm.generate(PROMPTS, PARAMS, use_tqdm=Bar)
    assert made[0].closed
    assert_empty(llm)


@pytest.mark.parametrize(
    ("prompts", "use_tqdm", "terminal", "shown"),
    [
        (PROMPTS, None, True, True),
        (PROMPTS, None, False, False),
        (PROMPTS[:1], None, True, False),
        (PROMPTS, False, True, False),
        (PROMPTS[:1], True, False, True),
        ([], True, True, False),
    ],
)
def test_where_it_is_shown(
    llm: LLM,
    prompts: list[Any],
    use_tqdm: bool | None,
    terminal: bool,
    shown: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    llm.generate(prompts, PARAMS, use_tqdm=use_tqdm)
    written = capsys.readouterr()
    assert ("Processed prompts: 100%" in written.err) == shown
    assert bool(written.err) == shown
    assert not written.out


def test_several_outputs_of_one_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_somebody_looks", lambda: True)
    job = llm.engine.job(JobSpec([1, 2], SamplingParams(n=2)))
    with module.progress_of([job], None) as after_step:
        assert after_step is not None
    with module.progress_of([llm.engine.job(JobSpec([1, 2]))], None) as after_step:
        assert after_step is None


def test_short_calls_show_none(llm: LLM, made: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_somebody_looks", lambda: True)
    monkeypatch.setattr(module, "AFTER_SECONDS", 1000.0)
    monkeypatch.setattr(module._Bar, "_made", None)
    llm.generate(PROMPTS, PARAMS)
    assert not made


def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell:
        pass

    class IPython:
        get_ipython = ZMQInteractiveShell

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert not module._somebody_looks()
    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert module._somebody_looks()


def test_a_kernel_gets_no_warning_about_widgets() -> None:
    """Transformers imports `tqdm.auto`; here it comes with the first import of ours."""
    code = (
        "from ipykernel import zmqshell; import tokenleap, sys; assert 'tqdm.auto' in sys.modules"
    )
    command = [sys.executable, "-W", "error:IProgress", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_beam_search_takes_it_too(llm: LLM, made: list[Bar]) -> None:
    found = llm.beam_search(PROMPTS, {"beam_width": 2, "max_tokens": 3}, use_tqdm=Bar)
    assert len(found) == 3
    assert made[0].done[-1] == 3


def test_jobs_that_wait_cost_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps, only jobs that have changed are looked at: at most those in the batch."""
    looks, shown = list[Job](), list[int]()

    def counted(job: Job) -> bool:
        looks.append(job)
        return all(request.closed for request in job.requests)

    params = SamplingParams(temperature=0, max_tokens=3)
    jobs = llm.engine.jobs(specs_of([[1, 2]] * 200, params))
    monkeypatch.setattr(module, "EVERY_SECONDS", 0)
    Bar.made = []
    with module.progress_of(jobs, Bar) as show:
        assert show is not None

        def after_step(changed: Sequence[Job]) -> None:
            shown.append(len(changed))
            show(changed)

        monkeypatch.setattr(Job, "finished", property(counted))
        llm.engine.run(jobs, after_step)
    batch = llm.engine.options.max_num_seqs
    assert max(shown) <= 2 * batch  # some end, and others begin
    assert Bar.made[0].done[-1] == 200
    assert len(looks) < 2 * sum(shown) + 2 * len(jobs)
