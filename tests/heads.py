"""Tiny trained heads: folders with random weights for tiny models, and runs of such heads."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.tiny import CONTEXT, VOCAB_SIZE
from tokenleap import SamplingParams
from tokenleap.core.tree import TokenTree, chain
from tokenleap.drafters.heads.eagle_net import EagleConfig, EagleNet, FeatureConfig, ParallelConfig
from tokenleap.drafters.heads.folder import Verifier
from tokenleap.drafters.heads.layouts import new_net, write_head
from tokenleap.drafters.heads.state_net import (
    BlockwiseConfig,
    BlockwiseNet,
    HydraConfig,
    HydraNet,
    MedusaConfig,
    MedusaNet,
    MlpSpeculatorConfig,
    MlpSpeculatorNet,
    StateConfig,
    StateNet,
)
from tokenleap.drafters.model_drafter import Head
from tokenleap.drafters.padding import write_pass_tokens
from tokenleap.request import Request
from tokenleap.runtime.target import final_norm

Net = TypeVar("Net", bound=nn.Module)


def lasting_folder() -> Path:
    """A folder until the tests are over."""
    folder = Path(tempfile.mkdtemp(prefix="tokenleap-tests-"))
    atexit.register(shutil.rmtree, folder)
    return folder


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


def parallel_config(vocab_size: int = VOCAB_SIZE, **fields: Any) -> ParallelConfig:
    """The same sizes for a head of two layers that drafts a block in one pass."""
    own: dict[str, Any] = {"num_layers": 2, "mask_token_id": vocab_size - 1, "depths": 8}
    own |= {name: fields.pop(name) for name in own.keys() & fields.keys()}
    return ParallelConfig(**vars(tiny_config(vocab_size, **fields)), **own)


def feature_config(vocab_size: int = VOCAB_SIZE, **fields: Any) -> FeatureConfig:
    """The same sizes for an EAGLE-1 head, which can draft every token."""
    none = dict.fromkeys(("norm_before_residual", "fc_norm", "norm_output"), False)
    own = {"fc_bias": fields.pop("fc_bias", True), **none}
    given = {"aux_layers": (2,), "draft_vocab_size": vocab_size, **fields}
    return FeatureConfig(**{**vars(tiny_config(vocab_size, **given)), **own})


def tiny_net(config: EagleConfig, model: PreTrainedModel, seed: int = 0) -> EagleNet:
    """A head with random weights over a model's embedding and output rows."""
    return _random_net(config, *_vocabulary(model), seed, final_norm(model))


def _vocabulary(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Its embedding and output rows."""
    rows = model.get_output_embeddings().weight.detach()  # type: ignore[no-untyped-call]
    return cast("Any", model.get_input_embeddings()).weight.detach(), rows


def _random_net(
    config: EagleConfig,
    embedding: Tensor,
    rows: Tensor,
    seed: int,
    norm: nn.Module | None = None,
) -> EagleNet:
    tokens = _draft_tokens(config)
    torch.manual_seed(seed)
    net = new_net(config, embedding, rows[tokens], tokens, norm)
    net.initialise()
    return _shaken(net)


def _draft_tokens(config: EagleConfig | StateConfig) -> Tensor:
    stride = config.vocab_size // config.draft_vocab_size
    return torch.arange(config.draft_vocab_size) * stride


def _shaken(net: Net) -> Net:
    """A network whose weights are random around what they were."""
    for parameter in net.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    net.train(False)
    return net


def save_head(folder: Path, net: EagleNet | StateNet, **notes: Any) -> None:
    """Write a head as one that was trained for a model called "tiny"."""
    write_head(folder, net, Verifier("tiny"), notes)


@cache
def random_head(config: EagleConfig) -> str:
    """A folder with random weights, until the tests are over."""
    folder = lasting_folder()
    nothing = torch.zeros(config.vocab_size, config.hidden_size)
    save_head(folder, _random_net(config, nothing, nothing, seed=0))
    return str(folder)


@cache
def random_pass_tokens(vocab_size: int = VOCAB_SIZE, count: int = 4, size: int = 64) -> str:
    """A folder with random look-ahead embeddings, until the tests are over."""
    folder = lasting_folder()
    torch.manual_seed(0)
    write_pass_tokens(folder, torch.randn(count, size), vocab_size, Verifier("tiny"), {})
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
    nothing = torch.zeros(config.vocab_size, config.hidden_size)
    embedding, rows = (nothing, nothing) if model is None else _vocabulary(model)
    torch.manual_seed(seed)
    net = STATE_NETS[method][0](config, embedding, rows, _draft_tokens(config))
    net.initialise()
    net.copy_rows(rows)
    return _shaken(net)


@cache
def random_state_head(method: str, config: StateConfig) -> str:
    """A folder with random weights, until the tests are over."""
    folder = lasting_folder()
    save_head(folder, state_net(method, config))
    return str(folder)


def published_medusa(folder: Path, vocab_size: int = VOCAB_SIZE, size: int = 64) -> Path:
    """A folder with two random Medusa heads in a `.pt` file, as their authors publish them."""
    folder.mkdir()
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.randn(size, size) / 8
        tensors[f"{head}.0.linear.bias"] = torch.randn(size)
        tensors[f"{head}.1.weight"] = torch.randn(vocab_size, size) / 8
    torch.save(tensors, folder / "medusa_lm_head.pt")
    fields = {"base_model_name_or_path": "tiny", "medusa_num_heads": 2, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def tiny_head(method: str = "eagle", vocab_size: int = VOCAB_SIZE) -> str:
    """A folder for tiny models with this vocabulary."""
    if method in STATE_NETS:
        return random_state_head(method, state_config(method, vocab_size))
    if method == "pass":
        return random_pass_tokens(vocab_size)
    if method == "parallel":
        return random_head(parallel_config(vocab_size))
    return random_head(tiny_config(vocab_size))


# Runs of heads


def request_of(tokens: Sequence[int]) -> Request:
    return Request(list(tokens), SamplingParams(), vocab_size=VOCAB_SIZE, max_model_len=CONTEXT)


def grown(
    head: Head,
    hidden: Mapping[int, Tensor],
    texts: Sequence[Sequence[int]],
    added: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Logits of the nodes of trees that are grown together, level by level.

    Args:
        hidden: layer id -> [n, E] the target's states of a text, of which `texts` are beginnings.
        texts: the requests' tokens.
        added: the levels of every request's tree. The i-th token of a level is the child of the
            i-th of the level above.

    Returns:
        For each level, the root's included, [requests, nodes, Vd].
    """
    requests = [request_of(text) for text in texts]
    for request, text in zip(requests, texts, strict=True):
        head.keep(request, 0, {layer: x[: len(text) - 1] for layer, x in hidden.items()})
    keys = [request.key for request in requests]
    head.expect(dict.fromkeys(keys, 1 + len(added)))
    pending = [head.pending(request) for request in requests]
    trees = [chain(tokens) for tokens in pending]
    above = [[len(tokens) - 1] * max([1, *map(len, added)]) for tokens in pending]
    computed, found = [0] * len(keys), list[Tensor]()
    for level in ([], *added):
        if level:
            computed = [len(tree) for tree in trees]
            trees = [
                TokenTree((*tree.tokens, *level), (*tree.parents, *parents[: len(level)]))
                for tree, parents in zip(trees, above, strict=True)
            ]
            above = [list(range(size, size + len(level))) for size in computed]
        outputs = head.verify(keys, trees, computed)
        last = max(1, len(level))
        found.append(torch.stack([output.scores[-last:].clone() for output in outputs]))
    for request, tokens in zip(requests, pending, strict=True):
        head.finish_draft(request, len(tokens))
        head.release(request)
    return found
