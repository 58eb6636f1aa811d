"""How every command ends: its exit code, and one line on stderr if something went wrong.

    0    success, also if the reader of a pipe closed it
    1    failure: something cannot be read, written or fetched
    2    wrong use: an option, a prompt or a combination has to change
    130  Ctrl-C

A traceback means a bug in this program. `tokenleap.cli` builds its app on `RootGroup`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from tokenleap.cli.console import as_json, say
from tokenleap.core import files
from tokenleap.core.config import nearest
from tokenleap.core.peers import own_rank
from tokenleap.errors import ModelError, TokenleapError

INTERRUPTED = 130

HELP_ALL = "help_all"
"""Whether a help page has all options; a parameter of commands with many, see `options.few`."""


class UsageError(typer.TyperException):
    """Wrong use that Typer cannot detect by itself."""

    exit_code = 2


_FIRST_EXAMPLES = 5


class LongCommand(TyperCommand):
    """A command with many options: --help shows those that matter, and --help-all all of them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help page; see Typer's."""
        shown = {*getattr(self.callback, "first", ()), HELP_ALL}
        more: list[Any] = [
            each
            for each in self.params
            if each.param_type_name == "option" and not each.required and each.name not in shown
        ]
        everything, examples = HELP_ALL in ctx.meta, self.epilog
        if examples and not everything:
            self.epilog = "\n".join(examples.split("\n")[: 1 + _FIRST_EXAMPLES])
        for each in more:
            each.hidden = not everything
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = examples
            for each in more:
                each.hidden = False  # completion offers it


class _Group(TyperGroup):
    """A group of commands that says what to run in place of one that it does not have."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names; see Typer's."""
        name = args[0]
        known = self.list_commands(ctx)
        if not name.startswith("-") and name.replace("_", "-") not in known:
            raise UsageError(f"no such command '{name}': {instead_of_command(name, known)}")
        return super().resolve_command(ctx, args)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    from tokenleap.runtime.kv_slab import is_out_of_memory

    return is_out_of_memory(error)


class RootGroup(_Group):
    """The top command: turns every known exception into an exit code and one line."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        """Run the command line and exit. The other parameters are Typer's."""
        extra |= {"prog_name": "tokenleap", "standalone_mode": False}
        try:
            code = super().main(args, **extra)
        except (typer.TyperException, TokenleapError, OSError) as error:
            code = _exit_code(error)
            say(_line(error, own_rank()))
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            code = 1
            say("error: out of memory: close other programs, or take a smaller model or batch")
        if code == INTERRUPTED:
            say("interrupted")
        for stream in (sys.stdout, sys.stderr):
            _flush_or_discard(stream)
        sys.exit(code or 0)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace a command of Ollama's by ours."""
        if args and args[0] in _OLLAMA:
            args = [*_OLLAMA[args[0]], *args[1:]]
        elif args and args[0] == "run":
            args = self._run(args[1:])
        return super().parse_args(ctx, args)

    def _run(self, args: list[str]) -> list[str]:
        """`run [MODEL] [PROMPT]` in our words: chat, or generate if there is a prompt."""
        chat, generate = self.commands["chat"], self.commands["generate"]
        with_value = {
            name
            for each in (*chat.params, *generate.params)
            if each.param_type_name == "option" and not getattr(each, "is_flag", False)
            for name in each.opts
        }
        words, options, names, left = list[str](), list[str](), set[str](), iter(args)
        for word in left:
            if word == "--":
                words += left
            elif word == "-" or not word.startswith("-"):
                words.append(word)
            else:
                name, equals, _ = word.replace("_", "-").partition("=")
                names.add(name)
                options += [word, *islice(left, not equals and name in with_value)]
        if words and not {"--model", "-m"} & names:
            options += ["--model", words.pop(0)]
        of_chat = {name for each in chat.params for name in (*each.opts, "--help", "-h")}
        if words or not sys.stdin.isatty() or names - of_chat:
            return ["generate", *options, *(["--", *words] if words else [])]
        return ["chat", *options]

    def invoke(self, ctx: Any) -> None:
        """Run the chosen command; a closed pipe ends it without an error."""
        with suppress(BrokenPipeError):
            super().invoke(ctx)
            sys.stdout.flush()


class DefaultGroup(_Group):
    """A group that runs its first command when none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the first command's name, unless a name or a help option comes first."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [self.list_commands(ctx)[0], *args]
        return super().parse_args(ctx, args)


def examples(*lines: str) -> str:
    """Example command lines for Typer's epilog, at the end of a command's help."""
    shown = []
    for line in lines:
        command, _, remark = line.partition("  # ")
        shown.append(f"[dim]$[/] {command}" + (f"  [dim]# {remark}[/]" if remark else ""))
    return "\n".join(["[bold]Examples[/]", *shown])


def _exit_code(error: Exception) -> int:
    if isinstance(error, typer.TyperException):
        return error.exit_code
    # The library raises the base class for files and `ModelError` for models, else for wrong use.
    failure = isinstance(error, OSError | ModelError) or type(error) is TokenleapError
    return 1 if failure else 2


def _line(error: Exception, rank: int = 0) -> str:
    """The one line; which process of several it comes from, if it is not the first one."""
    line = _line_of(error)
    return f"error in process {rank}{line.removeprefix('error')}" if rank else line


def _line_of(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        message = _what(error, context).rstrip(".")
        end = "" if message.endswith("?") else "."
        hint = f"{end} Try '{context.command_path} --help'." if context is not None else ""
        return f"error: {message[:1].lower()}{message[1:]}{hint}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror}"
    return f"error: {in_flags(str(error))}"


def _what(error: typer.TyperException, context: Any) -> str:
    """Explain a mistake in a command line, and name the correction where it is known."""
    if context is None:
        return error.format_message()
    options = {name for each in context.command.params for name in each.opts if name[0] == "-"}
    unknown = getattr(error, "option_name", None)
    if unknown is not None and unknown not in options:
        arguments = {each.name for each in context.command.params if each.name == each.opts[0]}
        advice = instead_of_option(unknown, sorted(options | arguments))
        if unknown == "--help-all":
            advice = "commands have it, such as 'tokenleap generate --help-all'"
        return f"no such option: {unknown}" + (f": {advice}" if advice else "")
    message = error.format_message()
    if message.startswith("Got unexpected extra argument"):
        if any(each.name == "prompt" for each in context.command.params):
            return f"{message}: put a prompt of several words in quotes"
        if "--model" in options:
            return f"{message}: name a model with --model"
    return message


def _flush_or_discard(stream: TextIO) -> None:
    """Flush; discard what cannot be written, or Python would fail again on it at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# Options and commands of other programs, and typing errors: what to write here instead.
#
# `root` asks when a command line has a name that does not exist.


_ANSWERS_STREAM = "answers to one prompt are streamed anyway"
_WITHOUT_OPTION = "write the prompt without an option"

_OPTIONS: dict[str, tuple[str, ...]] = {
    # Transformers
    "--max-new-tokens": ("use --max-tokens",),
    "--min-new-tokens": ("use --min-tokens",),
    "--do-sample": ("use --temperature, where 0 is greedy",),
    "--num-beams": ("use --beam-width",),
    "--num-return-sequences": ("use --n",),
    "--assistant-model": ("use --draft-model",),
    "--prompt-lookup-num-tokens": ("use --method ngram with --num-speculative-tokens",),
    "--load-in-8bit": ("use --quantization int8",),
    "--load-in-4bit": ("use --quantization int4",),
    "--torch-dtype": ("use --dtype",),
    "--device-map": ("use --device",),
    # vLLM
    "--speculative-model": ("use --draft-model",),
    "--gpu-memory-utilization": ("use --kv-cache-memory, such as 2GiB",),
    "--kv-cache-memory-bytes": ("use --kv-cache-memory",),
    "--enable-prefix-caching": ("the prefix cache is on; --no-enable-prefix-caching turns it off",),
    "--served-model-name": ("the model's name is that of --model",),
    "--enforce-eager": ("use --runtime torch",),
    "--guided-json": ("use --structured-outputs",),
    # llama.cpp and ollama
    "--n-predict": ("use --max-tokens",),
    "--num-predict": ("use --max-tokens",),
    "--predict": ("use --max-tokens",),
    "--ctx-size": ("use --max-model-len",),
    "--num-ctx": ("use --max-model-len",),
    "-c": ("use --max-model-len",),
    "-n": (  # "-ngl" is read as "-n", too
        "use --max-tokens for a number of tokens, --n for a number of answers, and --device cuda "
        "for -ngl",
        "use --device cuda for -ngl",
    ),
    "-t": ("use --threads",),
    "--n-gpu-layers": ("use --device cuda",),
    "--repeat-penalty": ("use --repetition-penalty",),
    "--model-draft": ("use --draft-model",),
    "--draft-max": ("use --num-speculative-tokens",),
    "--grammar": ("use --structured-outputs",),
    "--json-schema": ("use --structured-outputs",),
    "--prompt": (_WITHOUT_OPTION,),
    "-p": ("use --port", _WITHOUT_OPTION),
    "-f": ("use --file",),
    "-s": ("use --seed",),
    "--system-prompt": ("use --system",),
    "--stream": (_ANSWERS_STREAM,),
    "--verbose": ("set the environment variable TOKENLEAP_LOG=info",),
    "-v": ("use --version", "set the environment variable TOKENLEAP_LOG=info"),
    "-V": ("use --version",),
}
"""Advice by option. The first one counts whose options the command has, and what it `_NEEDS`."""

_NEEDS = {_ANSWERS_STREAM: "prompt", _WITHOUT_OPTION: "prompt"}
"""By advice: the argument that the command must have."""

_OLLAMA = {"pull": ("models", "fetch"), "list": ("models", "list"), "rm": ("models", "remove")}
"""Commands of Ollama's by its names for them; `run` and `ps` are the others that work."""

_COMMANDS = {
    "download": "'tokenleap models fetch'",
    "ls": "'tokenleap models'",
    "show": "'tokenleap models'",
    "delete": "'tokenleap models remove'",
    "complete": "'tokenleap generate'",
    "benchmark": "'tokenleap bench'",
    "info": "'tokenleap doctor'",
    "collect-env": "'tokenleap doctor'",
    "help": "'tokenleap --help'",
    "version": "'tokenleap --version'",
}
"""Commands to run in place of another program's."""


def instead_of_option(name: str, known: Sequence[str]) -> str:
    """The advice on an option that a command does not have; "" if there is none."""
    for advice in _OPTIONS.get(name, ()):
        needed = {*re.findall(r"(?<!\S)--[a-z-]+", advice)}
        if needed | ({_NEEDS[advice]} if advice in _NEEDS else set()) <= set(known):
            return advice
    hint = nearest(name, [each for each in known if each.startswith("--")])
    return hint if hint.startswith("did you mean") else ""


def instead_of_command(name: str, known: Sequence[str]) -> str:
    """The advice on a command that does not exist: one like it, or all that there are."""
    if name in _OLLAMA:  # below another command
        return f"use 'tokenleap {' '.join(_OLLAMA[name])}'."
    return f"use {_COMMANDS[name]}." if name in _COMMANDS else nearest(name, list(known))


# Messages of the library in terms of the command line: flags instead of field names.
#
# `root` translates every error of the library with `in_flags` before it prints it.


SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "allowed_token_ids", "min_tokens", "max_tokens", "seed"),
    *("stop", "stop_token_ids", "bad_words", "structured_outputs", "ignore_eos"),
)
"""Fields of `SamplingParams` that are options of several commands."""

_FIELDS = (
    *SAMPLING,
    *("n", "logprobs", "prompt_logprobs", "beam_width", "length_penalty"),
    *("num_speculative_tokens", "acceptance", "controller", "replicas", "ray_address"),
    *("dtype", "device", "max_model_len", "quantization", "runtime", "tensor_parallel_size"),
    *("kv_cache_memory", "prefix_cache_memory", "enable_prefix_caching", "max_body_size"),
    *("max_num_seqs", "max_num_batched_tokens"),
)

_PHRASES = {
    "needs a draft model: set 'model'": "needs a draft model: add --draft-model",
    "needs a trained head: set 'model' to its folder": (
        "needs a trained head: add --draft-model with its folder"
    ),
    "takes no draft model: remove 'model'": "takes no draft model: remove --draft-model",
    "or with {'method': 'none'}": "or with --method none",
    "pass text instead of messages": "use --no-chat",
    "pass token ids, or LLM(tokenizer=...)": "the command line needs one",
}

# Where a message names a field: at its start with a colon, before a value, and anywhere if the
# name has an underscore, since no English word has one.
_NAME = "|".join(sorted(_FIELDS, key=len, reverse=True))
_SUBJECT = re.compile(rf"^({_NAME})(?=:)")
_WITH_VALUE = re.compile(rf"\b({_NAME})='?(\w+)'?")
_WORD = re.compile(rf"\b({'|'.join(name for name in _FIELDS if '_' in name)})\b")


def flag(field: str) -> str:
    """The flag that sets a field."""
    return "--" + field.replace("_", "-")


def in_flags(message: str) -> str:
    """A message of the library with every field name replaced by its flag."""
    for phrase, advice in _PHRASES.items():
        message = message.replace(phrase, advice)
    message = _SUBJECT.sub(lambda match: flag(match[1]), message)
    message = _WITH_VALUE.sub(lambda match: f"{flag(match[1])} {match[2]}", message)
    return _WORD.sub(lambda match: flag(match[1]), message)


# Writing a result file completely or not at all; for every command with an --output file.


def check_writable(path: Path, *inputs: Path) -> None:
    """Refuse a path that cannot be written to, or that is read, before the work begins."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} to")
    if path.exists() and any(each.exists() and path.samefile(each) for each in inputs):
        raise UsageError(f"{path} is read: name another file to write")
    if path.exists() and not path.is_file():
        return  # a pipe or a device
    try:
        with TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


def write_whole(path: Path, text: str) -> None:
    """Write text in UTF-8 (see `core.files.write_whole`)."""
    files.write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON object, as `--json` prints it."""
    write_whole(path, as_json(value) + "\n")
