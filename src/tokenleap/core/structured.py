"""`StructuredOutputsParams`: the form that an output must have. `grammar.py` applies it."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import BeforeValidator, Field, model_validator

from tokenleap.core import trial
from tokenleap.core.config import Config
from tokenleap.core.extras import how_to_install
from tokenleap.core.files import levels
from tokenleap.errors import ConfigError, in_one_line


class StructuredOutputsParams(Config):
    """The form an output must have, under vLLM's names. Exactly one of the first five is given.

    Args:
        json: a JSON schema, as a dict or as text.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: a context-free grammar in Lark's notation.
        json_object: any JSON object.
        disable_any_whitespace: write JSON without optional whitespace. More tokens are then forced,
            and the drafter `regex` proposes forced tokens at no cost.

    Raises:
        ConfigError: not exactly one form is given, it cannot be compiled, or it is too large or too
            complex (`core.structured` and `core.trial` have the limits).
    """

    json_schema: Mapping[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    disable_any_whitespace: bool = False

    @property
    def kind(self) -> str:
        """Public name of the field that is given, such as "json"."""
        return self._given()[0]

    @property
    def value(self) -> Any:
        """Value of the field that is given."""
        return self.json_schema if self.kind == "json" else getattr(self, self.kind)

    def _given(self) -> list[str]:
        kinds = ("regex", "choice", "grammar", "json_object")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        return given if self.json_schema is None else ["json", *given]

    @model_validator(mode="after")
    def _one_valid_grammar(self) -> Self:
        given = self._given()
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ConfigError(f"give one of json, regex, choice, grammar, json_object: got {found}")
        if self.disable_any_whitespace and self.kind not in ("json", "json_object"):
            raise ConfigError(f"disable_any_whitespace is for json, not for {self.kind}: remove it")
        checked_source(self)
        return self


def _structured(value: Any) -> Any:
    # The constructor explains an error in one line; pydantic's own conversion does not.
    return StructuredOutputsParams(**value) if isinstance(value, Mapping) else value


Structured = Annotated[StructuredOutputsParams | Mapping[str, Any], BeforeValidator(_structured)]
"""The type of a field that accepts `StructuredOutputsParams` or a dict of its fields.

The field always stores `StructuredOutputsParams`.
"""


# The form an output must have, and the check that it can be compiled (`grammar.py` does that).
#
# This file needs neither PyTorch nor NumPy, so options are checked without waiting for them.


MAX_LENGTH = 256 << 10  # most characters of a form
MAX_VALUES = 10_000  # most objects, lists and values in a schema, and most choices
MAX_DEPTH = 128  # most levels of objects and lists in a schema; llguidance has this limit, too
MAX_DEFINITIONS = 1000
"""Most rules and terminals of a grammar, and most definitions that a schema refers to."""

_TOO_DEEP = f"json: a schema has at most {MAX_DEPTH} levels: nest it less."
_TRIVIAL = 1000  # choices that are shorter than this together need no trial
_DEFINITION = re.compile(r"^[ \t]*[?!]*[A-Za-z_]\w*[^:\n]{0,80}:", re.MULTILINE)


def checked_source(outputs: StructuredOutputsParams) -> str:
    """The grammar of a form in llguidance's own format, within the limits."""
    library()
    try:
        made = _source(outputs)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # no JSON; half of a character
        raise ConfigError(f"{outputs.kind}: {in_one_line(error)[:200]}") from None
    trivial = outputs.kind == "choice" and len(made) < _TRIVIAL
    tried = not trivial and outputs.kind != "json_object"
    if tried and (reason := what_is_wrong(made)):
        raise ConfigError(f"{outputs.kind}: {reason}.")
    return made


def _source(outputs: StructuredOutputsParams) -> str:
    matcher, kind, value = library().LLMatcher, outputs.kind, outputs.value
    compact = {"whitespace_flexible": not outputs.disable_any_whitespace}
    match kind:
        case "json":
            grammar = matcher.grammar_from_json_schema(_checked_schema(value), overrides=compact)
        case "json_object":
            grammar = matcher.grammar_from_json_schema({"type": "object"}, overrides=compact)
        case "regex":
            _at_most(MAX_LENGTH, "characters", len(value), kind)
            grammar = matcher.grammar_from_regex(value)
        case "choice":
            _at_most(MAX_LENGTH, "characters", sum(map(len, value)), kind)
            _at_most(MAX_VALUES, "choices", len(value), kind)
            strings = (json.dumps(choice, ensure_ascii=False) for choice in value)
            # One terminal: as rules, the choices would reach the parser's limit of 2000 items.
            grammar = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(strings)}")
        case _:
            _at_most(MAX_LENGTH, "characters", len(value), kind)
            _at_most(MAX_DEFINITIONS, "rules and terminals", len(_DEFINITION.findall(value)), kind)
            grammar = matcher.grammar_from_lark(value)
    return str(grammar)


def _at_most(most: int, what: str, found: int, kind: str) -> None:
    if found > most:
        raise ConfigError(f"{kind}: at most {most} {what}, got {found}: make it smaller.")


def _checked_schema(given: Mapping[str, Any] | str) -> Any:
    """A JSON schema, or text that has one, within the limits; no part of it is read recursively."""
    if isinstance(given, str):
        _at_most(MAX_LENGTH, "characters", len(given), "json")
        try:
            given = json.loads(given)
        except RecursionError:
            raise ConfigError(_TOO_DEEP) from None
        except ValueError as error:
            raise ConfigError(f"json: the schema is not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError("json: a schema is a JSON object, such as {...}")
    values, size, references = 0, 0, set[str]()
    for depth, level in enumerate(levels(given)):
        if depth == MAX_DEPTH:
            raise ConfigError(_TOO_DEEP)
        for value in level:
            named = isinstance(value, dict)
            inner = [*value.values()] if named else value
            texts = [*value, *inner] if named else inner
            values += len(inner)
            size += sum(len(text) for text in texts if isinstance(text, str))
            if named and isinstance(reference := value.get("$ref"), str):
                references.add(reference)
        _at_most(MAX_VALUES, "values", values, "json")
        _at_most(MAX_LENGTH, "characters", size, "json")
        _at_most(MAX_DEFINITIONS, "definitions that are referred to", len(references), "json")
    return given


def library() -> Any:
    """The module `llguidance`, or a `ConfigError` if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            f"structured outputs need llguidance: {how_to_install('structured')}"
        ) from None
    return llguidance


# Asks a process of its own whether a grammar can be used (`trial.py` is its program).
#
# llguidance recurses where a grammar does: enough rules that lead to one another overflow its
# stack, which ends the process. So a grammar is compiled here only after a trial there, under
# limits of time, memory and stack.


_PROCESSES = 2
"""Most trials at a time. One is enough for ordinary forms, and a slow one does not hold them up."""
_PATIENCE = 20.0
"""Seconds after which a trial ends even where it got too little CPU to reach its own limit."""
_NO_TRIAL = "the process that tries out forms did not start"


@lru_cache(maxsize=128)
def what_is_wrong(grammar: str) -> str | None:
    """Why a grammar in llguidance's format cannot be used, in one line; None if it can.

    Answers are kept. A trial that does not come about is a `ConfigError`.
    """
    if not sys.executable or getattr(sys, "frozen", False):  # no Python to start
        return trial.wrong(grammar)
    return _trials.ask(grammar)


class _Process:
    """A process that tries out one grammar after the other."""

    def __init__(self) -> None:
        self._late = False
        path = os.pathsep.join(each for each in sys.path if each)
        # An arena for each thread would not fit into the limit of memory, and be tried in vain.
        self._popen = subprocess.Popen(
            [sys.executable, "-P", str(Path(trial.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},
            start_new_session=True,
        )
        if self._answer() is None:
            self.end()
            raise ConfigError(f"{_NO_TRIAL}: try again.")

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, grammar: str) -> str | None:
        """As `what_is_wrong`; the process may be dead afterwards."""
        assert self._popen.stdin is not None
        with suppress(OSError):  # it has ended; then there is no answer
            self._popen.stdin.write(json.dumps(grammar).encode() + b"\n")
            self._popen.stdin.flush()
        answer = self._answer()
        if answer is not None:
            found: str | None = json.loads(answer)
            return found
        code = self._popen.wait()
        self.end()
        if code == -getattr(signal, "SIGXCPU", 0):
            return f"too complex: {trial.TOO_LONG}"
        if self._late:  # perhaps only because the machine is busy
            raise ConfigError(f"too complex: it took more than {_PATIENCE:g} s to try it out.")
        return (
            "too complex: llguidance overflows its stack, or needs more than "
            f"{trial.MAX_MEGABYTES} MB: nest and chain less"
        )

    def _answer(self) -> bytes | None:
        assert self._popen.stdout is not None
        killer = threading.Timer(_PATIENCE, self._kill)
        killer.daemon = True
        killer.start()
        line = self._popen.stdout.readline()
        killer.cancel()
        return line if line.endswith(b"\n") else None

    def _kill(self) -> None:
        self._late = True
        self._popen.kill()

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self.forget()

    def forget(self) -> None:
        """Close the pipes: a process without input ends by itself."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was written and not read
                pipe.close()
        self._popen.returncode = self._popen.returncode or 0  # no warning that it still runs


class _Trials:
    """The processes that are there; more are started when they are needed."""

    def __init__(self) -> None:
        self._places = threading.Semaphore(_PROCESSES)
        self._idle: list[_Process] = []

    def ask(self, grammar: str) -> str | None:
        with self._places:
            process = self._taken()
            try:
                answer = process.ask(grammar)
            except BaseException:  # its answer may still come
                process.end()
                raise
            if process.alive:
                self._idle.append(process)
            return answer

    def _taken(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.forget()
        return _Process()

    def end(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def forget(self) -> None:
        """In a fork: the processes are the parent's."""
        while self._idle:
            self._idle.pop().forget()


_trials = _Trials()
atexit.register(lambda: _trials.end())


def _forked() -> None:
    global _trials
    _trials.forget()
    _trials = _Trials()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
