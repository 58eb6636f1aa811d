"""What `LLMEngine` is made of, where that depends on the model."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.config import SpeculativeConfig
from foretoken.core.grammar import Grammars
from foretoken.core.rules import DecodingRules
from foretoken.drafters.heads.shipped import shipped_config
from foretoken.engine.request_maker import RequestMaker
from foretoken.engine.sources import SourceReader
from foretoken.models.audio import AudioReader
from foretoken.models.decoder_start import decoder_start
from foretoken.models.loaded import LoadedModel
from foretoken.runtime.target import Target

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


def request_maker(target: Target, loaded: LoadedModel, grammars: Grammars) -> RequestMaker:
    """Makes the requests of a model, which may be an encoder-decoder.

    Raises:
        CompatibilityError: its decoder has no start token, or its generation config asks for
            something that is not applied here.
    """
    eos, network = loaded.eos_token_ids, target.source_network
    tokenizer, beams = loaded.tokenizer, loaded.beam_defaults
    if network is None:
        return RequestMaker(target, tokenizer, eos, grammars, beams)
    audio = None
    if network.num_bins is not None:
        assert network.source_limit is not None, "audio has a fixed length"
        audio = AudioReader(loaded.path, network.num_bins, network.source_limit)
    reader = SourceReader(target, loaded.tokenizer, decoder_start(loaded.module), audio)
    rules = DecodingRules.of(loaded.module.generation_config, eos, target.vocab_size)
    return RequestMaker(target, tokenizer, eos, grammars, beams, reader, rules)


def default_config(name: str | None, target: Target) -> SpeculativeConfig:
    """The `hybrid` of a model whose head comes with the package, else plain decoding.

    On a GPU, where it was not measured, and where draft lengths change the bits, it is plain
    decoding, too.
    """
    fields = None
    if target.device.type == "cpu" and target.bit_exact:
        fields = shipped_config(name, trees=target.exact_trees)
    return SpeculativeConfig.parse(fields)
