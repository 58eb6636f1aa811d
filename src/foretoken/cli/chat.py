"""`foretoken chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from foretoken.cli.console import errors, plain, say, working
from foretoken.cli.flat import flat, in_panel
from foretoken.cli.options import CachingOptions, ModelOptions, SpeculationOptions
from foretoken.cli.report import show_summary
from foretoken.cli.root import UsageError, examples
from foretoken.cli.sampling_options import SamplingOptions
from foretoken.cli.session import open_llm
from foretoken.cli.writer import TokenWriter
from foretoken.errors import PromptError

if TYPE_CHECKING:
    from foretoken.core.params import SamplingParams
    from foretoken.llm import LLM

__all__ = ["EXAMPLES", "chat"]

EXAMPLES = examples(
    "foretoken chat",
    'foretoken chat --system "You answer in one sentence." --temperature 0.7',
    "foretoken chat --method ngram_table --num-speculative-tokens 8",
)

HELP = """\
/help   this list
/reset  forget the conversation
/exit   end the chat (so does Ctrl-D)
Ctrl-C stops an answer; the conversation keeps its text so far."""


@dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    """Sampling options with longer answers than `generate`."""

    max_tokens: Annotated[int, in_panel("Sampling", "Most tokens of an answer.")] = 512


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

    Ctrl-C stops an answer. Ctrl-D, or Ctrl-C at the prompt, ends the chat.
    """
    with working("Starting", quiet=quiet):
        config, params = speculation.config_for(target.model), sampling.params()
    llm = open_llm(target, config, quiet=quiet, **engine.arguments())
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise UsageError(f"{target.model} has no chat template: use `foretoken generate --no-chat`")
    if errors().is_terminal and not quiet:
        method = llm.speculative_config.method_name
        _note(f"{target.model} with {method}; /help for help, Ctrl-D to end")
    conversation = Conversation(llm, params, system, quiet=quiet)
    while (line := _read_line()) is not None:
        if line.startswith("/"):
            if not conversation.obey(line.strip()):
                break
        elif line.strip():
            conversation.answer(line)


class Conversation:
    """The messages of a chat and the commands that act on them.

    Args:
        llm: the model.
        params: sampling parameters of every answer.
        system: the system message, or None for the chat template's default.
        quiet: print no statistics after an answer.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, *, quiet: bool = False
    ) -> None:
        self._llm = llm
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._quiet = quiet
        self.messages = list(self._start)

    def obey(self, command: str) -> bool:
        """Run a slash command; return False if it ends the conversation."""
        if command == "/exit":
            return False
        if command == "/reset":
            self.messages = list(self._start)
            _note("the conversation starts anew")
        elif command == "/help":
            _note(HELP)
        else:
            _note(f"unknown command {command}; /help lists them")
        return True

    def answer(self, line: str) -> None:
        """Stream the answer to this line, and add both to the conversation.

        A line that the context has no room for is reported and dropped.
        """
        question = {"role": "user", "content": line}
        try:
            chunks = self._llm.stream([*self.messages, question], self._params)
        except PromptError as error:
            say(f"error: {error} /reset forgets the conversation.")
            return
        text, output, writer = "", None, TokenWriter()
        with closing(chunks), closing(writer), _first_interrupt() as interrupted:
            for chunk in chunks:
                writer.write(chunk.tokens)
                text, output = text + chunk.text, chunk.output
                if interrupted():
                    break
        if text:
            self.messages += [question, {"role": "assistant", "content": text}]
        if output is None:
            _note("(stopped)")
        elif not self._quiet:
            show_summary(output, writer)


def _read_line() -> str | None:
    """The next line; None at the end of input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` a history and editing keys)
    errors().print()
    try:
        return input("> ")
    except EOFError:
        errors().print()
        return None
    except KeyboardInterrupt:
        errors().print()
        raise


def _note(text: str) -> None:
    errors().print(plain(text, "note"))


@contextmanager
def _first_interrupt() -> Iterator[Callable[[], bool]]:
    """Count the first Ctrl-C instead of raising it, so that the step ends normally.

    The second one raises KeyboardInterrupt.

    Yields:
        A function that tells whether Ctrl-C was pressed.
    """
    interrupts = 0

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupts > 0
    finally:
        signal.signal(signal.SIGINT, before)
