"""Metrics for Prometheus: vLLM's names where it has one, and `tokenleap:` for the rest.

Counters are fed by the engine's thread (steps) and the event loop (requests). Gauges are read from
the engine when Prometheus asks.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tokenleap.core import clock
from tokenleap.engine.llm_engine import LLMEngine
from tokenleap.engine.worker import StepReport
from tokenleap.request import Request

_WINDOW = 60.0
"""Seconds that the gauge of goodput looks back."""

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10)
_SHORT_TOKEN = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LONG = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


_COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "Requests that lost their row."),
    "queries": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "hits": ("vllm:prefix_cache_hits", "Prompt tokens whose KV came from the prefix cache."),
    "prompts": ("vllm:prompt_tokens", "Tokens of prompts."),
    "generated": ("vllm:generation_tokens", "Tokens generated."),
    "drafts": ("vllm:spec_decode_num_drafts", "Drafts that were verified."),
    "drafted": ("vllm:spec_decode_num_draft_tokens", "Tokens drafted."),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "Tokens accepted."),
    "refused": ("tokenleap:requests_refused", "Requests that found too many waiting."),
    "failures": (
        "tokenleap:drafter_failures",
        "Outputs that went on without drafts after a failure.",
    ),
    "step_seconds": (
        "tokenleap:step_seconds",
        "Seconds that the engine computed, prompts included.",
    ),
}

_HISTOGRAMS = {
    "first": ("vllm:time_to_first_token_seconds", "Until the first token.", _SHORT),
    "between": (
        "vllm:inter_token_latency_seconds",
        "Between the tokens of two steps.",
        _SHORT_TOKEN,
    ),
    "per_token": (
        "vllm:request_time_per_output_token_seconds",
        "Mean per token after the first one, of an output.",
        _SHORT_TOKEN,
    ),
    "latency": (
        "vllm:e2e_request_latency_seconds",
        "From the request to the end of an output.",
        _LONG,
    ),
    "queued": ("vllm:request_queue_time_seconds", "Before a request got a row.", _LONG),
    "prefill": ("vllm:request_prefill_time_seconds", "Computing the prompt.", _LONG),
    "decode": ("vllm:request_decode_time_seconds", "Decoding.", _LONG),
    "prompt_length": ("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    "length": ("vllm:request_generation_tokens", "Tokens of an output.", _TOKENS),
    "wanted": ("vllm:request_params_n", "Outputs of a prompt.", (1, 2, 5, 10, 20)),
}


class Registry:
    """The metrics of a server; those of several models differ in a label."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._made: dict[str, Any] = {}

    def made(self, kind: type[Any], name: str, text: str, labels: list[str], **more: Any) -> Any:
        """A metric, which is made once."""
        if name not in self._made:
            self._made[name] = kind(name, text, labels, registry=self._registry, **more)
        return self._made[name]

    def exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class ServerMetrics:
    """The metrics of one model.

    Args:
        name: of the engine.
        registry: of a server with several models.
    """

    def __init__(
        self, engine: LLMEngine, model: str, name: str = "0", registry: Registry | None = None
    ) -> None:
        self._engine = engine
        self._registry = registry or Registry()
        self._labels = {"model_name": model, "engine": name}
        self._recent: deque[tuple[float, int, float]] = deque()  # steps: when, tokens, seconds
        self._positions: list[Counter] = []
        self._gauges()
        self._count = {name: self._made(Counter, *about) for name, about in _COUNTERS.items()}
        self._time = {
            name: self._made(Histogram, metric, text, buckets=buckets)
            for name, (metric, text, buckets) in _HISTOGRAMS.items()
        }
        self._by_position = self._registry.made(
            Counter,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens accepted at each position of a draft.",
            [*self._labels, "position"],
        )
        self._ended = self._registry.made(
            Counter,
            "vllm:request_success",
            "Outputs that have ended, by reason.",
            [*self._labels, "finished_reason"],
        )
        # Drafts that do not pay make it smaller, so it is no counter.
        self._saved = self._made(
            Gauge,
            "tokenleap:seconds_saved",
            "Estimate: seconds saved against decoding without drafts, by what passes cost here.",
        )

    def _made(self, kind: type[Any], name: str, text: str, **settings: Any) -> Any:
        made = self._registry.made(kind, name, text, list(self._labels), **settings)
        return made.labels(**self._labels)

    def _gauges(self) -> None:
        """Those that are read from the engine."""
        running = self._made(Gauge, "vllm:num_requests_running", "Outputs that have a row.")
        waiting = self._made(Gauge, "vllm:num_requests_waiting", "Outputs that wait for a row.")
        usage = self._made(
            Gauge, "vllm:kv_cache_usage_perc", "Part of the KV memory in use, 0 to 1."
        )
        goodput = self._made(
            Gauge,
            "tokenleap:goodput_tokens_per_second",
            "Tokens per second of computing, over the steps of the last minute.",
        )
        running.set_function(lambda: self._engine.load.running)
        waiting.set_function(lambda: self._engine.load.waiting)
        usage.set_function(lambda: self._engine.load.kv_usage)
        goodput.set_function(self._goodput)
        self._of_engine = (running, waiting, usage, goodput)

    def close(self) -> None:
        """Let go of the engine, which has ended: its gauges are 0, and counters stay."""
        for gauge in self._of_engine:
            gauge.set_function(lambda: 0.0)

    def _position(self, position: int) -> Counter:
        """The counter of a position, from 0; made at its first use."""
        while len(self._positions) <= position:
            number = str(len(self._positions))
            self._positions.append(self._by_position.labels(**self._labels, position=number))
        return self._positions[position]

    def observe_step(self, report: StepReport) -> None:
        """Count a step; called in the engine's thread."""
        rows = len(report.outcomes)
        tokens = sum(len(outcome.committed) for outcome in report.outcomes)
        self._count["step_seconds"].inc(report.seconds)
        self._count["generated"].inc(tokens)
        now = time.monotonic()
        self._recent.append((now, tokens, report.seconds))
        while self._recent and self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()
        drafting = [each for each in report.outcomes if each.draft.tree.num_drafted]
        if not drafting:
            return
        kept = [min(len(each.accepted.path), len(each.committed)) for each in drafting]
        self._count["drafts"].inc(len(drafting))
        self._count["drafted"].inc(sum(each.draft.tree.num_drafted for each in drafting))
        self._count["accepted"].inc(sum(kept))
        for position in range(max(kept)):
            self._position(position).inc(sum(count > position for count in kept))
        costs = self._engine.strategies.costs
        if costs:
            step = report.outcomes[0].request.last_step
            plain = tokens / rows * costs(rows, rows)
            self._saved.inc(plain - step.draft_seconds - step.verify_seconds)

    def chunk(self, seconds: float, *, first: bool) -> None:
        self._time["first" if first else "between"].observe(seconds)

    def finished(self, output: Request, seconds: float) -> None:
        """Count an output that has ended, or that is no longer waited for."""
        reason = output.finish_reason or "abort"
        self._ended.labels(**self._labels, finished_reason=reason).inc()
        if output.index == 0:
            self._time["wanted"].observe(output.params.n)
        if not output.admitted_at:  # it never got a row, so nothing of it was computed
            return
        metrics, generated = output.metrics, output.metrics.generated_tokens
        running = metrics.seconds or clock.now() - output.admitted_at
        decoding = max(running - metrics.prefill_seconds, 0.0)
        self._count["prompts"].inc(metrics.prompt_tokens)
        self._count["queries"].inc(metrics.prompt_tokens)
        self._count["hits"].inc(metrics.cached_prompt_tokens)
        self._count["preemptions"].inc(metrics.preemptions)
        self._count["failures"].inc(metrics.drafter_failure is not None)
        self._time["prompt_length"].observe(metrics.prompt_tokens)
        self._time["length"].observe(generated)
        self._time["latency"].observe(seconds)
        self._time["queued"].observe(max(seconds - running, 0.0))
        self._time["prefill"].observe(metrics.prefill_seconds)
        self._time["decode"].observe(decoding)
        if generated > 1:
            self._time["per_token"].observe(decoding / (generated - 1))

    def refused(self) -> None:
        self._count["refused"].inc()

    def exposition(self) -> tuple[bytes, str]:
        """All metrics in Prometheus' text format, and its media type."""
        return self._registry.exposition()

    def _goodput(self) -> float:
        since = time.monotonic() - _WINDOW
        recent = [
            (tokens, seconds) for when, tokens, seconds in list(self._recent) if when >= since
        ]
        spent = sum(seconds for _, seconds in recent)
        return sum(tokens for tokens, _ in recent) / spent if spent else 0.0
