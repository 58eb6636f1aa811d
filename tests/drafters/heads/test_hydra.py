"""`hydra`: the mathematics of a head that reads the drafted tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.heads import state_config, state_net
from tests.tiny import tiny_model
from tokenleap.drafters.heads.state_net import HydraNet


def test_a_head_reads_the_root_and_all_tokens_behind_it() -> None:
    model = tiny_model()
    net = state_net("hydra", state_config("hydra", num_layers=2), model)
    assert isinstance(net, HydraNet)
    hidden, tokens = torch.randn(64), torch.tensor([5, 9, 11, 40])
    found = net(hidden, tokens)
    weights = net.state_dict()
    rows = model.get_output_embeddings().weight[::2]  # type: ignore[no-untyped-call]
    for depth in range(4):
        state = torch.cat([hidden, *net.embedding[tokens[: depth + 1]]])

        own = f"heads.{depth}"
        x = linear(weights, f"{own}.residual", state)
        x = x + F.silu(linear(weights, f"{own}.layers.0", state))
        x = x + F.silu(linear(weights, f"{own}.layers.1", x))
        torch.testing.assert_close(found[depth], rows @ x, atol=1e-3, rtol=1e-3)


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]


def test_an_untrained_head_is_the_target_s_output_layer() -> None:
    model = tiny_model()
    net = state_net("hydra", state_config("hydra"), model)
    net.initialise()
    hidden = torch.randn(64)
    rows = model.get_output_embeddings().weight[::2]  # type: ignore[no-untyped-call]
    for logits in net(hidden, torch.tensor([1, 2, 3, 4])):
        torch.testing.assert_close(logits, rows @ hidden)
