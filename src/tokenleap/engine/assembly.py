"""What `LLMEngine` is made of, where that depends on the model."""

from __future__ import annotations

from dataclasses import dataclass

from tokenleap.config import SpeculativeConfig
from tokenleap.core.grammar import Grammars
from tokenleap.core.rules import DecodingRules
from tokenleap.drafters.heads.shipped import shipped_config
from tokenleap.engine.request_maker import RequestMaker
from tokenleap.engine.sources import SourceReader
from tokenleap.engine.turns import Turns
from tokenleap.models.audio import AudioReader
from tokenleap.models.decoder_start import decoder_start
from tokenleap.models.loaded import LoadedModel
from tokenleap.models.whisper import WhisperStart
from tokenleap.runtime.target import Target

__all__ = ["EngineOptions", "default_config", "request_maker"]


@dataclass(frozen=True)
class EngineOptions:
    """Limits on memory and batches, and how passes are computed; see the arguments of `LLM`."""

    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int | None
    prefix_cache_bytes: int | None  # None caches no prefixes
    quantization: str | None
    runtime: str


def request_maker(
    target: Target, loaded: LoadedModel, grammars: Grammars, turns: Turns
) -> RequestMaker:
    """Makes the requests of a model, which may be an encoder-decoder.

    Raises:
        CompatibilityError: its decoder has no start token, or its generation config asks for
            something that is not applied here.
    """
    reader = None if target.source_network is None else _source_reader(target, loaded, turns)
    eos = loaded.eos_token_ids
    return RequestMaker(
        target,
        loaded.tokenizer,
        eos,
        grammars,
        DecodingRules.of(loaded.obeyed_settings, eos, target.vocab_size),
        sampling_defaults=loaded.sampling_defaults,
        beam_defaults=loaded.beam_defaults,
        reader=reader,
    )


def _source_reader(target: Target, loaded: LoadedModel, turns: Turns) -> SourceReader:
    network = target.source_network
    assert network is not None, "the caller has looked"
    start = decoder_start(loaded.module, loaded.settings)
    if network.num_bins is None:
        return SourceReader(target, loaded.tokenizer, start)
    assert network.source_limit is not None, "audio has a fixed length"
    audio = AudioReader(loaded.path, network.num_bins, network.source_limit)
    speech = WhisperStart.of(start, loaded.settings, loaded.module.config)
    return SourceReader(target, loaded.tokenizer, start, audio, speech, turns.take_or_go_on)


def default_config(name: str | None, target: Target) -> SpeculativeConfig:
    """The `hybrid` of a model whose head comes with the package, else plain decoding.

    On a GPU, where it was not measured, and where draft lengths change the bits, it is plain
    decoding, too.
    """
    fields = None
    if target.device.type == "cpu" and target.bit_exact:
        fields = shipped_config(name, trees=target.exact_trees)
    return SpeculativeConfig.parse(fields)
