"""Drafters on encoder-decoders: they change no output, and draft models read the source, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.drafting import drafter_of, request_of
from tests.heads import tiny_head
from tests.matrix import (
    LOSSLESS,
    ON_CHAINS,
    ON_SOURCES,
    SPECULATIVE,
    fits,
    speculative_config,
)
from tests.spec_drafters import random_spec_drafter
from tests.tiny import tiny_tokenizer
from tests.tiny_seq2seq import VOCAB_SIZE, tiny_seq2seq, tiny_source
from tokenleap import LLM, CompatibilityError, RequestOutput, SamplingParams
from tokenleap.core.references import Source
from tokenleap.drafters.models import OwnModel
from tokenleap.drafters.registry import METHODS
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.target import Target

TOKENS = 7
SOURCES = [list(tiny_source(length=length, seed=length).tokens) for length in (9, 30)]
PROMPTS: list[Any] = [SOURCES[1], {"encoder_prompt": SOURCES[0], "decoder_prompt": [40, 41]}]
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=TOKENS, logprobs=1)
LAYERS = {
    "mbart": "decoder_layers",
    "mbart_wide": "decoder_layers",
    "t5": "num_decoder_layers",
    "t5_wide": "num_decoder_layers",
}
ENOUGH = "64MiB"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mbart": {"eos_bias": 3.0},
    "mbart_wide": {"eos_bias": 3.0},
    "t5": {},
    "t5_wide": {},
}
"""With rules of a generation config and without; table positions and relative ones. Wide ones run
natively."""


def with_layers(name: str, decoder_layers: int, **fields: Any) -> PreTrainedModel:
    fields[LAYERS[name]] = decoder_layers
    return tiny_seq2seq(name, **fields)


@cache
def model_of(name: str) -> PreTrainedModel:
    model = with_layers(name, 2, **ARCHITECTURES[name])
    assert model.generation_config is not None
    if name.startswith("mbart"):
        model.generation_config.forced_bos_token_id = 42
        model.generation_config.no_repeat_ngram_size = 3
    return model


@cache
def draft_of(name: str) -> PreTrainedModel:
    """A model that often agrees: the target with a little noise in its weights."""
    draft, generator = with_layers(name, 2), torch.Generator().manual_seed(1)
    draft.load_state_dict(model_of(name).state_dict(), strict=False)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.02 * parameter.std() * noise)
    return draft


@cache
def llm_of(name: str) -> LLM:
    """With a limit on its memory, which drafters with KV of their own share."""
    return LLM(model_of(name), tokenizer=tiny_tokenizer(), kv_cache_memory=ENOUGH)


@cache
def config_of(name: str, method: str, rule: str) -> dict[str, Any]:
    """The same object for the same arguments, so that its strategy is built once."""
    spec = METHODS[method]
    model: dict[str, Any] = {}
    if spec.takes_model:
        model["model"] = draft_of(name)
    elif spec.takes_head:
        model["model"] = random_spec_drafter(name)
    return speculative_config(method, rule, num_speculative_tokens=5, **model)


def bits(outputs: list[RequestOutput], method: str, *, trees: bool = False) -> list[Any]:
    """Values that must not change: on trees the tokens, on chains also the log-probabilities.

    With `trees`, those of trees, too.
    """
    exact = trees or method in ON_CHAINS
    return [(o.token_ids, o.finish_reason, o.logprobs if exact else None) for o in outputs]


@cache
def plain(name: str, *params: SamplingParams) -> list[RequestOutput]:
    """Every prompt with each of the parameters."""
    return llm_of(name).generate(PROMPTS * len(params), repeated(params))


def repeated(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    return [each for each in params for _ in PROMPTS]


def check(name: str, method: str, rule: str, *params: SamplingParams) -> None:
    """That a drafter gives what plain decoding gives, in one batch."""
    outputs = llm_of(name).generate(
        PROMPTS * len(params), repeated(params), speculative_config=config_of(name, method, rule)
    )
    trees = name.endswith("_wide")
    assert bits(outputs, method, trees=trees) == bits(plain(name, *params), method, trees=trees)
    assert all(output.metrics.drafter_failure is None for output in outputs)


@pytest.mark.parametrize("method", ON_SOURCES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_drafter(name: str, method: str) -> None:
    """Greedy outputs, and under `coupled` sampled ones, are those of plain decoding."""
    check(name, method, "coupled", GREEDY, SEEDED)


HEADS = [name for name in SPECULATIVE if METHODS[name].takes_head]
FOR_DECODERS = ("eagle", "parallel", "hybrid")
"""Heads with attention of their own, which have no source to attend to; `hybrid` takes `eagle`."""


@pytest.mark.parametrize("name", ["mbart_wide", "t5_wide"])
@pytest.mark.parametrize("method", HEADS)
def test_every_head_serves_or_is_refused(name: str, method: str) -> None:
    """At construction, also inside other methods."""
    head = {"method": method, "model": tiny_head(method, VOCAB_SIZE)}
    others: list[dict[str, Any]] = [{"method": "ngram"}, head]
    configs: list[dict[str, Any]] = [
        head,
        {"method": "ensemble", "drafters": others},
        {"method": "switch", "drafters": others},
        {"method": "cascade", "model": draft_of(name), "drafter": head},
    ]
    for config in configs:
        if method in FOR_DECODERS:
            with pytest.raises(CompatibilityError, match="drafts for decoder-only models"):
                LLM(model_of(name), speculative_config=config)
            continue
        if config is not head:
            continue
        fixed = {**config, "controller": "fixed", "num_speculative_tokens": 8}
        outputs = llm_of(name).generate(PROMPTS, GREEDY, speculative_config=fixed)
        assert bits(outputs, method, trees=True) == bits(plain(name, GREEDY), method, trees=True)
        assert all(output.metrics.num_drafts for output in outputs)


@pytest.mark.parametrize("rule", [rule for rule in LOSSLESS if rule != "coupled"])
def test_every_rule(rule: str) -> None:
    """Rules do not see the model: one architecture will do."""
    for method in ON_SOURCES:
        if fits(method, rule):
            check("mbart", method, rule, GREEDY)


def test_a_tree_from_a_draft_model() -> None:
    for fields in ({"tree": [2, 2]}, {"tree": "dynamic", "expansion": "top_k"}):
        config = {**config_of("mbart", "draft_model", "coupled"), **fields}
        outputs = llm_of("mbart").generate(PROMPTS, GREEDY, speculative_config=config)
        assert bits(outputs, "lookahead") == bits(plain("mbart", GREEDY), "lookahead")


@pytest.mark.parametrize("method", ["draft_model", "cascade", "spec_drafter"])
def test_a_draft_model_reads_the_source_once(method: str, read: Counter[Source]) -> None:
    for name in ("mbart", "t5_wide"):
        config = config_of(name, method, "coupled")
        llm = LLM(model_of(name), speculative_config=config, kv_cache_memory=ENOUGH)
        read.clear()
        outputs = llm.generate(SOURCES, GREEDY)
        assert read == dict.fromkeys(map(Source, map(tuple, SOURCES)), 2)  # target and drafter
        if method != "spec_drafter":  # whose weights are random
            assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


def test_a_source_that_is_too_long_for_the_draft_model() -> None:
    """The request is served without drafts."""
    short = tiny_seq2seq("mbart", seed=1, max_position_embeddings=20)
    for method in ("draft_model", "cascade"):
        config = {**config_of("mbart", method, "coupled"), "model": short}
        outputs = llm_of("mbart").generate(PROMPTS, GREEDY, speculative_config=config)
        assert bits(outputs, method) == bits(plain("mbart", GREEDY), method)
        drafts = [output.metrics.num_drafts for output in outputs]
        assert drafts[0] == 0
        assert drafts[1] > 0


@pytest.mark.parametrize("method", ["draft_model", "cascade"])
def test_without_memory_for_all_sources(method: str) -> None:
    """A draft model's memory of sources counts: only the oldest requests are drafted for."""
    llm = LLM(model_of("t5"), speculative_config=config_of("t5", method, "coupled"))
    drafter: Any = drafter_of(llm)
    model: Target = drafter._model if method == "cascade" else drafter._scorer._model
    row, state = KEY_BLOCK * model.cell_bytes, model.state_bytes(Source((1,)))
    sources = [list(tiny_source(seed=seed).tokens) for seed in range(4)]
    expected = bits(LLM(model_of("t5")).generate(sources, GREEDY), method)
    for num_states, num_drafted in ((3, 3), (1, 2)):
        model.limit_memory(3 * row + num_states * state)  # the rows alone would fit
        outputs = llm.generate(sources, GREEDY)
        assert bits(outputs, method) == expected
        drafted = [bool(output.trace.steps[0].drafted) for output in outputs]
        assert drafted == [True] * num_drafted + [False] * (4 - num_drafted)
        assert all(output.metrics.drafter_failure is None for output in outputs)


def test_rows_make_room_for_older_requests(read: Counter[Source]) -> None:
    """A freed row loses its source, and reads it again when its request comes back."""
    model = Target(draft_of("t5"))
    drafter = OwnModel(model)
    requests = [request_of((0,), GREEDY, VOCAB_SIZE, source=tiny_source(seed=s)) for s in range(2)]
    sources = [request.source for request in requests]
    row, state = KEY_BLOCK * model.cell_bytes, model.state_bytes(sources[0])
    model.limit_memory(row + state)
    for turn in (0, 1, 0):
        assert list(drafter.admit([requests[turn]], 4)) == [requests[turn]]
        assert drafter.pending(requests[turn]) == [0]
    assert [read[source] for source in sources if source is not None] == [2, 1]
    assert model.num_rows == 1
    model.limit_memory(2 * (row + state))
    assert list(drafter.admit(requests, 4)) == requests
    model.limit_memory(2 * row + state)
    assert list(drafter.admit(requests, 4)) == requests[:1]


def test_a_source_that_is_the_output_is_copied_whole() -> None:
    """A target that pays no attention to its source writes the same whatever it reads."""
    model = tiny_seq2seq("mbart", seed=3)
    decoder: Any = model.get_submodule("model.decoder")
    for layer in decoder.layers:
        for parameter in layer.encoder_attn.out_proj.parameters():
            parameter.zero_()
    params = SamplingParams(temperature=0, max_tokens=20)
    (written,) = LLM(model).generate([[5]], params)
    config = speculative_config("copy", num_speculative_tokens=19)
    (copied,) = LLM(model, speculative_config=config).generate([list(written.token_ids)], params)
    assert copied.token_ids == written.token_ids
    assert copied.metrics.target_passes == 1


@pytest.mark.parametrize("vocabulary", ["intersection", "text"])
def test_draft_models_with_other_vocabularies(vocabulary: str) -> None:
    config = {**config_of("t5", "draft_model", "coupled"), "vocabulary": vocabulary}
    with pytest.raises(CompatibilityError, match=f"'{vocabulary}' is for decoder-only models"):
        LLM(model_of("t5"), speculative_config=config)
    other = {"method": "draft_model", "model": tiny_seq2seq("t5", vocab_size=64)}
    with pytest.raises(CompatibilityError, match="a vocabulary of 64 tokens and the target one"):
        LLM(model_of("t5"), speculative_config=other)
    # Outputs of the same size, and other sources.
    own: dict[str, Any] = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 96}
    target, draft = (tiny_seq2seq("marian", **own, vocab_size=size) for size in (96, 100))
    other = {"method": "draft_model", "model": draft}
    with pytest.raises(
        CompatibilityError, match="reads sources of 100 tokens and the target of 96"
    ):
        LLM(target, speculative_config=other)


def test_the_tokenizer_decides_about_sources(tmp_path: Path) -> None:
    """Embeddings may be padded to different sizes; the same size may be of different tokens."""
    padded = tiny_seq2seq("t5", seed=1, vocab_size=128)
    padded.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = {**config_of("t5", "draft_model", "coupled"), "model": str(tmp_path)}
    outputs = llm_of("t5").generate(PROMPTS, GREEDY, speculative_config=config)
    assert bits(outputs, "draft_model") == bits(plain("t5", GREEDY), "draft_model")
    assert all(output.metrics.num_draft_tokens for output in outputs)
    for method in ("draft_model", "cascade"):
        other = {**config_of("t5", method, "coupled"), "model": str(tmp_path)}
        tiny_tokenizer().save_pretrained(tmp_path)
        text = (tmp_path / "tokenizer.json").read_text()
        swapped = text.replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":')
        assert swapped != text
        (tmp_path / "tokenizer.json").write_text(swapped)
        with pytest.raises(
            CompatibilityError, match=r"same size but different tokens|of 128 tokens"
        ):
            LLM(model_of("t5"), tokenizer=tiny_tokenizer(), speculative_config=other)


def test_copying_between_vocabularies() -> None:
    own: dict[str, Any] = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 96}
    marian = tiny_seq2seq("marian", **own)
    with pytest.raises(CompatibilityError, match="method 'copy' continues the source"):
        LLM(marian, speculative_config={"method": "copy"})
