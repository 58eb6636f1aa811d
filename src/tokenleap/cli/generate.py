"""`tokenleap generate`: the answer to a prompt, or several with --n, or one per line of a file."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenleap.cli.console import (
    TokenWriter,
    display,
    plain,
    show_json,
    show_summary,
    show_what_ran,
    stream,
    what_ran,
    working,
)
from tokenleap.cli.options import (
    CachingOptions,
    MaxNumSeqs,
    ModelOptions,
    RayOptions,
    SamplingOptions,
    SpeculationOptions,
    arguments_for_replicas,
    as_given,
    few,
    flat,
    in_panel,
    open_llm,
    option,
    option_group,
    option_of,
)
from tokenleap.cli.prompts import (
    STDIN,
    BatchOptions,
    LineResults,
    ReferenceOptions,
    generate_lines,
    read_prompt,
)
from tokenleap.cli.root import UsageError, check_writable, examples, flag, write_whole
from tokenleap.core.params import SamplingParams
from tokenleap.core.peers import num_processes, own_rank
from tokenleap.lines import Line, Shape, jobs_of, records, settings_of

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig
    from tokenleap.llm import LLM, Prompt
    from tokenleap.outputs import CompletionOutput, RequestOutput
    from tokenleap.ray.cluster import Replicas

_output = partial(in_panel, "Output")


EXAMPLES = examples(
    'tokenleap generate "Why is the sky blue?"',
    "tokenleap generate --file notes.txt --max-tokens 200",
    "git diff | tokenleap generate --method ngram_table --quiet",
    'tokenleap generate "Write a poem." --temperature 0.8 --seed 7 --json',
    'tokenleap generate "Count to ten." --trace steps.json',
    "tokenleap generate Hi --speculative-config '{\"prompt_lookup_max\": 6}'",
    "tokenleap generate --model DIR --file sentences.txt --jsonl",
    "tokenleap generate --prompts-file in.jsonl --output out.jsonl",
    "torchrun --nproc-per-node 2 -m tokenleap generate Hi -m DIR --tensor-parallel-size 2",
    "tokenleap generate --prompts-file in.jsonl --output out.jsonl --replicas 4",
    'tokenleap generate "What does the manual say?" --reference manual.txt',
    'tokenleap generate "Rename f to g. $(cat a.py)" --prediction-file a.py',
    'tokenleap generate "Translate to French: good morning." --beam-width 4',
)


@option_group("Translation")
class LanguageOptions:
    """The languages of a translation."""

    source_language: str | None = option("Language of the text, such as de_DE.", metavar="CODE")
    target_language: str | None = option("Language to translate into.", metavar="CODE")


@option_group("Engine")
class GenerateEngine(CachingOptions):
    """Engine options of one prompt with one or several answers."""

    max_num_seqs: MaxNumSeqs = None
    tensor_parallel_size: int | None = option(
        "Processes that torchrun has started, to spread the model over.", show_default="1", min=1
    )

    def refuse_what_is_for_several(self) -> None:
        given = {
            "--max-num-seqs": self.max_num_seqs is not None,
            "--prefix-cache-memory": self.prefix_cache_memory is not None,
            "--no-enable-prefix-caching": self.no_enable_prefix_caching,
        }
        for name, was_given in given.items():
            if was_given:
                raise UsageError(
                    f"{name} is for several answers: add --n, --jsonl or --prompts-file"
                )


@few(
    "file model quantization method draft_model temperature "
    "max_tokens json_output prompts_file output"
)
@flat
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; - or none reads standard input.", metavar="PROMPT"),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read the prompt from this file.", metavar="FILE")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Apply the model's chat template, or not.",
            show_default="chat if the model has a template",
        ),
    ] = None,
    *,
    target: ModelOptions,
    speculation: SpeculationOptions,
    references: ReferenceOptions,
    sampling: SamplingOptions,
    engine: GenerateEngine,
    languages: LanguageOptions,
    n: Annotated[int, option_of(SamplingParams, "n", "Sampling", "--n")] = 1,
    beam_width: Annotated[int, option_of(SamplingParams, "beam_width", "Sampling")] = 1,
    length_penalty: Annotated[
        float | None, option_of(SamplingParams, "length_penalty", "Sampling")
    ] = None,
    logprobs: Annotated[
        int | None, option_of(SamplingParams, "logprobs", "Output", before="In JSON: ")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, option_of(SamplingParams, "prompt_logprobs", "Output", before="In JSON: ")
    ] = None,
    json_output: Annotated[
        bool, _output("Print one JSON object; with --n, `outputs` has all answers.", "--json")
    ] = False,
    batch: BatchOptions,
    ray: RayOptions,
    trace: Annotated[
        Path | None, _output("Write what every step drafted, accepted and added.", metavar="FILE")
    ] = None,
    quiet: Annotated[
        bool, _output("Print the text only: no spinner, no statistics.", "--quiet", "-q")
    ] = False,
) -> None:
    """Generate text for one prompt, or for many with --prompts-file.

    On a terminal the colour of a token shows its origin: accepted draft,
    correction of a rejected draft, or bonus. A pipe gets the text and
    nothing else.
    """
    batch.check(prompt, file)
    has_file = file is not None or batch.prompts_file is not None
    check_together(engine.tensor_parallel_size, prompt, has_file=has_file)
    replicas = ray.wanted()
    if replicas is not None and not batch.wanted:
        raise UsageError("--replicas is for several prompts: add --prompts-file, or --jsonl")
    if replicas is not None and (engine.tensor_parallel_size or 1) > 1:
        raise UsageError("--replicas: a replica is one process: leave out --tensor-parallel-size")
    scores = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    _check(n, scores, json_output, trace, lines=batch.wanted, beams=beam_width > 1)
    muted = mute_others(engine.tensor_parallel_size)
    quiet = quiet or muted
    if n == 1 and not batch.wanted:
        engine.refuse_what_is_for_several()
    text = "" if batch.wanted else read_prompt(prompt, file)
    quoted = None if batch.wanted else references.read(1, lines=False)
    expected = None if batch.wanted else references.prediction()
    with working("Starting", quiet=quiet):
        config = speculation.config_for(target.model, beams=beam_width > 1)
    beams = {"beam_width": beam_width, "length_penalty": length_penalty}
    params = sampling.params_for(target.model, n=n, **scores, **beams)
    arguments = {"generation_config": sampling.generation_config, **engine.arguments()}
    lines = batch.lines(prompt, file, params, references) if batch.wanted else []
    shape = Shape(chat, **asdict(languages))
    results = batch.results({"model": target.model, **asdict(shape)})
    if replicas is not None:
        _on_replicas(replicas, ray, target, config, arguments, lines, shape, results, quiet=quiet)
        return
    llm = open_llm(target, config, quiet=quiet, **arguments)
    if batch.wanted:

        def made(chosen: Sequence[Line]) -> Generator[dict[str, Any], None, None]:
            return records(llm, chosen, jobs_of(llm, chosen, shape))

        peers = llm.engine.target.peers
        generate_lines(lines, settings_of(llm), made, results, quiet=quiet, peers=peers)
        return
    conversation = shape.of_text(llm, text)
    question = Question(text, conversation, params, None if quoted is None else quoted[0], expected)
    traced = trace is not None
    if json_output:
        answer = print_json(llm, target.model, question, trace=traced, quiet=quiet)
    elif n > 1:
        show_several(llm, question, quiet=quiet)
    else:
        answer = stream_answer(llm, question, trace=traced, quiet=quiet)
    if not (quiet or json_output):
        show_what_ran(llm)
    if trace is not None and not muted:  # there is one answer: see `_check`
        write_whole(trace, json.dumps(answer.trace.as_dict()) + "\n")


def _check(
    n: int,
    scores: Mapping[str, int | None],
    json_output: bool,
    trace: Path | None,
    *,
    lines: bool,
    beams: bool,
) -> None:
    if json_output and lines:
        raise UsageError(
            "--json prints one object, and several prompts have one per line: leave out --json"
        )
    for name, top in scores.items():
        if top is not None and not (json_output or lines):
            raise UsageError(
                f"{flag(name)} are shown in JSON only: add --json, or --jsonl or --prompts-file"
            )
    if trace is not None:
        if lines:
            raise UsageError("--trace describes one answer: leave out --jsonl, or --prompts-file")
        if n > 1:
            raise UsageError(f"--trace describes one answer: leave out --n {n}")
        if beams:
            raise UsageError("--trace: a beam search has none: leave out --beam-width")
        check_writable(trace)


def _on_replicas(
    replicas: Replicas,
    ray: RayOptions,
    target: ModelOptions,
    config: SpeculativeConfig | None,
    arguments: Mapping[str, Any],
    lines: Sequence[Line],
    shape: Shape,
    results: LineResults | None,
    *,
    quiet: bool,
) -> None:
    from tokenleap.ray.cluster import check_there, cluster
    from tokenleap.ray.offline import Offline

    check_there()
    model = arguments_for_replicas(target, config, **arguments)
    with ExitStack() as stack:
        with working("Starting Ray", quiet=quiet):
            stack.enter_context(cluster(ray.ray_address))
        offline = Offline(model, shape, replicas, threads=target.threads)
        with working(f"Checking {len(lines)} lines", quiet=quiet):
            settings = as_given(offline.checked(lines), config)
        generate_lines(lines, settings, offline.records, results, quiet=quiet)


# What `tokenleap generate` does for one prompt: streams its answer, or shows several, or JSON.


@dataclass(frozen=True)
class Question:
    """One prompt and what belongs to it."""

    text: str
    prompt: Prompt
    params: SamplingParams
    references: Sequence[str] | None
    prediction: str | None

    @property
    def beside(self) -> dict[str, Any]:
        """The texts beside the prompt, as arguments of `LLM.generate`."""
        return {"references": self.references, "prediction": self.prediction}


def stream_answer(llm: LLM, question: Question, *, trace: bool, quiet: bool) -> CompletionOutput:
    output, writer = stream(llm, question.prompt, question.params, **question.beside, trace=trace)
    if not quiet:
        show_summary(output, writer)
    return output


def show_several(llm: LLM, question: Question, *, quiet: bool) -> None:
    """Generate all answers in one batch and show them one after the other."""
    with working(f"Generating {question.params.n} answers", quiet=quiet):
        outputs = _result(llm, question).outputs
    console = display()
    for output in outputs:
        if output.index > 0:
            console.print()
        if console.is_terminal:
            console.print(plain(f"Answer {output.index + 1} of {len(outputs)}", "head"))
        writer = TokenWriter()
        with closing(writer):
            writer.write(output.tokens)
        if not quiet:
            show_summary(output, writer)


def print_json(
    llm: LLM, model: str, question: Question, *, trace: bool, quiet: bool
) -> CompletionOutput:
    """Print one object: the first answer's fields, and all answers if there are several."""
    with working("Generating", quiet=quiet):
        result = _result(llm, question, trace=trace)
    outputs = [
        output.as_dict() | ({"trace": output.trace.as_dict()} if trace else {})
        for output in result.outputs
    ]
    first = {name: field for name, field in outputs[0].items() if name != "index"}
    found = {
        "model": model,
        **what_ran(llm),
        "prompt": question.text,
        **result.prompt_as_dict(),
        **first,
        **({"outputs": outputs} if len(outputs) > 1 else {}),
    }
    show_json(found)
    return result.outputs[0]


def _result(llm: LLM, question: Question, *, trace: bool = False) -> RequestOutput:
    (result,) = llm.generate(
        [question.prompt], question.params, **question.beside, trace=trace, use_tqdm=False
    )
    return result


# What commands do where `torchrun` has started them several times: one speaks for all.


TOGETHER = ("generate", "train")
"""Commands that several processes can run together."""


def check_alone(command: str | None) -> None:
    """Refuse several processes of a command that runs in one."""
    processes = _num_started()
    if processes > 1 and command is not None and command not in TOGETHER:
        raise UsageError(
            f"torchrun has started {processes} processes, and tokenleap {command} runs in one: "
            "start it without torchrun"
        )


def check_together(size: int | None, prompt: str | None, *, has_file: bool) -> None:
    """Refuse what several processes of `generate` cannot do together."""
    processes = _num_started()
    if processes > 1 and (size or 1) == 1:
        raise UsageError(
            f"torchrun has started {processes} processes, which would all do the same: add "
            f"--tensor-parallel-size {processes}, or start it without torchrun"
        )
    if (size or 1) > 1 and not has_file and prompt in (None, STDIN):
        raise UsageError(
            "several processes cannot share standard input: give PROMPT or a file with it"
        )


def mute_others(size: int | None) -> bool:
    """Discard what this process writes on standard output, unless it is the first one."""
    if (size or 1) == 1 or own_rank() == 0:
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return True


def _num_started() -> int:
    """How many processes torchrun has started; other tools set the same variables, too."""
    return num_processes() if "TORCHELASTIC_RUN_ID" in os.environ else 1
