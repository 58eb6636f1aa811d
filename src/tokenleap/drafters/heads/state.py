"""Drafting with a `StateNet`: chains and trees from heads that have no attention and no KV.

`StateHead` is the `Scorer` that `ModelDrafter` uses, so trees, expansion and exact q come from
there. Between steps it keeps the target's hidden states of the last committed tokens; while a draft
grows, the states of its deepest level. A state has the same bits for any number of nodes that are
computed with it, so drafts do not depend on the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from tokenleap.core.per_request import PerRequest
from tokenleap.core.tree import TokenTree
from tokenleap.drafters.heads.folder import (
    CONFIG,
    WEIGHTS,
    Verifier,
    check_layers,
    check_sizes,
    check_tensors,
    draft_tokens,
    existing_folder,
    first_of,
    noted,
    notes_of,
    read_json,
    read_tensors,
    validated,
    vocabulary_weights,
    write_folder,
)
from tokenleap.drafters.heads.state_net import (
    Depth,
    FrozenLinear,
    MedusaConfig,
    MlpSpeculatorConfig,
    Size,
    StateConfig,
    StateNet,
)
from tokenleap.drafters.model_drafter import Head
from tokenleap.drafters.options import StateHeadOptions
from tokenleap.errors import CompatibilityError, ModelError
from tokenleap.models.folder import check_sizes as check_model_sizes
from tokenleap.request import Request
from tokenleap.runtime.cpu import linear_layer
from tokenleap.runtime.network import PassOutput
from tokenleap.runtime.target import Target

__all__ = [
    "Layout",
    "StateFile",
    "StateHead",
    "StateHeadOptions",
    "fasterdecoding_medusa",
    "ibm_mlp_speculator",
    "load_net",
    "read_state_file",
    "vllm_medusa",
    "write_state_file",
]

KEPT = 64
"""Tokens at the end of the text whose hidden states are kept. Only one is needed, except after
tokens were taken back."""

NO_LIMIT = 1 << 30


class _Recent:
    """The target's hidden states of the last committed tokens of a request."""

    def __init__(self) -> None:
        self._first = 0
        self._states: Tensor | None = None  # [n, E] of the tokens from `_first` on

    def keep(self, start: int, states: Tensor) -> None:
        """Keep the states [n, E] of the tokens from `start` on; those after are forgotten."""
        self.cut(start)
        if self._states is None or self._first + len(self._states) != start:
            self._first, self._states = start, states[:0]
        self._states = torch.cat([self._states, states[-KEPT:]])[-KEPT:]  # a copy
        self._first = start + len(states) - len(self._states)

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text."""
        if self._states is not None:
            self._states = self._states[: max(0, length - self._first)]

    def at(self, index: int) -> Tensor | None:
        """[1, E] the state of a token; None if it is not kept."""
        place = index - self._first
        if self._states is None or not 0 <= place < len(self._states):
            return None
        return self._states[place : place + 1]


class StateHead(Head):
    """A head in the target's dtype (see `scorer.Scorer`).

    Args:
        net: the head. It is changed: its linear layers are packed.
    """

    def __init__(self, net: StateNet, target: Target) -> None:
        assert target.final_norm is not None
        self.layers, self._norm = (target.network.num_layers,), target.final_norm
        self._dtype, self._device = target.dtype, target.device
        self.use(net)
        self.most_depth = self.num_heads = net.config.num_heads
        whole = net.config.draft_vocab_size == net.config.vocab_size
        self.token_ids: Tensor | None = None if whole else self._net.draft_tokens
        self._recent = PerRequest(_Recent)
        self._roots = PerRequest[Tensor]()  # [1, E] normalised, before the root
        # The number of nodes before those of the deepest level, and [n, S] theirs.
        self._levels = PerRequest[tuple[int, Tensor]]()
        self._all = PerRequest[Tensor]()  # [K, Vd] logits of all depths

    def use(self, net: StateNet) -> None:
        """Draft with this head, of the same sizes. It is changed: its linear layers are packed."""
        packed = net.to(self._device, self._dtype)
        least_rows = _pack(packed, self._dtype, self._device)  # it may raise
        self._net, self._least_rows = packed, least_rows

    def room(self, request: Request) -> int:
        """See `Scorer.room`; 0 without the hidden state of the token before the root."""
        known = self._recent[request.key].at(len(request.token_ids) - 2)
        return 0 if known is None else NO_LIMIT

    @torch.inference_mode()
    def pending(self, request: Request) -> list[int]:
        """See `Scorer.pending`: the root; what else was committed needs no pass."""
        hidden = self._recent[request.key].at(len(request.token_ids) - 2)
        assert hidden is not None, "room() is 0 without it"
        self._roots[request.key] = self._norm(hidden)
        return [request.root]

    @torch.inference_mode()
    def verify(
        self, keys: Sequence[int], trees: Sequence[TokenTree], num_computed: Sequence[int]
    ) -> list[PassOutput]:
        """The logits of one level of each tree; the levels before were computed."""
        (depth,) = {tree.depths[done] for tree, done in zip(trees, num_computed, strict=True)}
        counts = [len(tree) - done for tree, done in zip(trees, num_computed, strict=True)]
        if not self._net.reads_tokens:
            rows = self._logits_of_depth(keys, depth)
            logits = [row.expand(count, -1) for row, count in zip(rows, counts, strict=True)]
        else:
            states = self._next_states(keys, trees, num_computed, depth)
            for key, done, part in zip(
                keys, num_computed, torch.split(states, counts), strict=True
            ):
                self._levels[key] = done, part
            found = self._rows(lambda x: self._net.logits(x, depth), states)
            logits = list(torch.split(found, counts))
        return [PassOutput(each) for each in logits]

    def _next_states(
        self,
        keys: Sequence[int],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int],
        depth: int,
    ) -> Tensor:
        """[n, S] the states of the new nodes of all trees."""
        new = list(zip(keys, trees, num_computed, strict=True))
        tokens = torch.tensor(
            [token for _, tree, done in new for token in tree.tokens[done:]],
            device=self._net.d2t.device,
        )
        if depth == 0:
            hidden = torch.cat([self._roots[key] for key in keys])
            return self._rows(self._net.start, hidden, tokens)
        parents = []
        for key, tree, done in new:
            first, states = self._levels[key]
            parents.append(states[[parent - first for parent in tree.parents[done:]]])
        return self._rows(lambda x, t: self._net.advance(x, t, depth), torch.cat(parents), tokens)

    def _logits_of_depth(self, keys: Sequence[int], depth: int) -> list[Tensor]:
        """For each request, [1, Vd] the logits of all nodes of a depth, whatever their tokens."""
        hidden = torch.cat([self._roots[key] for key in keys])
        if self._net.config.own_rows:
            return list(torch.split(self._rows(lambda x: self._net.logits(x, depth), hidden), 1))
        if depth == 0:
            # All depths read the same output rows, which takes the time: read them once.
            every = self._rows(self._outputs_of_all_depths, hidden)  # [n, K, E]
            logits = self._rows(self._net.output_layer(0), every.flatten(0, 1))
            shape = (len(keys), self.num_heads, -1)
            self._all.update(zip(keys, logits.view(shape), strict=True))
        return [self._all[key][depth : depth + 1] for key in keys]

    def _outputs_of_all_depths(self, hidden: Tensor) -> Tensor:
        outputs = [self._net.outputs(hidden, depth) for depth in range(self.num_heads)]
        return torch.stack(outputs, dim=1)

    def _rows(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Compute on rows [n, ...], with as many as the linear layers need for the same bits."""
        count = len(inputs[0])
        missing = self._least_rows - count
        if missing > 0:
            inputs = tuple(F.pad(x, (*(0, 0) * (x.dim() - 1), 0, missing)) for x in inputs)
        return compute(*inputs)[:count]

    def finish_draft(self, request: Request, num_tokens: int) -> None:
        """See `Scorer.finish_draft`: forget the draft's states."""
        for kept in (self._roots, self._levels, self._all):
            kept.pop(request.key, None)

    @torch.inference_mode()  # as in a step, since prompts are shown outside of one
    def keep(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep the target's hidden states of the committed tokens from `start` on."""
        self._recent[request.key].keep(start, hidden[self.layers[0]])

    def rewind(self, request: Request) -> None:
        self._recent[request.key].cut(len(request.token_ids) - 1)


def _pack(net: StateNet, dtype: torch.dtype, device: torch.device) -> int:
    """Pack all linear layers, if there is something faster here."""
    kind = linear_layer(dtype, device, None)
    if kind is None:
        return 1
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear | FrozenLinear):
                setattr(module, name, kind(child.weight, child.bias))
    return kind.LEAST_ROWS


MODEL_TYPE = "tokenleap_head"


@dataclass(frozen=True)
class StateFile:
    """The contents of a folder.

    Args:
        draft_tokens: [Vd] the target's ids of the draft vocabulary, ascending.
    """

    path: Path
    config: StateConfig
    verifier: Verifier
    tensors: Mapping[str, Tensor]
    draft_tokens: Tensor
    notes: Mapping[str, Any] = field(default_factory=dict)

    def net(self, kind: type[StateNet], embedding: Tensor, rows: Tensor) -> StateNet:
        """The head over the target's embedding [V, E] and output rows [V, E]."""
        fields = asdict(self.config)
        sizes = {
            "hidden_size": self.config.hidden_size,
            "intermediate_size": fields.get("inner_size"),
            "num_layers": min(self.config.num_heads, len(self.tensors)),
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        check_model_sizes(self.path.parent / CONFIG, sizes, shapes)
        net = kind(self.config, embedding, rows, self.draft_tokens)
        check_tensors(self.path, self.tensors, net.wanted(), f"a head of method '{kind.METHOD}'")
        # The file's own tensors, without a copy.
        net.load_state_dict({**self.tensors, "d2t": net.d2t}, assign=True)
        net.train(False)
        return net


Layout: TypeAlias = Callable[[Path, Mapping[str, Any]], StateFile | None]
"""Reads a published layout: (folder, fields of its config.json) -> the same as our own form; None
if the fields are of another kind.

Raises:
    ModelError: the folder is damaged.
"""


def read_state_file(
    path: str | Path, kind: type[StateNet], layouts: tuple[Layout, ...] = ()
) -> StateFile:
    """Read a folder."""
    folder = existing_folder(path)
    fields = read_json(folder / CONFIG)
    if fields.get("model_type") == MODEL_TYPE:
        return _read_own(folder, fields, kind)
    for layout in layouts:
        if (found := layout(folder, fields)) is not None:
            return found
    raise ModelError(
        f"{folder / CONFIG} does not describe a head of method '{kind.METHOD}': is this the folder "
        "of such a head?"
    )


def _read_own(folder: Path, fields: Mapping[str, Any], kind: type[StateNet]) -> StateFile:
    path, method = folder / CONFIG, fields.get("method")
    if method != kind.METHOD:
        raise ModelError(
            f"{path}: this head is of method {method!r}, not '{kind.METHOD}': name its method."
        )
    config = validated(kind.Config, fields.get("config"), path)
    if (fault := config.fault()) is not None:
        raise ModelError(f"{path}: {fault}.")
    verifier, notes = noted(fields, path)
    tensors = read_tensors(folder / WEIGHTS)
    sizes = (config.draft_vocab_size, config.vocab_size)
    tokens = draft_tokens(folder / WEIGHTS, tensors.pop("d2t", None), *sizes)
    return StateFile(folder / WEIGHTS, config, verifier, tensors, tokens, notes)


def write_state_file(
    folder: Path, net: StateNet, verifier: Verifier, notes: Mapping[str, Any]
) -> None:
    """Write a head in our own form, in bfloat16; each file appears complete or not at all."""
    fields = {
        "model_type": MODEL_TYPE,
        "method": net.METHOD,
        "config": asdict(net.config),
        **notes_of(verifier, notes),
    }
    write_folder(folder, net.state_dict(), fields)


def load_net(file: StateFile, kind: type[StateNet], target: Target) -> StateNet:
    """The head of a folder, over a target's weights."""
    folder, config = file.path.parent, file.config
    check_layers(folder, file.verifier, target.network.num_layers)
    check_sizes(
        folder,
        file.verifier,
        (config.vocab_size, config.hidden_size),
        (target.vocab_size, target.hidden_size),
    )
    if target.final_norm is None:
        raise CompatibilityError(
            f"method '{kind.METHOD}' reads hidden states after the final norm, and it is not known "
            "which norm of this architecture that is."
        )
    if config.own_rows and not kind.reads_embedding(config):
        return file.net(kind, *[torch.empty(0, config.hidden_size)] * 2)
    net = file.net(kind, *vocabulary_weights(target))
    net.add_bias(target.logits_bias)
    return net


# Published layouts of heads without attention.
#
# - Medusa, FasterDecoding's: `config.json` with `medusa_num_heads`, `medusa_num_layers` and
#   `base_model_name_or_path`; `medusa_lm_head.safetensors` or `.pt` with the tensors
#   {head}.{block}.linear.weight, .bias, and {head}.{blocks}.weight, the output layer.
# - Medusa, vLLM's: `model_type` "medusa", `num_heads`, `num_hidden_layers`, `truncated_vocab_size`,
#   `medusa_fc_bias`, `original_lm_head`; tensors blocks.{head}.layers.{block}.weight,
#   lm_heads.{head}.weight and `token_map`.
# - MLP speculators, IBM's: `model_type` "mlp_speculator", `emb_dim`, `inner_dim`, `n_predict`,
#   `tie_weights`, `scale_input`; tensors (speculator.)emb.{depth}.weight, proj.{depth}.weight,
#   head.{depth}.weight, ln.{depth}.weight and .bias, in one file or several.


_UNKNOWN = "another model"


@dataclass(frozen=True)
class _FasterDecoding:
    medusa_num_heads: Depth
    medusa_num_layers: Depth = 1
    base_model_name_or_path: str = _UNKNOWN


def fasterdecoding_medusa(folder: Path, fields: Mapping[str, Any]) -> StateFile | None:
    """See `Layout`. Files may have more heads than their configuration says; all are used."""
    if "medusa_num_heads" not in fields:
        return None
    given = validated(_FasterDecoding, dict(fields), folder / CONFIG)
    path = first_of(folder, "medusa_lm_head.safetensors", "medusa_lm_head.pt")
    layers = given.medusa_num_layers
    tensors = {
        _renamed(name.removeprefix("medusa_head."), layers): tensor
        for name, tensor in read_tensors(path).items()
    }
    sizes = _shape(path, tensors, "lm_heads.0.weight")
    heads = max(given.medusa_num_heads, _count(tensors))
    config = MedusaConfig(sizes[1], sizes[0], sizes[0], heads, own_rows=True, num_layers=layers)
    verifier = Verifier(given.base_model_name_or_path)
    return StateFile(path, config, verifier, tensors, torch.arange(sizes[0]))


def _renamed(name: str, layers: int) -> str:
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        head, layer, part = match.groups()
        return f"blocks.{head}.layers.{layer}.{part}"
    if match := re.fullmatch(rf"(\d+)\.{layers}\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name


def _count(tensors: Mapping[str, Tensor]) -> int:
    return sum(re.fullmatch(r"lm_heads\.\d+\.weight", name) is not None for name in tensors)


@dataclass(frozen=True)
class _Vllm:
    hidden_size: Size
    vocab_size: Size
    num_heads: Depth
    num_hidden_layers: Depth = 1
    truncated_vocab_size: Size | None = None
    medusa_fc_bias: bool = False
    original_lm_head: bool = False
    base_model_name_or_path: str = _UNKNOWN


def vllm_medusa(folder: Path, fields: Mapping[str, Any]) -> StateFile | None:
    """See `Layout`. With `original_lm_head` the heads share the target's output layer."""
    if fields.get("model_type") != "medusa":
        return None
    given = validated(_Vllm, dict(fields), folder / CONFIG)
    path = folder / WEIGHTS
    tensors = {
        name.removeprefix("medusa_heads."): tensor for name, tensor in read_tensors(path).items()
    }
    count = given.truncated_vocab_size or given.vocab_size
    tokens, order = _token_map(path, tensors.pop("token_map", None), count, given.vocab_size)
    tensors.pop("lm_head.weight", None)  # the target's own
    if given.original_lm_head:
        tensors = {name: x for name, x in tensors.items() if not name.startswith("lm_heads.")}
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and tensor.dim() == 2 and order is not None:
            places = {given.vocab_size: tokens, count: order}.get(len(tensor))
            tensors[name] = tensor if places is None else tensor[places]
    config = MedusaConfig(
        given.hidden_size,
        given.vocab_size,
        count,
        given.num_heads,
        own_rows=not given.original_lm_head,
        num_layers=given.num_hidden_layers,
        bias=given.medusa_fc_bias,
    )
    return StateFile(path, config, Verifier(given.base_model_name_or_path), tensors, tokens)


@dataclass(frozen=True)
class _Mlp:
    vocab_size: Size
    emb_dim: Size
    n_predict: Depth
    inner_dim: Annotated[int, Ge(0)] = 0
    tie_weights: bool = False
    scale_input: bool = False
    base_model_name_or_path: str = _UNKNOWN


def ibm_mlp_speculator(folder: Path, fields: Mapping[str, Any]) -> StateFile | None:
    """See `Layout`. Files with tied weights may repeat them for every depth."""
    if fields.get("model_type") != "mlp_speculator":
        return None
    given = validated(_Mlp, dict(fields), folder / CONFIG)
    config = MlpSpeculatorConfig(
        given.emb_dim,
        given.vocab_size,
        given.vocab_size,
        given.n_predict,
        own_rows=True,
        inner_size=given.inner_dim or given.emb_dim,
        tie_weights=given.tie_weights,
        scale_input=given.scale_input,
        own_embedding=True,
    )
    named = {_ibm_name(name): tensor for name, tensor in _read_shards(folder).items()}
    if given.tie_weights:
        named = {name: tensor for name, tensor in named.items() if not _REPEATED.match(name)}
    verifier = Verifier(given.base_model_name_or_path)
    tokens = torch.arange(given.vocab_size)
    return StateFile(folder / WEIGHTS, config, verifier, named, tokens)


_REPEATED = re.compile(r"(emb|lm_heads|ln)\.([1-9]\d*)\.|proj\.([2-9]|[1-9]\d+)\.")
"""Tensors of later depths, which are those of the first ones if weights are tied."""


def _ibm_name(name: str) -> str:
    name = name.removeprefix("speculator.")
    return f"lm_heads.{name.removeprefix('head.')}" if name.startswith("head.") else name


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors, or of the files that its index names."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).exists() or not index.exists():
        return read_tensors(folder / WEIGHTS)
    shards = validated(_Index, read_json(index), index).weight_map.values()
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(shards)):
        if Path(shard).name != shard:
            raise ModelError(f"{index}: '{shard}' is not the name of a file of this folder.")
        tensors |= read_tensors(folder / shard)
    return tensors


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


def _token_map(
    path: Path, token_map: Tensor | None, count: int, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """The draft vocabulary, ascending, and the places of its tokens in the file; None for all."""
    if count == vocab_size:
        return torch.arange(vocab_size), None
    if token_map is None:
        raise ModelError(f"{path}: 'token_map' of the {count} draft tokens is missing.")
    if token_map.shape == (count,) and not token_map.is_floating_point():
        tokens, order = token_map.long().sort()
        if int(tokens[0]) >= 0 and int(tokens[-1]) < vocab_size and bool((tokens.diff() > 0).all()):
            return tokens, order
    raise ModelError(
        f"{path}: 'token_map' does not name {count} different token ids below {vocab_size}: the "
        "file is damaged."
    )


def _shape(path: Path, tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """The shape [out, in] of a tensor that tells sizes that no configuration does."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != 2 or not tensor.numel():
        raise ModelError(f"{path}: the first output layer is missing: the file is incomplete.")
    return tensor.shape[0], tensor.shape[1]
