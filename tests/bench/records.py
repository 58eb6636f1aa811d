"""Records as a run writes them, with figures one can check by hand."""

from __future__ import annotations

from typing import Any

from tokenleap.bench.contestants import BASELINE, OWN, Contestant

NGRAM = Contestant("ngram", OWN, {"method": "ngram"})
PLAIN = Contestant("transformers-plain", "transformers-plain")
CONTESTANTS = (BASELINE, NGRAM, PLAIN)

OWN_FACTS = {
    "batches": True,
    "dtype": "float32",
    "runtime": "native",
    "threads": 2,
    "bit_exact": True,
    "rule": "coupled",
    "controller": "fixed",
    "max_model_len": 256,
    "lossless": True,
    "same_samples": True,
    "weight_bytes": 1_000_000,
    "kv_bytes": 100,
    "draft_bytes": 0,
    "device": "cpu",
    "peak_bytes": 5_000_000,
    "load_seconds": 3.25,
}
PEER_FACTS = {
    "version": "5",
    "batches": True,
    "dtype": "float32",
    "threads": 2,
    "weight_bytes": 1_000_000,
    "device": "cpu",
    "peak_bytes": 4_000_000,
}
HEADER = {
    "model": "tiny",
    "dtype": "auto",
    "threads": 1,
    "contestants": [one.label for one in CONTESTANTS],
    "cpu": "any <processor>",
    "gguf": None,
}


def own_output(tokens: list[int], **fields: Any) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "cached_prompt_tokens": 0,
        "drafter_failure": None,
        "prefill_seconds": 0.5,
        "first_token_seconds": 0.75,
        "draft_seconds": [],
        "passes": 4,
        "drafts": 0,
        "accepted": 0,
        "accepted_lengths": {},
        "verify_seconds": {"1": [0.1, 0.2, 0.3]},
        "branched": False,
    }
    return {"token_ids": tokens, **counts, **fields}


def request(
    label: str,
    seconds: float,
    *outputs: dict[str, Any],
    unit: str = "1",
    kind: str = "qa",
    index: int = 0,
    joules: float | None = None,
    temperature: float = 0.0,
) -> dict[str, Any]:
    return {
        "type": "request",
        "contestant": label,
        "unit": unit,
        "kind": kind,
        "batch": len(outputs),
        "round": index,
        "temperature": temperature,
        "prompt_tokens": [6] * len(outputs),
        "joules": joules,
        "seconds": seconds,
        "outputs": list(outputs),
    }


def drafted(tokens: list[int], **fields: Any) -> dict[str, Any]:
    counts = {
        "passes": 2,
        "drafts": 2,
        "accepted": 2,
        "accepted_lengths": {"0": 1, "2": 1},
        "draft_seconds": [0.01, 0.03],
        "verify_seconds": {"3": [0.2, 0.4]},
    }
    return own_output(tokens, **{**counts, **fields})


def background() -> list[dict[str, Any]]:
    """Records of a journal besides the requests."""
    return [
        {"type": "contestant", "label": "none", "facts": OWN_FACTS},
        {"type": "contestant", "label": "ngram", "facts": OWN_FACTS},
        {"type": "contestant", "label": "transformers-plain", "facts": PEER_FACTS},
        {"type": "energy", "source": "unavailable: no counter"},
        {"type": "roofline", "bytes": 1_000_000, "seconds": 0.05},
        {"type": "memory", "label": "none", "peak_bytes": 6_000_000},
    ]


def complete() -> list[dict[str, Any]]:
    """Two kinds of two prompts, and a batch of two."""
    records = background()
    for unit, kind, factor in (("1", "qa", 2), ("2", "qa", 1), ("3", "rag", 4), ("4", "rag", 3)):
        tokens = [1, 2, 3, 4]
        records += [
            request("none", 4.0, own_output(tokens), unit=unit, kind=kind),
            request("ngram", 4.0 / factor, drafted(tokens), unit=unit, kind=kind),
            request("transformers-plain", 8.0, {"token_ids": tokens}, unit=unit, kind=kind),
        ]
    both = own_output([1, 2, 3, 4]), own_output([1, 2, 3, 4])
    records += [
        request("none", 5.0, *both, unit="batch of 2", kind="batch"),
        request("ngram", 4.0, *both, unit="batch of 2", kind="batch"),
    ]
    return records


def control(*, same: bool = True) -> list[dict[str, Any]]:
    """One prompt of random tokens, on which drafting is a little slower."""
    drawn = [5, 6] if same else [5, 7]
    unit: dict[str, Any] = {"unit": "random 0", "kind": "control", "temperature": 1.5}
    return [
        request("none", 1.0, own_output([5, 6]), **unit),
        request("ngram", 1.25, drafted(drawn, accepted=0), **unit),
    ]


def judgement(
    label: str, text: str, logprob: float, *, unit: str = "1", index: int = 0
) -> dict[str, Any]:
    names = {"contestant": label, "unit": unit, "round": index}
    return {"type": "judgement", **names, "text": text, "logprob": logprob}
