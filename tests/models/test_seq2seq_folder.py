"""Folders of encoder-decoders: what is loaded, what is refused, and where the decoder begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models.folders import CPU, refusal
from tests.tiny_seq2seq import BINS, FRAMES, NATIVE, seq2seq_config, tiny_seq2seq
from tokenleap import LLM, SamplingParams
from tokenleap.errors import CompatibilityError, ModelError, PromptError
from tokenleap.models import load_model
from tokenleap.models.audio import AudioReader, decoder_start

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_seq2seq().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", [name for name in NATIVE if name != "t5_v1_1"])
def test_a_folder_has_the_model(name: str, tmp_path: Path) -> None:
    model = tiny_seq2seq(name)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32, CPU)
    assert type(loaded) is type(model)
    assert not loaded.training
    expected = model.state_dict()
    for key, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[key]), key
    assert decoder_start(loaded) == decoder_start(model)


def test_a_folder_generates_as_its_model(folder: Path) -> None:
    prompts = [[5, 6, 7], list(range(5, 30))]
    llm = LLM(folder, dtype="float32")
    assert llm.max_model_len == 256
    expected = LLM(tiny_seq2seq()).generate(prompts, GREEDY)
    assert [o.token_ids for o in llm.generate(prompts, GREEDY)] == [o.token_ids for o in expected]
    with pytest.raises(PromptError, match="this model has no tokenizer"):
        llm.generate("text", GREEDY)


def test_the_output_may_be_shorter_than_the_context(folder: Path) -> None:
    llm = LLM(folder, max_model_len=6)
    (output,) = llm.generate([[5] * 100], SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.token_ids) == 5
    assert output.finish_reason == "length"


def test_a_relative_bias_has_no_end() -> None:
    assert LLM(tiny_seq2seq("t5")).max_model_len == 2**31 - 1


def test_whisper_is_loaded_with_its_feature_extractor(tmp_path: Path) -> None:
    tiny_seq2seq("whisper").save_pretrained(tmp_path)
    own: Any = transformers.WhisperFeatureExtractor
    own(feature_size=BINS, hop_length=80).save_pretrained(tmp_path)
    reader = AudioReader(tmp_path, BINS, FRAMES)
    assert tuple(reader.features(np.ones(FRAMES * 80)).shape) == (BINS, FRAMES)
    with pytest.raises(PromptError, match=r"the encoder reads 0\.2 s"):
        LLM(tmp_path).generate({"audio": np.ones(FRAMES * 160)}, GREEDY)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the feature extractor in"):
        LLM(tmp_path)


# Where the decoder begins


def test_the_start_token_is_that_of_generate() -> None:
    model: Any = tiny_seq2seq()
    assert decoder_start(model) == 2
    model.generation_config.decoder_start_token_id = 9
    assert decoder_start(model) == 9
    for config in (model.generation_config, model.config):
        config.decoder_start_token_id = None
    assert decoder_start(model) == model.generation_config.bos_token_id == 0
    for config in (model.generation_config, model.config):
        config.bos_token_id = None
    with pytest.raises(CompatibilityError, match=r"BartForC.* has no decoder_start_token_id: set"):
        decoder_start(model)


# What is refused


def test_a_classifier_is_no_language_model(tmp_path: Path) -> None:
    transformers.BartForSequenceClassification(seq2seq_config("bart")).save_pretrained(tmp_path)
    assert "is a BartForSequenceClassification, not an encoder-decoder with" in refusal(tmp_path)


def test_what_reads_something_else_is_refused(folder: Path) -> None:
    """Its class reads images, and neither text nor audio."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "pix2struct"}))
    assert "cannot load the model in" in refusal(folder)


def test_a_decoder_alone_stays_a_decoder_only_model(tmp_path: Path) -> None:
    config = seq2seq_config("bart", is_encoder_decoder=False, is_decoder=True)
    transformers.BartForCausalLM(config).save_pretrained(tmp_path)
    assert type(load_model(tmp_path, torch.float32, CPU)) is transformers.BartForCausalLM
