"""Invariant 5: what cannot work together is refused at construction, in one clear line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedModel,
)

from tests.drafting import RandomTrees, scheduler_of
from tests.matrix import tiny_llm
from tests.tiny import CONTEXT, tiny_model
from tests.tiny_seq2seq import tiny_seq2seq
from tests.windowed import windowed_model
from tokenleap import LLM, CompatibilityError, ConfigError
from tokenleap.models.support import default_device, default_dtype
from tokenleap.runtime import probing
from tokenleap.runtime.attention import padded_rows
from tokenleap.runtime.inputs import PassInputs
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.lean import LeanDecoder
from tokenleap.runtime.network import Need, PassOutput
from tokenleap.runtime.target import Target


def test_trees_with_a_rule_for_chains() -> None:
    drafter = RandomTrees(lambda _: [], 8)
    with pytest.raises(CompatibilityError, match=r"'block' takes chains only.*RandomTrees"):
        scheduler_of(Target(tiny_model()), drafter, "block", 3)


@pytest.mark.parametrize("method", ["rest", "suffix"])
def test_branching_lookups_with_a_rule_for_chains(method: str) -> None:
    tiny_llm(tiny_model(), method, "block")
    with pytest.raises(CompatibilityError, match=r"'block' takes chains only"):
        tiny_llm(tiny_model(), method, "block", branching=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "draft_model", "tree": [2, 1]},
        {"method": "draft_model", "tree": [2, 1], "expansion": "sample"},
        {"method": "draft_model", "tree": [2, 1], "expansion": "top_k"},
        {"method": "draft_model", "tree": "dynamic"},
        {"method": "suffix", "branching": True},
        {"method": "ensemble", "drafters": [{"method": "ngram"}, {"method": "random"}]},
    ],
)
def test_siblings_that_were_not_drawn_independently(fields: dict[str, Any]) -> None:
    if fields["method"] == "draft_model":
        fields = {**fields, "model": tiny_model(seed=1)}
    with pytest.raises(CompatibilityError, match="siblings that are drawn independently") as caught:
        LLM(tiny_model(), speculative_config={**fields, "acceptance": "k_sequential"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"tree": [2, 1], "expansion": "sample_with_replacement"},
        {"tree": [1, 1]},
        {"expansion": "sample"},
    ],
)
def test_independent_siblings_and_chains_fit(fields: dict[str, Any]) -> None:
    config = {"model": tiny_model(seed=1), "acceptance": "k_sequential", "controller": "fixed"}
    config |= fields
    (output,) = LLM(tiny_model(), speculative_config=config).generate([[1, 2, 3]])
    assert output.metrics.num_drafts > 0


def test_draft_model_with_another_vocabulary() -> None:
    config = {"method": "draft_model", "model": tiny_model(vocab_size=64)}
    with pytest.raises(
        CompatibilityError, match="vocabulary of 64 tokens and the target one of 96"
    ):
        LLM(tiny_model(), speculative_config=config)


def small(model_type: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, vocab_size=96, **fields)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def test_recurrent_state() -> None:
    model = small("mamba", hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(CompatibilityError, match="recurrent state"):
        LLM(model)


def test_layers_that_choose_their_keys() -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(CompatibilityError, match="kind 'indexed_attention', which choose"):
        LLM(model)


def test_attention_outside_the_interface() -> None:
    with pytest.raises(CompatibilityError, match="does not use Transformers' attention interface"):
        LLM(small("gptj", n_embd=32, n_layer=2, n_head=2, rotary_dim=8))


def test_queries_scaled_by_their_place_in_the_cache() -> None:
    """Llama 4 counts what is cached, where a node of a tree has another position."""
    model = windowed_model("llama4", attn_temperature_tuning=True, floor_scale=64)
    with pytest.raises(CompatibilityError, match=r"from position 64 on .* max_model_len=63"):
        LLM(model)
    assert LLM(model, max_model_len=63).max_model_len == 63


def test_rotary_frequencies_chosen_by_the_longest_row() -> None:
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    }
    model = tiny_model(rope_parameters=rope)
    with pytest.raises(CompatibilityError, match="longest row of a batch"):
        LLM(model)
    assert LLM(model, max_model_len=128).max_model_len == 128


def test_encoder_decoders_whose_outputs_would_depend_on_the_batch() -> None:
    config = AutoConfig.for_model(
        "longt5", vocab_size=32, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2
    )
    with pytest.raises(CompatibilityError, match=r"LongT5.* its encoder attends to windows"):
        LLM(AutoModelForSeq2SeqLM.from_config(config))  # type: ignore[no-untyped-call]


def test_an_encoder_and_a_decoder_of_two_configurations() -> None:
    size: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    encoder, decoder = BertConfig(**size), BertConfig(**size)
    joined = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    with pytest.raises(CompatibilityError, match="joins an encoder and a decoder"):
        LLM(EncoderDecoderModel(joined))


def test_an_encoder_decoder_without_a_head() -> None:
    config = tiny_seq2seq().config
    with pytest.raises(CompatibilityError, match="no language-model head"):
        LLM(AutoModel.from_config(config))  # type: ignore[no-untyped-call]


def test_no_language_model_head() -> None:
    config = tiny_model().config
    with pytest.raises(CompatibilityError, match="no language-model head"):
        LLM(AutoModel.from_config(config))  # type: ignore[no-untyped-call]


def test_a_model_that_ignores_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a configuration says, behaviour is checked."""
    model = tiny_model("lean")

    def nothing_hidden(inputs: PassInputs) -> Tensor:
        return torch.zeros(len(inputs.rows), 1, padded_rows(inputs.nodes), inputs.span)

    monkeypatch.setattr(PassInputs, "mask", property(nothing_hidden))
    with pytest.raises(CompatibilityError, match="ignores the 4-D mask or the position ids"):
        LLM(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_speculative_tokens": 3}, "num_speculative_tokens needs a method that drafts"),
        ({"controller": "fixed"}, "controller needs a method that drafts"),
        ({"method": "assisted"}, "unknown method 'assisted': known: block"),
        ({"method": "ngramm"}, "unknown method 'ngramm': did you mean 'ngram'?"),
        ({"method": "ngram", "acceptance": "rejecton"}, "did you mean 'rejection'?"),
        ({"method": "ngram", "prompt_lokup_max": 3}, "did you mean 'prompt_lookup_max'?"),
        ({"method": "none", "prompt_lookup_max": 3}, "no field 'prompt_lookup_max'"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "larger than"),
        ({"method": "draft_model"}, "needs a draft model: set 'model'"),
        ({"method": "ngram", "model": "x"}, "takes no draft model"),
        ({"method": "ngram", "acceptance": {"lenience": 0.5}}, "needs its name under 'rule'"),
        ({"method": "ngram", "controller": "fixd"}, "did you mean 'fixed'?"),
        ({"method": "ngram", "controller": {"rule": "batch", "lengths": {2: 1}}}, "batch size 1"),
        ({"method": "ngram", "acceptance": {"rule": "lenient", "lenience": 0}}, "lenience"),
        ({"method": "ngram", "acceptance": {"rule": "coupled", "tau": 1}}, "no field 'tau'"),
        ({"method": "ngram", "acceptance": 3}, "acceptance"),
    ],
)
def test_wrong_speculative_config(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(tiny_model(), speculative_config=config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_model_len": CONTEXT + 1}, "max_model_len: must be 2 to 256"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"dtype": "bfloat16"}, "the loaded model is in torch.float32"),
        ({"device": "cuda"}, "the loaded model is on cpu"),
        ({"speculative_config": "ngram"}, "must be a dict"),
    ],
)
def test_wrong_arguments(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(tiny_model(), **fields)
    assert message in str(caught.value)


def test_weights_that_are_no_numbers() -> None:
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = math.inf
    with pytest.raises(CompatibilityError, match=r"damaged: model.layers.1.mlp.up_proj.weight has"):
        LLM(model)
    model = tiny_model()
    model.model.norm.weight.data *= 1e38
    with pytest.raises(CompatibilityError, match=r"not finite in torch.float32: use another"):
        LLM(model)


def test_dtypes_and_devices() -> None:
    cpu = torch.device("cpu")
    assert default_dtype("float32", cpu) == torch.float32
    assert default_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
    for dtype in ("float16", "int8", "fp32", torch.int8):
        with pytest.raises(ConfigError, match="dtype"):
            default_dtype(dtype, cpu)
    for device in ("gpu0", "meta"):
        with pytest.raises(ConfigError, match="device"):
            default_device(device)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            default_device("cuda")


def test_a_loaded_model_is_left_as_it_was() -> None:
    model = tiny_model()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    implementation = model.config._attn_implementation
    LLM(model).generate([[1, 2]])
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert model.config._attn_implementation == implementation
    assert type(model.lm_head) is torch.nn.Linear


LARGE: dict[str, Callable[[PassInputs], bool]] = {
    "chunks": lambda inputs: max(map(len, inputs.rows)) >= 64 and len(inputs.rows) == 1,
    "long drafts": lambda inputs: max(map(len, inputs.rows)) == 65,
    "long drafts in two rows": lambda inputs: (
        max(map(len, inputs.rows)) == 65 and len(inputs.rows) == 2
    ),
}


@pytest.mark.parametrize("which", LARGE)
def test_bits_of_large_passes_are_looked_at(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Kernels that round otherwise in passes that small ones do not show."""
    forward = LeanDecoder.forward

    def rounding(self: LeanDecoder, inputs: PassInputs, slab: KVSlab, need: Need) -> PassOutput:
        output = forward(self, inputs, slab, need)
        if LARGE[which](inputs):
            for values in slab._values.values():
                values.mul_(1 + 1e-6)
            if output.logits is not None:
                output.logits.mul_(1 + 1e-6)
        return output

    assert Target(tiny_model("lean")).bit_exact
    monkeypatch.setattr(probing, "_LONG_PASSES", {})  # which remembers that
    monkeypatch.setattr(LeanDecoder, "forward", rounding)
    assert not Target(tiny_model("lean")).bit_exact
