"""Checks a model's behaviour when its target is constructed (invariant 5).

`probe` verifies a small token tree and compares the logits with those of the model's own forward
pass. It also compares the logits of one position, bit by bit, between passes over different numbers
of nodes (invariant 7).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn

from tokenleap.core.references import Source
from tokenleap.core.tree import TokenTree, chain
from tokenleap.errors import CompatibilityError, TokenleapError
from tokenleap.runtime.attention import SHORT_SPAN
from tokenleap.runtime.cpu import share
from tokenleap.runtime.inputs import Window, layer_windows, resize_windows
from tokenleap.runtime.network import Network, PassOutput, SourceNetwork, WindowedNetwork
from tokenleap.runtime.passes import INTERNAL_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = {True: 1e-3, False: 0.25}
"""Largest mean error of the logits, in standard deviations of the logits: in float32 (True) and in
16 bits (False). Rounding stays below it. A model that ignores the mask or positions does not."""

QUANTIZATION_TOLERANCE = 0.8
"""The same for quantized weights. Logits that have nothing in common reach 1.1."""

NARROW = 3
"""Attention windows of so many tokens are checked: so few that the last nodes of the checked path
do not see all of those whose slots and positions differ."""


class Packed(Protocol):
    @property
    def config(self) -> PreTrainedConfig: ...

    @property
    def logits(self) -> Tensor | None: ...

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]: ...


class Probed(Protocol):
    """The part of `Target` that the checks use."""

    name: str
    network: Network
    vocab_size: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype

    @property
    def bucket(self) -> Hashable: ...

    def with_network(self, network: Network) -> Self: ...

    def with_own_rows(self, num_layers: int | None = None) -> Self: ...

    def add(self, key: int) -> None: ...

    def encode(self, key: int, source: Source) -> None: ...

    def remove(self, key: int) -> None: ...

    def prefill(self, key: int, tokens: Sequence[int]) -> object: ...

    def verify(self, keys: Sequence[int], trees: Sequence[TokenTree]) -> list[PassOutput]: ...


@torch.inference_mode()
def probe(target: Probed, model: PreTrainedModel | Packed, *, quantized: bool) -> bool:
    """Check a tree against the model's own forward pass, and whether invariant 7 holds here.

    The tree of a quantized target is compared with a chain through the target itself, and what lies
    beyond a packed one's windows, too.
    """
    exact = _check_tree(target, model, quantized=quantized)
    windows = [w for w in _layer_windows(model) if w and w.size < target.max_model_len]
    if windows:
        assert isinstance(target.network, WindowedNetwork)
        narrow = target.with_network(target.network.narrowed(NARROW))
        limit = min(window.size for window in windows)
        own = _narrowed(model) if isinstance(model, nn.Module) else model
        exact &= _check_tree(narrow, own, quantized=quantized, window=limit)
    exact = exact and _same_bits(
        target, (_tokens(target.vocab_size, 5) * 4)[: target.max_model_len]
    )
    if not exact or target.network.exact_trees:
        return exact
    # PyTorch chooses kernels by shape, and the shapes of all layers are alike: two are enough, of
    # which the second one reads what the first has computed. The weights do not matter.
    kind = (target.device, target.dtype, quantized, type(target.network).__name__, target.bucket)
    longest = min(_CHUNKS[0] + 1, target.max_model_len)
    key = (model.config.to_json_string(), *kind, longest, torch.get_num_threads())
    if key not in _LONG_PASSES:
        try:
            few = target.with_own_rows(min(2, target.network.num_layers))
        except CompatibilityError:  # a module that does not say which are its layers
            few = target
        _LONG_PASSES[key] = _same_bits_in_long_passes(few)
    return _LONG_PASSES[key]


def _tokens(vocab_size: int, count: int) -> list[int]:
    """Different tokens, as far as the vocabulary has so many."""
    stride = max(1, vocab_size // 7)
    return [i * stride % vocab_size for i in range(count)]


def _check_tree(
    target: Probed,
    model: PreTrainedModel | Packed,
    *,
    quantized: bool,
    window: int | None = None,
) -> bool:
    """Check a tree; returns whether a path had the bits of a chain, if that is promised."""
    name, reads_source = target.name, isinstance(target.network, SourceNetwork)
    a, b, c, *path = _tokens(target.vocab_size, 5 if window is None else 7)
    parents = (-1, 0, 0, *range(2, len(path) + 1))
    tree = TokenTree((b, c, *path), parents)  # a b c  and  a b d e ...
    try:
        tree_logits = _logits(target, [a], tree)
        inputs = torch.tensor([[a, b, *path]], device=target.device)
        as_chain = _logits(target, [a], chain([b, *path]))
        if isinstance(model, nn.Module):
            own = _own_logits(target, model, inputs)[1:]
        else:  # which has no logits with a narrower window
            own = as_chain if window or model.logits is None else model.logits
    except TokenleapError:  # our own reasons
        raise
    except (RuntimeError, TypeError, LookupError, AttributeError, ValueError) as error:
        raise CompatibilityError(
            f"{name} cannot be run with a 4-D mask, position ids and an external KV cache: "
            f"{str(error).splitlines()[0]}"
        ) from error
    if not own.isfinite().all():
        _refuse_weights(target, model)
    on_path = tree_logits[[0, *range(2, len(tree))]]  # b d e ...
    if quantized and not _error(as_chain, own) <= QUANTIZATION_TOLERANCE:
        raise CompatibilityError(
            f"{name} computes quite different logits with quantized weights: use a finer "
            "quantization, or none."
        )
    expected = as_chain if quantized else own
    if not _error(on_path, expected) <= TOLERANCE[target.dtype == torch.float32]:
        if reads_source:
            raise CompatibilityError(
                f"{name} computes other logits than its parts do when they are put together as "
                "those of BART or T5."
            )
        if window is not None:
            raise CompatibilityError(
                f"{name} computes other logits beyond its attention window than with a mask of "
                f"that window; set max_model_len={window} or less to use it."
            )
        raise CompatibilityError(
            f"{name} computes other logits for a path of a token tree than for the same tokens as "
            "a chain: it ignores the 4-D mask or the position ids."
        )
    return not target.network.exact_trees or torch.equal(on_path, as_chain)


def probe_tokens(vocab_size: int) -> list[int]:
    """The tokens whose logits are compared with those of the module's own forward pass."""
    a, b, _, *path = _tokens(vocab_size, 5)
    return [a, b, *path]


def _refuse_weights(target: Probed, model: PreTrainedModel | Packed) -> NoReturn:
    """Say which weights make a model's logits NaN or infinite."""
    found = (
        name
        for name, weight in model.named_parameters()
        if not weight.is_meta and not weight.isfinite().all()
    )
    if (name := next(found, None)) is not None:
        raise CompatibilityError(
            f"the model's weights are damaged: {name} has values that are not finite; get them "
            "again."
        )
    raise CompatibilityError(
        f"{target.name} computes logits that are not finite in {target.dtype}: use another dtype."
    )


def _layer_windows(model: PreTrainedModel | Packed) -> tuple[Window | None, ...]:
    return () if model.config.is_encoder_decoder else layer_windows(model.config.get_text_config())


def _narrowed(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model on the same weights, whose windows have `NARROW` tokens."""
    narrow = share(model)
    resize_windows(narrow.config.get_text_config(), NARROW)
    return narrow


def _own_logits(target: Probed, model: Any, inputs: Tensor) -> Tensor:
    """[n, V] of the model's own forward pass over tokens [1, n]."""
    if not isinstance(target.network, SourceNetwork):
        logits: Tensor = model(input_ids=inputs).logits[0]
        return logits
    source = target.network.probe_source.inputs(target.device, target.dtype)
    own: Tensor = model(**source, decoder_input_ids=inputs).logits[0]
    return own


def _logits(
    target: Probed, context: Sequence[int], tree: TokenTree, chunk: int | None = None
) -> Tensor:
    """[n+1, V] logits of a tree after a context in chunks, in a row that is closed again."""
    size = chunk or len(context)
    with _rows(target, 1) as keys:
        for start in range(0, len(context), size):
            target.prefill(keys[0], context[start : start + size])
        return target.verify(keys, [tree])[0].scores.clone()


@contextmanager
def _rows(target: Probed, count: int) -> Iterator[list[int]]:
    keys: list[int] = []
    try:
        for place in range(count):
            target.add(INTERNAL_KEY - place)
            keys.append(INTERNAL_KEY - place)
        yield keys
    finally:
        for key in keys:
            target.remove(key)


def _same_bits(target: Probed, tokens: Sequence[int]) -> bool:
    """Whether positions get the same bits in passes over different numbers of nodes."""
    if len(tokens) < 4:
        return False  # too few to compare passes
    wide = _logits(target, tokens[:2], chain(tokens[2:]))
    narrow = _logits(target, tokens[:2], chain(tokens[2:3]))
    middle = _logits(target, tokens[:3], chain(tokens[3:9]))
    if not (torch.equal(wide[:1], narrow) and torch.equal(wide[1 : 1 + len(middle)], middle)):
        return False
    if not isinstance(target.network, SourceNetwork):
        return True
    return torch.equal(_beside_a_long_row(target, tokens[:2], chain(tokens[2:3])), narrow)


_LONGEST = 65  # nodes of the longest passes over drafts that are compared: 64 tokens and their root

_CHUNKS = (256, 64, 63)  # sizes of the chunks in which the same prompt is computed

_LONG_PASSES: dict[Hashable, bool] = {}
"""Findings by all that shapes depend on: these passes take most of the probe's time."""


def _same_bits_in_long_passes(target: Probed) -> bool:
    """Whether long drafts, in one row and in two, and chunks of prompts leave the bits alone."""
    tokens = (_tokens(target.vocab_size, 7) * 40)[: min(_CHUNKS[0] + 1, target.max_model_len)]
    after = [_logits(target, tokens[:-1], chain(tokens[-1:]), size) for size in _CHUNKS]
    if not all(torch.equal(each, after[0]) for each in after[1:]):
        return False
    longest = chain(tokens[2 : 2 + _LONGEST])
    if len(longest) < 2:
        return True
    wide = _logits(target, tokens[:2], longest)
    for place in {1, len(longest) // 2, len(longest) - 1}:
        start = 2 + place
        narrow = _logits(target, tokens[:start], chain(tokens[start : start + 1]))
        if not torch.equal(wide[place : place + 1], narrow):
            return False
    with _rows(target, 2) as keys:
        for key in keys:
            target.prefill(key, tokens[:2])
        return all(torch.equal(each.scores, wide) for each in target.verify(keys, [longest] * 2))


def _beside_a_long_row(target: Probed, context: Sequence[int], tree: TokenTree) -> Tensor:
    """The logits of `_logits`, in a pass with a row whose text and source are not short."""
    network = target.network
    assert isinstance(network, SourceNetwork)
    size, limit = SHORT_SPAN + 1, network.source_limit
    with _rows(target, 2) as keys:
        if network.num_bins is None and (limit is None or limit >= size):
            target.encode(keys[1], Source(size * network.probe_source.tokens[-1:]))
        target.prefill(keys[0], context)
        target.prefill(keys[1], (size * [*context])[: min(size, target.max_model_len - 2)])
        return target.verify(keys, [tree, tree])[0].scores.clone()


def _error(found: Tensor, expected: Tensor) -> float:
    """Mean error, in standard deviations of the expected logits."""
    return float((found.float() - expected.float()).abs().mean() / expected.float().std())
