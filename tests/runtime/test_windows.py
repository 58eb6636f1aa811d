"""Layers see what their windows hold, by position: in trees, batches and chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedModel

from tests.tiny import CONTEXT, VOCAB_SIZE, needs_packed, passes_of, reference_greedy
from tests.windowed import OWN_ATTENTION, WINDOW, WINDOWED, windowed_config, windowed_model
from tokenleap import LLM, CompatibilityError, SamplingParams
from tokenleap.core.tree import TokenTree, chain
from tokenleap.runtime.cpu import PackedLinear, decoder_layers
from tokenleap.runtime.inputs import (
    PassInputs,
    RowNodes,
    Window,
    layer_windows,
    tree_nodes,
    windows_by_kind,
)
from tokenleap.runtime.lean import LeanDecoder
from tokenleap.runtime.llama import LlamaWeights
from tokenleap.runtime.module import ModuleNetwork
from tokenleap.runtime.native.network import NativeDecoder
from tokenleap.runtime.network import Network, WindowedNetwork

TREE = TokenTree((5, 3, 5, 8, 9, 7, 1, 2, 4, 6, 8), (-1, 0, 0, 1, 3, 2, 2, 5, 7, 8, 9))
"""A chain of 8 below the root is longer than a window of 3, with other branches between."""
PROMPT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(3 * WINDOW)]
MOST = WINDOW + 2
GREEDY = SamplingParams(temperature=0, max_tokens=MOST, ignore_eos=True)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]


# Masks


def seen_by(row: RowNodes, node: int) -> list[int]:
    """The slots that a node sees, in order of position."""
    tail = row.tails[node] if row.tails else []
    return [*range(row.prefixes[node]), *tail]


@pytest.mark.parametrize("window", [Window(1), Window(3), Window(5), Window(4, chunked=True)])
def test_masks_are_by_position(window: Window) -> None:
    rows = [tree_nodes(TREE, 0, 2), tree_nodes(chain([1, 2, 3]), 1, 7), RowNodes(9)]
    inputs = PassInputs(rows, 0, len(TREE), 512, torch.float32, torch.device("cpu"))
    mask = inputs.mask_within(window)
    for index, row in enumerate(rows):
        for node, position in enumerate(row.positions):
            seen = seen_by(row, node)
            assert len(seen) == position + 1
            chunk = position // window.size * window.size
            first = chunk if window.chunked else max(0, position + 1 - window.size)
            found = (mask[index, 0, node] == 0).nonzero().flatten().tolist()
            assert found == sorted(seen[first:])
    assert (mask == 0).any(-1).all()  # of padding, too: a softmax over nothing is NaN


def test_a_window_that_hides_nothing_costs_nothing() -> None:
    inputs = PassInputs([tree_nodes(TREE, 0, 2)], 0, 12, 512, torch.float32, torch.device("cpu"))
    assert inputs.mask_within(Window(512)) is inputs.mask
    assert inputs.mask_within(None) is inputs.mask
    assert "ranks" not in vars(inputs)


def test_windows_of_configurations() -> None:
    sliding, chunks = Window(WINDOW), Window(WINDOW, chunked=True)
    found = {name: layer_windows(windowed_config(name)) for name in WINDOWED}
    assert found["mistral"] == found["phi3"] == (sliding, sliding)
    assert found["qwen2"] == found["qwen3"] == (None, sliding)
    assert found["gemma2"] == found["gemma3"] == found["gpt_oss"] == (sliding, None)
    assert found["llama4"] == (chunks, chunks)
    unused = windowed_config("qwen2", use_sliding_window=False)
    assert layer_windows(unused) == (None, None)
    assert not windows_by_kind(unused)


# Networks


NATIVE = ("mistral", "qwen2", "qwen3")


def network_of(model: PreTrainedModel, kind: str) -> Network:
    if kind == "native":
        return NativeDecoder(LlamaWeights(model))
    needs_packed(model.dtype)
    if kind == "lean":
        return LeanDecoder(LlamaWeights(model), PackedLinear)
    return ModuleNetwork.packed(model)


NETWORKS = [
    *((name, "module") for name in (*WINDOWED, *OWN_ATTENTION)),
    *((name, kind) for name in NATIVE for kind in ("lean", "native")),
]


def own(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits [n, V] of the model's own forward pass."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_matters(name: str) -> None:
    wide: dict[str, Any] = {
        "attention_chunk_size" if name == "llama4" else "sliding_window": CONTEXT
    }
    found = own(windowed_model(name, **wide), PROMPT)
    expected = own(windowed_model(name), PROMPT)
    torch.testing.assert_close(found[:WINDOW], expected[:WINDOW], atol=1e-4, rtol=1e-4)
    assert (found[WINDOW:] - expected[WINDOW:]).abs().amax() > 0.1


@pytest.mark.parametrize(("name", "kind"), NETWORKS)
def test_a_tree_beyond_the_window(name: str, kind: str) -> None:
    """Two rows, of which one is past its window. Their nodes get the model's own logits."""
    model, contexts = windowed_model(name), [PROMPT, [4, 2]]
    passes = passes_of(model, network_of(model, kind), *contexts)
    found = [output.scores.clone() for output in passes.verify([0, 1], [TREE, TREE])]
    leaves = set(range(len(TREE))) - set(TREE.parents)
    for context, scores in zip(contexts, found, strict=True):
        for leaf in leaves:
            path = [0, *TREE.path(leaf)] if leaf else [0]
            tokens = [*context, *(TREE.tokens[node] for node in path)]
            expected = own(model, tokens)[len(context) :]
            torch.testing.assert_close(scores[path], expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("mistral", "native"), ("qwen3", "native"), ("qwen2", "lean"), ("gemma2", "module")],
)
def test_bits(name: str, kind: str, dtype: torch.dtype) -> None:
    """Invariant 7: alone, in chunks, in a batch and, on the native runtime, in trees."""
    model = windowed_model(name, dtype)
    passes = passes_of(model, network_of(model, kind), PROMPT, PROMPT[:3])
    steps = chain(PROMPT[:14])
    alone = passes.verify([0], [steps])[0].scores.clone()
    beside, _ = passes.verify([0, 1], [chain(PROMPT[:6]), TREE])
    assert torch.equal(beside.scores, alone[:6])
    passes.commit(0, range(5))
    assert torch.equal(passes.verify([0], [chain(PROMPT[5:9])])[0].scores, alone[5:9])
    if passes.network.exact_trees:
        grown = TokenTree(
            (PROMPT[5], 9, *PROMPT[6:9], 1, *PROMPT[9:14]),
            (-1, 0, 0, 2, 3, 3, 4, 6, 7, 8, 9),
        )
        path = [0, *grown.path(len(grown) - 1)]
        assert torch.equal(passes.verify([0], [grown])[0].scores[path], alone[5:14])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_windows(quantization: str, native_library: None) -> None:
    """Positions are relative: a single layer with a window sees what one without it sees alone.

    No module computes with quantized weights, so this is the oracle of packed models.
    """
    wide: dict[str, Any] = {"num_hidden_layers": 1, "sliding_window": CONTEXT}
    narrow = windowed_model("mistral", num_hidden_layers=1)
    near, far = (
        NativeDecoder(LlamaWeights(model), quantization)
        for model in (narrow, windowed_model("mistral", **wide))
    )

    def last(network: Network, tokens: list[int]) -> Tensor:
        (found,) = passes_of(narrow, network, tokens[:-1]).verify([0], [chain(tokens[-1:])])
        return found.scores[0]

    for end in range(WINDOW + 2, len(PROMPT) + 1, 3):
        found, within = last(near, PROMPT[:end]), last(far, PROMPT[end - WINDOW : end])
        beyond = last(far, PROMPT[:end])
        assert (found - within).abs().max() < 0.2 * (found - beyond).abs().max()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen2", "native"), ("qwen2", "lean"), ("gemma2", "module"), ("bloom", "module")],
)
def test_parts_keep_their_windows(name: str, kind: str) -> None:
    model, first = windowed_model(name), windowed_model(name)
    del decoder_layers(first)[1:]
    first.config.num_hidden_layers = 1
    network = network_of(model, kind)
    for part, oracle in ((network.first_layers(1), first), (network.first_layers(2), model)):
        (found,) = passes_of(model, part, PROMPT[:-1]).verify([0], [chain(PROMPT[-1:])])
        expected = own(oracle, PROMPT)[-1:]
        torch.testing.assert_close(found.scores, expected, atol=2e-3, rtol=1e-3)


# Generation


def drafting(model: PreTrainedModel) -> LLM:
    config = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
    return LLM(model, speculative_config=config)


@pytest.mark.parametrize("name", [*WINDOWED, *OWN_ATTENTION])
def test_greedy_output_is_that_of_generate(name: str) -> None:
    """Far beyond the window, in a batch."""
    model, prompts = windowed_model(name), [PROMPT, PROMPT[5:9]]
    expected = [reference_greedy(model, prompt, MOST) for prompt in prompts]
    assert tokens_of(drafting(model), prompts) == expected


@pytest.mark.parametrize("name", ["mistral", "gemma3", "bloom"])
def test_chunks_and_known_prefixes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed_model(name)
    long = [*PROMPT, *PROMPT, *PROMPT]  # longer than a block of the prefix cache
    prompts = [long, [*long, 1], [*long[:-3], 2]]
    expected = [reference_greedy(model, prompt, MOST) for prompt in prompts]
    monkeypatch.setattr("tokenleap.runtime.passes.PREFILL_CHUNK", 11)
    llm = drafting(model)
    for _ in range(2):
        assert tokens_of(llm, prompts) == expected


# Checks at construction


def test_a_network_that_ignores_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassInputs, "mask_within", lambda inputs, _: inputs.mask)
    with pytest.raises(CompatibilityError, match=r"beyond its attention window.*max_model_len=8"):
        LLM(windowed_model("gemma3"))
    assert LLM(windowed_model("gemma3"), max_model_len=WINDOW).max_model_len == WINDOW


def test_a_window_by_slots_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tree, slots are not positions."""
    slots = property(lambda inputs: torch.arange(inputs.span).expand(inputs.mask[:, 0].shape))
    monkeypatch.setattr(PassInputs, "ranks", slots)
    with pytest.raises(CompatibilityError, match="beyond its attention window"):
        LLM(windowed_model("gemma3"))


def test_every_network_can_be_narrowed() -> None:
    model = windowed_model("mistral")
    for kind in ("module", "lean", "native"):
        assert isinstance(network_of(model, kind), WindowedNetwork)


def test_fields_that_nothing_reads_are_no_windows() -> None:
    left_over: Any = {"sliding_window": 4, "attention_chunk_size": 8}
    assert not windows_by_kind(LlamaConfig(**left_over))
    assert windows_by_kind(MistralConfig(sliding_window=4))
