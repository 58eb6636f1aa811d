"""One page of metrics of several replicas."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["joined"]


def joined(pages: Iterable[str]) -> str:
    """Pages in Prometheus' text format as one: each metric once, with the samples of all pages.

    Samples have a label that tells the pages apart, so nothing is added up.
    """
    heads: dict[str, str] = {}  # by the name of the metric
    samples: dict[str, list[str]] = {}
    for page in pages:
        for metric in page.split("# HELP ")[1:]:
            lines = metric.splitlines(keepends=True)  # HELP, TYPE, samples
            name = metric.split(" ", 1)[0]
            heads[name] = "# HELP " + "".join(lines[:2])
            samples.setdefault(name, []).extend(lines[2:])
    return "".join(heads[name] + "".join(samples[name]) for name in heads)
