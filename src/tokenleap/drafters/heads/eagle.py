"""`eagle`: a trained head drafts from the target's hidden states (Li et al., arXiv 2503.01840).

`EagleHead` is the `Scorer` that `ModelDrafter` uses, so chains, trees and exact q come from there.
The head's row of KV holds pairs: token t + 1 with the state of position t (see `eagle_net.py`). The
states of committed tokens come from the target's hidden states; those of drafted tokens are the
head's own outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokenleap.core.per_request import PerRequest
from tokenleap.core.tree import TokenTree, chain
from tokenleap.drafters.blocks import BlockScorer
from tokenleap.drafters.heads.eagle_net import EagleNet, FeatureNet, ParallelNet
from tokenleap.drafters.heads.folder import CONFIG, check_layers, read_json, write_fields
from tokenleap.drafters.heads.layouts import EMBEDDING, OUTPUT_ROWS, EagleFolder, write_head
from tokenleap.drafters.heads.probe import Probe, check_head, look, our_text
from tokenleap.drafters.model_drafter import Committed, Head, States, scored
from tokenleap.drafters.models import OwnModel
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.request import Request
from tokenleap.runtime.choose import head_network
from tokenleap.runtime.cpu import linear_layer
from tokenleap.runtime.growth_plan import GrowthPlan
from tokenleap.runtime.inputs import StateRows
from tokenleap.runtime.lean import DenseLinear, LinearLayer
from tokenleap.runtime.llama import (
    Family,
    JointInput,
    LayerWeights,
    LinearWeights,
    MixedInput,
    Rotary,
    Traits,
)
from tokenleap.runtime.native.network import NativeDecoder, NativeFusion
from tokenleap.runtime.network import (
    GrownTree,
    GrowthLimit,
    Need,
    Network,
    PassOutput,
    num_states,
)
from tokenleap.runtime.passes import Passes
from tokenleap.runtime.target import Target

_LEVEL_SHARE = 0.25
"""See `DrafterTraits.level_share`, where one call grows the tree. SmolLM2's head takes 0.7 ms for
one level, with Python and new states, and 0.1 for each further one."""


class EagleHead(OwnModel, Head):
    """A head with KV rows of its own.

    Args:
        token_ids: [Vd] the target's ids of the tokens that it can draft, ascending.

    Attributes:
        layers: ids of the target's layers whose hidden states it reads.
    """

    def __init__(self, head: Passes, fusion: Fusion, token_ids: Tensor) -> None:
        super().__init__(head)
        self.token_ids = token_ids.to(head.device)
        self.layers = fusion.layers
        self._states = PerRequest(partial(Committed, fusion))
        self._outputs = PerRequest(States)  # states after the nodes of the tree

    @property
    def level_share(self) -> float:
        return _LEVEL_SHARE if isinstance(self._model.network, NativeDecoder) else 1.0

    def use_head(self, net: EagleNet, target: Target, quantization: str | None) -> None:
        """Draft with other weights of the same sizes, on the KV and the states that are there."""
        network = network_of(net, target, quantization)
        self.use(network)
        fusion = Fusion.beside(network, net, target)
        self._states.default_factory = partial(Committed, fusion)
        for states in self._states.values():
            states.fusion = fusion

    def seen(self, request: Request) -> Sequence[int]:
        """The token of every pair: all committed tokens but the first."""
        return request.token_ids[1:]

    def room(self, request: Request) -> int:
        """See `OwnModel.room`; 0 for a text of one token, of which there is no state."""
        return super().room(request) if len(request.token_ids) > 1 else 0

    def pending(self, request: Request) -> list[int]:
        assert len(self._states[request.key]) == len(self.seen(request))
        return super().pending(request)

    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        new = zip(keys, trees, num_computed, strict=True)
        states = [self._states_of_new_nodes(*each) for each in new]
        layer = self._model.network.num_layers
        need = scored(num_computed, (layer,))
        outputs = self._model.verify(keys, trees, num_computed, need, states)
        for key, first, output in zip(keys, num_computed, outputs, strict=True):
            self._outputs[key].keep(first, output.hidden[layer])
        return outputs

    def grow(
        self,
        keys: Sequence[int],
        pending: Sequence[Sequence[int]],
        plan: GrowthPlan,
        limits: Sequence[GrowthLimit],
    ) -> list[GrownTree] | None:
        states = [
            self._states[key].last(len(tokens)) for key, tokens in zip(keys, pending, strict=True)
        ]
        return self._model.grow(keys, pending, plan, limits, self.token_ids, states)

    def _states_of_new_nodes(self, key: int, tree: TokenTree, num_computed: int) -> StateRows:
        """[n, E] the states of a tree's new nodes: the target's, then the parents' outputs."""
        states = self._states[key]
        num_cached = self._model.cached(key)  # pairs before those of the tree
        committed = states[num_cached + num_computed :]
        drafted = tree.parents[max(num_computed, len(states) - num_cached) :]
        if drafted:
            committed = torch.cat([committed, self._outputs[key][drafted]])
        return StateRows.of(committed)

    def _prefill(self, request: Request, start: int, stop: int) -> None:
        states = self._states[request.key][start:stop]
        self._model.prefill(request.key, self.seen(request)[start:stop], states=states)

    def keep(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        self._states[request.key].keep(start, hidden)

    def rewind(self, request: Request) -> None:
        self._states[request.key].cut(len(request.token_ids) - 1)


def load_parts(
    file: EagleFolder,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization: str | None = None,
) -> tuple[EagleNet, Passes, Fusion]:
    """The head of a folder for a target, its KV rows, and what makes its states."""
    net = file.load(target)
    check_head(file, net.to(target.device), target, tokenizer)
    passes = head_passes(net, target, quantization)
    return net, passes, Fusion.beside(passes.network, net, target)


def load_head(
    file: EagleFolder,
    target: Target,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization: str | None = None,
) -> tuple[EagleHead, Passes]:
    """The head of a folder for a target, and its KV rows: see `load_parts`."""
    net, passes, fusion = load_parts(file, target, tokenizer, quantization)
    if isinstance(net, ParallelNet):
        return ParallelHead(passes, fusion, net), passes
    return EagleHead(passes, fusion, net.draft_tokens), passes


# The weights of an `EagleNet` in the form that the networks of `runtime/` use.


class EagleWeights:
    """See `runtime.llama.DecoderWeights`.

    Args:
        net: the head. Its embedding is shared; all other weights are converted to its dtype.
    """

    def __init__(self, net: EagleNet) -> None:
        config = net.config
        self._layers = net.layers
        self.embedding = net.embedding.detach()
        self._dtype = self.embedding.dtype
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.hidden_size, self.inner_size = config.hidden_size, config.intermediate_size
        self.width, self.epsilon = config.head_dim, config.rms_norm_eps
        self.scaling: float = net.layer.self_attn.scaling
        self.num_layers = len(net.layers)
        self.head = LinearWeights(self._of(net.head), None)
        self.rotary = Rotary(net.rotary, self.embedding.device)
        self.local_rotary: Rotary | None = None
        self.traits = Traits()
        self.norm: Tensor | None = None
        self.joint: JointInput | MixedInput | None
        if isinstance(net, FeatureNet):
            self.joint = MixedInput(self._linear(LinearWeights.of(net.fc)))
        else:
            self.norm = self._of(net.norm.weight)
            self.joint = JointInput(
                self._of(net.layer.input_layernorm.weight),
                self._of(net.layer.hidden_norm.weight),
                config.norm_before_residual,
                config.norm_output,
            )

    def layer(self, index: int) -> LayerWeights:
        parts: dict[str, Any] = {
            name: self._linear(part) if isinstance(part, LinearWeights) else self._of(part)
            for name, part in Family().parts(self._layers[index]).items()
        }
        return LayerWeights(**parts)

    def _linear(self, part: LinearWeights) -> LinearWeights:
        bias = None if part.bias is None else self._of(part.bias)
        return LinearWeights(self._of(part.weight), bias)

    def _of(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.embedding.device, self._dtype)


def network_of(net: EagleNet, target: Target, quantization: str | None) -> Network:
    weights, own = EagleWeights(net), target.quantization
    return head_network(weights, target.network, quantization, of_target=own)


def head_passes(net: EagleNet, target: Target, quantization: str | None = None) -> Passes:
    """The head over KV rows of its own, computed by the kind of network that the target has."""
    network = network_of(net, target, quantization)
    length = min(target.max_model_len, net.config.max_position_embeddings)
    passes = Passes(network, length, target.dtype, target.device)
    passes.allocate(net.embedding[:1])
    return passes


# The states of an EAGLE head's committed tokens, from the target's hidden states.
#
# A state has the same bits for any number of tokens that are computed with it. So drafts do not
# depend on how the tokens came to be committed (invariant 4).


class Fusion:
    """`EagleNet.fuse` for serving, in the target's dtype."""

    def __init__(
        self, net: EagleNet, dtype: torch.dtype, device: torch.device, *, native: bool = False
    ) -> None:
        self.layers = net.config.aux_layers
        self.like = torch.empty(0, net.config.hidden_size, dtype=dtype, device=device)
        self._fuse: Callable[[Sequence[Mapping[int, Tensor]], Sequence[int], StateRows], object]
        if isinstance(net, FeatureNet):
            norm = net.final_norm
            self._fuse = lambda parts, layers, to: to.tensor.copy_(norm(_joined(parts, layers[0])))
            return
        modules: list[Any] = [net.fc, *net.fc_norm]
        fc, *norms = (module.weight.detach().to(device, dtype) for module in modules)
        self._fuse = (NativeFusion if native else _Fusion)(fc, norms, net.config.rms_norm_eps)

    @classmethod
    def beside(cls, network: Network, net: EagleNet, target: Target) -> Fusion:
        """Computed by the kind of network that computes the head."""
        native = isinstance(network, NativeDecoder)
        return cls(net, target.dtype, target.device, native=native)

    def __call__(self, parts: Sequence[Mapping[int, Tensor]], to: StateRows) -> None:
        """Write the states of n tokens; `parts` map layer ids to hidden states of theirs."""
        self._fuse(parts, self.layers, to)

    def states(self, *parts: Mapping[int, Tensor]) -> Tensor:
        """[n, E] the same."""
        states = self.like.new_empty(sum(map(num_states, parts)), self.like.shape[1])
        self(parts, StateRows.of(states))
        return states


def _joined(parts: Sequence[Mapping[int, Tensor]], layer: int) -> Tensor:
    return parts[0][layer] if len(parts) == 1 else torch.cat([part[layer] for part in parts])


class _Fusion:
    """`NativeFusion` in PyTorch's operations."""

    def __init__(self, fc: Tensor, norms: Sequence[Tensor], epsilon: float) -> None:
        kind: type[LinearLayer] = linear_layer(fc.dtype, fc.device, None) or DenseLinear
        self._least_rows = kind.LEAST_ROWS
        self._fc = kind(fc, None).forward
        self.norms, self._epsilon = norms, epsilon

    def __call__(
        self, parts: Sequence[Mapping[int, Tensor]], layers: Sequence[int], to: StateRows
    ) -> None:
        hidden = [_joined(parts, layer) for layer in layers]
        if self.norms:
            hidden = [self._normed(*each) for each in zip(hidden, self.norms, strict=True)]
        joined = torch.cat(hidden, dim=-1)
        missing = self._least_rows - len(joined)
        if missing > 0:
            joined = F.pad(joined, (0, 0, 0, missing))
        to.tensor[:] = self._fc(joined)[: to.count]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._epsilon)


# `parallel`: one pass of a trained head drafts a whole block (P-EAGLE, arXiv 2602.01469).
#
# The head is an EAGLE-3 head with learnt masks after the root (see `eagle_net.py`). Every level
# of a draft is one node of its pass (see `drafters/blocks.py`).


class ParallelHead(BlockScorer, EagleHead):
    """A head with KV rows of its own whose first pass computes all levels."""

    def __init__(self, head: Passes, fusion: Fusion, net: ParallelNet) -> None:
        EagleHead.__init__(self, head, fusion, net.draft_tokens)
        self.prepare_blocks(net.config.depths)
        self._mask_token = net.config.mask_token_id
        self._mask_state = _mask_state(net, fusion, head)

    def block(self, keys: Sequence[int], pending: Sequence[Sequence[int]]) -> list[Tensor]:
        """See `BlockScorer.block`: as many masks as each draft needs."""
        blocks, states = [], []
        for key, tokens in zip(keys, pending, strict=True):
            masks = self._depths[key] - 1
            blocks.append(chain((*tokens, *[self._mask_token] * masks)))
            known = self._states[key][-len(tokens) :]
            together = torch.cat([known, self._mask_state.expand(masks, -1)])
            states.append(StateRows.of(together))
        need = Need(last=max(self._depths[key] for key in keys))
        outputs = self._model.verify(keys, blocks, None, need, states)
        return [
            output.scores[-self._depths[key] :] for key, output in zip(keys, outputs, strict=True)
        ]


@torch.inference_mode()
def _mask_state(net: ParallelNet, fusion: Fusion, head: Passes) -> Tensor:
    """[1, E] the state of a mask, from its features like that of a token."""
    features = net.mask_features().detach().to(head.device, head.dtype)
    hidden = {layer: row.unsqueeze(0) for layer, row in zip(fusion.layers, features, strict=True)}
    return fusion.states(hidden)


# Heads for other engines, and records of heads that were trained elsewhere, or long ago.
#
# Other engines take weights from the head's file that are the target's own: vLLM the output rows of
# a reduced draft vocabulary, without which it does not load the head, and `speculators` the
# embedding as well, without which it computes with whatever is in memory.


_METHODS = ("eagle", "parallel")
"""Whose heads can be exported and checked."""


def export_head(
    source: Path, to: Path, embedding: Tensor, rows: Tensor, layers: int, verifier: str
) -> None:
    """Write an EAGLE-3 or P-EAGLE head as vLLM and `speculators` load it.

    Args:
        embedding: [V, E] the target's.
        rows: [V, E] of the target's output layer.
    """
    if (to / CONFIG).exists():
        raise ModelError(f"{to} has a model already: give another folder.")
    file = EagleFolder.read(source, *_METHODS).for_target(layers)
    net = file.net(embedding, rows)
    check_layers(source, file.verifier, layers)
    named = replace(file.verifier, name_or_path=verifier)
    vocabulary = {OUTPUT_ROWS: net.head, EMBEDDING: net.embedding}
    if isinstance(net, FeatureNet):
        if net.config.draft_vocab_size != net.config.vocab_size:
            raise ModelError(
                f"{source}: other engines load EAGLE-1 heads only if they can draft all tokens: "
                "train one with draft_vocab_size=null."
            )
        del vocabulary[OUTPUT_ROWS]  # the layout has none
    shared = {name: tensor.detach().contiguous() for name, tensor in vocabulary.items()}
    write_head(to, net, named, file.notes, shared)


def check_folder(folder: Path, target: Target, tokenizer: PreTrainedTokenizerBase | None) -> Probe:
    """Check an EAGLE head as when it is loaded, then run it and a target on our text."""
    net, _, fusion = load_parts(EagleFolder.read(folder, *_METHODS), target, tokenizer)
    tokens = our_text(tokenizer)
    if len(tokens) < 2 or len(tokens) >= target.max_model_len:
        raise CompatibilityError(
            "a head is checked with a text of a few dozen tokens, and this model has no tokenizer, "
            "or no room for them."
        )
    return Probe.of(look(target, tokens, fusion.layers), net)


def record_probe(folder: Path, probe: Probe) -> None:
    """Add it to the head's `config.json`."""
    fields = read_json(folder / CONFIG)
    fields["tokenleap"] = {**fields.get("tokenleap", {}), **probe.note()}
    write_fields(folder, fields)
