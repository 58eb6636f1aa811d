"""`parallel`: a block is what plain attention over masks computes, in training and in serving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.drafters.heads.test_serving import PROMPTS, served
from tests.heads import grown, parallel_config, save_head, tiny_net
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.drafters.heads.eagle import ParallelHead
from tokenleap.drafters.heads.eagle import load_head as drafting_head
from tokenleap.drafters.heads.eagle_net import EagleLayer, ParallelNet
from tokenleap.drafters.heads.layouts import EagleFolder
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
    found = blocks(head, hidden, [tokens[: root + 1]], LEVELS)
    return [level[0, 0] for level in found]


def blocks(
    head: ParallelHead, hidden: Mapping[int, Tensor], texts: list[list[int]], levels: int
) -> list[Tensor]:
    """[levels] of [texts, 1, Vd]: the logits of all levels of drafts, in one pass."""
    return grown(head, hidden, texts, [[9]] * (levels - 1))


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
    together = blocks(head, hidden, texts, LEVELS)
    for place, text in enumerate(texts):
        for count in (1, 3):
            for one, other in zip(blocks(head, hidden, [text], count), together, strict=False):
                assert torch.equal(one[0], other[place])


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
    llm = LLM(model, speculative_config=served("parallel", model, tmp_path) | SHAPES[shape])
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


@pytest.mark.parametrize(
    ("method", "runtime", "share"),
    [
        ("parallel", "native", 0.0),
        ("parallel", "torch", 0.0),
        ("eagle", "native", 0.25),
        ("eagle", "torch", 1.0),
    ],
)
def test_what_further_levels_are_expected_to_take(
    method: str, runtime: str, share: float, tmp_path: Path
) -> None:
    """One pass makes a block, and one native call the levels of another head."""
    model = tiny_model(head_dim=32)
    llm = LLM(model, runtime=runtime, speculative_config=served(method, model, tmp_path))
    assert llm.engine._speculation.default.controller.level_share == share


def test_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    """Masks take positions, too."""
    model = tiny_model(head_dim=32, max_position_embeddings=64)
    config = served("parallel", model, tmp_path, max_position_embeddings=64)
    config |= {"num_speculative_tokens": 8, "tree": "dynamic", "tree_depth": 8}
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (output,) = LLM(model, speculative_config=config).generate([[1, 2, 3]], params)
    (plain,) = LLM(model).generate([[1, 2, 3]], params)
    assert output.token_ids == plain.token_ids
    assert len(output.token_ids) == 61
    assert output.metrics.drafter_failure is None
