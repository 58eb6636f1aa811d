"""`chat`: the conversation is kept, and nothing short of its end ends it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.terminal import Terminal
from tokenleap import LLM, SamplingParams
from tokenleap.cli.chat import Conversation

PROMPT = r">\x08\x1b\[2C"
"""A prompt, as prompt_toolkit draws it."""

SENT = r"\x1b\[\?2004l"
"""A message was sent: pastes are not expected any more."""

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
    result = run.done("chat", "-m", tiny, "--max-tokens", 12, stdin="hello\n\n  \nand?\n")
    assert result.stdout == f"{first.text}\n{second.text}\n"
    assert result.stderr == ""


def test_commands(run: Run, tiny: Path, llm: LLM) -> None:
    (first,) = llm.chat([user("hello")], GREEDY)
    lines = "hello\n/clear\nhello\n/nonsense\n/?\n/bye\nhello\n"
    result = run("chat", "-m", tiny, "--max-tokens", 12, stdin=lines)
    assert result.exit_code == 1
    assert result.stdout == f"{first.text}\n" * 2
    for text in ("starts anew", "unknown command /nonsense", "forget the conversation"):
        assert text in result.stderr


def test_other_names_of_commands(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, GREEDY, None)
    for name, meant in (("/?", "/help"), ("/clear", "/reset")):
        assert conversation.obey(name)
        first = capsys.readouterr().err
        assert conversation.obey(meant)
        assert capsys.readouterr().err == first
    assert not any(conversation.obey(name) for name in ("/exit", "/quit", "/bye"))


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
    assert result.exit_code == 1
    assert result.stdout == f"{first.text}\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the prompt has 90")
    assert line.endswith("/reset forgets the conversation.")


def test_ctrl_c(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stops the answer, the next at the prompt asks, and the third leaves and saves."""
    monkeypatch.setenv("TOKENLEAP_CACHE", str(tmp_path))
    endless = ["--max-tokens", 8000, "--ignore-eos"]
    with Terminal("chat", "-m", tiny, *endless) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("hello\n")
        terminal.wait_for(SENT + r"[\s\S]{60}")
        terminal.type("\x03")
        stopped = terminal.wait_for(r"\(stopped\)[\s\S]*" + PROMPT)
        assert "Traceback" not in stopped
        terminal.type("\x1b[200~/he\x1b[201~lp\n")  # a part of it is pasted
        terminal.wait_for(r"several lines[\s\S]*" + PROMPT)
        terminal.type("half a line\x03\x03")  # the first one only clears the line
        asked = terminal.wait_for(r"Ctrl-C again saves[\s\S]*" + PROMPT)
        assert "saved in" not in asked
        terminal.type("\x03")
        assert terminal.end() == 130
        assert terminal.shown.rstrip().endswith("interrupted")
        assert "Traceback" not in terminal.shown
    kept = tmp_path / "interrupted-chat.json"
    assert str(kept) in terminal.shown.replace("\r\n", "")
    question, answer = json.loads(kept.read_text())
    assert (question, answer["role"]) == (user("hello"), "assistant")
    assert kept.stat().st_mode & 0o077 == 0


def test_a_paste_of_several_lines_is_one_message(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Terminal("chat", "-m", tiny, "--max-tokens", 5) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[200~one\ntwo\x1b[201~\x1b\rthree\r")
        terminal.wait_for(SENT + r"[\s\S]*tokens[\s\S]*" + PROMPT)
        terminal.type("/save talk.json\r")
        terminal.wait_for(r"saved in talk.json[\s\S]*" + PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
    messages = json.loads(Path("talk.json").read_text())
    assert messages[0] == user("one\ntwo\nthree")


def test_ctrl_d_ends(tiny: Path) -> None:
    with Terminal("chat", "-m", tiny, "--max-tokens", 5) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0


def test_what_was_said_before_ctrl_c_is_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenleap.cli import chat

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


def test_a_full_context_forgets_the_oldest(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(tiny, max_model_len=128)
    conversation = Conversation(llm, GREEDY, "be brief")
    for line in ("a" * 30, "b" * 30, "c" * 30):
        conversation.answer(line)
    system, first, *_, last = conversation.messages
    assert system["role"] == "system"
    assert first["role"] == "user"
    assert first != user("a" * 30)
    assert last["role"] == "assistant"
    before = list(conversation.messages)
    conversation.answer("d" * 500)  # has no room even alone
    assert conversation.failed
    assert conversation.messages == before
    assert "context of 128 tokens is full: the oldest" in capsys.readouterr().err


def test_set(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, GREEDY, None)
    for command in ("/set max_tokens 3", "/set stop END", "/set"):
        conversation.obey(command)
    told = capsys.readouterr().err
    assert "max_tokens 3" in told
    assert not conversation.failed
    conversation.answer("hello")
    assert len(conversation.messages[1]["content"]) <= 3
    for command, error in (
        ("/set temperature hot", "temperature: "),
        ("/set warmth 1", "no field 'warmth'"),
        ("/set n 2", "n: a chat has one answer"),
    ):
        conversation.obey(command)
        assert error in capsys.readouterr().err
    assert conversation.failed


def test_undo(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY, None)
    conversation.answer("hello")
    before = list(conversation.messages)
    conversation.answer("and?")
    conversation.obey("/undo")
    assert conversation.messages == before
    conversation.obey("/undo")
    assert conversation.messages == []
    assert not conversation.failed
    conversation.obey("/undo")
    assert conversation.failed


def test_save_and_load(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, GREEDY, "be brief")
    conversation.answer("hello")
    conversation.obey(f"/save {tmp_path / 'talk.json'}")
    other = Conversation(llm, GREEDY, None)
    capsys.readouterr()
    other.obey(f"/load {tmp_path / 'talk.json'}")
    assert capsys.readouterr().err == "1 question and its answer\n"
    assert other.messages == conversation.messages
    other.obey("/reset")
    assert other.messages == conversation.messages[:1]
    assert not other.failed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "talk.json: No such file or directory"),
        ("[1", "is not a saved conversation"),
        ('[{"role": "user", "content": "a"}]', "no questions and answers"),
        ('[{"role": "user"}]', "no questions and answers"),
        ('{"a": 1}', "no questions and answers"),
    ],
)
def test_what_cannot_be_loaded(
    llm: LLM,
    tmp_path: Path,
    content: str | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted = tmp_path / "interrupted.json"
    monkeypatch.setattr("tokenleap.cli.chat._interrupted", lambda: interrupted)
    file = tmp_path / "talk.json"
    if content is not None:
        file.write_text(content)
    conversation = Conversation(llm, GREEDY, None)
    conversation.messages = [user("a"), assistant("b")]
    conversation.obey(f"/load {file}")
    assert message in " ".join(capsys.readouterr().err.split())
    assert conversation.messages == [user("a"), assistant("b")]
    conversation.obey("/load")
    assert "name a file" in capsys.readouterr().err
    interrupted.write_text(json.dumps([user("b"), assistant("c")]))
    conversation.obey("/load")
    assert conversation.messages == [user("b"), assistant("c")]
