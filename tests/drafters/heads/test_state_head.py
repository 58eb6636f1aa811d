"""Heads without attention: what serves computes what training computes, in any batch and schedule.

Every test runs over all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tests.drafters.heads.test_serving import PROMPTS, served
from tests.heads import STATE_NETS, grown, request_of, save_head, state_config, state_net
from tests.tiny import ARCHITECTURES, VOCAB_SIZE, tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tests.training.world import parts_of
from tokenleap import LLM, CompatibilityError, SamplingParams
from tokenleap.core.tree import chain
from tokenleap.drafters.heads import state
from tokenleap.drafters.heads.layouts import StateFolder
from tokenleap.drafters.heads.state import KEPT, StateHead
from tokenleap.drafters.heads.state_net import StateConfig
from tokenleap.runtime.network import Need
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target
from tokenleap.training.method import training_method

METHODS = list(STATE_NETS)
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in METHODS},
    **{f"{method}, own rows": (method, {"own_rows": True}) for method in METHODS},
    "medusa, two blocks": ("medusa", {"num_layers": 2, "bias": False}),
    "hydra, three layers": ("hydra", {"num_layers": 3}),
    "mlp_speculator, untied": ("mlp_speculator", {"tie_weights": False, "scale_input": False}),
    "mlp_speculator, all its own": (
        "mlp_speculator",
        {"own_rows": True, "own_embedding": True, "inner_size": 80, "tie_weights": False},
    ),
    "mlp_speculator, tied, all its own": (
        "mlp_speculator",
        {"own_rows": True, "own_embedding": True, "inner_size": 80},
    ),
}
K = 4


def head_of(method: str, folder: Path, target: Target) -> StateHead:
    kind = STATE_NETS[method][0]
    return StateHead(StateFolder.read(folder, kind.METHOD).load(target), target)


def text_and_states(target: Target, seed: int = 0) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB_SIZE, (90,), generator=generator).tolist()
    target.add(0)
    last = target.network.num_layers
    return tokens, target.prefill(0, tokens, (last,))[last]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("runtime", ["native", "torch"])
@torch.inference_mode()
def test_serving_computes_what_training_computes(form: str, runtime: str, tmp_path: Path) -> None:
    model = tiny_model(head_dim=32)
    method, fields = FORMS[form]
    served(method, model, tmp_path, **fields)
    target = Target(model, runtime=runtime)
    head = head_of(method, tmp_path, target)
    net = StateFolder.read(tmp_path, method).load(target)
    tokens, hidden = text_and_states(target)
    decoder: Any = model.base_model
    normed = decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    for root in (1, 2, 80):
        expected = net.float()(normed[root - 1], torch.tensor(tokens[root : root + K]))
        levels = [[token] for token in tokens[root + 1 : root + K]]
        found = grown(head, {head.layers[0]: hidden}, [tokens[: root + 1]], levels)
        for level, logits in zip(found, expected, strict=True):
            torch.testing.assert_close(level[0, 0], logits, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_logits_do_not_depend_on_what_is_computed_with_them(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A path of a tree has the bits of a chain, and a request in a batch those it has alone."""
    model = tiny_model(dtype=dtype)
    method, fields = FORMS[form]
    served(method, model, tmp_path, **fields)
    target = Target(model)
    head = head_of(method, tmp_path, target)
    tokens, hidden = text_and_states(target)
    texts = [tokens[:length] for length in (2, 30, 31, 33, 80)]
    tree = [[10, 20, 30], [11, 21], [12, 22]]
    together = grown(head, {head.layers[0]: hidden}, texts, tree)
    for request, text in enumerate(texts):
        for first in ((10, 11, 12), (20, 21, 22)):
            place = tree[0].index(first[0])
            chain = grown(head, {head.layers[0]: hidden}, [text], [[token] for token in first])
            assert torch.equal(together[0][request, 0], chain[0][0, 0])
            for level in range(1, K):
                assert torch.equal(together[level][request, place], chain[level][0, 0])


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_only_heads_that_read_tokens_tell_them_apart(method: str, tmp_path: Path) -> None:
    model = tiny_model()
    served(method, model, tmp_path)
    target = Target(model)
    tokens, hidden = text_and_states(target)
    head = head_of(method, tmp_path, target)
    found = grown(head, {head.layers[0]: hidden}, [tokens[:9]], [[10, 20], [11, 11]])
    for level in found[1:]:
        same = torch.equal(level[0, 0], level[0, 1])
        assert same != STATE_NETS[method][0].reads_tokens


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@torch.inference_mode()
def test_hidden_states_are_read_after_the_final_norm(architecture: str, tmp_path: Path) -> None:
    """As the target's own output layer does, in every architecture."""
    model = tiny_model(architecture)
    served("medusa", model, tmp_path)
    target = Target(model)
    tokens, hidden = text_and_states(target)
    decoder: Any = model.base_model
    expected = decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    head = head_of("medusa", tmp_path, target)
    torch.testing.assert_close(head._norm(hidden), expected, atol=1e-4, rtol=1e-4)


def test_a_target_whose_final_norm_is_not_known(tmp_path: Path) -> None:
    model = tiny_model()
    served("medusa", model, tmp_path)
    target = Target(model)
    target.final_norm = None
    with pytest.raises(CompatibilityError, match="final norm"):
        head_of("medusa", tmp_path, target)


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_the_states_of_the_last_tokens_are_kept(method: str, tmp_path: Path) -> None:
    """In chunks of any size; tokens that were taken back may be followed by others."""
    model = tiny_model()
    served(method, model, tmp_path)
    target = Target(model)
    head = head_of(method, tmp_path, target)
    tokens, hidden = text_and_states(target)
    request = request_of(tokens[:1])
    assert head.room(request) == 0
    at = 0
    for size in (1, 3, KEPT - 1, 2, 7):
        head.keep(request, at, {head.layers[0]: hidden[at : at + size]})
        at += size
        request.token_ids[:] = tokens[: at + 1]
        assert head.room(request) > 0
    for length in (at, at - 9, at - KEPT + 2, at - KEPT + 1, 2):
        request.token_ids[:] = tokens[:length]
        head.rewind(request)
        assert bool(head.room(request)) == (length > at - KEPT + 1)
        if head.room(request):
            head.pending(request)
            kept = head._roots[request.key]
            torch.testing.assert_close(kept[0], head._norm(hidden[length - 2]), rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_what_was_learnt_is_accepted(method: str, tmp_path: Path) -> None:
    """A head that is fitted to a text drafts that text: training and serving agree on positions."""
    model = tiny_model()
    params = SamplingParams(temperature=0, max_tokens=150)
    (written,) = LLM(model).generate([PROMPTS[0]], params)
    tokens = torch.tensor([*PROMPTS[0], *written.token_ids])
    with torch.no_grad():
        decoder: Any = model.base_model
        hidden = decoder(input_ids=tokens[None]).last_hidden_state[0]
    net = state_net(method, state_config(method, draft_vocab_size=VOCAB_SIZE), model)
    net.initialise()
    windows = tokens.unfold(0, K + 1, 1)[1:]  # a root, and the tokens after it
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(60):
        logits = net(hidden[: len(windows)], windows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    save_head(tmp_path, net)
    config: dict[str, Any] = {"method": method, "model": str(tmp_path), "controller": "fixed"}
    config["num_speculative_tokens"] = K
    (output,) = LLM(model, speculative_config=config).generate([PROMPTS[0]], params)
    assert output.token_ids == written.token_ids
    assert output.metrics.acceptance_rate > 0.8


@pytest.mark.parametrize("method", METHODS)
def test_training_moves_its_own_parameters_alone(method: str) -> None:
    """Gradients reach every parameter, and neither the embedding nor the target's rows."""
    model = tiny_model()
    net = state_net(method, state_config(method), model).train()
    hidden = torch.randn(3, 5, 64)
    tokens = torch.randint(0, VOCAB_SIZE, (3, 5, K))
    logits = net(hidden, tokens)
    assert logits.shape == (3, 5, K, VOCAB_SIZE // 2)
    logits.logsumexp(-1).sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert not any(buffer.requires_grad for buffer in net.buffers())


@pytest.mark.parametrize("method", METHODS)
def test_an_untrained_head_predicts_numbers(method: str) -> None:
    """`initialise` sets every parameter."""
    config: StateConfig = state_config(method, own_rows=True)
    model = tiny_model()
    kind = STATE_NETS[method][0]
    weights = Target(model).vocabulary_weights
    assert weights is not None
    net = kind(config, *weights, torch.arange(48) * 2)
    for parameter in net.parameters():
        parameter.data.fill_(torch.nan)
    net.initialise()
    net.copy_rows(weights[1])
    assert net(torch.randn(2, 64), torch.randint(0, VOCAB_SIZE, (2, K))).isfinite().all()


def test_a_head_that_cannot_be_packed_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    config = state_config("medusa")
    head = StateHead(state_net("medusa", config, model), Target(model))
    before = head._net

    def full(*_: Any) -> int:
        raise MemoryError

    monkeypatch.setattr(state, "_pack", full)
    with pytest.raises(MemoryError):
        head.use(state_net("medusa", config, model))
    assert head._net is before


@pytest.mark.parametrize("name", ["marian", "bart", "phi"])
@torch.inference_mode()
def test_what_the_target_adds_to_its_logits(name: str, tmp_path: Path) -> None:
    """A new blockwise head computes the target's own logits, in training and in serving."""
    model: Any = tiny_model(name) if name == "phi" else tiny_seq2seq(name)
    if name == "phi":
        model.lm_head.bias.normal_(generator=torch.Generator().manual_seed(0))
    target = Target(model)
    assert target.logits_bias is not None
    target.add(INTERNAL_KEY)
    need = Need(hidden=(target.network.num_layers,))
    (output,) = target.verify([INTERNAL_KEY], [chain([5, 20, 21])], need=need)
    (hidden,) = output.hidden.values()
    own = output.scores[-1:, ::2]

    method: Any = training_method("blockwise", {"inner_size": 16})
    trainee = method.trainee(parts := parts_of(target, stride=2))
    assert target.final_norm is not None
    outputs = trainee.net.outputs(target.final_norm(hidden[-1:]), 1)
    torch.testing.assert_close(trainee.logits(outputs, 1), own, rtol=0, atol=1e-4)
    trainee.write(parts, tmp_path, {})
    head = head_of("blockwise", tmp_path, target)
    first, second = grown(head, {head.layers[0]: hidden}, [[5, 20, 21, 22]], [[23]])
    torch.testing.assert_close(first[0], own, rtol=0, atol=1e-4)
    torch.testing.assert_close(second[0], own, rtol=0, atol=1e-4)


def test_a_bias_of_zeros_costs_nothing() -> None:
    assert Target(tiny_model("phi")).logits_bias is None
    assert Target(tiny_model()).logits_bias is None


# The formulas of the papers, written out


def rows_of(model: PreTrainedModel) -> Tensor:
    """Of the draft vocabulary."""
    rows: Tensor = model.get_output_embeddings().weight[::2]  # type: ignore[no-untyped-call]
    return rows


@pytest.mark.parametrize("method", ["medusa", "hydra", "blockwise"])
def test_an_untrained_head_is_the_target_s_output_layer(method: str) -> None:
    model = tiny_model()
    net = state_net(method, state_config(method), model)
    net.initialise()
    hidden = torch.randn(64)
    for logits in net(hidden, torch.tensor([1, 2, 3, 4])):
        torch.testing.assert_close(logits, rows_of(model) @ hidden)


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def test_hydra_reads_the_root_and_all_tokens_after_it() -> None:
    model = tiny_model()
    net = state_net("hydra", state_config("hydra", num_layers=2), model)
    hidden, tokens = torch.randn(64), torch.tensor([5, 9, 11, 40])
    found, weights = net(hidden, tokens), net.state_dict()
    for depth in range(K):
        state = torch.cat([hidden, *net.embedding[tokens[: depth + 1]]])
        own = f"heads.{depth}"
        x = linear(weights, f"{own}.residual", state)
        x = x + F.silu(linear(weights, f"{own}.layers.0", state))
        x = x + F.silu(linear(weights, f"{own}.layers.1", x))
        torch.testing.assert_close(found[depth], rows_of(model) @ x, atol=1e-3, rtol=1e-3)


def test_blockwise_is_a_layer_with_a_residual_before_the_target_s_output_layer() -> None:
    model = tiny_model()
    net = state_net("blockwise", state_config("blockwise"), model)
    hidden = torch.randn(64)
    found, weights = net(hidden, torch.zeros(4, dtype=torch.long)), net.state_dict()
    for depth in range(K):
        inner = F.relu(linear(weights, f"heads.{depth}.hidden", hidden))
        x = hidden + linear(weights, f"heads.{depth}.output", inner)
        torch.testing.assert_close(found[depth], rows_of(model) @ x, atol=1e-3, rtol=1e-3)


def blockwise_output(folder: Path, rule: str | dict[str, Any]) -> Any:
    model = tiny_model()
    config = served("blockwise", model, folder) | {"acceptance": rule}
    params = SamplingParams(temperature=0, max_tokens=40)
    (output,) = LLM(model, speculative_config=config).generate([[1, 2, 3]], params)
    return output


def test_predicting_and_verifying_are_one_pass(tmp_path: Path) -> None:
    """A step takes one pass of the target, and no step is spent on predicting alone."""
    output = blockwise_output(tmp_path, "rejection")
    assert output.metrics.target_passes == len(output.trace)
    assert all(step.drafted for step in output.trace.steps[:-1])


def test_a_minimum_block_size(tmp_path: Path) -> None:
    """Every step commits so many tokens, whatever the head drafts."""
    output = blockwise_output(tmp_path, {"rule": "distance", "epsilon": 0, "minimum_block": 3})
    lengths = [len(step.accepted) for step in output.trace.steps[:-1]]
    assert min(lengths) == 2
    exact = blockwise_output(tmp_path, {"rule": "distance", "epsilon": 0})
    assert len(exact.trace) > len(output.trace)
