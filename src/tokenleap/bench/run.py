"""Rounds: the contestants take turns on every prompt, and every call is saved at once."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

from tokenleap.bench.contestants import BASELINE, OWN, Contestant, Setting
from tokenleap.bench.machine import host, open_meter
from tokenleap.bench.prompts_file import Prompt
from tokenleap.bench.summary import CONTROL, bleu_metric, facts_of, scipy_stats, unjudged
from tokenleap.bench.worker import Process
from tokenleap.core.files import JsonLines, parsed_json
from tokenleap.errors import TokenleapError

FORMAT = "tokenleap-bench-1"

WARM_UP_TOKENS = 16

CONTROL_TEMPERATURE = 1.5
"""So hot that hardly any token recurs."""


@dataclass(frozen=True)
class Unit:
    """The prompts of one call: one, or several at once.

    Args:
        seeds: one per prompt if it is sampled. All contestants have the same, in every round.
    """

    id: str
    kind: str
    prompts: tuple[Prompt, ...]
    temperature: float = 0.0
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    label: str
    unit: Unit
    round: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.label, self.unit.id, self.round


@dataclass(frozen=True)
class Plan:
    """The measurements to make.

    Args:
        control: how many prompts of random tokens; the contestants that are not peers sample
            their continuation at `CONTROL_TEMPERATURE`.
    """

    contestants: tuple[Contestant, ...]
    setting: Setting
    prompts: tuple[Prompt, ...]
    rounds: int
    batch_sizes: tuple[int, ...] = ()
    control: int = 0

    def units(self) -> list[Unit]:
        """Every prompt alone, then the control, then batches of the sample's first prompts."""
        alone = [self._unit(prompt.id, prompt.kind, (prompt,)) for prompt in self.prompts]
        batches = [
            self._unit(f"batch of {size}", "batch", tuple(islice(cycle(self.prompts), size)))
            for size in self.batch_sizes
        ]
        return alone + self.control_units() + batches

    def _unit(self, name: str, kind: str, prompts: tuple[Prompt, ...]) -> Unit:
        temperature = self.setting.temperature
        seeds = [prompt.seed + index for index, prompt in enumerate(prompts)]
        return Unit(name, kind, prompts, temperature, tuple(seeds) if temperature else ())

    def control_units(self) -> list[Unit]:
        prompts = [Prompt(f"random {seed}", CONTROL, "") for seed in range(self.control)]
        return [
            Unit(one.id, CONTROL, (one,), CONTROL_TEMPERATURE, (seed,))
            for seed, one in enumerate(prompts)
        ]

    def header(self) -> dict[str, Any]:
        """Everything that results depend on, except rounds: more may be added later."""
        texts = json.dumps([[prompt.id, prompt.text] for prompt in self.prompts])
        return {
            **asdict(self.setting),
            "quantization": self.contestants[0].quantization,
            "contestants": [one.label for one in self.contestants],
            "prompts": hashlib.sha256(texts.encode()).hexdigest()[:12],
            "batch_sizes": list(self.batch_sizes),
            "control": self.control,
            **host(),
        }


def pending(plan: Plan, journal: Journal, facts: Mapping[str, Mapping[str, Any]]) -> list[Job]:
    """The calls that are not in the journal yet, in order."""
    done = {
        (record["contestant"], record["unit"], record["round"])
        for record in journal.records
        if record["type"] == "request"
    }
    return [job for job in _jobs(plan, facts) if job.key not in done]


def _jobs(plan: Plan, facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Job]:
    for unit in plan.units():
        able = [
            one.label
            for one in plan.contestants
            if (len(unit.prompts) == 1 or facts[one.label]["batches"])
            and (unit.kind != CONTROL or one.kind == OWN)
        ]
        for index in range(plan.rounds):
            for label in order(able, index):
                yield Job(label, unit, index)


def check_installed() -> None:
    """Refuse to measure for hours what could not be reported afterwards."""
    scipy_stats()
    bleu_metric()


def run(plan: Plan, journal: Journal, show: Callable[[str, int, int], object]) -> None:
    if _complete(plan, journal):
        return
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for one in plan.contestants:  # one after the other, because it is timed
            show(f"loading {one.label}", 0, 1)
            process = stack.enter_context(Process(one, plan.setting))
            process.wait_until_loaded()
            processes[one.label] = process
        _Session(plan, journal, processes, show).run()


def _complete(plan: Plan, journal: Journal) -> bool:
    """Whether the journal has everything, up to the roofline at the end."""
    known = facts_of(journal.records)
    if not all(one.label in known for one in plan.contestants):
        return False
    ended = any(record["type"] == "roofline" for record in journal.records)
    ended = ended and not unjudged(journal.records)
    return ended and not pending(plan, journal, known)


class _Session:
    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        processes: Mapping[str, Process],
        show: Callable[[str, int, int], object],
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._processes = processes
        self._show = show
        baseline = processes[BASELINE.label]
        # A draft model's KV may leave its contestant a shorter context than the others have.
        contexts = [process.facts.get("max_model_len") for process in processes.values()]
        least = min(context for context in contexts if context is not None)
        texts = [prompt.text for prompt in plan.prompts]
        encoded = baseline.ask("encode", texts=texts, max_model_len=least)
        self._ids = dict(zip([prompt.id for prompt in plan.prompts], encoded, strict=True))
        if units := plan.control_units():
            seeds = list(range(len(units)))
            random = baseline.ask("control", seeds=seeds, max_model_len=least)
            self._ids |= dict(zip([unit.id for unit in units], random, strict=True))
        self._meter, self._energy = open_meter(str(baseline.facts["device"]))

    def run(self) -> None:
        """Record facts, warm up, make all calls, record memory and the roofline."""
        for label, process in self._processes.items():
            self._journal.add({"type": "contestant", "label": label, "facts": process.facts})
        self._journal.add({"type": "energy", "source": self._energy})
        self._warm_up()
        facts = {label: process.facts for label, process in self._processes.items()}
        jobs = pending(self._plan, self._journal, facts)
        for done, job in enumerate(jobs):
            self._show(f"{job.label}, prompt {job.unit.id}", done, len(jobs))
            self._journal.add(self._call(job))
        self._show("done", len(jobs), len(jobs))
        for label, process in self._processes.items():
            self._journal.add({"type": "memory", "label": label, **process.ask("memory")})
        self._judge()
        self._roofline()  # last, because it makes the baseline's process larger

    def _warm_up(self) -> None:
        """Run the longest prompt and every batch once, so that KV caches have their final size."""
        longest = max(self._ids.values(), key=len)
        units = [unit for unit in self._plan.units() if len(unit.prompts) > 1]
        for label, process in self._processes.items():
            self._show(f"warming up {label}", 0, 1)
            process.ask("generate", prompts=[longest], max_tokens=WARM_UP_TOKENS)
            if process.facts["batches"]:
                for unit in units:
                    prompts = self._tokens(unit)
                    process.ask("generate", prompts=prompts, max_tokens=WARM_UP_TOKENS)
            process.ask("forget")

    def _judge(self) -> None:
        """Let the baseline's model say what it thinks of every output; after all that is timed."""
        open_calls = unjudged(self._journal.records)
        known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
        for done, call in enumerate(open_calls):
            self._show("judging outputs", done, len(open_calls))
            key = call["unit"], tuple(call["outputs"][0]["token_ids"])
            if key not in known:
                prompt, tokens = self._ids[call["unit"]], list(key[1])
                known[key] = self._processes[BASELINE.label].ask(
                    "judge", prompt=prompt, token_ids=tokens
                )
            names = {name: call[name] for name in ("contestant", "unit", "round")}
            self._journal.add({"type": "judgement", **names, **known[key]})

    def _roofline(self) -> None:
        """Measure the time to stream each contestant's weights, in the baseline's process."""
        sizes = {process.facts["weight_bytes"] for process in self._processes.values()}
        for size in sorted(sizes):
            seconds = self._processes[BASELINE.label].ask("stream", size=size)
            self._journal.add({"type": "roofline", "bytes": size, "seconds": seconds})

    def _tokens(self, unit: Unit) -> list[list[int]]:
        return [self._ids[prompt.id] for prompt in unit.prompts]

    def _call(self, job: Job) -> dict[str, Any]:
        process, prompts = self._processes[job.label], self._tokens(job.unit)
        if job.round or len(prompts) > 1:  # or a drafter would remember this prompt's output
            process.ask("forget")
        before = self._meter.read() if self._meter else []
        answer = process.ask(
            "generate",
            prompts=prompts,
            max_tokens=self._plan.setting.max_tokens,
            temperature=job.unit.temperature,
            seeds=job.unit.seeds,
        )
        joules = self._meter.joules(before, self._meter.read()) if self._meter else None
        return {
            "type": "request",
            "contestant": job.label,
            "unit": job.unit.id,
            "kind": job.unit.kind,
            "batch": len(prompts),
            "round": job.round,
            "temperature": job.unit.temperature,
            "prompt_tokens": [len(ids) for ids in prompts],
            "joules": joules,
            **answer,
        }


# The order of contestants in each round.


Method = TypeVar("Method")


def order(methods: Sequence[Method], index: int) -> list[Method]:
    """The order of the methods in one round.

    Rounds come in pairs: the second of a pair is the first backwards, and the next pair begins one
    method later. Over the rounds every method is before every other one as often as after it.
    """
    start = index // 2 % len(methods)
    turned = [*methods[start:], *methods[:start]]
    return turned[::-1] if index % 2 else turned


# Records as JSON lines, appended one by one, from which an interrupted run continues.


_CHECK = "checksum"


class Journal:
    """A file of JSON objects; the first one has the settings that all others depend on.

    A file made with other settings is refused, so that a summary never mixes different runs. So is
    one with a line that was changed: each ends with the checksum of what it says.

    Args:
        path: created if it does not exist; None keeps the records in memory only.
        format_name: marks the first line as that of such a file.
    """

    def __init__(self, path: Path | None, format_name: str, settings: dict[str, Any]) -> None:
        self._path = path
        self.records: list[dict[str, Any]] = []
        header = {"format": format_name, **settings}
        try:
            if path is None or not path.exists() or not self._load(path, header):
                self._append(header)
        except OSError as error:
            raise TokenleapError(f"cannot use {path}: {error.strerror}.") from error

    def add(self, record: dict[str, Any]) -> None:
        """Add a record; it is on disk before this returns."""
        self.records.append(record)
        self._append(record)

    def _load(self, path: Path, header: dict[str, Any]) -> bool:
        """Read the file; False if it has not even a whole header."""
        file = JsonLines(path)
        if not (lines := list(file)):
            if not _line(header).encode().startswith(path.read_bytes()):
                raise TokenleapError(f"{path} is not a results file; choose another --output.")
            file.mend()
            return False
        try:
            found, *self.records = [parsed_json(line) for line in lines]
        except ValueError as error:
            raise TokenleapError(f"{path} is not a results file: {error}.") from error
        if not all(isinstance(record, dict) for record in (found, *self.records)):
            raise TokenleapError(f"{path} is not a results file: expected JSON objects.")
        if found.get("format") != header["format"]:
            raise TokenleapError(f"{path} is not a results file; choose another --output.")
        for number, record in enumerate((found, *self.records), 1):
            if record.pop(_CHECK, None) != _checksum(record):
                raise TokenleapError(
                    f"{path}: line {number} has changed since it was written, or is of an older "
                    "version; choose another --output."
                )
        # JSON turns tuples into lists: compare like with like.
        _check_header(path, found, json.loads(json.dumps(header)))
        file.mend()
        return True

    def _append(self, record: dict[str, Any]) -> None:
        if self._path is not None:
            JsonLines(self._path).append([_line(record)])


def _line(record: dict[str, Any]) -> str:
    return json.dumps({**record, _CHECK: _checksum(record)})


def _checksum(record: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record).encode()):08x}"


def _check_header(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    changed = [name for name in wanted if found.get(name) != wanted[name]]
    if changed:
        name = changed[0]
        raise TokenleapError(
            f"{path} was made with {name} {found.get(name)!r}, and this run has {wanted[name]!r}; "
            "choose another --output."
        )
