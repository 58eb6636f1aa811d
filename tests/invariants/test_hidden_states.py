"""Hidden states: a drafter that asks has those of all committed tokens but the last.

They are those of the unmodified Transformers module, and their bits are the same however tokens
were computed: as nodes of chains or trees, one by one, in a batch, in chunks of a prompt, again
after preemption, or restored from the prefix cache. `Reader` checks after every step that none is
missing; these tests compare what it has collected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from tests.drafting import RandomTrees, Reader, Scripted, drafter_of
from tests.matrix import PROMPTS
from tests.tiny import VOCAB_SIZE, needs_packed, tiny_model
from tokenleap import LLM, CompatibilityError, SamplingParams
from tokenleap.core.tree import chain
from tokenleap.drafters.base import Drafter
from tokenleap.engine.prefix_cache import BLOCK
from tokenleap.request import Request
from tokenleap.runtime import kv_slab
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.network import Need
from tokenleap.runtime.target import Target

States = dict[int, Tensor]
Tokens = tuple[int, ...]

TOKENS = 10
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=TOKENS)
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"


@dataclass(frozen=True)
class Kind:
    """A model and the runtime that it runs on."""

    name: str
    architecture: str = "llama"
    dtype: torch.dtype = torch.float32
    quantization: str | None = None
    runtime: str = "auto"
    layers: int = 2

    @property
    def exact_trees(self) -> bool:
        """Whether nodes of trees have the bits of chains."""
        return self.name == "native"

    @property
    def hidden_layers(self) -> Tokens:
        """The embedding, a middle layer and what enters the final norm."""
        return (0, 1, self.layers)

    def model(self, seed: int = 0) -> PreTrainedModel:
        return _shared_model(self, seed)

    def llm(self, drafter: Drafter | dict[str, Any] | None, **fields: Any) -> LLM:
        """With drafts of five tokens from this drafter, or by this configuration."""
        if self.name == "lean":
            needs_packed(self.dtype)
        config = drafter if isinstance(drafter, dict) else {"method": drafter or "none"}
        config = {"num_speculative_tokens": 5, "controller": "fixed", **config}
        llm = LLM(
            self.model(),
            speculative_config=config,
            quantization=self.quantization,
            runtime=self.runtime,
            **fields,
        )
        assert llm.runtime == self.name
        return llm


def fresh_model(kind: Kind, seed: int) -> PreTrainedModel:
    """One that no LLM has seen."""
    fields: dict[str, Any] = {"max_position_embeddings": 2 * KEY_BLOCK}
    if kind.architecture == "gpt2":
        fields = {"n_positions": 2 * KEY_BLOCK, "n_layer": kind.layers}
    else:
        fields |= {"head_dim": 32, "num_hidden_layers": kind.layers}
    return tiny_model(kind.architecture, seed=seed, dtype=kind.dtype, **fields)


_shared_model = cache(fresh_model)


NATIVE = Kind("native", runtime="native")
LEAN = Kind("lean", runtime="torch")
MODULE = Kind("module", "gpt2")
KINDS = {
    "native float32": NATIVE,
    "native bfloat16": Kind("native", dtype=torch.bfloat16, runtime="native"),
    "native int8": Kind("native", quantization="int8", runtime="native"),
    "native int4": Kind("native", dtype=torch.bfloat16, quantization="int4", runtime="native"),
    "native of 4 layers": Kind("native", runtime="native", layers=4),
    "lean": LEAN,
    "lean bfloat16": Kind("lean", dtype=torch.bfloat16, runtime="torch"),
    "module": MODULE,
}


def _kinds(*kinds: Kind) -> list[Any]:
    names = {kind: name for name, kind in KINDS.items()}
    return [pytest.param(kind, id=names[kind]) for kind in kinds or KINDS.values()]


@pytest.fixture(params=_kinds())
def kind(request: pytest.FixtureRequest) -> Kind:
    return _available(request)


@pytest.fixture(params=_kinds(NATIVE, LEAN, MODULE))
def float32(request: pytest.FixtureRequest) -> Kind:
    return _available(request)


def _available(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    if found.name == "native":
        request.getfixturevalue("native_library")
    return found


# What there is to compare


@torch.inference_mode()
def transformers_states(kind: Kind, tokens: Sequence[int], seed: int = 0) -> States:
    """Layer id -> [n, E] of the unmodified module, which norms its last `hidden_states`."""
    model: Any = fresh_model(kind, seed)
    final_norm = model.transformer.ln_f if kind.architecture == "gpt2" else model.model.norm
    entering: list[Tensor] = []
    hook = final_norm.register_forward_pre_hook(lambda _, args: entering.append(args[0][0]))
    output = model(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True)
    hook.remove()
    states = {layer: output.hidden_states[layer][0] for layer in range(kind.layers)}
    return {**states, kind.layers: entering[0]}


def states_of(reader: Reader) -> dict[Tokens, States]:
    """Hidden states by token ids: the prompts of a test differ."""
    found = {tuple(tokens): states for tokens, states in reader.ended}
    assert len(found) == len(reader.ended)
    return found


def assert_equal(
    found: Mapping[Tokens, States], expected: Mapping[Tokens, States], *, exact: bool = True
) -> None:
    assert found.keys() == expected.keys()
    for tokens, states in found.items():
        assert states.keys() == expected[tokens].keys()
        for layer, each in states.items():
            assert len(each) == len(tokens) - 1
            if exact:
                assert torch.equal(each, expected[tokens][layer]), layer
            else:
                assert_close(each, expected[tokens][layer])


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-3 if found.dtype == torch.float32 else 0.5
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def run(
    kind: Kind,
    inner: Drafter | None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    params: SamplingParams = PARAMS,
    **fields: Any,
) -> Reader:
    """The states that a reader has seen of these prompts, generated together."""
    reader = Reader(inner, kind.hidden_layers)
    llm = kind.llm(reader, **fields)
    outputs = llm.generate([list(prompt) for prompt in prompts], params)
    assert all(output.metrics.drafter_failure is None for output in outputs)
    return reader


@cache
def plain_outputs(kind: Kind, prompts: tuple[Tokens, ...], greedy: bool) -> dict[Tokens, Tokens]:
    """The continuation of each prompt, by prompt."""
    outputs = kind.llm(None).generate(list(map(list, prompts)), GREEDY if greedy else PARAMS)
    return {prompt: out.token_ids for prompt, out in zip(prompts, outputs, strict=True)}


@cache
def one_by_one(kind: Kind, prompts: tuple[Tokens, ...], greedy: bool = False) -> Mapping[Any, Any]:
    """Hidden states of plain decoding, every prompt in an LLM of its own."""
    found: dict[Tokens, States] = {}
    for prompt in prompts:
        params = GREEDY if greedy else PARAMS
        found |= states_of(run(kind, None, [prompt], params, enable_prefix_caching=False))
    return found


SHORT = tuple(map(tuple, PROMPTS))


def scripted(
    kind: Kind, make: type[Scripted], prompts: tuple[Tokens, ...] = SHORT, greedy: bool = False
) -> Scripted:
    """Drafts of which every fifth position is wrong."""
    outputs = plain_outputs(kind, prompts, greedy)
    return make(lambda request: outputs[request.prompt_ids], VOCAB_SIZE, wrong=5)


def tokens_of(seed: int, length: int) -> Tokens:
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=length))


# Against the Transformers module


@pytest.mark.parametrize("drafts", [None, Scripted, RandomTrees], ids=["plain", "chains", "trees"])
def test_they_are_those_of_the_transformers_module(
    float32: Kind, drafts: type[Scripted] | None
) -> None:
    inner = None if drafts is None else scripted(float32, drafts)
    for tokens, states in states_of(run(float32, inner)).items():
        expected = transformers_states(float32, tokens[:-1])
        for layer in float32.hidden_layers:
            assert_close(states[layer], expected[layer])


@pytest.mark.usefixtures("native_library")
def test_layers_may_be_asked_for_in_a_deeper_model() -> None:
    kind = KINDS["native of 4 layers"]
    for layers in ((2,), (3,), (0, 3), (1, 2, 4)):
        reader = Reader(None, layers)
        kind.llm(reader).generate([PROMPTS[0]], PARAMS)
        ((tokens, states),) = reader.ended
        expected = transformers_states(kind, tokens[:-1])
        assert tuple(states) == layers
        for layer in layers:
            assert_close(states[layer], expected[layer])


# The same bits


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_chains_and_trees_in_a_batch_are_plain_decoding_alone(kind: Kind, greedy: bool) -> None:
    expected = one_by_one(kind, SHORT, greedy)
    params = GREEDY if greedy else PARAMS
    assert_equal(states_of(run(kind, None, params=params)), expected)
    chains = scripted(kind, Scripted, greedy=greedy)
    assert_equal(states_of(run(kind, chains, params=params)), expected)
    for prompt in PROMPTS:
        alone = states_of(run(kind, chains, [prompt], params))
        assert_equal(alone, {tokens: expected[tokens] for tokens in alone})
    trees = scripted(kind, RandomTrees, greedy=greedy)
    assert_equal(states_of(run(kind, trees, params=params)), expected, exact=kind.exact_trees)


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunked_prefill(kind: Kind, chunk: int) -> None:
    """Also beside steps of requests that came earlier."""
    prompts = (*SHORT[:2], tokens_of(1, 90), tokens_of(2, 140))
    expected = one_by_one(kind, prompts)
    reader = run(kind, None, prompts, max_num_batched_tokens=chunk)
    assert_equal(states_of(reader), expected)
    assert not reader.shown_again


LONG = (tokens_of(1, KEY_BLOCK - 6), tokens_of(2, KEY_BLOCK - 100), tokens_of(3, 70))


@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("prefixes", [False, True])
def test_preemption(kind: Kind, blocks: int, prefixes: bool) -> None:
    """The youngest are computed again, their outputs included: the same bits a second time."""
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=TOKENS)
    reader = Reader(scripted(kind, Scripted, LONG), kind.hidden_layers)
    memory = blocks * KEY_BLOCK * kind.llm(None).engine.target.cell_bytes
    llm = kind.llm(reader, kv_cache_memory=memory, enable_prefix_caching=prefixes)
    outputs = llm.generate(list(map(list, LONG)), params)
    assert_equal(states_of(reader), one_by_one(kind, LONG))
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert reader.shown_again


def test_restored_from_the_prefix_cache(kind: Kind) -> None:
    """A second identical prompt, and a third that begins alike."""
    first = tokens_of(1, 3 * BLOCK + 20)
    third = (*first[: 2 * BLOCK], *tokens_of(2, 50))
    reader = Reader(None, kind.hidden_layers)
    llm = kind.llm(reader)
    cached = []
    for prompt, seed in ((first, 4), (first, 5), (third, 4), (first[: 2 * BLOCK], 4)):
        (output,) = llm.generate([list(prompt)], PARAMS.model_copy(update={"seed": seed}))
        cached.append(output.metrics.cached_prompt_tokens)
    assert cached == [0, 3 * BLOCK, 2 * BLOCK, BLOCK]
    fresh = Reader(None, kind.hidden_layers)
    for prompt, seed in ((first, 4), (first, 5), (third, 4), (first[: 2 * BLOCK], 4)):
        params = PARAMS.model_copy(update={"seed": seed})
        kind.llm(fresh, enable_prefix_caching=False).generate([list(prompt)], params)
    assert_equal(states_of(reader), states_of(fresh))


def test_blocks_stored_without_hidden_states(kind: Kind) -> None:
    """Of a request whose drafter does not read: the next one computes them, the third has them."""
    prompt = tokens_of(1, 3 * BLOCK + 20)
    reader, other = Reader(None, kind.hidden_layers), Reader(None, kind.hidden_layers[:1])
    llm = kind.llm(None)
    cached, output_ids = [], set()
    for drafter in (None, reader, reader, None, other):
        config = None if drafter is None else {"method": drafter, "controller": "fixed"}
        (output,) = llm.generate([list(prompt)], PARAMS, speculative_config=config)
        cached.append(output.metrics.cached_prompt_tokens)
        output_ids.add(output.token_ids)
    assert cached == [0, 0, 3 * BLOCK, 3 * BLOCK, 3 * BLOCK]
    assert len(output_ids) == 1
    (tokens, computed), (same, restored) = reader.ended
    assert tokens == same
    for layer in kind.hidden_layers:
        assert torch.equal(computed[layer], restored[layer])
    assert_equal({tuple(tokens): computed}, one_by_one(kind, (prompt,)))
    ((_, few),) = other.ended
    assert list(few) == [0]
    assert torch.equal(few[0], computed[0])


def test_requests_that_ask_for_different_layers(kind: Kind) -> None:
    """In one batch, beside requests that ask for none."""
    expected = one_by_one(kind, SHORT)
    readers = [Reader(None, layers) for layers in ((0,), (1, kind.layers), (1,))]
    configs: list[Any] = [None, None, *({"method": reader} for reader in readers)]
    prompts = list(map(list, SHORT))
    kind.llm(None).generate(prompts, PARAMS, speculative_config=configs)
    for reader in readers:
        ((tokens, states),) = reader.ended
        assert tuple(states) == reader.traits.hidden_layers
        for layer, each in states.items():
            assert torch.equal(each, expected[tuple(tokens)][layer])


def test_steps_without_memory_for_drafts(kind: Kind) -> None:
    """Where drafting fills the slab the step is a plain one, and its states are shown, too."""
    reader = Reader(scripted(kind, Scripted), kind.hidden_layers, full_every=2)
    outputs = kind.llm(reader).generate(PROMPTS, PARAMS)
    assert_equal(states_of(reader), one_by_one(kind, SHORT))
    assert any(not step.drafted for output in outputs for step in output.trace.steps[:-1])


def test_memory_that_runs_out_between_two_chunks_of_a_prompt(
    float32: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens whose chunk was computed before, the states are not lost."""
    prompt = tokens_of(5, KEY_BLOCK + 200)
    expected = one_by_one(float32, (prompt,))
    reader = Reader(None, float32.hidden_layers)
    llm = float32.llm(reader, max_num_batched_tokens=2 * KEY_BLOCK)
    llm.generate([list(tokens_of(6, 2 * BLOCK))], PARAMS)  # copies that may be dropped
    reader.ended.clear()
    failures: list[int] = []

    monkeypatch.setattr(llm.engine.target._slab, "_fit", _fit_once(llm, failures))
    llm.generate([list(prompt)], PARAMS)
    assert failures
    assert_equal(states_of(reader), expected)


def _fit_once(llm: LLM, failures: list[int]) -> Callable[[int, int], None]:
    """`_fit` that fails as a whole the first time it has to grow past a key block."""
    fit = llm.engine.target._slab._fit

    def fitted(rows: int, positions: int) -> None:
        if positions > KEY_BLOCK and not failures:
            failures.append(positions)
            raise kv_slab.SlabFull(NO_MEMORY)
        fit(rows, positions)

    return fitted


MIXED = tuple(
    (*tokens_of(seed % 2, shared), *tokens_of(seed, own))
    for seed, (shared, own) in enumerate(
        [(0, 9), (BLOCK, 30), (2 * BLOCK + 7, 1), (3 * BLOCK, 40), (3 * BLOCK, 90), (6 * BLOCK, 2)]
    )
)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("seed", range(8))
def test_any_schedule(seed: int) -> None:
    """Readers and others share prompts, a prefix cache that is too small, and too little memory."""
    dice = random.Random(seed)
    cell_bytes = NATIVE.llm(None).engine.target.cell_bytes
    prefix_bytes = dice.choice((1, 2, 5, 9, 40)) * BLOCK * cell_bytes
    llm = NATIVE.llm(
        None,
        kv_cache_memory=dice.choice((None, 2 * KEY_BLOCK * cell_bytes)),
        max_num_batched_tokens=dice.choice((5, 64, 100, 512)),
        prefix_cache_memory=prefix_bytes,
    )
    readers = [
        Reader(scripted(NATIVE, drafts, MIXED), layers, full_every)
        for drafts, layers, full_every in (
            (Scripted, (0, 1, 2), 0),
            (RandomTrees, (1,), 3),
            (Scripted, (0, 2), 5),
        )
    ]
    configs = [None, *({"method": reader, "controller": "fixed"} for reader in readers)]
    outputs = []
    for _ in range(6):
        prompts = dice.choices(MIXED, k=dice.randrange(1, 6))
        chosen = [dice.choice(configs) for _ in prompts]
        outputs += llm.generate(list(map(list, prompts)), PARAMS, speculative_config=chosen)
        prefixes = llm.engine._scheduler._prefixes
        assert prefixes is not None
        assert prefixes.num_bytes <= prefix_bytes
    assert all(output.metrics.drafter_failure is None for output in outputs)
    expected = one_by_one(NATIVE, MIXED)
    assert sum(len(reader.ended) for reader in readers) > 3
    for reader in readers:
        for tokens, states in reader.ended:
            assert tuple(states) == reader.traits.hidden_layers
            for layer, each in states.items():
                assert torch.equal(each, expected[tuple(tokens)][layer])


# Inside other drafters


def combined(kind: Kind, method: str, reader: Reader) -> dict[str, Any]:
    ngram = {"method": "ngram", "prompt_lookup_min": 1}
    inside = {"method": reader}
    fields: dict[str, dict[str, Any]] = {
        "ensemble": {"drafters": [ngram, inside]},
        "switch": {"drafters": [ngram, inside], "try_every": 2},
        "horizontal_cascade": {"drafters": [inside, ngram], "tokens": [2, 3]},
    }
    return {"method": method, **fields[method]}


@pytest.mark.parametrize("method", ["ensemble", "switch", "horizontal_cascade"])
def test_inside_another_drafter(kind: Kind, method: str) -> None:
    reader = Reader(scripted(kind, Scripted), kind.hidden_layers)
    llm = kind.llm(combined(kind, method, reader))
    assert drafter_of(llm).traits.hidden_layers == kind.hidden_layers
    outputs = llm.generate(PROMPTS, PARAMS)
    assert all(output.metrics.drafter_failure is None for output in outputs)
    exact = kind.exact_trees or method != "ensemble"
    assert_equal(states_of(reader), one_by_one(kind, SHORT), exact=exact)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("method", ["ensemble", "switch", "horizontal_cascade"])
def test_inside_another_drafter_with_everything_at_once(method: str) -> None:
    """Chunks, preemption, prefixes and steps without memory."""
    reader = Reader(scripted(NATIVE, Scripted, LONG), NATIVE.hidden_layers, full_every=4)
    memory = 3 * KEY_BLOCK * NATIVE.llm(None).engine.target.cell_bytes
    fields = {"kv_cache_memory": memory, "max_num_batched_tokens": 50}
    llm = NATIVE.llm(combined(NATIVE, method, reader), **fields)
    for _ in range(2):
        outputs = llm.generate(list(map(list, LONG)), PARAMS)
        assert sum(output.metrics.preemptions for output in outputs) > 0
        assert_equal(states_of(reader), one_by_one(NATIVE, LONG))
        reader.ended.clear()
    assert sum(output.metrics.cached_prompt_tokens for output in outputs) > 0


def test_a_reader_behind_the_first_drafter_of_a_horizontal_cascade() -> None:
    drafters = [{"method": "ngram"}, {"method": Reader()}]
    config = {"method": "horizontal_cascade", "drafters": drafters, "tokens": [2, 3]}
    with pytest.raises(CompatibilityError, match=r"hidden states.* can only come first"):
        LLM(tiny_model(), speculative_config=config)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_that_the_model_does_not_have(float32: Kind, layer: int) -> None:
    """Refused at construction (invariant 5), inside other drafters, too."""
    reader = Reader(None, (0, layer))
    configs: list[dict[str, Any]] = [
        {"method": reader},
        {"method": "ensemble", "drafters": [{"method": "ngram"}, {"method": reader}]},
        {"method": "cascade", "model": float32.model(seed=1), "drafter": {"method": reader}},
    ]
    for config in configs:
        with pytest.raises(CompatibilityError, match=rf"of layer {layer}, and .* layers 0 to 2"):
            float32.llm(config)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_inside_a_cascade_they_are_those_of_the_middle_model(float32: Kind, rule: str) -> None:
    """The middle model's own guesses are taken back again and again."""
    reader = Reader(layers=float32.hidden_layers)
    middle = float32.model(seed=1)
    config = {"method": "cascade", "model": middle, "drafter": {"method": reader}}
    llm = float32.llm({**config, "acceptance": rule})
    outputs = llm.generate(PROMPTS, PARAMS)
    assert sum(output.metrics.num_rejected_tokens for output in outputs) > 0
    assert len(reader.ended) == len(PROMPTS)
    for tokens, states in reader.ended:
        expected = transformers_states(float32, tokens[:-1], seed=1)
        for layer in float32.hidden_layers:
            assert_close(states[layer], expected[layer])


# Hidden states that are not asked for


class Made(TorchDispatchMode):
    """Notes the shapes of tensors that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.elements += [each.numel() for each in tree_leaves(output) if isinstance(each, Tensor)]
        return output


def test_who_does_not_ask_pays_nothing(float32: Kind) -> None:
    target = Target(float32.model(), runtime=float32.runtime)
    target.add(0)
    assert target.prefill(0, [1, 2, 3]) == {}
    tree = chain([5, 6, 7, 8, 9])
    size = len(tree) * target.hidden_size

    def made(need: Need) -> list[int]:
        with Made() as found:
            (output,) = target.verify([0], [tree], need=need)
        assert tuple(output.hidden) == need.hidden
        elements: list[int] = found.elements
        return elements

    asked, silent = made(Need(hidden=(0, 1, 2))), made(Need())
    if float32.name == "native":  # one tensor for all layers, and nothing is left without them
        assert 3 * size in asked
        assert max((n for n in silent if n % size == 0), default=0) == 0
    assert len(asked) >= len(silent)
    assert sum(asked) >= sum(silent)


def test_hooks_are_gone_after_the_pass() -> None:
    target = Target(MODULE.model())
    target.add(0)
    target.verify([0], [chain([5, 6])], need=Need(hidden=(0, 1, 2)))
    network: Any = target.network
    for module in network._model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Watching(Reader):
    """Sees outcomes without asking for hidden states."""

    def observe(self, outcomes: Any, times: Any) -> None:
        assert all(outcome.hidden == {} for outcome in outcomes)
        assert all(outcome.output.hidden == {} for outcome in outcomes)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        raise AssertionError("it was not asked for")

    def _check(self, request: Request) -> None:
        pass


def test_who_does_not_ask_is_shown_nothing(kind: Kind) -> None:
    outputs = kind.llm(Watching(None, ())).generate(PROMPTS, PARAMS)
    assert all(output.metrics.drafter_failure is None for output in outputs)
