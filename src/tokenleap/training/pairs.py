"""Data for encoder-decoders: sources that the target answers, or pairs of source and output.

    {"source": "...", "target": "..."}   a line of JSONL; the languages of the two may be given as
                                         "source_language" and "target_language"
    source <tab> target                  a line of a .tsv file
    source                               a line of any other file

or two files with as many lines, one with the sources and one with the outputs. The target writes
the outputs that are learnt (sequence-level knowledge distillation, Kim and Rush 2016), so those of
the files may be missing. Where a method asks for them, they are learnt instead, and the target
answers only what is held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenleap.core.files import parsed_json
from tokenleap.core.params import SamplingParams
from tokenleap.errors import DataError, PromptError
from tokenleap.llm import LLM
from tokenleap.training.collect import share_of
from tokenleap.training.conversations import Conversation, loop_start
from tokenleap.training.settings import DataSettings

__all__ = ["Pair", "PairData", "PairSource"]

_LANGUAGES = ("source_language", "target_language")


@dataclass(frozen=True)
class Pair:
    """One entry.

    Args:
        number: its place in the data.
        prompt: the source, as `LLM.generate` takes it.
        target: the output; None if the data has none.
    """

    number: int
    prompt: Mapping[str, Any]
    target: str | None


class PairData:
    """What files hold, in the order of the files.

    Args:
        llm: the target, an encoder-decoder.
        data: names the files.

    Attributes:
        pairs: whose sources the target can read.
        left_out: number of the others.
        reason: why the first of them was left out; empty if none was.

    Raises:
        DataError: a file cannot be read, a line is none of the above, two parallel files have
            different numbers of lines, or there is nothing to learn from.
    """

    def __init__(self, llm: LLM, data: DataSettings) -> None:
        if llm.tokenizer is None:
            raise DataError("this model has no tokenizer, so it cannot learn from text.")
        self.pairs: list[Pair] = []
        self.left_out, self.reason = 0, ""
        for where, prompt, target in _entries(data):
            try:
                llm.engine.read(prompt)
            except PromptError as error:
                self.left_out += 1
                self.reason = self.reason or f"{where}: {error}"
                continue
            self.pairs.append(Pair(len(self.pairs), prompt, target))
        if not self.pairs:
            reason = f" ({self.reason})" if self.reason else ""
            raise DataError(f"{_names(data)}: there is nothing to learn from{reason}.")


class PairSource:
    """The user's own sources, which the target answers (see `collect.Source`).

    Args:
        llm: the target.
        data: what the files hold.
        rows: sequences that the target writes at a time.
        params: with which it writes.
        given_answers: whether the outputs in the files are learnt.

    Raises:
        DataError: they are to be learnt, and one is missing.
    """

    def __init__(
        self,
        llm: LLM,
        data: PairData,
        rows: int,
        params: SamplingParams,
        *,
        given_answers: bool = False,
    ) -> None:
        self._llm, self._pairs, self._batch = llm, data.pairs, 8 * rows
        self._params, self._given = params, given_answers
        if given_answers and any(pair.target is None for pair in data.pairs):
            raise DataError(
                "answers: 'fixed' learns the outputs in your files, and a line has none: give "
                "'target' beside 'source', or let the target write them."
            )

    def write(self, after: int | None, *, held_out: bool) -> Iterator[list[Conversation]]:
        """See `Source.write`: until the files end."""
        pairs = share_of(self._pairs, held_out=held_out)
        left = [pair for pair in pairs if after is None or pair.number > after]
        for start in range(0, len(left), self._batch):
            part = left[start : start + self._batch]
            if self._given and not held_out:
                yield [self._as_given(pair) for pair in part]
            else:
                yield self._answered(part)

    def _answered(self, pairs: Sequence[Pair]) -> list[Conversation]:
        """What the target writes; where it begins to loop it is cut off."""
        prompts = [pair.prompt for pair in pairs]
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        written = []
        for pair, output in zip(pairs, outputs, strict=True):
            opening, answer = output.prompt_token_ids, output.token_ids
            answer = answer[: loop_start(answer)]
            source = output.encoder_prompt_token_ids
            assert source is not None, "the target is an encoder-decoder"
            written.append(_conversation(pair, source, opening, answer))
        return [each for each in written if each.num_answer_tokens]

    def _as_given(self, pair: Pair) -> Conversation:
        source, opening = self._llm.engine.read(pair.prompt)
        tokenizer: Any = self._llm.tokenizer
        answer = tuple(tokenizer(text_target=pair.target)["input_ids"])
        known = len(opening) - 1  # a language may be in both
        if answer[:known] == tuple(opening[1:]):
            answer = answer[known:]
        assert source is not None, "the target is an encoder-decoder"
        return _conversation(pair, source.tokens, opening, answer)


def _conversation(
    pair: Pair, source: Sequence[int], opening: Sequence[int], answer: Sequence[int]
) -> Conversation:
    tokens = (*opening, *answer)
    answers = ((len(opening), len(tokens)),)
    return Conversation(tokens, answers, pair.number, source=tuple(source))


def _names(data: DataSettings) -> str:
    return ", ".join(map(str, data.files or data.parallel))


def _entries(data: DataSettings) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """(where, prompt, output or None) of each entry."""
    if data.parallel:
        yield from _parallel(*data.parallel)
    for path in data.files:
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                yield _entry(f"{path}, line {number}", line, path.suffix)


def _entry(where: str, line: str, suffix: str) -> tuple[str, dict[str, Any], str | None]:
    if suffix == ".jsonl":
        return _of_json(where, line)
    if suffix != ".tsv":
        return where, {"prompt": line}, None
    source, *rest = line.split("\t")
    if len(rest) != 1:
        raise DataError(f"{where}: has {len(rest)} tabs: write SOURCE, a tab, and TARGET.")
    return where, {"prompt": source}, rest[0]


def _of_json(where: str, line: str) -> tuple[str, dict[str, Any], str | None]:
    try:
        fields = parsed_json(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}.") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("source"), str):
        raise DataError(f"{where}: has no text in 'source'.")
    target = fields.get("target")
    if target is not None and not isinstance(target, str):
        raise DataError(f"{where}: has no text in 'target'.")
    languages = {name: fields[name] for name in _LANGUAGES if name in fields}
    return where, {"prompt": fields["source"], **languages}, target


def _parallel(sources: Path, targets: Path) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    first, second = _lines(sources), _lines(targets)
    if len(first) != len(second):
        raise DataError(
            f"{sources} has {len(first)} lines and {targets} {len(second)}: line N of one must "
            "belong to line N of the other."
        )
    for number, (source, target) in enumerate(zip(first, second, strict=True), 1):
        if source.strip():
            yield f"{sources}, line {number}", {"prompt": source}, target


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from None
    return text.removesuffix("\n").split("\n")  # not `splitlines`: a line may hold U+2028
