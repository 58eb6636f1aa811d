"""Tiny trained heads: folders with random weights for tiny models."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.drafters.heads.blockwise import BlockwiseConfig, BlockwiseNet
from foretoken.drafters.heads.checkpoint import write_checkpoint
from foretoken.drafters.heads.config_file import Description, Verifier
from foretoken.drafters.heads.eagle_net import EagleConfig, EagleNet
from foretoken.drafters.heads.hydra import HydraConfig, HydraNet
from foretoken.drafters.heads.medusa import MedusaConfig, MedusaNet
from foretoken.drafters.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorNet
from foretoken.drafters.heads.state_file import write_state_file
from foretoken.drafters.heads.state_net import StateConfig, StateNet
from tests.tiny import CONTEXT, VOCAB_SIZE


def tiny_config(vocab_size: int = VOCAB_SIZE, **fields: Any) -> EagleConfig:
    """Sizes that fit every tiny model; the head can draft every second token."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": vocab_size,
        "draft_vocab_size": (vocab_size + 1) // 2,
        "aux_layers": (0, 1, 2),
        "max_position_embeddings": CONTEXT,
    }
    return EagleConfig(**{**sizes, **fields})


def tiny_net(config: EagleConfig, model: PreTrainedModel, seed: int = 0) -> EagleNet:
    """A head with random weights over a model's embedding and output rows."""
    embedding = cast("Any", model.get_input_embeddings()).weight.detach()
    rows = model.get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    return _random_net(config, embedding, rows, seed)


def _random_net(config: EagleConfig, embedding: Tensor, rows: Tensor, seed: int) -> EagleNet:
    stride = config.vocab_size // config.draft_vocab_size
    tokens = torch.arange(config.draft_vocab_size) * stride
    torch.manual_seed(seed)
    net = EagleNet(config, embedding, rows[tokens], tokens)
    net.initialise()
    for parameter in net.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    net.train(False)
    return net


def save_head(folder: Path, net: EagleNet, **notes: Any) -> None:
    """Write a head as one that was trained for a model called "tiny"."""
    write_checkpoint(folder, net, Description(net.config, Verifier("tiny"), notes))


@cache
def random_head(config: EagleConfig) -> str:
    """A folder with random weights, until the tests are over."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-tests-"))
    atexit.register(shutil.rmtree, folder)
    nothing = torch.zeros(config.vocab_size, config.hidden_size)
    save_head(folder, _random_net(config, nothing, nothing, seed=0))
    return str(folder)


STATE_NETS: dict[str, tuple[type[StateNet], type[StateConfig], dict[str, Any]]] = {
    "medusa": (MedusaNet, MedusaConfig, {}),
    "hydra": (HydraNet, HydraConfig, {}),
    "blockwise": (BlockwiseNet, BlockwiseConfig, {"inner_size": 80}),
    "mlp_speculator": (MlpSpeculatorNet, MlpSpeculatorConfig, {"inner_size": 64}),
}
"""Heads without attention: the classes of the network and its configuration, and their sizes."""


def state_config(method: str, vocab_size: int = VOCAB_SIZE, **fields: Any) -> StateConfig:
    """Sizes that fit every tiny model; the head can draft every second token."""
    _, config, own = STATE_NETS[method]
    sizes = {
        "hidden_size": 64,
        "vocab_size": vocab_size,
        "draft_vocab_size": (vocab_size + 1) // 2,
        "num_heads": 4,
    }
    return config(**{**sizes, **own, **fields})


def state_net(
    method: str, config: StateConfig, model: PreTrainedModel | None = None, seed: int = 0
) -> StateNet:
    """A head with random weights, over a model's embedding and output rows if one is given."""
    embedding = rows = torch.zeros(config.vocab_size, config.hidden_size)
    if model is not None:
        embedding = cast("Any", model.get_input_embeddings()).weight.detach()
        rows = model.get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    stride = config.vocab_size // config.draft_vocab_size
    tokens = torch.arange(config.draft_vocab_size) * stride
    torch.manual_seed(seed)
    net = STATE_NETS[method][0](config, embedding, rows, tokens)
    net.initialise()
    net.copy_rows(rows)
    for parameter in net.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    net.train(False)
    return net


def save_state_head(folder: Path, net: StateNet, **notes: Any) -> None:
    """Write a head as one that was trained for a model called "tiny"."""
    write_state_file(folder, net, Verifier("tiny"), notes)


@cache
def random_state_head(method: str, config: StateConfig) -> str:
    """A folder with random weights, until the tests are over."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-tests-"))
    atexit.register(shutil.rmtree, folder)
    save_state_head(folder, state_net(method, config))
    return str(folder)


def tiny_head(method: str = "eagle", vocab_size: int = VOCAB_SIZE) -> str:
    """A folder for tiny models with this vocabulary."""
    if method in STATE_NETS:
        return random_state_head(method, state_config(method, vocab_size))
    return random_head(tiny_config(vocab_size))
