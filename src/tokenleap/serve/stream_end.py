"""The usage in the chunks of a stream of completions, and the stream's last events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenleap.serve.errors import invalid
from tokenleap.serve.events import DONE, data
from tokenleap.serve.fields import SamplingBody
from tokenleap.serve.rendering import usage_of
from tokenleap.serve.running import Run

__all__ = ["chunk_usage", "last_events", "refuse_stream_options"]


def refuse_stream_options(body: SamplingBody) -> None:
    """Refuse options of a stream for a response that is none.

    Raises:
        APIError: there are some.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", 'stream_options need "stream": true.')


def chunk_usage(body: SamplingBody, run: Run) -> dict[str, Any]:
    """What a chunk has besides its choices: the usage so far, if the request wants it."""
    options = body.stream_options
    if options is None or not options.continuous_usage_stats:
        return {}
    return {"usage": usage_of(run)}


def last_events(body: SamplingBody, run: Run, head: Mapping[str, Any]) -> Iterator[bytes]:
    """The usage of all outputs, if the request wants it, and the end of the stream.

    Args:
        body: the request.
        run: its run, which has ended.
        head: what all chunks begin with.
    """
    if body.stream_options is not None and body.stream_options.include_usage:
        yield data({**head, "choices": [], "usage": usage_of(run)})
    yield DONE
