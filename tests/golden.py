"""A golden record: what every method writes with every rule, on every runtime, in every dtype.

    python -m tests.golden FILE            writes it, or compares with it if the file exists
    python -m tests.golden FILE --only TEXT      only cases whose names contain the text

A change that moves code without changing what it does leaves the record as it is. Records of two
machines differ: they have tokens, log-probabilities, numbers of drafted and accepted tokens, and
hidden states, bit by bit. Exits with 1 if anything differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import PreTrainedModel

from tests.matrix import ON_SOURCES, PROMPTS, SPECULATIVE, fits, speculative_config
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq, tiny_source
from tokenleap import LLM, SamplingParams, TokenleapError
from tokenleap.core.acceptance import RULES
from tokenleap.drafters.heads.shipped import shipped_head

WIDE = {"head_dim": 32}
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "native float32": ("llama", {}, {}),
    "native bfloat16": ("llama", {"dtype": torch.bfloat16}, {}),
    "native int4": ("llama", {}, {"quantization": "int4"}),
    "native int8": ("llama", {}, {"quantization": "int8"}),
    "lean float32": ("llama", {}, {"runtime": "torch"}),
    "lean bfloat16": ("llama", {"dtype": torch.bfloat16}, {"runtime": "torch"}),
    "module float32": ("gpt2", {}, {}),
    "native bart": ("bart", {}, {}),
    "native t5": ("t5", {}, {}),
    "torch bart": ("bart", {}, {"runtime": "torch"}),
}
"""Models: architecture, fields of the model, fields of `LLM`."""
SEQ2SEQ = ("bart", "t5")

GREEDY = SamplingParams(temperature=0, seed=3, max_tokens=16, logprobs=2)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=5, max_tokens=16, logprobs=2
)
PARAMS = {"greedy": GREEDY, "seeded": SEEDED}
SHORT = "smollm2-135m"


def _digest(value: Any) -> str:
    content = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _written(llm: LLM, prompts: Any, params: SamplingParams, **fields: Any) -> dict[str, Any]:
    """The kept part of a run's outputs."""
    outputs = llm.generate(prompts, params, **fields)
    metrics = [output.metrics for output in outputs]
    return {
        "tokens": _digest([(output.token_ids, output.finish_reason) for output in outputs]),
        "logprobs": _digest([output.logprobs for output in outputs]),
        "drafts": [[m.num_drafts, m.num_draft_tokens, m.num_accepted_tokens] for m in metrics],
        "failures": sorted({m.drafter_failure for m in metrics if m.drafter_failure}),
    }


def _model(architecture: str, fields: dict[str, Any]) -> PreTrainedModel:
    if architecture in SEQ2SEQ:
        return tiny_seq2seq(architecture, **fields)
    return tiny_model(architecture, **fields)


def _states(llm: LLM) -> str:
    """Of all hidden states of a prompt, computed in one pass."""
    target = llm.engine.lend()
    layers = tuple(range(target.network.num_layers + 1))
    target.add(0)
    hidden = target.prefill(0, PROMPTS[3][:60], hidden_layers=layers)
    target.remove(0)
    parts = [hidden[layer].float().contiguous().numpy().tobytes() for layer in layers]
    return _digest(b"".join(parts))


def cases(only: str) -> Iterator[tuple[str, Any]]:
    """Names of cases, and what they wrote."""
    for kind, (architecture, model_fields, fields) in KINDS.items():
        sources = architecture in SEQ2SEQ
        llm = LLM(
            _model(architecture, model_fields),
            tokenizer=tiny_tokenizer(),
            speculative_config={"method": "none"},
            **fields,
        )
        prompts = [list(tiny_source(length=n, seed=n).tokens) for n in (5, 9, 30)]
        prompts = prompts if sources else PROMPTS
        if not sources and only in (name := f"{kind}, hidden states"):
            yield name, {"runtime": llm.runtime, "states": _states(llm)}
        methods = ON_SOURCES if sources else SPECULATIVE
        for (sampling, params), method in product(PARAMS.items(), ("none", *methods)):
            for rule in RULES if method != "none" else ("coupled",):
                name = f"{kind}, {sampling}, {method}, {rule}"
                if only not in name or (method != "none" and not fits(method, rule)):
                    continue
                config = (
                    {"method": "none"} if method == "none" else speculative_config(method, rule)
                )
                try:
                    yield name, _written(llm, prompts, params, speculative_config=config)
                except TokenleapError as error:
                    yield name, {"refused": type(error).__name__}
    if only in SHORT:
        for quantization, (sampling, params) in product((None, "int4"), PARAMS.items()):
            llm = LLM(SHORT, quantization=quantization)
            for method in ("none", "ngram", "suffix", "hybrid"):
                config = {"method": method, "controller": "fixed", "num_speculative_tokens": 4}
                config |= {"model": str(shipped_head(SHORT))} if method == "hybrid" else {}
                name = f"{SHORT} {quantization}, {sampling}, {method}"
                text = ["Repeat after me: one two three, one two three, one"]
                yield name, _written(llm, text, params, speculative_config=config)


def main(file: Path, only: str = "") -> None:
    """Write a golden record, or compare with one."""
    known = json.loads(file.read_text()) if file.exists() else None
    found = dict[str, Any]()
    for name, value in cases(only):
        found[name] = json.loads(json.dumps(value))
    if known is None:
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        file.write_text("{" + ",\n".join(lines) + "}\n")
        print(f"{len(found)} cases written")
        return
    names = [name for name in {**known, **found} if only in name]
    differ = [name for name in names if known.get(name) != found.get(name)]
    for name in differ:
        print(f"{name}:\n  {known.get(name)}\n  {found.get(name)}")
    print(f"{len(differ)} of {len(names)} cases differ")
    raise typer.Exit(bool(differ))


if __name__ == "__main__":
    typer.run(main)
