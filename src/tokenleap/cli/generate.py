"""`tokenleap generate`: the answer to a prompt, or several with --n, or one per line of a file."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenleap.cli.advice import flag
from tokenleap.cli.answers import Question, print_json, show_several, stream
from tokenleap.cli.batch_options import BatchOptions
from tokenleap.cli.console import working
from tokenleap.cli.files import check_writable, write_whole
from tokenleap.cli.flat import flat, in_panel
from tokenleap.cli.line_results import LineResults
from tokenleap.cli.lines import generate_lines
from tokenleap.cli.options import (
    CachingOptions,
    MaxNumSeqs,
    ModelOptions,
    SpeculationOptions,
)
from tokenleap.cli.processes import check_together, mute_others
from tokenleap.cli.prompt import read_prompt
from tokenleap.cli.ray_options import RayOptions, arguments_for_replicas, as_given
from tokenleap.cli.references import ReferenceOptions
from tokenleap.cli.report import show_what_ran
from tokenleap.cli.root import UsageError, examples
from tokenleap.cli.sampling_options import SamplingOptions
from tokenleap.cli.session import open_llm
from tokenleap.engine.lines import Line, Shape, jobs_of, records, settings_of

if TYPE_CHECKING:
    from tokenleap.config import SpeculativeConfig
    from tokenleap.ray.plan import Replicas

__all__ = ["EXAMPLES", "generate"]

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


@dataclass(frozen=True)
class LanguageOptions:
    """The languages of a translation."""

    source_language: Annotated[
        str | None, in_panel("Translation", "Language of the text, such as de_DE.", metavar="CODE")
    ] = None
    target_language: Annotated[
        str | None, in_panel("Translation", "Language to translate into.", metavar="CODE")
    ] = None


@dataclass(frozen=True)
class GenerateEngine(CachingOptions):
    """Engine options of one prompt with one or several answers."""

    max_num_seqs: MaxNumSeqs = None
    tensor_parallel_size: Annotated[
        int | None,
        in_panel(
            "Engine",
            "Processes that torchrun has started, to spread the model over.",
            show_default="1",
            min=1,
        ),
    ] = None

    def refuse_what_is_for_several(self) -> None:
        """Refuse options without effect on a single answer.

        Raises:
            UsageError: one of them was given.
        """
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
    n: Annotated[int, in_panel("Sampling", "Number of answers.", "--n")] = 1,
    beam_width: Annotated[
        int, in_panel("Sampling", "Search for the best answer with this many beams.")
    ] = 1,
    length_penalty: Annotated[
        float | None,
        in_panel("Sampling", "With --beam-width: above 0 favours long answers."),
    ] = None,
    logprobs: Annotated[
        int | None,
        in_panel("Output", "In JSON: log-probabilities of the k most likely tokens."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        in_panel("Output", "In JSON: the same for each token of the prompt; -1 is all tokens."),
    ] = None,
    json_output: Annotated[
        bool,
        in_panel("Output", "Print one JSON object; with --n, `outputs` has all answers.", "--json"),
    ] = False,
    batch: BatchOptions,
    ray: RayOptions,
    trace: Annotated[
        Path | None,
        in_panel("Output", "Write what every step drafted, accepted and added.", metavar="FILE"),
    ] = None,
    quiet: Annotated[
        bool, in_panel("Output", "Print the text only: no spinner, no statistics.", "--quiet", "-q")
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
        answer = stream(llm, question, trace=traced, quiet=quiet)
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
    """Refuse wrong combinations before the model is loaded."""
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
    """Generate for all lines on a Ray cluster."""
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
