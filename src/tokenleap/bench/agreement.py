"""How near outputs are to the baseline's own, and what they cost in p: for lossy rules.

Xia et al., "Speculative Decoding" (SpecDec, 2023), table 6, has relative BLEU: BLEU with the
outputs of plain decoding as references. sacreBLEU computes it. The baseline's model judges every
output after all that is timed (`Worker.judge`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tokenleap.bench.calls import first_difference
from tokenleap.bench.contestants import BASELINE
from tokenleap.bench.rows import CONTROL
from tokenleap.errors import TokenleapError

__all__ = ["Agreement", "agreements", "bleu_metric", "unjudged"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Agreement:
    """The outputs of one contestant beside those of the baseline, on the same prompts and seeds.

    Args:
        label: the contestant.
        outputs: how many were compared, over prompts and rounds.
        equal: how many are equal.
        equal_tokens: share of positions with the same token.
        first_difference: mean position, from 0, of the first difference of those that differ; None
            if all are equal.
        bleu: relative BLEU, 0 to 100.
        logprob: mean log-probability of a token under the baseline's model, in nats.
    """

    label: str
    outputs: int
    equal: int
    equal_tokens: float
    first_difference: float | None
    bleu: float
    logprob: float


def bleu_metric() -> Any:
    """BLEU of sacreBLEU with its defaults.

    Raises:
        TokenleapError: sacreBLEU is not installed.
    """
    try:
        return importlib.import_module("sacrebleu.metrics").BLEU()
    except ImportError as error:
        raise TokenleapError(
            "relative BLEU needs sacreBLEU: pip install 'tokenleap[bench]'."
        ) from error


def unjudged(records: Sequence[Record]) -> list[Record]:
    """The calls that the baseline has not judged: those of single prompts, without the control."""
    judged = {_key(record) for record in records if record["type"] == "judgement"}
    return [call for call in _calls(records) if _key(call) not in judged]


def agreements(records: Sequence[Record]) -> list[Agreement]:
    """Every contestant beside the baseline; empty if nothing was judged or all outputs are equal.

    Args:
        records: of a journal.
    """
    judged = {_key(record): record for record in records if record["type"] == "judgement"}
    calls = [call for call in _calls(records) if _key(call) in judged]
    base = {(c["unit"], c["round"]): c for c in calls if c["contestant"] == BASELINE.label}
    pairs: dict[str, list[tuple[Record, Record]]] = {}
    for call in calls:
        other = base.get((call["unit"], call["round"]))
        if other is not None:
            pairs.setdefault(call["contestant"], []).append((other, call))
    found = [_agreement(label, each, judged) for label, each in pairs.items()]
    return found if any(one.equal < one.outputs for one in found) else []


def _agreement(
    label: str,
    pairs: Sequence[tuple[Record, Record]],
    judged: Mapping[tuple[str, str, int], Record],
) -> Agreement:
    tokens = [(_tokens(expected), _tokens(got)) for expected, got in pairs]
    differences = [first_difference(*each) for each in tokens]
    known = [position for position in differences if position is not None]
    texts = [[judged[_key(call)]["text"] for call in calls] for calls in zip(*pairs, strict=True)]
    same = sum(a == b for each in tokens for a, b in zip(*each, strict=False))
    return Agreement(
        label=label,
        outputs=len(pairs),
        equal=len(pairs) - len(known),
        equal_tokens=same / sum(max(map(len, each)) for each in tokens),
        first_difference=fmean(known) if known else None,
        bleu=float(bleu_metric().corpus_score(texts[1], [texts[0]]).score),
        logprob=fmean(judged[_key(call)]["logprob"] for _, call in pairs),
    )


def _calls(records: Sequence[Record]) -> list[Record]:
    return [
        record
        for record in records
        if record["type"] == "request" and record["batch"] == 1 and record["kind"] != CONTROL
    ]


def _key(record: Record) -> tuple[str, str, int]:
    return record["contestant"], record["unit"], record["round"]


def _tokens(call: Record) -> list[int]:
    return list(call["outputs"][0]["token_ids"])
