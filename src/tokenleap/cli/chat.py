"""`tokenleap chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from tokenleap.cli.console import TokenWriter, errors, plain, say, show_summary, working
from tokenleap.cli.options import (
    CachingOptions,
    ModelOptions,
    SamplingOptions,
    SpeculationOptions,
    few,
    flat,
    in_panel,
    open_llm,
    option_of,
)
from tokenleap.cli.root import UsageError, examples
from tokenleap.core.files import read_json, write_whole
from tokenleap.core.params import SamplingParams
from tokenleap.errors import ConfigError, PromptError, RequestError, TokenleapError

if TYPE_CHECKING:
    from tokenleap.llm import LLM

EXAMPLES = examples(
    "tokenleap chat",
    'tokenleap chat --system "You answer in one sentence." --temperature 0.7',
    "tokenleap chat --method ngram_table --num-speculative-tokens 8",
)


@dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    """Sampling options with longer answers than `generate`."""

    max_tokens: Annotated[
        int | None,
        option_of(SamplingParams, "max_tokens", "Sampling", show_default="the model's, else 512"),
    ] = None

    OTHERWISE: ClassVar[Mapping[str, Any]] = {**SamplingOptions.OTHERWISE, "max_tokens": 512}


@few(
    "model max_model_len quantization device method draft_model temperature max_tokens system quiet"
)
@flat
def chat(
    target: ModelOptions,
    speculation: SpeculationOptions,
    sampling: ChatSampling,
    engine: CachingOptions,
    system: Annotated[str | None, in_panel("Options", "System message.", metavar="TEXT")] = None,
    quiet: Annotated[
        bool, in_panel("Options", "Print answers only: no spinner, no statistics.", "--quiet", "-q")
    ] = False,
) -> None:
    """Chat with a model. /help lists the commands.

    Ctrl-C stops an answer. Ctrl-D, or Ctrl-C twice at the prompt, ends the
    chat. On a pipe, each line is a message, and a message that fails makes the
    exit code 1.
    """
    with working("Starting", quiet=quiet):
        config = speculation.config_for(target.model)
    params = sampling.params_for(target.model)
    llm = open_llm(
        target,
        config,
        quiet=quiet,
        generation_config=sampling.generation_config,
        **engine.arguments(),
    )
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise UsageError(f"{target.model} has no chat template: use `tokenleap generate --no-chat`")
    if errors().is_terminal and not quiet:
        method = llm.speculative_config.method_name
        note(f"{target.model} with {method}; /help for help, Ctrl-D to end")
    conversation, read = Conversation(llm, params, system, quiet=quiet), _reader()
    try:
        while (line := read()) is not None:
            if line.startswith("/"):
                if not conversation.obey(line.strip()):
                    break
            elif line.strip():
                conversation.answer(line)
    except KeyboardInterrupt:
        if sys.stdin.isatty():
            conversation.keep()
        raise
    if conversation.failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _reader() -> Callable[[], str | None]:
    """A function that reads the next message; it gives None at the end of input."""
    if not sys.stdin.isatty():
        return _piped_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys, interrupts = KeyBindings(), 0
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))

    @keys.add("c-c")
    @keys.add("<sigint>")
    def interrupt(event: Any) -> None:
        nonlocal interrupts
        if event.current_buffer.text:
            event.current_buffer.reset()
            interrupts = 0
        else:
            interrupts += 1
            event.app.exit(exception=KeyboardInterrupt())

    # On stderr, so that answers alone are on standard output.
    output = create_output(stdout=sys.stderr)
    session: PromptSession[str] = PromptSession("> ", key_bindings=keys, output=output)

    def typed() -> str | None:
        nonlocal interrupts
        errors().print()
        interrupts = 0
        while True:
            try:
                return session.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if interrupts > 1:
                    raise
                note("Ctrl-C again saves the conversation and ends the chat; Ctrl-D ends it")

    return typed


def _piped_line() -> str | None:
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


# A conversation in the terminal: its messages, and the slash commands that act on them.


HELP = """\
/help, /?          this list
/set               the sampling parameters that differ from their defaults
/set NAME VALUE    change one, for example /set temperature 0.7
/undo              forget the last question and its answer
/reset, /clear     forget the conversation
/save FILE         write the conversation as JSON
/load FILE         continue one that was saved
/exit, /quit, /bye end the chat (so do Ctrl-D, and Ctrl-C twice)
Ctrl-C stops an answer; the conversation keeps its text so far.
Alt-Enter begins a new line. A text that you paste may have several lines."""

_SAME = {"/?": "/help", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}
"""Commands that others call otherwise."""

_LEAST_ROOM = 4
"""An answer gets a fourth of the context at least, or `max_tokens` if that is less."""


class Conversation:
    """The messages of a chat and the commands that act on them."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, quiet: bool = False
    ) -> None:
        self._llm = llm
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._quiet = quiet
        self.messages: list[dict[str, str]] = list(self._start)
        self.failed = False

    # Commands

    def obey(self, command: str) -> bool:
        """Run a slash command; return False if it ends the conversation."""
        typed, _, rest = command.partition(" ")
        name = _SAME.get(typed, typed)
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(HELP),
            "/set": self._set,
            "/undo": self._undo,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
        }
        if name == "/exit":
            return False
        if name not in commands:
            self._fail(f"unknown command {name}; /help lists them")
            return True
        try:
            commands[name](rest.strip())
        except TokenleapError as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return True

    def _fail(self, why: str) -> None:
        self.failed = True
        say(f"error: {why}")

    def _set(self, words: str) -> None:
        name, _, text = words.partition(" ")
        if not name:
            changed = self._params.model_dump(exclude_defaults=True)
            note("\n".join(f"{name} {value}" for name, value in changed.items()))
            return
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = text
        if name == "n":
            raise ConfigError("n: a chat has one answer")
        given = self._params.model_dump(exclude_unset=True, by_alias=True)
        self._params = type(self._params)(**{**given, name: value})
        note(f"{name} {value}")

    def _undo(self, _: str) -> None:
        if self.messages == self._start:
            raise PromptError("there is nothing to undo")
        del self.messages[-2:]
        note("the last question and its answer are forgotten")

    def _reset(self, _: str) -> None:
        self.messages = list(self._start)
        note("the conversation starts anew")

    def _save(self, name: str) -> None:
        content = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        write_whole(_file(name), lambda to: to.write_text(content, encoding="utf-8"))
        note(f"saved in {name}, which /load reads")

    def keep(self) -> None:
        """Save a conversation that Ctrl-C ends where only this user reads it, and say where."""
        if self.messages == self._start:
            return
        file, before = _interrupted(), os.umask(0o077)
        with suppress(OSError):  # what is wrong with it, saving says
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.obey(f"/save {file}")
        finally:
            os.umask(before)

    def _load(self, name: str) -> None:
        if not name and _interrupted().exists():
            name = str(_interrupted())
        try:
            found = read_json(_file(name))
        except ValueError as error:
            raise PromptError(f"{name} is not a saved conversation: {error}") from None
        if not _are_messages(found):
            raise PromptError(f"{name} is not a saved conversation: no questions and answers")
        self.messages = found
        self._start = [message for message in found[:1] if message["role"] == "system"]
        count = sum(message["role"] == "user" for message in found)
        note("1 question and its answer" if count == 1 else f"{count} questions and their answers")

    # Answers

    def answer(self, line: str) -> None:
        """Stream an answer; if the context is full, the oldest turns are dropped."""
        question = {"role": "user", "content": line}
        try:
            kept, params = self._with_room(question)
            chunks = self._llm.stream([*kept, question], params)
        except TokenleapError as error:
            self._fail(f"{error} /reset forgets the conversation.")
            return
        self._forget(len(self.messages) - len(kept))
        text, output, writer = "", None, TokenWriter()
        try:
            with closing(chunks), closing(writer), _first_interrupt() as interrupted:
                for chunk in chunks:
                    writer.write(chunk.tokens)
                    text, output = text + chunk.text, chunk.output
                    if interrupted():
                        break
        except RequestError as error:
            self._fail(str(error))
            return
        if text:
            self.messages += [question, {"role": "assistant", "content": text}]
        if output is None:
            note("(stopped)")
        elif not self._quiet:
            show_summary(output, writer)

    def _with_room(self, question: dict[str, str]) -> tuple[list[dict[str, str]], SamplingParams]:
        """The messages without the oldest turns, and parameters of an answer that fits."""
        most, begin, kept = self._llm.max_model_len, len(self._start), list(self.messages)
        wanted = self._params.max_tokens or most
        room = min(wanted, most // _LEAST_ROOM)
        while (length := len(self._llm.encode([*kept, question]))) + room > most:
            if len(kept) <= begin:
                break
            del kept[begin : begin + 2]
        most_tokens = max(1, min(wanted, most - length))
        return kept, self._params.model_copy(update={"max_tokens": most_tokens})

    def _forget(self, count: int) -> None:
        """Drop so many of the oldest messages, and say so."""
        if not count:
            return
        begin = len(self._start)
        del self.messages[begin : begin + count]
        turns = "turn is" if count == 2 else f"{count // 2} turns are"
        most = self._llm.max_model_len
        note(f"(the context of {most} tokens is full: the oldest {turns} forgotten)")


def note(text: str) -> None:
    """Print a remark on stderr."""
    errors().print(plain(text, "note"))


def _interrupted() -> Path:
    """The conversation that Ctrl-C has ended."""
    from tokenleap.models.store import cache_dir

    return cache_dir() / "interrupted-chat.json"


def _file(name: str) -> Path:
    if not name:
        raise ConfigError("name a file: /save FILE or /load FILE")
    return Path(name).expanduser()


def _are_messages(value: Any) -> bool:
    """Whether this is a system message, if any, and then questions with their answers."""
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value
    ):
        return False
    roles = [each["role"] for each in value if isinstance(each["content"], str)]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    pairs = ["user", "assistant"] * (len(turns) // 2)
    return len(roles) == len(value) and turns == pairs


@contextmanager
def _first_interrupt() -> Iterator[Callable[[], bool]]:
    """Count the first Ctrl-C, so that the step ends normally; the second one raises."""
    interrupts = 0

    def count(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, count)
    try:
        yield lambda: interrupts > 0
    finally:
        signal.signal(signal.SIGINT, before)
