"""An `LLM` drafts for another one: its weights are in memory once, and both go on serving."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch

from tests.drafting import drafter_of
from tests.tiny import tiny_model
from tokenleap import LLM, CompatibilityError, ConfigError, SamplingParams, models
from tokenleap.config import SpeculativeConfig
from tokenleap.drafters.vocabulary import DraftModel
from tokenleap.engine.jobs import JobSpec

pytestmark = pytest.mark.usefixtures("native_library")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[3, 5, 7, 3, 5, 7], [11]]


def small(**options: Any) -> LLM:
    return LLM(tiny_model(head_dim=32, seed=1), **options)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)]


def addresses(llm: Any) -> set[int]:
    return {tensor.data_ptr() for tensor in llm.engine.target.network._kept}


@pytest.mark.parametrize("method", ["draft_model", "cascade"])
def test_it_drafts_as_a_model_of_its_own_would(method: str) -> None:
    config = {"method": method, "controller": "fixed", "num_speculative_tokens": 3}
    draft, target = small(), tiny_model(head_dim=32)
    if method == "cascade":
        config["drafter"] = {"method": "ngram"}
    shared = LLM(target, speculative_config={**config, "model": draft})
    apart = LLM(target, speculative_config={**config, "model": tiny_model(head_dim=32, seed=1)})
    found, expected = (llm.generate(PROMPTS, GREEDY) for llm in (shared, apart))
    for one, other in zip(found, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.metrics.num_accepted_tokens == other.metrics.num_accepted_tokens
        assert one.metrics.num_draft_tokens > 0


def test_weights_are_in_memory_once_and_both_serve_at_once() -> None:
    draft = small()
    expected = tokens(draft)
    llm = LLM(tiny_model(head_dim=32), speculative_config={"model": draft, "controller": "fixed"})
    drafter: Any = drafter_of(llm)
    network = drafter.scorer._model.network
    assert {tensor.data_ptr() for tensor in network._kept} == addresses(draft)
    greedy = tokens(llm)
    found: list[list[list[int]]] = []
    threads = [Thread(target=lambda one=one: found.append(tokens(one))) for one in (llm, draft)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([greedy, expected])


def test_it_keeps_its_own_quantization() -> None:
    draft = small(quantization="int8")
    llm = LLM(tiny_model(head_dim=32), speculative_config={"model": draft})
    drafter: Any = drafter_of(llm)
    assert drafter.scorer._model.quantization == "int8"
    assert llm.engine.target.quantization is None


def test_for_one_request() -> None:
    draft, llm = small(), LLM(tiny_model(head_dim=32))
    config = {"model": draft, "controller": "fixed"}
    (out,) = llm.generate(PROMPTS[:1], GREEDY, speculative_config=config)
    assert out.metrics.num_draft_tokens > 0
    assert [list(out.outputs[0].token_ids)] == tokens(llm)[:1]


def test_an_llm_of_a_loaded_module_cannot_learn() -> None:
    with pytest.raises(CompatibilityError, match="an LLM of a loaded module"):
        LLM(tiny_model(head_dim=32), speculative_config={"model": small(), "online": {}})


def test_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = small()
    lent = draft.as_draft_model()
    lent.model.device = torch.device("cuda", 0)

    def lend() -> DraftModel:
        return lent

    monkeypatch.setattr(draft, "as_draft_model", lend)
    with pytest.raises(CompatibilityError, match="on cuda:0 and the target is on cpu"):
        LLM(tiny_model(head_dim=32), speculative_config={"model": draft})


def test_a_head_is_no_llm() -> None:
    with pytest.raises(ConfigError, match="set 'model' to its folder"):
        LLM(tiny_model(head_dim=32), speculative_config={"method": "eagle", "model": small()})


def test_two_modules_are_not_in_memory_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's is gone, and its weights packed, when the draft model's is loaded."""
    folders = [tmp_path / "target", tmp_path / "draft"]
    for seed, folder in enumerate(folders):
        tiny_model(head_dim=32, seed=seed).save_pretrained(folder)
    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []
    load = models.load_model

    def watched(*args: Any) -> Any:
        gc.collect()
        alive.append(sum(reference() is not None for reference in loaded))
        module = load(*args)
        loaded.append(weakref.ref(module))
        return module

    monkeypatch.setattr(models, "load_model", watched)
    llm = LLM(folders[0], dtype="float32", speculative_config={"model": folders[1]})
    assert alive == [0, 0]
    assert llm.engine.target.vocabulary_weights is not None  # loaded again, as it is not tied
    assert alive[:2] == [0, 0]


def test_a_model_is_lent_in_its_own_turn() -> None:
    """A pass of another thread may have hooks on the module that is copied."""
    draft, began, ends, lent = small(), Event(), Event(), list[object]()

    def pass_of_another() -> None:
        began.set()
        ends.wait(60)

    serving = Thread(target=lambda: draft.engine.worker.call(pass_of_another))
    serving.start()
    began.wait(60)
    lending = Thread(target=lambda: lent.append(draft.as_draft_model()))
    lending.start()
    lending.join(0.05)
    waited = not lent
    ends.set()
    for thread in (serving, lending):
        thread.join(60)
    assert waited
    assert len(lent) == 1
    draft.engine.worker.call(lambda: lent.append(draft.as_draft_model()))  # its own draft model
    assert len(lent) == 2


@pytest.mark.parametrize("ahead", [False, True], ids=["llm", "async"])
def test_two_may_lend_to_each_other_at_once(
    monkeypatch: pytest.MonkeyPatch, *, ahead: bool
) -> None:
    """Both threads ask for the other's model before either gets one; neither has its turn then."""
    llms, both, found = (small(), small()), Barrier(2), dict[int, list[int]]()
    (expected, _) = tokens(llms[0])
    lend = LLM.as_draft_model

    def lend_together(llm: LLM) -> DraftModel:
        both.wait(60)
        return lend(llm)

    def generate(index: int) -> None:
        config = {
            "method": "ensemble",
            "drafters": [{"method": "ngram"}, {"model": llms[1 - index]}],
        }
        if ahead:
            engine = llms[index].engine
            engine.jobs([JobSpec([1], None, config)])
        (out,) = llms[index].generate(PROMPTS[:1], GREEDY, speculative_config=config)
        found[index] = list(out.token_ids)

    monkeypatch.setattr(LLM, "as_draft_model", lend_together)
    threads = [Thread(target=generate, args=(index,), daemon=True) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {0: expected, 1: expected}


def test_a_copy_of_the_factory_takes_what_was_lent_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, draft = LLM(tiny_model(head_dim=32)), small()
    strategies = llm.engine.strategies.sharing_models()
    config = SpeculativeConfig.parse({"model": draft})
    lent = strategies.lent_to(config)
    ((_, lent_model),) = lent
    monkeypatch.setattr(draft, "as_draft_model", lambda: pytest.fail("it waits for another turn"))
    strategy = strategies.strategy(config, lent)
    assert strategy is not None
    drafter: Any = strategy.drafter
    assert drafter.scorer._model is lent_model.model
