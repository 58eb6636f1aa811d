"""EAGLE-3 heads in the `speculators` package: it computes what we compute, from the same files.

The package is no dependency of ours, and without it these tests are skipped. They were written
with version 0.9.0.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.drafters.heads.test_eagle import FORMS as SERVED
from tests.drafters.heads.test_eagle import LEVELS, levels
from tests.drafters.heads.test_parallel import FORMS as SERVED_BLOCKS
from tests.heads import parallel_config, save_head, tiny_config, tiny_net
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap.drafters.heads.eagle import export_head
from tokenleap.drafters.heads.eagle_net import EagleConfig, EagleNet, ParallelConfig, ParallelNet
from tokenleap.drafters.heads.layouts import EagleFolder
from tokenleap.runtime.target import vocabulary_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    package: Any = pytest.importorskip("speculators.models.eagle3")
    parallel_package: Any = pytest.importorskip("speculators.models.peagle.core")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FORMS: dict[str, dict[str, Any]] = {
    **SERVED,
    "EAGLE-3 with normalised heads": {**SERVED["EAGLE-3"], "qk_norm": True},
    "norms of features only": {"norm_output": False},
    "a fed-back norm only": {"fc_norm": False},
    "all tokens": {"draft_vocab_size": VOCAB_SIZE},
    "Llama 3's rotation": {"rope_parameters": LLAMA3},
}


class Files:
    """A target on disk, with weights that bfloat16 holds, and heads beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_model(dtype=torch.bfloat16).to(torch.float32)  # type: ignore[arg-type]
        self.target = str(folder / "target")
        self.model.save_pretrained(self.target)
        weights = vocabulary_weights(self.model)
        assert weights is not None
        self.weights = weights

    def exported(self, config: EagleConfig) -> Path:
        save_head(self.folder / "head", tiny_net(config, self.model))
        export_head(self.folder / "head", self.folder / "out", *self.weights, 2, self.target)
        return self.folder / "out"

    def ours(self, head: Path) -> EagleNet:
        return EagleFolder.read(head, "eagle").net(*self.weights)

    def theirs(self, config: EagleConfig) -> Any:
        """The package's model as its training makes it, with random weights."""
        return made_by_package(package.Eagle3DraftModel, self, config, 1, ttt_steps=LEVELS)


def made_by_package(
    kind: Any, files: Files, config: EagleConfig, num_layers: int, **own: Any
) -> Any:
    """A model as the package's training makes it, with random weights.

    Args:
        kind: its class.
        files: the target.
        config: what it is like.
        num_layers: of the head.
        own: what only this class takes.
    """
    net = tiny_net(config, files.model)
    layer = AutoConfig.for_model(
        "qwen3" if config.qk_norm else "llama",
        num_hidden_layers=num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
    )
    model = kind.from_training_args(
        layer,
        t2d=net.t2d,
        d2t=net.d2t,
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=config.norm_before_residual,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        target_layer_ids=list(config.aux_layers),
        verifier_name_or_path=files.target,
        draft_attn_impl="eager",
        **own,
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = package.Eagle3SpeculatorConfig.from_pretrained(folder)
    # Its own choice, flex attention, takes only multiples of 128 tokens where it is not compiled.
    config.transformer_layer_config._attn_implementation = "eager"
    return package.Eagle3DraftModel.from_pretrained(folder, config=config, dtype=dtype)


@torch.inference_mode()
def assert_same_logits(theirs: Any, ours: EagleNet) -> None:
    """All levels of drafts of a text's own tokens, from each of its tokens."""
    torch.manual_seed(7)
    tokens = torch.randint(0, VOCAB_SIZE, (40,))
    hidden = torch.randn(40, len(ours.config.aux_layers), ours.config.hidden_size)
    found: list[Tensor] = []
    hook = theirs.lm_head.register_forward_hook(lambda *call: found.append(call[-1]))
    theirs(
        hidden[None, :-1].flatten(-2),
        tokens[None, 1:],
        document_ids=torch.zeros(1, 39, dtype=torch.long),
        ttt_steps=LEVELS,
    )
    hook.remove()
    expected = levels(ours, hidden, tokens)
    assert len(found) == LEVELS
    for their_logits, our_logits in zip(found, expected, strict=True):
        these = their_logits[0, : len(our_logits)]  # it has no tokens for the last ones
        torch.testing.assert_close(these, our_logits, atol=1e-3, rtol=1e-3)
    assert expected[0].std() > 0.1
    assert not torch.allclose(expected[0], expected[1], atol=0.1)


@pytest.mark.parametrize("form", FORMS)
def test_the_package_loads_what_is_exported(files: Files, form: str) -> None:
    head = files.exported(tiny_config(**FORMS[form]))
    assert_same_logits(load(head), files.ours(head))


@pytest.mark.parametrize("form", FORMS)
def test_a_head_of_the_package_is_read(files: Files, form: str, tmp_path: Path) -> None:
    config = tiny_config(**FORMS[form])
    theirs = files.theirs(config)
    theirs.save_pretrained(tmp_path / "theirs")
    assert EagleFolder.read(tmp_path / "theirs", "eagle").config == config
    assert_same_logits(theirs, files.ours(tmp_path / "theirs"))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_own_embeddings_and_rows(files: Files, name: str, tmp_path: Path) -> None:
    """The package, too, takes them from the file rather than from the target."""
    theirs = files.theirs(tiny_config())
    getattr(theirs, name).weight.data.normal_()
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same_logits(load(tmp_path / "theirs"), files.ours(tmp_path / "theirs"))


@pytest.mark.parametrize("form", ["EAGLE-3.1", "EAGLE-3", "normalised heads", "scaled rotation"])
def test_config_json_says_what_the_package_writes(files: Files, form: str, tmp_path: Path) -> None:
    head = files.exported(tiny_config(**FORMS[form]))
    load(head, torch.bfloat16).save_pretrained(tmp_path / "again")
    ours, theirs = (json.loads((x / "config.json").read_text()) for x in (head, tmp_path / "again"))
    our_layer, their_layer = (x.pop("transformer_layer_config") for x in (ours, theirs))
    # Where Python code lies beside the file, and what wrote it.
    assert theirs.keys() - ours.keys() == {"auto_map", "transformers_version"}
    assert {name: theirs[name] for name in ours} == ours
    assert our_layer.pop("rope_theta") == their_layer["rope_parameters"]["rope_theta"]
    assert {name: their_layer[name] for name in our_layer} == our_layer
    read = [EagleFolder.read(folder, "eagle") for folder in (head, tmp_path / "again")]
    assert read[0].config == read[1].config
    assert read[0].verifier == read[1].verifier
    assert read[0].notes == read[1].notes


def test_the_tensors_are_those_that_the_package_writes(files: Files, tmp_path: Path) -> None:
    head = files.exported(tiny_config())
    load(head, torch.bfloat16).save_pretrained(tmp_path / "again")
    ours, again = EagleFolder.read(head, "eagle"), EagleFolder.read(tmp_path / "again", "eagle")
    assert torch.equal(ours.draft_tokens, again.draft_tokens)
    for kept, written in ((ours.tensors, again.tensors), (ours.vocabulary, again.vocabulary)):
        assert kept.keys() == written.keys()
        for name, tensor in kept.items():
            assert written[name].dtype == tensor.dtype
            assert torch.equal(written[name], tensor)


# P-EAGLE

BLOCKS = {name: SERVED_BLOCKS[name] for name in ("two layers", "one layer", "three layers")}


def parallel_of_package(files: Files, config: ParallelConfig) -> Any:
    """The package's P-EAGLE model as its training makes it, with random weights."""
    own = {"num_depths": config.depths, "mask_token_id": config.mask_token_id}
    kind = parallel_package.PEagleDraftModel
    return made_by_package(kind, files, config, config.num_layers, **own)


def load_parallel(folder: Path) -> Any:
    config = parallel_package.PEagleSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    kind = parallel_package.PEagleDraftModel
    return kind.from_pretrained(folder, config=config, dtype=torch.float32)


@torch.inference_mode()
def assert_same_blocks(theirs: Any, ours: ParallelNet) -> None:
    """All levels of drafts from many pairs of a text; the package chooses which."""
    torch.manual_seed(7)
    tokens = torch.randint(0, VOCAB_SIZE, (31,))
    hidden = torch.randn(30, len(ours.config.aux_layers), ours.config.hidden_size)
    chosen: dict[str, Any] = {"num_depths": LEVELS, "down_sample_ratio": 0.9}
    learnt = torch.ones(1, 30)
    learnt[:, 0] = 0  # or it would draft from the place before the first
    found: list[Tensor] = []
    hook = theirs.lm_head.register_forward_hook(lambda *call: found.append(call[-1]))
    torch.manual_seed(3)
    theirs(
        hidden[None].flatten(-2),
        tokens[None, 1:],
        document_ids=torch.zeros(1, 30, dtype=torch.long),
        loss_mask=learnt,
        verifier_last_hidden_states=torch.zeros(1, 30, ours.config.hidden_size),
        loss_config=parallel_package.resolve_loss_config("kl_div", "eager"),
        **chosen,
    )
    hook.remove()
    torch.manual_seed(3)
    anchors, depths = parallel_package.generate_cod_sample_indices(
        seq_length=30, loss_mask=learnt, **chosen
    )
    assert depths.max() == LEVELS - 1
    places = torch.arange(30)
    blocks = ours.block(tokens[None, 1:], ours.fuse(hidden[None]), places[None], [30] * LEVELS)
    expected = torch.stack([ours.logits(block)[0] for block in blocks])
    torch.testing.assert_close(found[0][0], expected[depths, anchors], atol=1e-3, rtol=1e-3)
    assert not torch.allclose(expected[0], expected[1], atol=0.1)


@pytest.mark.parametrize("form", BLOCKS)
def test_a_parallel_head_of_the_package_is_read(files: Files, form: str, tmp_path: Path) -> None:
    config = parallel_config(**BLOCKS[form], norm_output=False)
    theirs = parallel_of_package(files, config)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = EagleFolder.read(tmp_path / "theirs", "parallel")
    assert checkpoint.config == config
    ours = checkpoint.net(*files.weights)
    assert isinstance(ours, ParallelNet)
    assert_same_blocks(theirs, ours)


@pytest.mark.parametrize("form", BLOCKS)
def test_the_package_loads_parallel_heads(files: Files, form: str) -> None:
    head = files.exported(parallel_config(**BLOCKS[form], norm_output=False))
    ours = EagleFolder.read(head, "parallel").net(*files.weights)
    assert isinstance(ours, ParallelNet)
    assert_same_blocks(load_parallel(head), ours)
    load_parallel(head).save_pretrained(head / "again")
    mine, theirs = (json.loads((x / "config.json").read_text()) for x in (head, head / "again"))
    assert theirs.keys() - mine.keys() == {"auto_map", "transformers_version"}
    skipped = {"transformer_layer_config", "dtype", "tokenleap"}
    same = {name: value for name, value in mine.items() if name not in skipped}
    assert {name: theirs[name] for name in same} == same
