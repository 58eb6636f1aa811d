"""Encoder-decoders over the slab compute what the Transformers module computes, its oracle.

In float64 the two agree to twelve digits, so a wrong position or mask cannot hide in rounding. The
native runtime has no float64.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from tests.runtime.test_llama_family import PORTABLE
from tests.tiny import tiny_model
from tests.tiny_seq2seq import (
    BART,
    CONTEXT,
    NATIVE,
    SEQ2SEQ,
    STACKS,
    VOCAB_SIZE,
    WIDE,
    WIDE_T5,
    reference_logits,
    tiny_seq2seq,
    wide_fields,
)
from tests.tiny_seq2seq import tiny_source as source_of
from tokenleap.core.references import Source
from tokenleap.core.tree import TokenTree, chain
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.models import load_model
from tokenleap.runtime.attention import KEY_BLOCK
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.kv_slab import OverBudget
from tokenleap.runtime.native.seq2seq import NativeEncoder, NativeSeq2Seq
from tokenleap.runtime.network import Need, PassOutput
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.seq2seq.network import TorchEncoder
from tokenleap.runtime.target import Target

TEXT_TOKENS = [(7 * i + 3) % 90 for i in range(40)]
TREE = TokenTree((7, 8, 9, 10, 11, 12), (-1, 0, 0, 2, 1, 3))
LEAVES = (4, 5)
_IN_CPP = " in C++"
PARITY = {torch.float64: 1e-10, torch.float32: 3e-4}


@cache
def model_of(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    if name.endswith(_IN_CPP):
        base = name.removesuffix(_IN_CPP)
        return tiny_seq2seq(base, **wide_fields(base))
    return tiny_seq2seq(name, dtype=dtype)


def tiny_source(name: str = "bart", length: int = 9, seed: int = 1) -> Source:
    return source_of(name.removesuffix(_IN_CPP), length, seed)


@cache
def target_of(name: str, dtype: torch.dtype = torch.float64) -> Target:
    return Target(model_of(name, dtype))


@pytest.fixture(params=[*NATIVE, *(name + _IN_CPP for name in NATIVE)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target(name: str) -> Iterator[Target]:
    target = target_of(name)
    assert target.network.name == ("native" if name.endswith(_IN_CPP) else "lean")  # float64
    yield target
    close_rows(target)


def close_rows(target: Target) -> None:
    for key in range(9):
        if key in target:
            target.remove(key)


def open_row(target: Target, key: int, source: Source, tokens: list[int]) -> None:
    target.add(key)
    target.encode(key, source)
    target.prefill(key, tokens)


def assert_close(found: Tensor, expected: Tensor, relative: float | None = None) -> None:
    relative = relative or PARITY[expected.dtype]
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < relative * float(expected.std())


def assert_paths(output: PassOutput, name: str, source: Source, before: list[int]) -> None:
    """The logits of `TREE` after these tokens."""
    for leaf in LEAVES:
        nodes = [0, *TREE.path(leaf)]
        tokens = [TREE.tokens[node] for node in nodes]
        own = reference_logits(model_of(name), source, [*before, *tokens])
        assert_close(output.scores[nodes], own[len(before) :])


# What a pass computes


def test_a_chain_from_the_start_token(name: str, target: Target) -> None:
    """Nothing is cached before the first step: its root is the decoder's start token."""
    source = tiny_source(name)
    open_row(target, 0, source, [])
    (output,) = target.verify([0], [chain(TEXT_TOKENS)])
    assert_close(output.scores, reference_logits(model_of(name), source, TEXT_TOKENS))


def test_a_tree_behind_a_long_text(name: str, target: Target) -> None:
    """Longer than the distance from which on T5 does not tell positions apart."""
    source = tiny_source(name)
    open_row(target, 0, source, TEXT_TOKENS)
    (output,) = target.verify([0], [TREE])
    assert_paths(output, name, source, TEXT_TOKENS)


def test_a_tree_grown_level_by_level(name: str, target: Target) -> None:
    source = tiny_source(name)
    open_row(target, 0, source, TEXT_TOKENS[:9])
    target.verify([0], [TokenTree(TREE.tokens[:3], TREE.parents[:3])])
    (output,) = target.verify([0], [TREE], [3])
    (whole,) = target.verify([0], [TREE])
    assert_close(output.scores, whole.scores[3:])


def test_rows_of_different_texts_and_sources(name: str, target: Target) -> None:
    """The row in between has neither tokens nor a source yet."""
    short, long = tiny_source(name), tiny_source(name, length=200, seed=2)
    open_row(target, 0, short, TEXT_TOKENS[:11])
    target.add(1)
    open_row(target, 2, long, TEXT_TOKENS[3:6])
    first, second = target.verify([2, 0], [TREE, chain([5, 6])])
    assert_paths(first, name, long, TEXT_TOKENS[3:6])
    own = reference_logits(model_of(name), short, [*TEXT_TOKENS[:11], 5, 6])
    assert_close(second.scores, own[11:])


def test_an_accepted_path_is_committed_and_others_are_forgotten(name: str, target: Target) -> None:
    source = tiny_source(name)
    open_row(target, 0, source, TEXT_TOKENS[:9])
    target.verify([0], [TREE])
    target.commit(0, (0, 2, 3))
    (output,) = target.verify([0], [TREE])
    assert_paths(output, name, source, [*TEXT_TOKENS[:9], 7, 9, 10])
    target.rollback(0, 4)
    (output,) = target.verify([0], [TREE])
    assert_paths(output, name, source, TEXT_TOKENS[:4])


def test_another_row_moves_into_the_place_of_a_removed_one(name: str, target: Target) -> None:
    sources = [tiny_source(name, seed=seed) for seed in range(3)]
    for key, source in enumerate(sources):
        open_row(target, key, source, TEXT_TOKENS[key:9])
    target.verify([0, 1, 2], [TREE] * 3)
    target.remove(0)
    for key, output in zip((1, 2), target.verify([1, 2], [TREE] * 2), strict=True):
        assert_paths(output, name, sources[key], TEXT_TOKENS[key:9])


def test_a_row_that_reads_another_source(name: str, target: Target) -> None:
    first, second = tiny_source(name), tiny_source(name, seed=2)
    open_row(target, 0, first, [])
    target.verify([0], [TREE])
    target.encode(0, second)
    assert_paths(target.verify([0], [TREE])[0], name, second, [])
    open_row(target, 1, first, [])
    target.verify([0, 1], [TREE, TREE])
    target.encode(0, first)
    target.encode(1, second)
    for source, output in zip((first, second), target.verify([0, 1], [TREE] * 2), strict=True):
        assert_paths(output, name, source, [])


def test_hidden_states_are_those_of_the_module(name: str, target: Target) -> None:
    """And the final norm, the output layer and its bias make the logits of the last ones."""
    source, model, tokens = tiny_source(name), model_of(name), TEXT_TOKENS[:9]
    open_row(target, 0, source, [])
    layers = target.network.num_layers
    (output,) = target.verify([0], [chain(tokens)], need=Need(hidden=(0, 1, layers)))
    with torch.inference_mode():
        own = model(
            **source.inputs(model.device, model.dtype),
            decoder_input_ids=torch.tensor([tokens]),
            output_hidden_states=True,
        ).decoder_hidden_states
    for layer in (0, 1):
        assert_close(output.hidden[layer], own[layer][0])
    assert target.final_norm is not None
    assert target.vocabulary_weights is not None
    _, head = target.vocabulary_weights
    logits = target.final_norm(output.hidden[layers]) @ head.T
    if target.logits_bias is not None:
        logits = logits + target.logits_bias
    assert_close(logits, output.scores)


def test_learnt_embeddings(name: str, target: Target) -> None:
    """Ids after the vocabulary that stand for what the embedding returns for other tokens."""
    model: Any = model_of(name)
    first = target.network.extend(model.get_decoder().embed_tokens(torch.tensor([7, 9])))
    open_row(target, 0, tiny_source(name), TEXT_TOKENS[:5])
    (learnt,) = target.verify([0], [chain([3, first, first + 1])])
    found = learnt.scores.clone()
    (own,) = target.verify([0], [chain([3, 7, 9])])
    assert_close(found, own.scores)


def test_only_the_logits_that_are_needed(name: str, target: Target) -> None:
    open_row(target, 0, tiny_source(name), TEXT_TOKENS[:9])
    open_row(target, 1, tiny_source(name, seed=2), TEXT_TOKENS[:5])
    every = target.verify([0, 1], [TREE, chain([5])])
    some = target.verify([0, 1], [TREE, chain([5])], need=Need(last=2))
    assert_close(some[0].scores, every[0].scores[-2:])
    assert_close(some[1].scores, every[1].scores)
    none = target.verify([0], [TREE], need=Need(logits=False))
    assert none[0].logits is None


@pytest.mark.parametrize("name", NATIVE)
def test_float32_on_packed_weights(name: str) -> None:
    target, source = target_of(name, torch.float32), tiny_source(name)
    assert target.bit_exact
    open_row(target, 0, source, [])
    (output,) = target.verify([0], [chain(TEXT_TOKENS)])
    own = reference_logits(model_of(name, torch.float32), source, TEXT_TOKENS)
    close_rows(target)
    assert_close(output.scores, own, 2e-3 if "t5" in name else None)


# Fewer layers and sublayers


def test_the_first_layers(name: str, target: Target) -> None:
    source, model = tiny_source(name), copy.deepcopy(model_of(name))
    del layers_of(model)[2:]
    open_row(target, 0, source, [])
    (output,) = target.with_network(target.network.first_layers(2)).verify([0], [chain([3, 5, 7])])
    assert_close(output.scores, reference_logits(model, source, [3, 5, 7]))


def test_layers_without_attention_or_mlp(name: str, target: Target) -> None:
    source, model = tiny_source(name), copy.deepcopy(model_of(name))
    layers = layers_of(model)
    silence(layers[0], ("self_attn.out_proj", "encoder_attn.out_proj", "Attention.o"))
    silence(layers[1], ("fc2", "wo"))
    open_row(target, 0, source, [])
    network = target.network.without(attention=[0], mlp=[1])
    (output,) = target.with_network(network).verify([0], [chain([3, 5, 7])])
    assert_close(output.scores, reference_logits(model, source, [3, 5, 7]))


def layers_of(model: Any) -> nn.ModuleList:
    decoder = model.get_decoder()
    layers: nn.ModuleList = decoder.block if hasattr(decoder, "block") else decoder.layers
    return layers


def silence(layer: nn.Module, ends: tuple[str, ...]) -> None:
    """Let the linear layers with these names return zeros."""
    for name, module in layer.named_modules():
        if name.endswith(ends):
            for parameter in module.parameters():
                parameter.zero_()


@pytest.mark.parametrize("name", [name for name in NATIVE if name != "whisper"])
def test_the_encoder_in_cpp(name: str) -> None:
    """It rounds about as much as the module in float32, for which that in float64 is the oracle."""
    fields = wide_fields(name)
    model = tiny_seq2seq(name, **fields)
    exact = tiny_seq2seq(name, dtype=torch.float64, **fields)
    exact.load_state_dict(model.state_dict())
    network: Any = NativeSeq2Seq(model)
    assert isinstance(network._encoder, NativeEncoder)
    for length in (1, 9, 200):
        tokens = list(tiny_source(name, length).tokens)
        if name == "m2m_100" and length > 1:
            tokens[length // 2] = model.config.pad_token_id
        source = Source(tuple(tokens))
        expected = TorchEncoder(exact, None)(source)
        error = (TorchEncoder(model, None)(source) - expected).abs().max()
        assert (network.encoded(source) - expected).abs().max() < 20 * error + 1e-5


def test_an_encoder_that_cpp_cannot_run() -> None:
    """The decoder runs natively all the same."""
    model = tiny_seq2seq(**WIDE, encoder_ffn_dim=40)
    target, source = Target(model), tiny_source()
    network: Any = target.network
    assert network.name == "native"
    assert isinstance(network._encoder, TorchEncoder)
    open_row(target, 0, source, [])
    (output,) = target.verify([0], [chain(TEXT_TOKENS)])
    assert_close(output.scores, reference_logits(model, source, TEXT_TOKENS))


# Sources and their state


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("length", [1, 128, 129])
def test_sources_of_any_length(name: str, length: int) -> None:
    target, source = target_of(name), tiny_source(name, length)
    open_row(target, 0, source, [3, 5])
    (output,) = target.verify([0], [TREE])
    assert target._slab.state_bytes == target.state_bytes(source)
    assert target.row_state(0)[0].shape[2] == (128 if length <= 128 else 512)
    close_rows(target)
    assert_paths(output, name, source, [3, 5])


def test_audio_is_told_apart_by_what_it_holds() -> None:
    one, other = tiny_source("whisper", seed=1), tiny_source("whisper", seed=2)
    assert one == tiny_source("whisper", seed=1)
    assert one != other
    assert len({one, other, tiny_source("whisper", seed=2)}) == 2


def test_only_rows_of_checks_read_a_source_by_themselves() -> None:
    target = target_of("bart")
    target.add(0)
    target.add(INTERNAL_KEY)
    assert target.reads_source
    assert not target.has_source(0)
    assert target.has_source(INTERNAL_KEY)
    target.encode(0, tiny_source())
    assert target.has_source(0)
    target.remove(INTERNAL_KEY)
    close_rows(target)
    plain = Target(tiny_model())
    plain.add(0)
    assert not plain.reads_source
    assert plain.has_source(0)
    assert plain.state_bytes(None) == 0


def test_a_state_that_does_not_fit() -> None:
    target = Target(model_of("bart", torch.float32), max_model_len=64)
    cells = KEY_BLOCK * target.cell_bytes
    target.limit_memory(cells + target.state_bytes(tiny_source()) - 4)
    target.add(0)
    with pytest.raises(OverBudget):
        target.encode(0, tiny_source())
    assert not target.has_source(0)
    with pytest.raises(OverBudget):
        target.add(INTERNAL_KEY)
    assert INTERNAL_KEY not in target


def test_the_padding_token_of_m2m_100_has_no_position() -> None:
    """In `generate()`, where a token is computed after a cache, the others keep theirs."""
    target, source = target_of("m2m_100"), tiny_source()
    model = model_of("m2m_100")
    padding = model.config.pad_token_id
    open_row(target, 0, source, [3, 5, padding])
    (output,) = target.verify([0], [chain([7])])
    close_rows(target)
    cache = None
    for token in (3, 5, padding, 7):
        with torch.inference_mode():
            own = model(
                **source.inputs(model.device, model.dtype),
                decoder_input_ids=torch.tensor([[token]]),
                past_key_values=cache,
                use_cache=True,
            )
        cache = own.past_key_values
    assert_close(output.scores, own.logits[0])


@pytest.mark.parametrize("name", ["bart", "marian", "m2m_100", "whisper"])
def test_the_end_of_the_context(name: str) -> None:
    """A pass of one node is padded, with a position after the last one."""
    target = Target(model_of(name, torch.float32), max_model_len=CONTEXT)
    open_row(target, 0, tiny_source(name), [3] * (CONTEXT - 2))
    tree = TokenTree((5, 6, 7, 8), (-1, 0, 0, 0))
    target.verify([0], [TokenTree((5, 6, 7), (-1, 0, 0))])
    (output,) = target.verify([0], [tree], [3])
    own = reference_logits(
        model_of(name, torch.float32), tiny_source(name), [*[3] * (CONTEXT - 2), 5, 8]
    )
    assert_close(output.scores, own[-1:], 1e-4)


def test_t5_in_float16_keeps_a_layer_in_float32() -> None:
    model = tiny_seq2seq("t5", dtype=torch.float16)
    for name, module in model.named_modules():
        if name.endswith(".wo"):  # as `from_pretrained` does
            module.float()
    target = Target(model)
    open_row(target, 0, tiny_source("t5"), [])
    (output,) = target.verify([0], [chain(TEXT_TOKENS)])
    assert_close(output.scores, reference_logits(model, tiny_source("t5"), TEXT_TOKENS), 0.1)


def test_the_model_is_not_changed() -> None:
    model = tiny_seq2seq("t5")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    logits = reference_logits(model, tiny_source(), [3, 5])
    Target(model)
    assert torch.equal(reference_logits(model, tiny_source(), [3, 5]), logits)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# Quantized


@pytest.mark.parametrize(
    ("sizes", "quantization", "error"),
    [({}, "int8", 0.1), (WIDE, "int8", 0.1), (WIDE, "int4", 0.7)],
)
def test_quantized_weights(sizes: dict[str, Any], quantization: str, error: float) -> None:
    """With weights that are small enough not to magnify differences layer by layer."""
    model = tiny_seq2seq(**{**sizes, "init_std": 0.1})
    target = Target(model, quantization=quantization)
    open_row(target, 0, tiny_source(), [])
    (output,) = target.verify([0], [chain(TEXT_TOKENS)])
    own = reference_logits(model, tiny_source(), TEXT_TOKENS)
    assert_close(output.scores, own, error)
    assert not torch.allclose(output.scores, own, rtol=1e-3)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "module"}, "runtime: module is for decoder-only models"),
        ({"runtime": "native"}, "runtime: native is not available for .*: head_dim must be one of"),
        ({"quantization": "int4"}, "quantization: int4 needs the native runtime, .* take int8"),
    ],
)
def test_options_that_a_model_does_not_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        network_for(model_of("bart", torch.float32), **options)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("t5_v1_1", {**WIDE_T5, "feed_forward_proj": "gated-tanh"}, "this configuration of T5"),
        ("bart", {**WIDE, "activation_function": "tanh"}, "this configuration of Bart"),
        ("bart", {**WIDE, "decoder_ffn_dim": 40}, "must be multiples of 32"),
    ],
)
def test_what_cpp_cannot_run(name: str, fields: dict[str, Any], message: str) -> None:
    model = tiny_seq2seq(name, **fields)
    with pytest.raises(ConfigError, match=message):
        network_for(model, runtime="native")
    assert network_for(model).name == "lean"


def test_the_model_s_own_runtime_can_be_asked_for() -> None:
    assert network_for(model_of("bart in C++"), runtime="lean").name == "lean"


@pytest.mark.parametrize("name", ["bart", "t5_v1_1"])
def test_the_portable_kernels(name: str) -> None:
    """See `test_llama_family.py`."""
    model, source = tiny_seq2seq(name, **wide_fields(name)), tiny_source()
    target = Target(model)
    target.network = NativeSeq2Seq(model, None, *PORTABLE)
    open_row(target, 0, source, [])
    (output,) = target.verify([0], [chain(TEXT_TOKENS)])
    assert_close(output.scores, reference_logits(model, source, TEXT_TOKENS))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu"])
def test_activations_in_cpp(activation: str) -> None:
    model, source = tiny_seq2seq(**WIDE, activation_function=activation), tiny_source()
    target = Target(model, runtime="native")
    open_row(target, 0, source, [])
    (output,) = target.verify([0], [chain(TEXT_TOKENS)])
    assert_close(output.scores, reference_logits(model, source, TEXT_TOKENS))


@pytest.mark.parametrize("model_type", ["blenderbot", "plbart", "mvp", "mt5"])
def test_relatives_of_the_layouts(model_type: str) -> None:
    """Construction compares the logits of a tree with those of the model."""
    assert Target(relative_of(model_type)).network.name == "lean"
    wide = wide_fields("t5" if model_type == "mt5" else "bart")
    assert Target(relative_of(model_type, **wide)).network.name == "native"


SPEECH: dict[str, Any] = {"hidden_size": 32, **{k: v for k, v in STACKS.items() if k != "d_model"}}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "blenderbot-small": ("BlenderbotSmallForConditionalGeneration", BART, "positions after the"),
    "fsmt": (
        "FSMTForConditionalGeneration",
        {**BART, "langs": ["de", "en"], "src_vocab_size": 96, "tgt_vocab_size": 96},
        "its output layer is an embedding",
    ),
    "moonshine": (
        "MoonshineForConditionalGeneration",
        {"hidden_size": 32, "intermediate_size": 32},
        "only Whisper is supported",
    ),
    "seamless_m4t": ("SeamlessM4TForTextToText", SPEECH, "its layers have other parts"),
    "seamless_m4t_v2": ("SeamlessM4Tv2ForTextToText", SPEECH, "its layers have other parts"),
    "speech_to_text": ("Speech2TextForConditionalGeneration", STACKS, "only Whisper is supported"),
    "speecht5": (
        "SpeechT5ForSpeechToText",
        {**SPEECH, "conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 2},
        "only Whisper is supported",
    ),
}
"""Encoder-decoders that are refused: class, configuration, and why."""


@pytest.mark.parametrize("model_type", OTHERS)
def test_encoder_decoders_of_other_kinds(model_type: str, tmp_path: Path) -> None:
    """Refused as modules and as folders, whose weights are not read."""
    name, fields, reason = OTHERS[model_type]
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **fields)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    message = f"{name} is not supported: .*{reason}"
    with pytest.raises(CompatibilityError, match=message):
        Target(model)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    save_file({f"x{i}": torch.zeros(999) for i in range(9)}, tmp_path / "model.safetensors")
    with pytest.raises(CompatibilityError, match=message):
        load_model(tmp_path, torch.float32, torch.device("cpu"))


def relative_of(model_type: str, **more: Any) -> PreTrainedModel:
    fields = {**SEQ2SEQ["t5" if model_type == "mt5" else "bart"][1], **more}
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **fields)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(config)  # type: ignore[no-untyped-call]
    model.train(False)
    return model
