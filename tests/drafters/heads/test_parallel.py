"""`parallel`: a block is what plain attention over masks computes, in training and in serving."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.drafters.heads.folders import (
    Fault,
    assert_refused,
    change_config,
    change_tensors,
    load_head,
    truncate,
)
from tests.drafters.heads.serving import PROMPTS, drafts
from tests.drafters.heads.test_checkpoint import change_layer
from tests.heads import parallel_config, save_head, tiny_config, tiny_net
from tests.tiny import CONTEXT, VOCAB_SIZE, tiny_model
from tokenleap import LLM, CompatibilityError, SamplingParams, TokenleapError
from tokenleap.core.tree import TokenTree
from tokenleap.drafters.heads.eagle import ParallelHead
from tokenleap.drafters.heads.eagle import load_head as drafting_head
from tokenleap.drafters.heads.eagle_net import EagleLayer, ParallelNet
from tokenleap.drafters.heads.layouts import EagleFolder, Verifier, write_head
from tokenleap.request import Request
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target

FORMS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "one layer": {"num_layers": 1, "norm_before_residual": False, "fc_norm": False},
    "three layers": {"num_layers": 3, "qk_norm": True, "mask_token_id": 3},
    "two features": {"aux_layers": (2, 0), "head_dim": 16, "num_attention_heads": 4},
}
LEVELS = 5


def expected_block(
    net: ParallelNet, hidden: Tensor, tokens: Tensor, root: int, levels: int
) -> list[Tensor]:
    """Logits of each level after pair `root`: plain causal attention over pairs and masks."""
    config, known = net.config, root + 1
    masks = torch.full((levels - 1,), config.mask_token_id)
    ids = torch.cat([tokens[1 : known + 1], masks])[None]
    mask_state = net.fuse(net.mask_hidden.view(-1, config.hidden_size))
    states = torch.cat([net.fuse(hidden[:known]), mask_state.expand(levels - 1, -1)])[None]
    cos, sin = (x[:, None] for x in net.rotary(states, torch.arange(ids.shape[1])[None]))
    first = cast("EagleLayer", net.layers[0])
    x = first.hidden_norm(states) if config.norm_before_residual else states
    read = torch.cat([first.input_layernorm(net.embedding[ids]), first.hidden_norm(states)], -1)
    for index, layer in enumerate(cast("list[EagleLayer]", list(net.layers))):
        if index:
            read = layer.input_layernorm(x)
        attention = layer.self_attn
        query = attention.queries(read, cos, sin)
        keys, values = attention.keys_values(read, cos, sin)
        mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return list(net.logits(x)[0, root:])


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_block_is_plain_attention_over_masks(form: str) -> None:
    net = tiny_net(parallel_config(**FORMS[form]), tiny_model())
    assert isinstance(net, ParallelNet)
    torch.manual_seed(3)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 21))
    hidden = torch.randn(2, 20, len(net.config.aux_layers), 64)
    roots, sizes = torch.tensor([[7, 2, 19], [0, 18, 3]]), [3, 3, 2, 2, 1]
    found = net.block(tokens[:, 1:], net.fuse(hidden), roots, sizes)
    assert [each.shape[1] for each in found] == sizes
    for row in range(2):
        for place, root in enumerate(roots[row].tolist()):
            levels = sum(place < size for size in sizes)
            expected = expected_block(net, hidden[row], tokens[row], root, levels)
            for level in range(levels):
                logits = net.logits(found[level][row, place])
                torch.testing.assert_close(logits, expected[level], atol=1e-4, rtol=1e-4)


def block_of(
    folder: Path, target: Target, hidden: Mapping[int, Tensor], tokens: list[int], root: int
) -> list[Tensor]:
    """[Vd] of each level from what serves, after the token `root`."""
    head, _ = drafting_head(EagleFolder.read(folder, "parallel"), target)
    assert isinstance(head, ParallelHead)
    return grown(head, hidden, [tokens[: root + 1]], LEVELS)[0]


def grown(
    head: ParallelHead, hidden: Mapping[int, Tensor], texts: list[list[int]], levels: int
) -> list[list[Tensor]]:
    """Logits of all levels of the drafts for some texts, in one pass."""
    requests = [
        Request(text, SamplingParams(), vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)
        for text in texts
    ]
    for request, text in zip(requests, texts, strict=True):
        head.keep(request, 0, {k: states[: len(text) - 1] for k, states in hidden.items()})
    head.expect({request.key: levels for request in requests})
    pending = [head.pending(request) for request in requests]
    found: list[list[Tensor]] = [[] for _ in requests]
    for level in range(levels):
        trees = []
        for tokens in pending:
            nodes = (*tokens, *[9] * level)
            trees.append(TokenTree(nodes, tuple(range(-1, len(nodes) - 1))))
        computed = [len(tokens) + level - 1 if level else 0 for tokens in pending]
        outputs = head.verify([request.key for request in requests], trees, computed)
        for each, output in zip(found, outputs, strict=True):
            each.append(output.scores[-1].clone())
    for request, tokens in zip(requests, pending, strict=True):
        head.finish_draft(request, len(tokens))
        head.release(request)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("runtime", ["native", "torch"])
@torch.inference_mode()
def test_serving_computes_what_training_computes(form: str, runtime: str, tmp_path: Path) -> None:
    model = tiny_model(head_dim=32)
    save_head(tmp_path, tiny_net(parallel_config(**FORMS[form]), model))
    target = Target(model, runtime=runtime)
    assert target.vocabulary_weights is not None
    net = EagleFolder.read(tmp_path, "parallel").net(*target.vocabulary_weights)
    assert isinstance(net, ParallelNet)
    tokens = torch.randint(0, VOCAB_SIZE, (50,))
    layers = net.config.aux_layers
    target.add(0)
    hidden = target.prefill(0, tokens.tolist(), tuple(sorted(layers)))
    stacked = torch.stack([hidden[layer] for layer in layers], 1)
    for root in (1, 2, 40):  # the pair before the root is the last one with the target's states
        found = block_of(tmp_path, target, hidden, tokens.tolist(), root)
        expected = expected_block(net, stacked, tokens, root - 1, LEVELS)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_logits_do_not_depend_on_what_is_computed_with_them(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """In a batch and with more levels after: the same bits."""
    model = tiny_model(head_dim=32, dtype=dtype)
    save_head(tmp_path, tiny_net(parallel_config(), model))
    target = Target(model)
    head, _ = drafting_head(EagleFolder.read(tmp_path, "parallel"), target)
    assert isinstance(head, ParallelHead)
    tokens = torch.randint(0, VOCAB_SIZE, (60,)).tolist()
    target.add(0)
    hidden = target.prefill(0, tokens, (0, 1, 2))
    texts = [tokens[:length] for length in (2, 30, 31, 60)]
    together = grown(head, hidden, texts, LEVELS)
    for text, levels in zip(texts, together, strict=True):
        for count in (1, 3):
            (alone,) = grown(head, hidden, [text], count)
            for one, other in zip(alone, levels, strict=False):
                assert torch.equal(one, other)


def served(model: Any, folder: Path, **fields: Any) -> dict[str, Any]:
    save_head(folder, tiny_net(parallel_config(**fields), model))
    return {"method": "parallel", "model": str(folder), "controller": "fixed"}


SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "widths": {"tree": [3, 2, 1]},
    "cut widths": {"tree": [3, 2, 2], "num_speculative_tokens": 5},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 10, "tree_depth": 4},
    "pruned": {"tree": "dynamic", "num_speculative_tokens": 3, "tree_depth": 6},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_that_grow_at_once_are_those_of_the_levels(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(head_dim=32)
    llm = LLM(model, speculative_config=served(model, tmp_path) | SHAPES[shape])
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    passes: list[int] = []
    verify = Passes.verify

    def counted(self: Passes, keys: Any, *args: Any, **fields: Any) -> Any:
        if not isinstance(self, Target):
            passes.append(len(keys))
        return verify(self, keys, *args, **fields)

    monkeypatch.setattr(Passes, "verify", counted)
    at_once = llm.generate(PROMPTS, params)
    steps = len(passes)
    monkeypatch.setattr(ParallelHead, "grow", lambda *_: None)
    by_levels = llm.generate(PROMPTS, params)
    assert len(passes) == 2 * steps  # one for all levels of a step
    assert max(passes) == len(PROMPTS)
    for one, other in zip(at_once, by_levels, strict=True):
        assert one.metrics.drafter_failure is None
        assert [(s.drafted, s.parents) for s in one.trace] == [
            (s.drafted, s.parents) for s in other.trace
        ]
    assert sum(output.metrics.num_draft_tokens for output in at_once) > 300


@pytest.mark.parametrize("tree", [None, [2, 2, 1], "dynamic"], ids=str)
def test_drafts_do_not_depend_on_the_schedule(tree: Any, tmp_path: Path) -> None:
    """Alone, in a batch, in chunks, and after preemption: the same drafts (invariant 4)."""
    model = tiny_model(head_dim=32, max_position_embeddings=1024)
    config = served(model, tmp_path) | ({} if tree is None else {"tree": tree})
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
    fields: dict[str, Any] = {"speculative_config": config}
    alone = LLM(model, max_num_seqs=1, **fields).generate(PROMPTS, params)
    cells = Target(model).cell_bytes + 2 * 2 * 32 * 4
    tight = LLM(model, max_num_batched_tokens=7, kv_cache_memory=3 * 512 * cells, **fields)
    together = tight.generate(PROMPTS, params)
    for one, other in zip(alone, together, strict=True):
        assert other.token_ids == one.token_ids
        assert other.metrics.drafter_failure is None
        if other.metrics.preemptions == 0:
            assert drafts(other) == drafts(one)
    assert sum(o.metrics.num_draft_tokens for o in together) > 100


@pytest.mark.parametrize("tree", [None, [2, 1, 1, 1, 1], "dynamic"], ids=str)
def test_drafts_are_no_deeper_than_was_learnt(tree: Any, tmp_path: Path) -> None:
    model = tiny_model()
    config = served(model, tmp_path, depths=2) | {"num_speculative_tokens": 9}
    llm = LLM(model, speculative_config=config | ({} if tree is None else {"tree": tree}))
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=20)
        (output,) = llm.generate([[1, 2, 3]], params)
        depths = {
            TokenTree((0, *s.drafted), (-1, *(p + 1 for p in s.parents))).depths[-1]
            for s in output.trace
        }
        assert max(depths) == 2
        assert output.metrics.drafter_failure is None


def test_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    """Masks take positions, too."""
    model = tiny_model(head_dim=32, max_position_embeddings=64)
    config = served(model, tmp_path, max_position_embeddings=64)
    config |= {"num_speculative_tokens": 8, "tree": "dynamic", "tree_depth": 8}
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (output,) = LLM(model, speculative_config=config).generate([[1, 2, 3]], params)
    (plain,) = LLM(model).generate([[1, 2, 3]], params)
    assert output.token_ids == plain.token_ids
    assert len(output.token_ids) == 61
    assert output.metrics.drafter_failure is None


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "head"
    net = tiny_net(parallel_config(), tiny_model())
    verifier = Verifier("tiny", ("LlamaForCausalLM",), 2)
    write_head(path, net, verifier, {"seed": 3})
    return path


load = partial(load_head, method="parallel")


def test_what_is_written_is_read(folder: Path) -> None:
    net = tiny_net(parallel_config(), tiny_model())
    found = EagleFolder.read(folder, "parallel")
    assert found.config == parallel_config()
    assert found.notes == {"seed": 3}
    assert found.tensors["mask_hidden"].shape == (1, 1, 3 * 64)
    for name, tensor in net.state_dict().items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(found.tensors[name], expected)
    fields = json.loads((folder / "config.json").read_text())
    assert fields["speculators_model_type"] == fields["speculators_config"]["algorithm"] == "peagle"
    assert fields["mask_token_id"] == VOCAB_SIZE - 1
    assert fields["transformer_layer_config"]["num_hidden_layers"] == 2


def proposals(*tokens: Any) -> dict[str, Any]:
    return {
        "verifier": {"name_or_path": "tiny", "architectures": []},
        "proposal_methods": [{"speculative_tokens": each} for each in tokens],
    }


FAULTS: dict[str, Fault] = {
    "truncated": (truncate, "cannot be read"),
    "a head of another kind": (
        lambda f: change_config(f, speculators_model_type="eagle3"),
        "'eagle3', and method 'parallel' needs 'peagle': .* P-EAGLE head",
    ),
    "no mask token": (lambda f: change_config(f, mask_token_id=None), "mask_token_id: .*integer"),
    "a mask token outside": (
        lambda f: change_config(f, mask_token_id=96),
        r"mask_token_id \(96\) is not below vocab_size \(96\)",
    ),
    "no depths": (lambda f: change_config(f, speculators_config=proposals()), "proposal_methods"),
    "zero depths": (
        lambda f: change_config(f, speculators_config=proposals(0)),
        "proposal_methods.0.speculative_tokens: .*greater than 0",
    ),
    "no layers": (lambda f: change_layer(f, num_hidden_layers=0), "num_hidden_layers"),
    "a layer less": (
        lambda f: change_layer(f, num_hidden_layers=1),
        r"'layers.1.\S+' is not part of",
    ),
    "a layer more": (
        lambda f: change_layer(f, num_hidden_layers=3),
        r"'layers.2.\S+' is missing",
    ),
    "no mask": (
        lambda f: change_tensors(f, lambda t: t.pop("mask_hidden")),
        "'mask_hidden' is missing",
    ),
    "a mask of another size": (
        lambda f: change_tensors(f, lambda t: t.update(mask_hidden=torch.zeros(1, 1, 64))),
        r"'mask_hidden' has shape \[1, 1, 64\], and config.json says \[1, 1, 192\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(folder: Path, fault: str) -> None:
    assert_refused(folder, FAULTS[fault], load)


def test_an_eagle_head_needs_its_own_method(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenleapError, match="'peagle', and method 'eagle' needs 'eagle3'"):
        load_head(folder, "eagle")
    save_head(tmp_path / "eagle", tiny_net(tiny_config(), tiny_model()))
    with pytest.raises(TokenleapError, match="'eagle3', and method 'parallel' needs 'peagle'"):
        load(tmp_path / "eagle")


@pytest.mark.parametrize(
    "other", [{"vocab_size": 100}, {"hidden_size": 32}, {"num_hidden_layers": 3}], ids=str
)
def test_another_target_is_refused(folder: Path, other: dict[str, Any]) -> None:
    with pytest.raises(CompatibilityError, match="trained for tiny with"):
        load(folder, **other)
