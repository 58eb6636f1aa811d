"""`tokenleap chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from tokenleap.cli.console import errors, working
from tokenleap.cli.conversation import Conversation, note
from tokenleap.cli.flat import flat, in_panel
from tokenleap.cli.options import CachingOptions, ModelOptions, SpeculationOptions
from tokenleap.cli.root import UsageError, examples
from tokenleap.cli.sampling_options import SamplingOptions
from tokenleap.cli.session import open_llm

__all__ = ["EXAMPLES", "chat"]

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
        in_panel("Sampling", "Most tokens of an answer.", show_default="the model's, else 512"),
    ] = None

    OTHERWISE: ClassVar[Mapping[str, Any]] = {**SamplingOptions.OTHERWISE, "max_tokens": 512}


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
    On a pipe, each line is a message, and a message that fails makes the
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
    while (line := read()) is not None:
        if line.startswith("/"):
            if not conversation.obey(line.strip()):
                break
        elif line.strip():
            conversation.answer(line)
    if conversation.failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _reader() -> Callable[[], str | None]:
    """A function that reads the next message; it gives None at the end of input."""
    if not sys.stdin.isatty():
        return _piped_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    # On stderr, so that answers alone are on standard output.
    output = create_output(stdout=sys.stderr)
    session: PromptSession[str] = PromptSession("> ", key_bindings=keys, output=output)

    def typed() -> str | None:
        errors().print()
        try:
            return session.prompt()
        except EOFError:
            return None

    return typed


def _piped_line() -> str | None:
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None
