"""`spec_drafter`: a pass is the model's own over a block of masks; drafts change no output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.drafters.heads.folders import Fault, assert_refused, change_inside, truncate
from tests.spec_drafters import (
    random_spec_drafter,
    random_vocabulary,
    save_spec_drafter,
    spec_drafter_of,
)
from tests.tiny import tiny_model
from tests.tiny_seq2seq import CONTEXT, VOCAB_SIZE, reference_logits, tiny_seq2seq, tiny_source
from tokenleap import LLM, CompatibilityError, ModelError, SamplingParams
from tokenleap.core.tree import chain
from tokenleap.drafters import spec_drafter
from tokenleap.drafters.heads.probe import Probe, look
from tokenleap.drafters.spec_drafter import (
    VOCABULARY_FILE,
    SpecDrafterNotes,
    load_spec_drafter,
    save_vocabulary,
)
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target

MASKS, MASK = 5, VOCAB_SIZE
TEXT = [2, 20, 21, 22, 23, 24, 25, 26]
CLASSES = ("bart", "bart_wide", "mbart", "mbart_wide", "marian", "m2m_100", "pegasus")
GREEDY = SamplingParams(temperature=0, max_tokens=9, logprobs=1)
SOURCES = [list(tiny_source(length=length, seed=length).tokens) for length in (9, 30)]


def own_logits(model: Any, tokens: list[int], count: int) -> Tensor:
    """[count, V + 1] of the model's own forward pass over tokens and masks."""
    size = len(tokens) + count
    sees = torch.ones(size, size, dtype=torch.bool).tril()
    sees[len(tokens) :] = True
    inputs = tiny_source().inputs(model.device, model.dtype)
    mask = torch.zeros(1, 1, size, size).masked_fill(~sees, -torch.inf)
    ids = torch.tensor([[*tokens, *[MASK] * count]])
    logits: Tensor = model(**inputs, decoder_input_ids=ids, decoder_attention_mask=mask).logits[
        0, len(tokens) :
    ]
    return logits


def passes_of(model: PreTrainedModel) -> Passes:
    """With a row 0 that has read the tiny source."""
    found = Passes(network_for(model), CONTEXT, torch.float32, torch.device("cpu"))
    found.add(0)
    found.encode(0, tiny_source())
    return found


@pytest.mark.parametrize("name", CLASSES)
@torch.inference_mode()
def test_a_block_is_the_models_own_pass(name: str) -> None:
    """Over committed tokens, too: the KV of masks is gone when the next block is filled."""
    model, _ = spec_drafter_of(name)
    most = 1e-3 if name.endswith("_wide") else 1e-4  # the native runtime rounds in other places
    passes = passes_of(model)
    for start, stop, count in ((0, 3, MASKS), (3, 4, 2), (4, 8, MASKS)):
        (found,) = passes.fill([0], [TEXT[start:stop]], [count], MASK)
        expected = own_logits(model, TEXT[:stop], count)
        torch.testing.assert_close(found, expected, rtol=0, atol=most)
        passes.commit(0, range(stop - start))
    torch.testing.assert_close(
        passes.verify([0], [chain([30])])[0].scores,
        reference_logits(model, tiny_source(), [*TEXT, 30])[-1:],
        rtol=0,
        atol=most,
    )


@torch.inference_mode()
def test_masks_see_one_another() -> None:
    model, _ = spec_drafter_of()
    passes = passes_of(model)
    (few,) = passes.fill([0], [TEXT], [2], MASK)
    few = few.clone()
    (many,) = passes.fill([0], [TEXT], [MASKS], MASK)
    assert not torch.allclose(few, many[:2], atol=1e-2)
    assert not torch.allclose(many[0], many[1], atol=1e-2)  # each at its own position


@torch.inference_mode()
def test_rows_of_different_lengths() -> None:
    model, _ = spec_drafter_of()
    passes = passes_of(model)
    alone = [passes.fill([0], [TEXT[:n]], [m], MASK)[0].clone() for n, m in ((8, 5), (3, 2))]
    passes.add(1)
    passes.encode(1, tiny_source())
    both = passes.fill([1, 0], [TEXT[:3], TEXT], [2, 5], MASK)
    for found, expected in zip(both, reversed(alone), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# In the engine


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_seq2seq("bart", eos_bias=2.0))


def config(**fields: Any) -> dict[str, Any]:
    model = random_spec_drafter("bart", MASKS)
    return {"method": "spec_drafter", "model": model, "controller": "fixed", **fields}


def outputs_of(llm: LLM, params: SamplingParams = GREEDY, **fields: Any) -> Any:
    return llm.generate(SOURCES, params, speculative_config=config(**fields) if fields else None)


@pytest.mark.parametrize("fields", [{"tree": [3, 2]}, {"tree": "dynamic", "expansion": "top_k"}])
def test_trees(llm: LLM, fields: dict[str, Any]) -> None:
    for rule in ("coupled", "rejection"):
        outputs = outputs_of(llm, acceptance=rule, **fields)
        assert all(output.metrics.drafter_failure is None for output in outputs)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in outputs_of(llm)]


def test_no_draft_is_longer_than_a_block(llm: LLM) -> None:
    outputs = outputs_of(llm, num_speculative_tokens=30)
    drafted = [step.drafted for output in outputs for step in output.trace.steps]
    assert max(map(len, drafted)) == MASKS


@pytest.mark.parametrize("fewer", [False, True])
def test_short_drafts_take_fewer_masks_if_that_was_learnt(
    llm: LLM, fewer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: set[int] = set()
    fill = Passes.fill

    def counted(
        passes: Passes, keys: list[int], pending: Any, num_masks: list[int], mask: int
    ) -> list[Tensor]:
        counts.update(num_masks)
        return fill(passes, keys, pending, num_masks, mask)

    monkeypatch.setattr(Passes, "fill", counted)
    model = random_spec_drafter("bart", MASKS, fewer_masks=fewer)
    for shape in ({"num_speculative_tokens": 2}, {"num_speculative_tokens": 6, "tree": [3, 1]}):
        outputs = outputs_of(llm, model=model, **shape)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in outputs_of(llm)]
        assert all(output.metrics.num_draft_tokens for output in outputs)
    assert max(counts) == (2 if fewer else MASKS)


@pytest.mark.parametrize("name", ["bart", "bart_wide", "marian"])
@torch.inference_mode()
def test_a_draft_vocabulary_leaves_out_the_other_rows(name: str, tmp_path: Path) -> None:
    target = Target(tiny_seq2seq(name))
    found = []
    for size in (None, 30):
        save_spec_drafter(tmp_path, *spec_drafter_of(name, draft_vocab_size=size))
        scorer, passes = load_spec_drafter(tmp_path, target)
        passes.add(0)
        passes.encode(0, tiny_source())
        scorer._masks[0] = MASKS
        found.append(scorer.block([0], [TEXT])[0].clone())
    tokens = random_vocabulary(30)
    torch.testing.assert_close(found[1], found[0][:, tokens], rtol=0, atol=1e-5)
    assert scorer.token_ids is not None
    assert scorer.token_ids.tolist() == tokens.tolist()


@pytest.mark.parametrize("shape", [{}, {"tree": [3, 2]}])
@pytest.mark.parametrize("transitions", [False, True])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_drafts_of_a_draft_vocabulary(
    llm: LLM, rule: str, transitions: bool, shape: dict[str, Any]
) -> None:
    """With drawn drafts, too: then levels are asked for one by one."""
    model = random_spec_drafter("bart", MASKS, transitions=transitions, draft_vocab_size=30)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=9, seed=3)
        outputs = outputs_of(llm, params, model=model, acceptance=rule, **shape)
        assert all(output.metrics.drafter_failure is None for output in outputs)
        if rule == "coupled" or not temperature:
            assert [o.token_ids for o in outputs] == [o.token_ids for o in outputs_of(llm, params)]
        drafted = {t for o in outputs for step in o.trace.steps for t in step.drafted}
        assert drafted
        assert drafted <= set(random_vocabulary(30).tolist())


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        (torch.bfloat16, None, "int8"),
        (torch.bfloat16, "none", None),
        (torch.float32, None, None),
        (torch.float32, "int8", "int8"),
    ],
)
def test_the_drafters_weights_are_rounded(
    dtype: torch.dtype,
    given: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not the target's, so that the output stays the same."""
    asked: list[str | None] = []

    def noted(model: Any, quantization: str | None, runtime: str) -> Any:
        asked.append(quantization)
        return network_for(model, quantization, runtime)

    monkeypatch.setattr(spec_drafter, "network_for", noted)
    target: Any = tiny_seq2seq("bart_wide")
    llm = LLM(target.to(dtype), runtime="native")
    model = random_spec_drafter("bart_wide", MASKS)
    outputs = outputs_of(llm, model=model, draft_quantization=given)
    assert asked == [expected]
    assert [o.token_ids for o in outputs] == [o.token_ids for o in outputs_of(llm)]
    assert all(output.metrics.num_draft_tokens for output in outputs)


def test_the_end_of_the_context() -> None:
    """The drafter has positions for its masks after the longest text; other ones get fewer."""
    model = tiny_seq2seq("bart", max_position_embeddings=40)
    (plain,) = LLM(model).generate([SOURCES[0]], SamplingParams(temperature=0, ignore_eos=True))
    llm = LLM(model, speculative_config=config())
    (output,) = llm.generate([SOURCES[0]], SamplingParams(temperature=0, ignore_eos=True))
    assert output.token_ids == plain.token_ids
    assert output.metrics.drafter_failure is None


# Bad input


def test_a_decoder_only_target_is_refused() -> None:
    with pytest.raises(CompatibilityError, match="'spec_drafter' drafts for encoder-decoders"):
        LLM(tiny_model(), speculative_config=config())


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(CompatibilityError, match="a target with 96 tokens, and this one has 90"):
        LLM(tiny_seq2seq("bart", vocab_size=90), speculative_config=config())


def test_another_target_is_refused(tmp_path: Path) -> None:
    target, other = (Target(tiny_seq2seq("bart", seed=seed)) for seed in (0, 1))
    probe = Probe.of(look(target, TEXT)).note()
    save_spec_drafter(tmp_path, *spec_drafter_of(), **probe)
    load_spec_drafter(tmp_path, target)
    with pytest.raises(CompatibilityError, match="was trained for tiny, and this is another"):
        load_spec_drafter(tmp_path, other)


def test_it_is_no_model_by_itself() -> None:
    with pytest.raises(ModelError, match="holds a Spec-Drafter, which fills masks"):
        LLM(random_spec_drafter("bart", MASKS))


def test_a_draft_vocabulary_that_is_damaged(tmp_path: Path) -> None:
    save_spec_drafter(tmp_path, *spec_drafter_of(draft_vocab_size=30))
    target = Target(tiny_seq2seq("bart"))
    save_vocabulary(random_vocabulary(29), tmp_path)
    with pytest.raises(ModelError, match="'d2t' does not map 30 draft tokens"):
        load_spec_drafter(tmp_path, target)
    (tmp_path / VOCABULARY_FILE).unlink()
    with pytest.raises(ModelError, match=r"draft_vocabulary\.safetensors does not exist"):
        load_spec_drafter(tmp_path, target)


FAULTS: dict[str, Fault] = {
    "another model": (
        lambda f: tiny_seq2seq("bart").save_pretrained(f),
        "does not describe a Spec-Drafter",
    ),
    "truncated": (truncate, "truncated or damaged"),
    "no masks": (
        lambda f: change_inside(f, "tokenleap", spec_drafter={"num_masks": 0}),
        "config.json",
    ),
    "no such mask": (
        lambda f: change_inside(
            f, "tokenleap", spec_drafter=SpecDrafterNotes(5, 97, 96).note()["spec_drafter"]
        ),
        "has no token 97",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_folder(fault: str, tmp_path: Path) -> None:
    save_spec_drafter(tmp_path, *spec_drafter_of())
    target = Target(tiny_seq2seq("bart"))
    assert_refused(tmp_path, FAULTS[fault], lambda folder: load_spec_drafter(folder, target))


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        load_spec_drafter(tmp_path / "none", Target(tiny_seq2seq("bart")))
