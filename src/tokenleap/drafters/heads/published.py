"""Layouts of EAGLE's authors (SafeAILab), in which EAGLE-1 heads are also written.

`config.json` has the fields of a Llama model with one layer. The weights are `model.safetensors` or
`pytorch_model.bin`, and their names tell the form:

    EAGLE-1 and EAGLE-2: fc (2 E -> E, with a bias unless "bias" is false), layers.0 without
        input_layernorm, mostly embed_tokens
    EAGLE-3: fc (3 E -> E), midlayer or layers.0 with hidden_norm, norm, lm_head, d2t, t2d

None of them names the target. EAGLE-3's need not name the layers whose inputs are fused either;
these are then `default_layers`. EAGLE-1 has no draft vocabulary. Ours may have one, with
`draft_vocab_size` and `d2t` as in EAGLE-3, and `tokenleap` holds our notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tokenleap.drafters.heads.config_file import Description, describe, described
from tokenleap.drafters.heads.feature_net import FeatureConfig
from tokenleap.drafters.heads.folder import CONFIG, WEIGHTS, first_of, read_tensors

__all__ = ["fields_of", "read_published"]

_DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
"""Of the class that reads such files (`EConfig`)."""


def read_published(
    folder: Path, fields: Mapping[str, Any]
) -> tuple[Path, Description, dict[str, Tensor]] | None:
    """Read a folder whose configuration is that of a Llama model.

    Args:
        folder: the folder.
        fields: of its config.json.

    Returns:
        The file of the weights; what config.json says; and the weights by the names of
        `EagleNet.state_dict()`. `aux_layers` is empty where the target decides. None if the fields
        are of another kind.

    Raises:
        ModelError: the folder is damaged, or of a variant that is not supported.
    """
    if "hidden_size" not in fields or "speculators_model_type" in fields:
        return None
    path = first_of(folder, WEIGHTS, "pytorch_model.bin")
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in read_tensors(path).items()
        if not name.endswith("rotary_emb.inv_freq")  # old files have it; it follows from the sizes
    }
    layers = _named_layers(fields)
    found = described(_as_speculators(fields, layers), folder / CONFIG)
    config = replace(found.config, aux_layers=layers)
    if "layers.0.hidden_norm.weight" not in tensors:
        sizes = {**asdict(config), "aux_layers": ()}
        config = FeatureConfig(**sizes, fc_bias=fields.get("bias", True) is not False)
    return path, replace(found, config=config), tensors


def _named_layers(fields: Mapping[str, Any]) -> Any:
    """The ids of the fused layers as far as a file of EAGLE-3 has them; else none."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner = fields.get("eagle_config")
    found = fields.get(name, inner.get(name) if isinstance(inner, dict) else None)
    return tuple(found) if isinstance(found, list) else ()


def _as_speculators(fields: Mapping[str, Any], layers: Any) -> dict[str, Any]:
    """The same in the fields of the `speculators` format."""
    notes = fields.get("tokenleap", {})
    unknown = {"name_or_path": None}
    verifier = notes.get("verifier", unknown) if isinstance(notes, dict) else unknown
    layer = {"num_key_value_heads": fields.get("num_attention_heads"), **_DEFAULTS, **fields}
    if isinstance(scaling := fields.get("rope_scaling"), dict) and "type" in scaling:
        layer["rope_scaling"] = {"rope_type": scaling["type"], **scaling}
    return {
        "transformer_layer_config": layer,
        "speculators_config": {"verifier": verifier},
        "draft_vocab_size": fields.get("draft_vocab_size") or fields.get("vocab_size"),
        "eagle_aux_hidden_state_layer_ids": layers or [0],
        "norm_before_residual": False,
        "tokenleap": {name: note for name, note in notes.items() if name != "verifier"}
        if isinstance(notes, dict)
        else notes,
    }


def fields_of(description: Description) -> dict[str, Any]:
    """The fields of `config.json` in the layout in which a head is written."""
    fields, config = describe(description), description.config
    if not isinstance(config, FeatureConfig):
        return fields
    reduced = config.draft_vocab_size != config.vocab_size
    return {
        "architectures": ["LlamaForCausalLM"],
        **fields["transformer_layer_config"],
        "bias": config.fc_bias,
        **({"draft_vocab_size": config.draft_vocab_size} if reduced else {}),
        "tie_word_embeddings": False,
        "dtype": fields["dtype"],
        "tokenleap": {
            **fields["tokenleap"],
            "verifier": fields["speculators_config"]["verifier"],
        },
    }
