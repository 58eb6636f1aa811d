"""`chat`: the conversation is kept, and nothing short of its end ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams
from foretoken.cli.chat import Conversation
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(tiny, speculative_config={"method": "ngram"})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_history_is_kept(run: Run, tiny: Path, llm: LLM) -> None:
    (first,) = llm.chat([user("hello")], GREEDY)
    (second,) = llm.chat([user("hello"), assistant(first.text), user("and?")], GREEDY)
    result = run("chat", "-m", tiny, "--max-tokens", 12, stdin="hello\n\nand?\n")
    assert result.exit_code == 0
    assert result.stdout == f"{first.text}\n{second.text}\n"
    assert result.stderr == ""


def test_commands(run: Run, tiny: Path, llm: LLM) -> None:
    (first,) = llm.chat([user("hello")], GREEDY)
    lines = "hello\n/reset\nhello\n/nonsense\n/help\n/exit\nhello\n"
    result = run("chat", "-m", tiny, "--max-tokens", 12, stdin=lines)
    assert result.exit_code == 0
    assert result.stdout == f"{first.text}\n" * 2
    for text in ("starts anew", "unknown command /nonsense", "/reset  forget"):
        assert text in result.stderr


def test_system_message(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY, "be brief")
    conversation.answer("hello")
    system = {"role": "system", "content": "be brief"}
    assert conversation.messages[:2] == [system, user("hello")]
    assert conversation.messages[2]["role"] == "assistant"
    conversation.obey("/reset")
    assert conversation.messages == [system]


def test_a_prompt_that_is_too_long(run: Run, tiny: Path, llm: LLM) -> None:
    (first,) = llm.chat([user("hello")], GREEDY)
    lines = "x" * 9000 + "\nhello\n"
    result = run("chat", "-m", tiny, "--max-tokens", 12, stdin=lines)
    assert result.exit_code == 0
    assert result.stdout == f"{first.text}\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the prompt has 90")
    assert line.endswith("/reset forgets the conversation.")


def test_ctrl_c(tiny: Path) -> None:
    """One stops the answer, the next at the prompt ends the program."""
    endless = ["--max-tokens", 8000, "--ignore-eos"]
    with Terminal("chat", "-m", tiny, *endless) as terminal:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for(r"hello\r\n(.|\r|\n){40}")
        terminal.type("\x03")
        stopped = terminal.wait_for(r"\(stopped\)(.|\r|\n)*> ")
        assert "Traceback" not in stopped
        terminal.type("/help\n")
        terminal.wait_for(r"/reset(.|\r|\n)*> ")
        assert terminal.interrupt_until_end() == 130
        assert terminal.shown.rstrip().endswith("interrupted")
        assert "Traceback" not in terminal.shown


def test_ctrl_d_ends(tiny: Path) -> None:
    with Terminal("chat", "-m", tiny, "--max-tokens", 5) as terminal:
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_what_was_said_before_ctrl_c_is_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.cli import chat

    class Interrupts:
        """As if Ctrl-C had come during the third step."""

        steps = 0

        def __enter__(self) -> Interrupts:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __call__(self) -> bool:
            self.steps += 1
            return self.steps == 3

    monkeypatch.setattr(chat, "_first_interrupt", Interrupts)
    conversation = Conversation(llm, GREEDY, None)
    conversation.answer("hello")
    (whole,) = llm.chat([user("hello")], GREEDY)
    question, answer = conversation.messages
    assert question == user("hello")
    assert 0 < len(answer["content"]) < len(whole.text)
    assert whole.text.startswith(answer["content"])
