"""A Spec-Drafter that reads what the target's encoder made of the source."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.drafting import drafter_of, request_of
from tests.engine.serving import assert_empty
from tests.spec_drafters import random_spec_drafter, save_spec_drafter, spec_drafter_of
from tests.tiny_seq2seq import (
    TEXT,
    VOCAB_SIZE,
    tiny_seq2seq,
    tiny_source,
)
from tokenleap import LLM, CompatibilityError, SamplingParams, models
from tokenleap.core.references import Source
from tokenleap.drafters.spec_drafter import load_spec_drafter
from tokenleap.engine.jobs import JobMaker
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.target import Target
from tokenleap.training.distill import write_lm

MASKS, MASK = 5, VOCAB_SIZE
GREEDY = SamplingParams(temperature=0, max_tokens=9, logprobs=1)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=9, logprobs=1)
SOURCES = [list(tiny_source(length=length, seed=length).tokens) for length in (9, 30, 140)]


def config(name: str = "bart", **fields: Any) -> dict[str, Any]:
    model = random_spec_drafter(name, MASKS, "target")
    return {"method": "spec_drafter", "model": model, "controller": "fixed", **fields}


def bits(outputs: list[Any]) -> list[Any]:
    return [(output.token_ids, output.finish_reason, output.logprobs) for output in outputs]


@pytest.mark.parametrize("name", TEXT)
@torch.inference_mode()
def test_a_block_reads_the_targets_encoder(name: str) -> None:
    """It is the drafter's own decoder over the target's encoder, in Transformers."""
    model = tiny_seq2seq(name)
    target = Target(model)
    folder = random_spec_drafter(name, MASKS, "target")
    scorer, passes = load_spec_drafter(folder, target)
    request = request_of((2, 20, 21), GREEDY, VOCAB_SIZE, source=tiny_source(length=20))
    assert request.source is not None
    target.add(request.key)
    target.encode(request.key, request.source)
    (found,) = scorer.block([request.key], [scorer.pending(request)])

    lm: Any = models.load_model(Path(folder), torch.float32, torch.device("cpu"), fills_masks=True)
    reader: Any = model
    encoded = reader.get_encoder()(**request.source.inputs(model.device, model.dtype))
    size = 3 + MASKS
    sees = torch.ones(size, size, dtype=torch.bool).tril()
    sees[3:] = True
    expected = lm(
        encoder_outputs=(encoded.last_hidden_state,),
        decoder_input_ids=torch.tensor([[2, 20, 21, *[MASK] * MASKS]]),
        decoder_attention_mask=torch.zeros(1, 1, size, size).masked_fill(~sees, -torch.inf),
    ).logits[0, 3:, :VOCAB_SIZE]
    most = 1e-3 if name.endswith("_wide") else 1e-4  # the native encoder rounds in other places
    torch.testing.assert_close(found, expected, rtol=0, atol=most)
    assert passes.num_rows == 1


# In the engine


@pytest.mark.parametrize("name", ["mbart", "t5"])
def test_the_output_is_that_of_plain_decoding(name: str) -> None:
    llm = LLM(tiny_seq2seq(name, eos_bias=2.0 if name == "mbart" else 0.0))
    for params in (GREEDY, SEEDED):
        outputs = llm.generate(SOURCES, params, speculative_config=config(name))
        assert bits(outputs) == bits(llm.generate(SOURCES, params))
        assert all(output.metrics.drafter_failure is None for output in outputs)
        assert all(output.metrics.num_draft_tokens for output in outputs)


def test_nothing_is_read_twice(read: Counter[Source]) -> None:
    """Neither by the drafter, nor for a second request with the same source, nor when it waits."""
    model = tiny_seq2seq("bart")
    plain = bits(LLM(model).generate(SOURCES + SOURCES[:1], GREEDY))
    llm = LLM(model, speculative_config=config(), max_num_seqs=2)
    read.clear()
    outputs = llm.generate(SOURCES + SOURCES[:1], GREEDY)
    assert bits(outputs) == plain
    assert read == dict.fromkeys(map(Source, map(tuple, SOURCES)), 1)
    assert all(output.metrics.num_draft_tokens for output in outputs)
    assert_empty(llm)


def test_sources_that_were_read_before_the_drafter_came(read: Counter[Source]) -> None:
    """The cache has no output of the encoder: the drafter lets it run once more."""
    llm = LLM(tiny_seq2seq("bart"))
    plain = bits(llm.generate(SOURCES, GREEDY))
    read.clear()
    outputs = llm.generate(SOURCES, GREEDY, speculative_config=config())
    assert bits(outputs) == plain
    assert [read[Source(tuple(tokens))] for tokens in SOURCES] == [1, 1, 1]


def test_memory_is_counted(read: Counter[Source]) -> None:
    """The kept encoder output belongs to the row; a preempted request is computed again."""
    model = tiny_seq2seq("bart")
    target, source = Target(model), Source(tuple(SOURCES[1]))
    before = target.state_bytes(source)
    _loaded = load_spec_drafter(random_spec_drafter("bart", MASKS, "target"), target)
    assert target.state_bytes(source) == before + 4 * 32 * len(source)
    target.add(0)
    target.encode(0, source)
    assert target._slab.state_bytes == target.state_bytes(source)

    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    sources = [list(tiny_source(seed=seed).tokens) for seed in range(4)]
    plain = bits(LLM(model).generate(sources, long))
    llm = LLM(model, speculative_config=config(), enable_prefix_caching=False)
    target = llm.engine.target
    row, state = KEY_BLOCK * target.cell_bytes, target.state_bytes(Source(tuple(sources[0])))
    target.limit_memory(2 * (row + state))
    read.clear()
    outputs = llm.generate(sources, long)
    assert bits(outputs) == plain
    assert all(output.metrics.num_draft_tokens for output in outputs)
    assert set(read.values()) == {1}


def test_a_preempted_request_goes_on_drafting() -> None:
    model = tiny_seq2seq("bart")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = bits(LLM(model).generate(SOURCES, params))
    llm = LLM(model, speculative_config=config(), enable_prefix_caching=False)
    engine = llm.engine
    ids = [engine.add_request(source, params) for source in SOURCES]
    engine.step()
    scheduler: Any = engine._scheduler
    scheduler._preempt(scheduler._running[-1])
    drafter: Any = drafter_of(llm)
    drafter._scorer._free(scheduler._waiting[0].key)  # and its drafter lost its row, too
    found: dict[Any, Any] = {}
    while len(found) < len(ids):
        found |= {c.request_id: c.output for c in engine.step() if c.output is not None}
    assert bits([found[each] for each in ids]) == plain
    last = found[ids[-1]]
    assert last.metrics.preemptions == 1
    assert last.metrics.drafter_failure is None
    assert last.trace.steps[5].drafted


def test_beams_and_cascades() -> None:
    """The inner drafter of a cascade reads the encoder of the middle model."""
    llm = LLM(tiny_seq2seq("bart", eos_bias=2.0))
    inner = {"method": "spec_drafter", "model": config()["model"]}
    middle = tiny_seq2seq("bart", seed=1, encoder_layers=1)
    cascade = {"method": "cascade", "model": middle, "drafter": inner, "controller": "fixed"}
    beams = SamplingParams(temperature=0, max_tokens=9, beam_width=3)
    for params, given in ((beams, config()), (GREEDY, cascade)):
        outputs = llm.generate(SOURCES, params, speculative_config=given)
        plain = llm.generate(SOURCES, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert all(output.metrics.drafter_failure is None for output in outputs)
        assert all(output.metrics.num_draft_tokens for output in outputs)


@pytest.mark.parametrize("encoder", ["own", "target"])
@pytest.mark.parametrize(("fewer_masks", "transitions"), [(True, False), (True, True)])
def test_beams_with_all_that_was_learnt(
    encoder: Literal["own", "target"], fewer_masks: bool, transitions: bool
) -> None:
    llm = LLM(tiny_seq2seq("bart", eos_bias=2.0))
    model = random_spec_drafter(
        "bart", MASKS, encoder, fewer_masks=fewer_masks, transitions=transitions
    )
    given = {"method": "spec_drafter", "model": model, "controller": "fixed"}
    beams = SamplingParams(temperature=0, max_tokens=9, beam_width=3)
    outputs = llm.generate(SOURCES, beams, speculative_config=given)
    plain = llm.generate(SOURCES, beams)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert all(output.metrics.drafter_failure is None for output in outputs)
    assert all(output.metrics.num_draft_tokens for output in outputs)


def test_an_encoder_of_another_width_is_refused(tmp_path: Path) -> None:
    save_spec_drafter(tmp_path, *spec_drafter_of(encoder="target"))
    target = Target(tiny_seq2seq("bart", d_model=64))
    with pytest.raises(CompatibilityError, match=r"encoders of width 32, and .* has 64"):
        load_spec_drafter(tmp_path, target)


def test_a_folder_from_before(tmp_path: Path) -> None:
    """Notes without an encoder say that the drafter has its own."""
    lm, notes = spec_drafter_of()
    note = notes.note()
    del note["spec_drafter"]["encoder"]
    write_lm(lm, "tiny", tmp_path, note)
    target = Target(tiny_seq2seq("bart"))
    load_spec_drafter(tmp_path, target)
    assert target.source_network is not None
    assert not target.source_network.keeps_encoded


def test_nothing_is_kept_once_the_drafter_is_gone(tmp_path: Path) -> None:
    save_spec_drafter(tmp_path, *spec_drafter_of(encoder="target"))
    target = Target(tiny_seq2seq("bart"))
    network = target.source_network
    assert network is not None
    source, kept = tiny_source(), [network.keeps_encoded]
    sizes = [network.state_bytes(source)]
    loaded = load_spec_drafter(tmp_path, target)
    kept.append(network.keeps_encoded)
    sizes.append(network.state_bytes(source))
    del loaded
    gc.collect()
    kept.append(network.keeps_encoded)
    assert kept == [False, True, False]
    assert sizes[1] > sizes[0] == network.state_bytes(source)


def test_a_request_is_checked_with_the_drafter_that_it_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source in its row counts when the request is made."""
    kept = list[bool]()

    def make(self: JobMaker, *args: Any) -> Any:
        assert self._target.source_network is not None
        kept.append(self._target.source_network.keeps_encoded)
        return original(self, *args)

    original = JobMaker._requests
    monkeypatch.setattr(JobMaker, "_requests", make)
    llm = LLM(tiny_seq2seq("bart"))
    llm.generate(SOURCES[:1], GREEDY, speculative_config=config())
    assert kept == [True]
