"""Many prompts on a Ray cluster: a stage of Ray Data, and what the command line makes of it."""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Generator as Iterates
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenleap.core.params import SamplingParams
from tokenleap.errors import ConfigError, TokenleapError, in_one_line
from tokenleap.lines import Line, Shape, error_of, jobs_of, line_of, records, settings_of
from tokenleap.ray.cluster import Replicas, Share, check_installed, cluster, cores_beside, share

if TYPE_CHECKING:
    from tokenleap.engine.jobs import Job
    from tokenleap.llm import LLM

BLOCK = 64
"""Most prompts of a block: what is made again if its process is lost."""
ATTEMPTS = 3
"""Processes that a block may lose before the run is given up: a line of it may be what ends them.

A process has the next block while it makes one, so that is given up as well.
"""


def generate(
    dataset: Any,
    model: str,
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    *,
    replicas: int | str = 1,
    batch_size: int = BLOCK,
    chat: bool | None = None,
    threads: int | None = None,
    **engine: Any,
) -> Any:
    """A stage of Ray Data that generates text for each row.

    A row has a `prompt` (text), `messages` or `prompt_token_ids`; also `references`, `prediction`
    and sampling parameters of its own, as a line of `tokenleap generate --prompts-file`. Other
    columns have to be left out before. The order of the rows is kept. If a process is lost, its
    block is made again. Nothing runs before the dataset is read or written.

    Returns:
        The dataset with further columns: `text`, `token_ids` and `finish_reason` of the first
        output, `error` (None if all went well), and `result`, the JSON object that
        `tokenleap generate --prompts-file` writes, without `line`.
    """
    check_installed()
    if batch_size < 1:
        raise ConfigError(f"batch_size: must be at least 1, got {batch_size}")
    params = SamplingParams.parse(sampling_params)
    arguments = {"model": model, **engine}
    wanted = Replicas.parse(replicas)
    with cluster(None, stays=True):
        of_each = share(arguments, wanted, threads)
        cores = cores_beside(of_each)
    stage = _Stage(arguments, Shape(chat), wanted, of_each, cores)
    return stage.on(dataset, partial(_row, params), batch_size)


class Generator:
    """A process of the stage: an engine, which turns blocks of rows into results."""

    def __init__(
        self,
        model: Mapping[str, Any],
        shape: Shape,
        threads: int,
        read: Callable[[dict[str, Any]], Line],
    ) -> None:
        self._llm = _loaded(model, threads)
        self._shape, self._read = shape, read

    def __call__(self, block: Any) -> Any:
        """The block (a `pyarrow.Table`) with the columns of the results."""
        import pyarrow

        found = self._records(block.to_pylist())
        columns: dict[str, tuple[Any, list[Any]]] = {
            "text": (pyarrow.string(), [each.get("text") for each in found]),
            "token_ids": (
                pyarrow.list_(pyarrow.int64()),
                [each.get("token_ids") for each in found],
            ),
            "finish_reason": (pyarrow.string(), [each.get("finish_reason") for each in found]),
            "error": (pyarrow.string(), [error_of(each) for each in found]),
            "result": (
                pyarrow.string(),
                [json.dumps(each, ensure_ascii=False) for each in found],
            ),
        }
        for name, (kind, values) in columns.items():
            if name in block.column_names:
                block = block.drop_columns([name])
            block = block.append_column(name, pyarrow.array(values, kind))
        return block

    def _records(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A result for each row; a row that is no prompt has an error."""
        lines: list[Line] = []
        jobs: list[Job] = []
        refused: dict[int, str] = {}
        for place, row in enumerate(rows):
            try:
                line = self._read(row)
                jobs += jobs_of(self._llm, [line], self._shape)
            except TokenleapError as error:
                refused[place] = str(error)
            else:
                lines.append(line)
        made = records(self._llm, lines, jobs)
        return [
            {"error": refused[place]} if place in refused else next(made)
            for place in range(len(rows))
        ]


class Offline:
    """The lines of `tokenleap generate` on the cluster that this process is connected to."""

    def __init__(
        self,
        model: Mapping[str, Any],
        shape: Shape,
        replicas: Replicas,
        *,
        threads: int | None = None,
    ) -> None:
        self._model, self._shape, self._replicas = model, shape, replicas
        self._share = share(model, replicas, threads)

    def checked(self, lines: Sequence[Line]) -> dict[str, Any]:
        """Load the model in a process of the cluster, and look at all lines there."""
        import ray

        check = ray.remote(num_cpus=self._share.cores, num_gpus=self._share.gpus, max_calls=1)(
            _checked
        )
        given = dict(self._model), self._shape, self._share.cores, list(lines)
        try:
            found = ray.get(check.remote(*given))
        except ray.exceptions.RayError as error:
            raise _given_up(error) from None
        if isinstance(found, TokenleapError):
            raise found
        assert isinstance(found, dict)
        return found

    def records(self, lines: Sequence[Line]) -> Iterates[dict[str, Any], None, None]:
        """The results of the lines, in their order, block by block."""
        if not lines:
            return
        import ray

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are stacks
        size = min(BLOCK, -(-len(lines) // (4 * self._replicas.most)))
        blocks = -(-len(lines) // size)
        rows = [{"line": pickle.dumps(line)} for line in lines]
        dataset = ray.data.from_items(rows, override_num_blocks=blocks)
        share = self._share
        stage = _Stage(self._model, self._shape, self._replicas, share, share.cores)
        made = stage.on(dataset, _unpickled, None)
        done = 0
        try:
            for row in made.iter_rows():
                yield json.loads(row["result"])
                done += 1
        except ray.exceptions.RayActorError:
            raise TokenleapError(
                f"the run was given up: {ATTEMPTS} processes were lost with the same lines. One of "
                f"those from line {lines[done].number} on may be what ends them"
            ) from None
        except ray.exceptions.RayError as error:
            raise _given_up(error) from None


@dataclass(frozen=True)
class _Stage:
    """Processes with engines."""

    model: Mapping[str, Any]
    shape: Shape
    replicas: Replicas
    of_each: Share
    cores: float

    def on(
        self, dataset: Any, read: Callable[[dict[str, Any]], Line], batch_size: int | None
    ) -> Any:
        """The dataset with the columns of the results, in its order."""
        import ray

        least, most = self.replicas.least, self.replicas.most
        with warnings.catch_warnings():
            # Ray 2.60 deprecates the two `max_`, which have no other name in it.
            warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
            made = dataset.map_batches(
                Generator,
                fn_constructor_args=(dict(self.model), self.shape, self.of_each.cores, read),
                batch_format="pyarrow",
                batch_size=batch_size,
                compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most),
                num_cpus=self.cores,
                num_gpus=self.of_each.gpus,
                max_restarts=-1,  # of a process, which may work for days
                max_task_retries=ATTEMPTS - 1,  # of a block
                udf_modifying_row_count=False,
            )
        made.context.execution_options.preserve_order = True
        return made


def _loaded(model: Mapping[str, Any], threads: int) -> LLM:
    from tokenleap.llm import LLM
    from tokenleap.runtime.native.network import set_num_threads

    set_num_threads(threads)
    return LLM(**model)


def _checked(
    model: Mapping[str, Any], shape: Shape, threads: int, lines: Sequence[Line]
) -> dict[str, Any] | TokenleapError:
    """Runs in another process, from which Ray would wrap what is raised."""
    try:
        llm = _loaded(model, threads)
        jobs_of(llm, lines, shape)
    except TokenleapError as error:
        return error
    return settings_of(llm)


def _row(params: SamplingParams, row: dict[str, Any]) -> Line:
    """The line in a row; a table has nulls for what a row does not say."""
    return line_of(None, _without_nulls(row), params)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _unpickled(row: dict[str, Any]) -> Line:
    line = pickle.loads(row["line"])
    assert isinstance(line, Line)
    return line


def _given_up(error: Exception) -> TokenleapError:
    reason = in_one_line(getattr(error, "cause", None) or error)
    return TokenleapError(f"the run was given up: {reason}")
