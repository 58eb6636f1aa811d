"""Options and commands of other programs, and typing errors: what to write here instead.

`root` asks when a command line has a name that does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenleap.core.config import nearest

__all__ = ["instead_of_command", "instead_of_option"]

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

_COMMANDS = {
    "run": "'tokenleap chat', or 'tokenleap generate' with a prompt",
    "pull": "'tokenleap models fetch'",
    "download": "'tokenleap models fetch'",
    "list": "'tokenleap models'",
    "ls": "'tokenleap models'",
    "ps": "'tokenleap models'",
    "show": "'tokenleap models'",
    "rm": "'tokenleap models remove'",
    "delete": "'tokenleap models remove'",
    "complete": "'tokenleap generate'",
    "benchmark": "'tokenleap bench'",
    "info": "'tokenleap doctor'",
    "collect-env": "'tokenleap doctor'",
    "help": "'tokenleap --help'",
    "version": "'tokenleap --version'",
}
"""What to run in place of a command of another program."""


def instead_of_option(name: str, known: Sequence[str]) -> str:
    """What to write in place of an option that a command does not have; "" if nobody knows.

    Args:
        name: with its dashes.
        known: all options of the command, and the names of its arguments.
    """
    for advice in _OPTIONS.get(name, ()):
        needed = {*re.findall(r"(?<!\S)--[a-z-]+", advice)}
        if needed | ({_NEEDS[advice]} if advice in _NEEDS else set()) <= set(known):
            return advice
    hint = nearest(name, [each for each in known if each.startswith("--")])
    return hint if hint.startswith("did you mean") else ""


def instead_of_command(name: str, known: Sequence[str]) -> str:
    """What to run in place of a command that does not exist: one like it, or all that there are."""
    return f"use {_COMMANDS[name]}." if name in _COMMANDS else nearest(name, list(known))
