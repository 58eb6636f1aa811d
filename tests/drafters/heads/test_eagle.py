"""`eagle`: what serves computes what training computes, for every level, runtime and form."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.heads.test_serving import PROMPTS
from tests.heads import feature_config, grown, save_head, tiny_config, tiny_net
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import LLM, SamplingParams
from tokenleap.core.tree import chain
from tokenleap.drafters.heads.eagle import EagleHead, Fusion, head_passes, load_head
from tokenleap.drafters.heads.eagle_net import EagleConfig, EagleNet, KeysValues
from tokenleap.drafters.heads.layouts import EagleFolder
from tokenleap.drafters.model_drafter import Head
from tokenleap.errors import ConfigError
from tokenleap.runtime.inputs import StateRows
from tokenleap.runtime.network import HiddenStates, Need, num_states, states_of
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target

FORMS: dict[str, dict[str, Any]] = {
    "EAGLE-3.1": {},
    "EAGLE-3": {"fc_norm": False, "norm_output": False, "norm_before_residual": False},
    "normalised heads": {"qk_norm": True},
    "two features": {"aux_layers": (2, 0)},
    "scaled rotation": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    },
    "narrow heads": {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
    "an odd inner size": {"intermediate_size": 80},
}
CONFIGS: dict[str, EagleConfig] = {
    **{form: tiny_config(**fields) for form, fields in FORMS.items()},
    "EAGLE-1": feature_config(),
    "EAGLE-1, few tokens": feature_config(fc_bias=False, draft_vocab_size=VOCAB_SIZE // 2),
}
LEVELS = 4


def levels(net: EagleNet, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
    """[T, Vd] logits of each level from every pair, as training computes them."""
    length = len(tokens) - LEVELS
    positions = torch.arange(length)[None]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    states = net.fuse(hidden[None, :length])
    earlier: list[KeysValues] = []
    found: list[Tensor] = []
    for level in range(LEVELS):
        these = tokens[None, level + 1 : level + 1 + length]
        outputs, earlier = net(these, states, positions + level, mask, earlier)
        found.append(net.logits(outputs)[0])
        states = net.next_states(outputs)
    return found


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("runtime", ["native", "torch"])
@torch.inference_mode()
def test_serving_computes_what_training_computes(form: str, runtime: str, tmp_path: Any) -> None:
    model = tiny_model(head_dim=32)
    save_head(tmp_path, tiny_net(CONFIGS[form], model))
    target = Target(model, runtime=runtime)
    net = EagleFolder.read(tmp_path, "eagle").load(target)
    head, passes = load_head(EagleFolder.read(tmp_path, "eagle"), target)
    if form == "EAGLE-1":
        assert passes.network.name == {"native": "native", "torch": "lean"}[runtime]
    tokens = torch.randint(0, VOCAB_SIZE, (50,))
    layers = net.config.aux_layers
    target.add(0)
    hidden = target.prefill(0, tokens.tolist(), tuple(sorted(layers)))
    expected = levels(net, torch.stack([hidden[layer] for layer in layers], 1), tokens)
    for root in (1, 2, 40):  # the pair before the root is the last one with the target's states
        found = drafted(head, hidden, tokens.tolist(), root)
        for level in range(LEVELS):
            torch.testing.assert_close(
                found[level], expected[level][root - 1], atol=2e-3, rtol=1e-3
            )


def drafted(head: Head, hidden: Mapping[int, Tensor], tokens: list[int], root: int) -> list[Tensor]:
    """The logits of a chain of the text's own tokens after `root`."""
    own = [[token] for token in tokens[root + 1 : root + LEVELS]]
    return [level[0, 0] for level in grown(head, hidden, [tokens[: root + 1]], own)]


@pytest.mark.parametrize("form", ["EAGLE-3.1", "EAGLE-1"])
@torch.inference_mode()
def test_a_path_of_a_tree_has_the_logits_of_a_chain(form: str) -> None:
    """Each node continues the state of its parent, not that of the node before it."""
    model = tiny_model(head_dim=32)
    target = Target(model, runtime="native")
    net = tiny_net(CONFIGS[form], model)
    head = EagleHead(
        head_passes(net, target), Fusion(net, target.dtype, target.device), net.draft_tokens
    )
    tokens = [5, 3, 8, 1, 9, 2]
    target.add(0)
    hidden = target.prefill(0, tokens[:-1], net.config.aux_layers)
    tree = grown(head, hidden, [tokens], [[10, 20], [11, 21]])
    for place, path in enumerate(([10, 11], [20, 21])):
        alone = grown(head, hidden, [tokens], [[token] for token in path])
        for level in (1, 2):
            assert torch.equal(tree[level][0, place], alone[level][0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["EAGLE-3.1", "EAGLE-3", "two features", "EAGLE-1"])
@torch.inference_mode()
def test_native_code_fuses_as_pytorch_does(form: str, dtype: torch.dtype) -> None:
    """And a state's bits do not depend on how many are computed with it, and in which parts."""
    model = tiny_model(head_dim=32, dtype=dtype)
    net = tiny_net(CONFIGS[form], model)
    fusions = [Fusion(net, dtype, model.device, native=native) for native in (True, False)]
    layers = net.config.aux_layers
    together = torch.randn(len(layers), 19, 64).to(dtype)
    hidden = dict(zip(layers, together, strict=True))
    native, other = (fusion.states(hidden) for fusion in fusions)
    assert native.dtype == dtype
    error = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(native, other, atol=error, rtol=error)
    for start, stop in ((0, 1), (3, 8), (18, 19)):
        some = {layer: states[start:stop] for layer, states in hidden.items()}
        assert torch.equal(fusions[0].states(some), native[start:stop])
    of_pass = HiddenStates(together, layers, range(19))
    parts = [states_of(of_pass, slice(4)), states_of(hidden, slice(4, 5))]
    parts.append(states_of(states_of(of_pass, slice(5, 30)), slice(0, 9)))
    parts.append(states_of(states_of(of_pass, slice(10, 19)), [4, 6, 7]))
    assert [num_states(part) for part in parts] == [4, 1, 9, 3]
    chosen = [*range(14), 14, 16, 17]
    for fusion, whole in zip(fusions, (native, other), strict=True):
        torch.testing.assert_close(fusion.states(*parts), whole[chosen], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("runtime", "dtype", "of_target", "default"),
    [
        ("native", torch.bfloat16, None, "int8"),
        ("native", torch.float32, None, "none"),
        ("native", torch.float32, "int8", "int8"),
        ("native", torch.float32, "int4", "int4"),
        ("torch", torch.bfloat16, None, "none"),
        ("torch", torch.bfloat16, "int8", "none"),
    ],
    ids=str,
)
@torch.inference_mode()
def test_how_the_weights_of_a_head_are_rounded(
    runtime: str, dtype: torch.dtype, of_target: str | None, default: str
) -> None:
    model = tiny_model(head_dim=32, dtype=dtype)
    target = Target(model, runtime=runtime, quantization=of_target)
    net = tiny_net(tiny_config(), model)
    likeness = {"none": 1 - 1e-5, "int8": 0.99, "int4": 0.85}
    if runtime == "torch":
        del likeness["int4"]
    logits = {
        quantization: _pair_logits(head_passes(net, target, quantization))
        for quantization in (None, *likeness)
    }
    assert torch.equal(logits[None], logits[default])
    for one, other in itertools.combinations(likeness, 2):
        assert not torch.equal(logits[one], logits[other])
    for each, least in likeness.items():
        assert torch.cosine_similarity(logits["none"], logits[each]).min() > least
    if runtime == "torch":
        with pytest.raises(
            ConfigError, match=r"^draft_quantization: int4 needs .* is 'lean'; take"
        ):
            head_passes(net, target, "int4")


def _pair_logits(passes: Passes) -> Tensor:
    """[9, Vd] logits of some pairs of token and state."""
    states = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(passes.dtype)
    passes.add(0)
    need = Need()
    rows = [StateRows.of(states)]
    (output,) = passes.verify([0], [chain(range(1, 10))], None, need, rows)
    return output.scores.float().clone()


@pytest.mark.parametrize(
    ("runtime", "quantization", "rule", "params"),
    [
        ("native", "int4", "coupled", {"temperature": 0}),
        ("native", "int4", "rejection", {"temperature": 1, "top_p": 0.9}),
        ("native", None, "coupled", {"temperature": 1}),
        ("lean", None, "coupled", {"temperature": 1}),
    ],
    ids=str,
)
def test_a_head_whose_outputs_grow_without_an_end_only_loses_its_drafts(
    runtime: str, quantization: str | None, rule: str, params: dict[str, Any], tmp_path: Path
) -> None:
    """EAGLE-1 reads its own outputs, which no norm keeps small; their squares overflow."""
    model = tiny_model(head_dim=32)
    net = tiny_net(CONFIGS["EAGLE-1"], model)
    save_head(tmp_path, net)
    config = {"method": "eagle", "model": str(tmp_path), "acceptance": rule, "controller": "fixed"}
    llm = LLM(
        model,
        speculative_config={**config, "num_speculative_tokens": 60},
        quantization=quantization,
        runtime=runtime,
    )
    own = SamplingParams(max_tokens=70, seed=1, ignore_eos=True, **params)
    (output,) = llm.generate([PROMPTS[0]], own, trace=True)
    failure = output.metrics.drafter_failure or ""
    depth = re.search(r"NaN or infinite after (\d+) drafted tokens: draft fewer", failure)
    assert depth is not None
    assert int(depth[1]) > 20
    assert len(output.token_ids) == 70
    short = own.model_copy(update={"max_tokens": 10})
    (next_one,) = llm.generate([PROMPTS[1]], short)
    assert next_one.metrics.drafter_failure is None
    assert next_one.metrics.num_drafts > 0
    if rule == "coupled":
        plain = LLM(model, quantization=quantization, runtime=runtime)
        assert plain.generate([PROMPTS[0]], own)[0].token_ids == output.token_ids
