"""`Target`: one language model with its KV slab, which verifies the trees of many rows in one pass.

The decoding loop calls prefill, verify, commit and rollback. A draft model is a second `Target`;
only its caller differs. `passes.py` runs the passes; this file makes them of a model. `probing.py`
checks the model, and `profiling.py` measures what passes cost.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from torch import Tensor, nn

from tokenleap.core.peers import ALONE
from tokenleap.errors import CompatibilityError
from tokenleap.models.support import check_layers, check_supported, context_length
from tokenleap.runtime.choices import AUTO, NONE
from tokenleap.runtime.choose import network_for
from tokenleap.runtime.network import SourceNetwork
from tokenleap.runtime.packed import PackedModel, norm_module
from tokenleap.runtime.passes import Bucket, Passes
from tokenleap.runtime.probing import probe
from tokenleap.runtime.seq2seq.structure import describe
from tokenleap.runtime.sharded import is_sharded, peers_of, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VocabularyWeights: TypeAlias = tuple[Tensor, Tensor]


class Target(Passes):
    """A model that verifies token trees.

    Args:
        model: a loaded causal LM or encoder-decoder, not changed here and used elsewhere; or a
            model whose packed weights are mapped.
        max_model_len: most tokens of a row, prompt included; None means the model's own limit. Of
            an encoder-decoder, these are the decoder's.
        reload: loads the model again; None if that is not possible.
        bucket: a shape for all passes, unless the network is bit-exact without (see `Bucket`).
        beside: a target whose network stays in memory as long as this one's (see `network_for`).

    Attributes:
        quantization: "int8", "int4", "gguf" for a GGUF file as it is, or None.
        bit_exact: whether the checks at construction found the same bits for every number of nodes
            (invariant 7).
        name: that of the model's class.
        logits_bias: [V] that the model adds to what its output rows give; None if it adds nothing.
    """

    _vocabulary_weights: Callable[[], VocabularyWeights | None]
    _final_norm: Callable[[], nn.Module | None]

    def __init__(
        self,
        model: PreTrainedModel | PackedModel,
        max_model_len: int | None = None,
        quantization: str | None = None,
        runtime: str = "auto",
        reload: Callable[[], PreTrainedModel] | None = None,
        beside: Target | None = None,
        bucket: Bucket | None = None,
    ) -> None:
        length = context_length(model.config, max_model_len)
        self.config = config = model.config.get_text_config()
        self.vocab_size, self.hidden_size = int(config.vocab_size), int(config.hidden_size)
        self.reload = reload
        other = None if beside is None else beside.network
        quantization = None if quantization in (AUTO, NONE) else quantization
        if isinstance(model, PackedModel):
            self.name, quantization = model.name, model.quantization
            check_layers(self.name, config, length)
            self.logits_bias, self.peers = None, ALONE
            known = model.vocabulary_weights
            self._vocabulary_weights = lambda: known
            self._final_norm = partial(norm_module, model.config, model.norm.to(model.dtype))
            network = network_for(model.weights, None, runtime, other)
        else:
            self.name = type(model).__name__
            check_supported(model, length)
            if config.is_encoder_decoder:
                self.vocab_size = describe(model).head.out_features
            self.logits_bias, self.peers = logits_bias(model), peers_of(model)
            self._vocabulary_weights = _kept_weights(model)
            norm = final_norm(model)
            self._final_norm = lambda: norm
            network = network_for(model, quantization, runtime, other, self.peers)
        if bucket is not None and isinstance(network, SourceNetwork):
            raise CompatibilityError(
                "batch_invariant: it is for decoder-only models: leave it out."
            )
        own = None if network.exact_trees else bucket
        super().__init__(network, length, model.dtype, model.device, own)
        self.quantization, self.runtime = quantization, runtime
        exact = probe(self, model, quantized=quantization is not None)
        self.bit_exact = bool(self.peers.agreed(exact))
        if bucket is not None and not self.bit_exact:
            raise CompatibilityError(
                f"batch_invariant: in {model.dtype} on {model.device}, the bits of "
                f"{self.name} depend on what is computed together, also in passes of "
                "one shape: leave it out."
            )
        self.exact_trees = self.bit_exact and self.network.exact_trees
        self.num_passes = 0

    def with_own_rows(self, num_layers: int | None = None) -> Self:
        """The same model, or its first layers, over rows of its own; weights are in memory once."""
        other = copy.copy(self)
        network = self.network.first_layers(num_layers or self.network.num_layers)
        Passes.__init__(other, network, self.max_model_len, self.dtype, self.device, self.bucket)
        other.allocate()
        return other

    @cached_property
    def final_norm(self) -> nn.Module | None:
        """The norm before the output layer, [..., E] -> [..., E]; None if it is not known."""
        return self._final_norm()

    @property
    def vocabulary_weights(self) -> VocabularyWeights | None:
        """Weights [V, E] of embedding and output layer, for drafting heads; None if there are none.

        They are loaded again if they are not tied and the model has been freed.
        """
        found = self._vocabulary_weights()
        return vocabulary_weights(self.reload()) if found is None and self.reload else found


_FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f")


def final_norm(model: Any) -> nn.Module | None:
    """The norm between the last layer and the output layer, or None if it is not known.

    In a decoder-only model it is the last of the norms beside the layers. An encoder-decoder may
    have none there, or a norm of the embeddings.
    """
    if model.config.is_encoder_decoder:
        return describe(model).final_norm
    decoder: Any = model.get_decoder()
    if getattr(decoder, "project_out", None) is not None:  # OPT: the output layer reads that
        return None
    named = next((getattr(decoder, n) for n in _FINAL_NORMS if hasattr(decoder, n)), None)
    norms = [module for module in decoder.children() if "norm" in type(module).__name__.lower()]
    return named if isinstance(named, nn.Module) else norms[-1] if norms else None


def logits_bias(model: Any) -> Tensor | None:
    """[V] that a model adds to what its output rows give; None if it adds nothing."""
    layer = model.get_output_embeddings()
    found: list[Tensor | None] = [getattr(layer, "bias", None)]
    if model.config.is_encoder_decoder:
        found.append(describe(model).logits_bias)
    biases = [whole(bias.detach()) for bias in found if bias is not None]
    total = sum(biases[1:], biases[0]) if biases else None
    return total if total is not None and total.any() else None


def vocabulary_weights(model: Any) -> VocabularyWeights | None:
    layers = _vocabulary_layers(model)
    if not all(layers):
        return None
    embedding, output = (whole(layer.weight.detach()) for layer in layers)
    return embedding, output


def _vocabulary_layers(model: Any) -> tuple[Any, Any]:
    reader = model.get_decoder() if model.config.is_encoder_decoder else model
    return reader.get_input_embeddings(), model.get_output_embeddings()


def _kept_weights(model: Any) -> Callable[[], VocabularyWeights | None]:
    """Access to the weights of the embedding and of the output layer, as long as they are there.

    Tied ones are kept, as by every network. Others are not: a packed copy may be all that is
    needed.
    """
    layers = _vocabulary_layers(model)
    sharded = all(layers) and is_sharded(layers[0].weight)
    if not sharded:  # else they are put together when somebody asks
        found = vocabulary_weights(model)
        if found is None or found[0].data_ptr() == found[1].data_ptr():
            return lambda: found
    references = [weakref.ref(layer.weight) for layer in layers]

    def alive() -> VocabularyWeights | None:
        first, second = (reference() for reference in references)
        if first is None or second is None:
            return None
        return whole(first.detach()), whole(second.detach())

    return alive
