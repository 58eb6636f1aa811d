"""Draft models within `kv_cache_memory`: what they may take, and who goes without drafts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.matrix import SPECULATIVE, speculative_config
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer
from tokenleap import LLM, ConfigError, RequestOutput, SamplingParams
from tokenleap.control import Budget
from tokenleap.drafters.model_drafter import ModelDrafter
from tokenleap.drafters.models import FIRST_PASS, OwnModel, rows_that_fit
from tokenleap.drafters.shapes import TreeOptions
from tokenleap.engine.scheduler import KVBudget
from tokenleap.request import Request
from tokenleap.runtime import kv_slab as slab_module
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.target import Target

CONTEXT = 3 * KEY_BLOCK
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "dynamic": {"method": "draft_model", "tree": "dynamic", "num_speculative_tokens": 8},
    "cascade": {"drafter": {"method": "ngram", "prompt_lookup_min": 1}},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    """One layer of one head: an eighth of the target's KV."""
    return tiny_model(
        seed=1,
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
    )


def config_of(name: str, model: PreTrainedModel) -> dict[str, Any]:
    """Drafts at every step, as far as there is room."""
    return {"method": name, "controller": "fixed", **METHODS[name], "model": model}


def llm_of(model: PreTrainedModel, draft: PreTrainedModel, blocks: int, **fields: Any) -> LLM:
    """With room for this many key blocks of KV in each of the two models."""
    each = Target(model).cell_bytes + Target(draft).cell_bytes
    config = fields.pop("config", config_of("draft_model", draft))
    return LLM(
        model,
        speculative_config=config,
        kv_cache_memory=blocks * KEY_BLOCK * each,
        enable_prefix_caching=False,
        **fields,
    )


def prompt_of(length: int, start: int = 3) -> list[int]:
    return [(start + 5 * i) % VOCAB_SIZE for i in range(length)]


def plain(model: PreTrainedModel, prompts: list[list[int]]) -> list[Any]:
    outputs = LLM(model, enable_prefix_caching=False).generate(prompts, GREEDY)
    return [(output.token_ids, output.logprobs) for output in outputs]


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in outputs]


def draft_slab(llm: LLM) -> KVSlab:
    drafter: Any = llm.engine._speculation.default.drafter
    owner = drafter._scorer if hasattr(drafter, "_scorer") else drafter
    slab: KVSlab = owner._model._slab
    return slab


def test_the_memory_is_shared_in_proportion(model: PreTrainedModel, small: PreTrainedModel) -> None:
    target, draft = Target(model), Target(small)
    assert target.cell_bytes == 8 * draft.cell_bytes
    llm = llm_of(model, small, 4)
    assert llm.engine.target._slab.limit == draft_slab(llm).limit == 4 * KEY_BLOCK
    assert (
        LLM(model, kv_cache_memory="1MiB").engine.target._slab.limit == 2**20 // target.cell_bytes
    )


@pytest.mark.parametrize("method", SPECULATIVE)
def test_every_method_drafts_within_a_limit(method: str) -> None:
    """Those with models of their own know what a token takes before the first request."""
    config = speculative_config(method)
    llm = LLM(
        tiny_model(),
        tokenizer=tiny_tokenizer(),
        speculative_config=config,
        kv_cache_memory="64MiB",
    )
    slabs = [each() for each in llm.engine._kv_budget._slabs]
    assert len({slab.limit for slab in slabs if slab is not None}) == 1
    (output,) = llm.generate([[3, 5, 3, 5, 3]], GREEDY)
    assert output.metrics.drafter_failure is None
    (expected,) = LLM(tiny_model()).generate([[3, 5, 3, 5, 3]], GREEDY)
    assert output.token_ids == expected.token_ids


@pytest.mark.parametrize("name", METHODS)
def test_both_slabs_stay_inside(
    model: PreTrainedModel, small: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that come, grow over a key block, are preempted and go."""
    prompts = [prompt_of(length, start=length) for length in (500, 3, 505, 700, 9, 502)]
    expected = plain(model, prompts)
    llm = llm_of(model, small, 3, config=config_of(name, small))
    slabs = (llm.engine.target._slab, draft_slab(llm))
    sizes: list[int] = []
    original = KVSlab._resize

    def resized(slab: KVSlab, rows: int, positions: int) -> None:
        original(slab, rows, positions)
        if slab in slabs:
            sizes.append(slab.cells)

    monkeypatch.setattr(KVSlab, "_resize", resized)
    outputs = llm.generate(prompts, GREEDY)
    if name in ("draft_model", "cascade"):
        assert bits(outputs) == expected
    assert [output.token_ids for output in outputs] == [tokens for tokens, _ in expected]
    assert max(sizes) <= 3 * KEY_BLOCK
    assert all(output.metrics.drafter_failure is None for output in outputs)
    assert sum(output.metrics.num_drafts for output in outputs) > 0
    assert not slabs[0].lengths
    assert not slabs[1].lengths


@pytest.mark.parametrize("name", ["draft_model", "cascade"])
def test_the_youngest_goes_without_drafts(
    model: PreTrainedModel, small: PreTrainedModel, name: str
) -> None:
    """The target has room for both, and the draft model for one until that one has ended."""
    prompts = [prompt_of(20), prompt_of(20, start=4)]
    expected = plain(model, prompts)
    llm = llm_of(model, small, 2, config=config_of(name, small))
    draft_slab(llm).limit = KEY_BLOCK
    params = [GREEDY.model_copy(update={"max_tokens": length}) for length in (6, 24)]
    first, second = llm.generate(prompts, params)
    assert bits([second]) == expected[1:]
    assert first.token_ids == expected[0][0][:6]
    steps = list(second.trace)
    assert not any(step.drafted for step in steps[:2])
    assert any(step.drafted for step in steps[6:])
    assert all(step.drafted for step in list(first.trace)[:2])


def test_a_preempted_request_leaves_its_row_to_those_that_run(
    model: PreTrainedModel, small: PreTrainedModel
) -> None:
    """Two rows fit as long as both are within one key block; so it is in both models."""
    prompts = [prompt_of(KEY_BLOCK - 20, start=start) for start in (1, 2)]
    params = GREEDY.model_copy(update={"max_tokens": 60})
    llm = llm_of(model, small, 2)
    first, second = llm.generate(prompts, params)
    assert second.metrics.preemptions == 1
    steps = list(first.trace)
    ends = list(accumulate((step.committed for step in steps), initial=len(prompts[0])))
    late = [step for step, end in zip(steps, ends, strict=False) if end > KEY_BLOCK + 1]
    assert len(late) > 3
    assert all(step.drafted for step in late[:-1])


def test_a_request_too_long_for_the_draft_model_is_no_hindrance(
    model: PreTrainedModel, small: PreTrainedModel
) -> None:
    prompts = [prompt_of(700), prompt_of(20)]
    expected = plain(model, prompts)
    llm = llm_of(model, small, 4)
    draft_slab(llm).limit = KEY_BLOCK
    long, short = llm.generate(prompts, GREEDY)
    assert bits([long, short]) == expected
    assert long.metrics.num_drafts == 0
    assert short.metrics.num_drafts > 0
    assert long.metrics.drafter_failure is None


def test_a_pass_that_does_not_fit_after_all(
    model: PreTrainedModel, small: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the reckoning is wrong the step is done without drafts, and the next one drafts."""
    prompts = [prompt_of(KEY_BLOCK - 12)]
    expected = plain(model, prompts)
    llm = llm_of(model, small, 2)
    draft_slab(llm).limit = KEY_BLOCK
    monkeypatch.setattr("tokenleap.drafters.models.rows_that_fit", lambda _, w, *__: (set(w), []))
    monkeypatch.setattr("tokenleap.drafters.models.OwnModel.room", lambda *_: 100)
    (output,) = llm.generate(prompts, GREEDY)
    assert bits([output]) == expected
    assert output.metrics.drafter_failure is None
    steps = list(output.trace)
    assert steps[0].drafted
    assert not steps[-2].drafted
    assert not draft_slab(llm).lengths


@pytest.mark.parametrize(
    "config",
    [
        {"method": "draft_model", "num_speculative_tokens": 8},
        {"method": "draft_model", "tree": [2, 2, 2, 2, 2]},
        {"method": "draft_model", "tree": "dynamic", "tree_top_k": 8, "num_speculative_tokens": 62},
        {
            "method": "cascade",
            "drafter": {"method": "random"},
            "inner_num_speculative_tokens": 8,
        },
    ],
    ids=["chain", "tree", "dynamic", "cascade"],
)
def test_the_oldest_drafts_to_the_end_of_the_memory(
    model: PreTrainedModel, small: PreTrainedModel, config: dict[str, Any]
) -> None:
    """A whole tree after its tokens would not fit any more, and nothing would be drafted.

    Where there is little room left a tree has fewer nodes, and a dynamic one fewer levels.
    """
    prompts = [prompt_of(2 * KEY_BLOCK - 28), prompt_of(20)]
    expected = [tokens for tokens, _ in plain(model, prompts)]
    llm = llm_of(model, small, 6, config={**config, "controller": "fixed", "model": small})
    draft_slab(llm).limit = 2 * KEY_BLOCK
    old, young = llm.generate(prompts, GREEDY)
    assert [old.token_ids, young.token_ids] == expected
    assert all(step.drafted for step in list(old.trace)[:-1])


@pytest.mark.parametrize("short", [5, FIRST_PASS, 60])
@pytest.mark.parametrize("tree", [None, (2, 2, 2, 2)], ids=["chain", "tree"])
def test_what_is_reckoned_with_is_enough(
    small: PreTrainedModel, short: int, tree: tuple[int, ...] | None
) -> None:
    """Rows are padded to the longest in their pass, which may take in the short ones' prompts.

    The long one may draft three tokens and is near the end of a key block. There are three blocks:
    for all, or for the first alone where the long one may get into another.
    """
    draft = Target(small)
    draft.limit_memory(3 * KEY_BLOCK * draft.cell_bytes)
    drafter = ModelDrafter(OwnModel(draft), TreeOptions(tree=tree), coupled=False)
    widest = FIRST_PASS if short == FIRST_PASS else 20
    for long in range(KEY_BLOCK - 40, KEY_BLOCK - 2, 3):
        batch = [
            Request(prompt_of(length), GREEDY, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
            for length in (short, long, short)
        ]
        expected = [20, 3, 20] if long + widest + 3 <= KEY_BLOCK else [20, 0, 0]
        drafts = drafter.propose(batch, [Budget(20, 20), Budget(3, 3), Budget(20, 20)])
        assert [each.tree.num_drafted for each in drafts] == expected
        for request in batch:
            drafter.release(request)


@pytest.mark.parametrize("name", ["draft_model", "cascade"])
def test_a_machine_without_memory_for_the_draft_model(
    model: PreTrainedModel, small: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocation itself fails: steps are done without drafts until there is some again."""
    prompts = [prompt_of(20), prompt_of(20, start=4)]
    expected = plain(model, prompts)
    llm = llm_of(model, small, 4, config=config_of(name, small))
    ours, original = draft_slab(llm)._keys, vars(slab_module)["_resized"]
    attempts = 0

    def resized(old: Any, rows: int, *sizes: Any) -> Any:
        nonlocal attempts
        if any(old is buffer for buffer in ours.values()) and rows > old.shape[0]:
            attempts += 1
            if attempts <= 10:
                raise RuntimeError("can't allocate memory")
        return original(old, rows, *sizes)

    monkeypatch.setattr(slab_module, "_resized", resized)
    outputs = llm.generate(prompts, GREEDY)
    assert attempts > 10
    assert bits(outputs) == expected
    for output in outputs:
        assert output.metrics.drafter_failure is None
        steps = list(output.trace)
        assert not any(step.drafted for step in steps[:2])
        assert any(step.drafted for step in steps[-8:])
    assert not draft_slab(llm).lengths


def test_copies_of_prompts_make_room_for_drafts(
    model: PreTrainedModel, small: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is full, and the KV of earlier prompts can be computed again."""
    llm = LLM(model, speculative_config=config_of("draft_model", small))
    copies = llm.engine._scheduler._prefixes
    assert copies is not None
    prompts = [prompt_of(200), prompt_of(200, start=4)]
    expected = plain(model, prompts)
    ours, original = draft_slab(llm)._keys, vars(slab_module)["_resized"]

    def resized(old: Any, rows: int, *sizes: Any) -> Any:
        if len(copies) and any(old is buffer for buffer in ours.values()):
            raise RuntimeError("can't allocate memory")
        return original(old, rows, *sizes)

    monkeypatch.setattr(slab_module, "_resized", resized)
    outputs = llm.generate(prompts, GREEDY)
    assert bits(outputs) == expected
    assert len(copies) == 0
    assert all(output.metrics.num_drafts > 0 for output in outputs)
    assert all(output.metrics.preemptions == 0 for output in outputs)


def test_a_draft_model_of_a_request_gets_as_much(
    model: PreTrainedModel, small: PreTrainedModel
) -> None:
    cells = Target(model).cell_bytes * 2 * KEY_BLOCK
    llm = LLM(model, kv_cache_memory=cells)
    prompts = [prompt_of(20), prompt_of(20, start=4)]
    outputs = llm.generate(prompts, GREEDY, speculative_config=config_of("draft_model", small))
    assert bits(outputs) == plain(model, prompts)
    (strategy,) = llm.engine.strategies.kept()
    drafter = strategy.drafter
    scorer: Any = vars(drafter)["_scorer"]
    assert scorer._model._slab.limit == llm.engine.target._slab.limit == 2 * KEY_BLOCK


def test_too_little_for_both(model: PreTrainedModel, small: PreTrainedModel) -> None:
    config = config_of("draft_model", small)
    enough = KEY_BLOCK * Target(model).cell_bytes
    assert LLM(model, kv_cache_memory=enough).max_model_len < KEY_BLOCK
    with pytest.raises(
        ConfigError, match=r"this model and its draft models takes at least 0[.]6 MiB"
    ):
        LLM(model, kv_cache_memory=enough, speculative_config=config)


def test_no_limit_is_none(model: PreTrainedModel) -> None:
    budget, target = KVBudget(None), Target(model)
    budget.add(target)
    budget.share()
    budget.add(target)
    assert target._slab.limit is None
    assert rows_that_fit(target, {1: 10**9, 2: 5}, {3: 7}) == ({1, 2}, [])


@pytest.mark.parametrize(
    ("wanted", "held", "expected"),
    [
        ({1: 9, 2: 9}, {}, ({1, 2}, [])),
        ({1: 9, 2: 9, 3: 9}, {}, ({1, 2}, [])),
        ({1: 9, 2: KEY_BLOCK + 1}, {}, ({1}, [])),
        ({1: KEY_BLOCK + 1, 2: 9}, {}, ({1}, [])),
        ({1: 9}, {1: 5, 2: 5}, ({1}, [])),
        ({1: 9, 2: 9}, {1: 5, 3: 5}, ({1, 2}, [3])),
        ({1: KEY_BLOCK + 1, 2: 9}, {1: 5, 2: 5}, ({1}, [2])),
        ({1: 9}, {1: 5, 2: KEY_BLOCK}, ({1}, [2])),
        ({1: 3 * KEY_BLOCK}, {}, (set(), [])),
        ({1: 3 * KEY_BLOCK, 2: 9}, {}, ({2}, [])),
        ({1: 9, 2: 3 * KEY_BLOCK, 3: 9}, {2: 5}, ({1, 3}, [2])),
    ],
)
def test_who_is_drafted_for(
    model: PreTrainedModel,
    wanted: dict[int, int],
    held: dict[int, int],
    expected: tuple[set[int], list[int]],
) -> None:
    target = Target(model)
    target.limit_memory(2 * KEY_BLOCK * target.cell_bytes)
    assert rows_that_fit(target, wanted, held) == expected
