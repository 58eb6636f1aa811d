"""`pass`: tokens after the vocabulary have learnt embeddings, and nothing else changes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.drafters.heads.folders import (
    FILE_FAULTS,
    Fault,
    assert_refused,
    change_config,
    change_tensors,
    load_head,
)
from tests.drafting import drafter_of
from tests.heads import random_pass_tokens
from tests.matrix import PROMPTS, speculative_config, takes_any_tree, tiny_llm
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model, tiny_tokenizer
from tokenleap import LLM, CompatibilityError, SamplingParams, TokenleapError
from tokenleap.control import Budget
from tokenleap.core.acceptance import RULES
from tokenleap.core.distribution import Distribution
from tokenleap.core.tree import TokenTree, chain
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.probe import Probe, look
from tokenleap.drafters.padding import PassDrafter, read_pass_tokens, write_pass_tokens
from tokenleap.request import Request
from tokenleap.runtime.target import Target

TEXT = [5, 3, 8, 1, 9, 2]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
LOOK_AHEAD = (VOCAB_SIZE, VOCAB_SIZE + 1)


def rows_of(count: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 64, generator=generator)


# Networks


def logits_behind(target: Target, tree: TokenTree) -> Tensor:
    """[n, V] of a tree after a text."""
    target.add(0)
    target.prefill(0, TEXT[:-1])
    with torch.inference_mode():
        (output,) = target.verify([0], [tree])
        found = output.scores.float().clone()
    target.remove(0)
    return found


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """[n, V] of Transformers, where these embeddings follow the text's own."""
    embed: Any = model.get_input_embeddings()
    embeddings = torch.cat([embed(torch.tensor([TEXT])), rows[None]], dim=1)
    found: Tensor = model(inputs_embeds=embeddings).logits[0, len(TEXT) - 1 :]
    return found


KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "native": ({"head_dim": 32}, "native", "native"),
    "lean": ({}, "torch", "lean"),
    "GPT-2": ({"architecture": "gpt2"}, "torch", "module"),
    "Gemma, which scales embeddings": ({"architecture": "gemma"}, "torch", "module"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_look_ahead_tokens_are_embedded_by_their_rows(kind: str) -> None:
    """Twice two of them; the nodes beside them keep their bits."""
    fields, runtime, name = KINDS[kind]
    model = tiny_model(**fields)
    target = Target(model, runtime=runtime)
    assert target.network.name == name
    plain = logits_behind(target, chain([TEXT[-1], 7]))
    rows = rows_of()
    assert target.network.extend(rows[:2]) == VOCAB_SIZE
    assert target.network.extend(rows[2:]) == VOCAB_SIZE + 2
    found = logits_behind(target, chain([TEXT[-1], *range(VOCAB_SIZE, VOCAB_SIZE + 4)]))
    torch.testing.assert_close(found, expected_logits(model, rows), atol=1e-3, rtol=1e-3)
    assert torch.equal(logits_behind(target, chain([TEXT[-1], 7])), plain)
    tree = TokenTree((TEXT[-1], 7, *LOOK_AHEAD, *LOOK_AHEAD), (-1, 0, 0, 2, 1, 4))
    beside = logits_behind(target, tree)
    torch.testing.assert_close(beside[:2], plain, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(beside[2:4], found[1:3], atol=1e-3, rtol=1e-3)
    if name == "native":
        assert torch.equal(beside[:2], plain)
        assert torch.equal(beside[2:4], found[1:3])


def test_the_target_does_not_write_them() -> None:
    for p in (
        Distribution(torch.full((VOCAB_SIZE,), 1 / VOCAB_SIZE)),
        Distribution.one_hot(3),
        Distribution(torch.tensor([0.5, 0.5]), torch.tensor([3, VOCAB_SIZE - 1])),
    ):
        assert p.prob(VOCAB_SIZE) == 0


@pytest.mark.parametrize("rule", [rule for rule in RULES if takes_any_tree(rule)])
def test_they_are_never_accepted(rule: str) -> None:
    """Whatever a lossy rule lets through."""
    llm = tiny_llm(tiny_model(), "pass", rule, gamma=15)
    for temperature in (0, 1.5):
        params = SamplingParams(temperature=temperature, seed=2, max_tokens=40)
        for output in llm.generate(PROMPTS, params):
            assert output.metrics.drafter_failure is None
            assert max(output.token_ids) < VOCAB_SIZE
            assert any(token >= VOCAB_SIZE for step in output.trace for token in step.drafted)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"structured_outputs": {"regex": "[a-z ]{200}"}},
        {"bad_words": ["a", "bc"]},
    ],
)
def test_nothing_that_shapes_p_sees_them(fields: dict[str, Any]) -> None:
    """A trace computes p after them, too; the output stays that of plain decoding."""
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=12, **fields)
    config = speculative_config("pass", "coupled", 15)
    llm = LLM(tiny_model(eos_token_id=95), tokenizer=tiny_tokenizer(), speculative_config=config)
    plain = llm.generate(PROMPTS, params, speculative_config={"method": "none"})
    drafted = llm.generate(PROMPTS, params, trace=True)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert {each.finish_reason for each in drafted} <= {"length", "stop"}
    assert any(max(step.drafted) >= VOCAB_SIZE for each in drafted for step in each.trace)


# The drafter


def request_of(text: list[int]) -> Request:
    return Request(text, GREEDY, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)


def test_every_place_of_a_block_has_its_own_token() -> None:
    drafter, request = PassDrafter(100, 2), request_of([1, 2, 3])
    (draft,) = drafter.propose([request], [Budget(8, 8)])
    assert draft.tree.tokens == (3, 100, 101)
    drafter._guesses[request.key] = (3, [5, 6])
    (draft,) = drafter.propose([request], [Budget(8, 8)])
    assert draft.tree.tokens == (3, 5, 6, 100, 101, 100, 101, 100, 101)
    assert draft.tree.parents == (-1, 0, 1, 0, 3, 1, 5, 2, 7)
    (draft,) = drafter.propose([request], [Budget(200, 200)])
    assert draft.tree.num_drafted == 2 + 3 * 2  # no longer than there are embeddings


def test_the_next_draft_is_what_the_model_says_there() -> None:
    model = tiny_model()
    llm = tiny_llm(model, "pass", gamma=8)
    request = request_of(TEXT)
    llm.engine._scheduler.add(request)
    llm.engine._scheduler.step()
    (draft,) = drafter_of(llm).propose([request], [Budget(8, 8)])
    target = Target(model)
    rows = read_pass_tokens(random_pass_tokens(), target).float()
    guesses = expected_logits(model, rows[:2]).argmax(-1)[1:]
    assert draft.tree.tokens[1:3] == tuple(guesses.tolist())
    llm.engine._scheduler.abort([request])


def test_several_files_serve_one_target(tmp_path: Path) -> None:
    """Each has tokens of its own, also where drafts are merged."""
    model = tiny_model(head_dim=32)
    write_pass_tokens(tmp_path, rows_of(3, seed=9), VOCAB_SIZE, Verifier("tiny"), {})
    first = {"method": "pass", "model": random_pass_tokens()}
    second = {"method": "pass", "model": str(tmp_path)}
    llm = LLM(model)
    plain = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    both = {"method": "ensemble", "drafters": [first, second], "num_speculative_tokens": 16}
    drafted: list[set[int]] = []
    for config in (first, second, both):
        config = {**config, "controller": "fixed"}
        outputs = llm.generate(PROMPTS, GREEDY, speculative_config=config)
        assert [output.token_ids for output in outputs] == plain
        assert all(output.metrics.drafter_failure is None for output in outputs)
        drafted.append({t for o in outputs for s in o.trace for t in s.drafted if t >= VOCAB_SIZE})
    assert drafted[0] == set(LOOK_AHEAD)
    assert drafted[1] == {VOCAB_SIZE + 4, VOCAB_SIZE + 5}
    assert len(drafted[2]) > 2


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    verifier = Verifier("tiny", ("LlamaForCausalLM",), 2)
    write_pass_tokens(tmp_path / "head", rows_of(), VOCAB_SIZE, verifier, {"seed": 3})
    return tmp_path / "head"


load = partial(load_head, method="pass")


def test_what_is_written_is_read(folder: Path) -> None:
    found = read_pass_tokens(folder, Target(tiny_model()))
    assert torch.equal(found, rows_of().bfloat16())
    fields = json.loads((folder / "config.json").read_text())
    assert fields["tokenleap"]["seed"] == 3
    assert fields["tokenleap"]["verifier"]["name_or_path"] == "tiny"


FAULTS: dict[str, Fault] = {
    **FILE_FAULTS,
    "another kind": (
        lambda f: change_config(f, model_type="tokenleap_head"),
        "does not describe look-ahead embeddings",
    ),
    "no sizes": (lambda f: change_config(f, config={}), "hidden_size: .*required"),
    "too many": (
        lambda f: change_config(
            f, config={"hidden_size": 64, "vocab_size": VOCAB_SIZE, "num_tokens": 16}
        ),
        "num_tokens: .*less than or equal to 15",
    ),
    "fewer than it says": (
        lambda f: change_tensors(f, lambda t: t.update(look_ahead=torch.zeros(3, 64))),
        r"'look_ahead' has shape \[3, 64\], and config.json says \[4, 64\]",
    ),
    "a NaN": (
        lambda f: change_tensors(f, lambda t: t["look_ahead"].fill_(torch.nan)),
        "not finite",
    ),
    "no target": (lambda f: change_config(f, tokenleap={}), "verifier: .*required"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(folder: Path, fault: str) -> None:
    assert_refused(folder, FAULTS[fault], load)


@pytest.mark.parametrize(
    "other", [{"vocab_size": 100}, {"hidden_size": 32}, {"num_hidden_layers": 3}], ids=str
)
def test_another_target_is_refused(folder: Path, other: dict[str, Any]) -> None:
    with pytest.raises(CompatibilityError, match="trained for tiny with"):
        load(folder, **other)


def test_another_target_of_the_same_sizes_is_refused(tmp_path: Path) -> None:
    """By what it says about a short text, which the folder records."""
    target = Target(tiny_model())
    notes = Probe.of(look(target, TEXT)).note()
    write_pass_tokens(tmp_path, rows_of(), VOCAB_SIZE, Verifier("tiny"), notes)
    load(tmp_path)
    with pytest.raises(CompatibilityError, match="trained for tiny, and this is another model"):
        load(tmp_path, seed=1)


def test_a_folder_is_needed() -> None:
    with pytest.raises(TokenleapError, match="give the folder of a trained head"):
        LLM(tiny_model(), speculative_config={"method": "pass", "model": "nowhere"})
