"""`pad`: padding tokens after the text make one target pass propose a block.

Padded self-drafting, as the survey of Xia et al. ("Unlocking Efficiency in Large Language Model
Inference") calls it. The padding is any token of the vocabulary. `tokenleap train pad` trains the
target to predict after it; `pass` (PaSS, Monea et al.) trains the padding instead. A pass that
verifies a draft of length k also computes k padding tokens below the root and below every drafted
token. Wherever acceptance ends, the logits of the padding there predict the tokens after the next
one. These predictions are the next draft.

The padding consists of ordinary tree nodes with one-hot q, so the loop needs no special case. A
padding token may be accepted if it happens to be right, which is correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isqrt
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from torch import Tensor

from tokenleap.control import Budget
from tokenleap.core.tree import Draft, TokenTree
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import DrafterTraits, OneByOne, PerRequest
from tokenleap.drafters.heads.folder import (
    CONFIG,
    WEIGHTS,
    Verifier,
    check_layers,
    check_sizes,
    check_tensors,
    noted,
    notes_of,
    read_json,
    read_tensors,
    validated,
    write_folder,
)
from tokenleap.drafters.heads.probe import check_target
from tokenleap.drafters.heads.shipped import existing_folder
from tokenleap.errors import ModelError
from tokenleap.request import Request
from tokenleap.runtime.target import Target

MOST_PADDING = 15
"""Longest block that is trained: it takes 255 nodes, and a draft has at most 256."""


class PadDrafter(OneByOne):
    """Trees of the last pass' predictions, with padding below every node; q is one-hot."""

    traits = DrafterTraits(drafts_trees=True)
    most_guesses: int | None = None
    """Longest draft; None if only the budget limits it."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id
        self._guesses = PerRequest[tuple[int, list[int]]]()  # length of the text, guesses after it

    def draft(self, request: Request, budget: Budget) -> Draft:
        length, guesses = self._guesses.get(request.key, (0, []))
        if length != len(request.token_ids):
            guesses = []  # tokens were taken back, or there was no pass yet
        size = block_size(budget.nodes)
        size = size if self.most_guesses is None else min(size, self.most_guesses)
        drafted = guesses[: min(size, budget.depth)]
        tokens, parents = [request.root, *drafted], list(range(-1, len(drafted)))
        for node in range(len(drafted) + 1):
            parent = node
            for place in range(min(size, budget.depth - node)):
                parents.append(parent)
                parent = len(tokens)
                tokens.append(self.padding(place))
        return Draft.deterministic(TokenTree(tuple(tokens), tuple(parents)))

    def padding(self, place: int) -> int:
        """The padding token at a place of a block, from 0."""
        return self._pad

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Read the next guesses from the padding below the last accepted node."""
        for outcome in outcomes:
            tree, node = outcome.draft.tree, outcome.accepted.last
            guesses: list[int] = []
            while padding := [
                child
                for child in tree.children[node]
                if tree.tokens[child] == self.padding(len(guesses))
            ]:
                node = padding[-1]
                guesses.append(outcome.output.argmax_of(node))
            self._guesses[outcome.request.key] = (len(outcome.request.token_ids), guesses)


def block_nodes(size: int) -> int:
    """The nodes of a draft of so many tokens, with as much padding after each and the root."""
    return size + (size + 1) * size


def block_size(nodes: int) -> int:
    """The longest draft length k that fits with its padding: block_nodes(k) <= nodes."""
    return isqrt(nodes + 1) - 1


# `pass`: learnt look-ahead embeddings make one target pass propose a block (PaSS).
#
# Monea, Joulin, Grave, "PaSS: Parallel Speculative Sampling" (arXiv 2311.13581). It is `pad` with
# embeddings [LA]_1 to [LA]_L that were trained for the target, in place of a padding token: [LA]_i
# predicts the token i places after the next one. The paper drafts and verifies in turns. Here the
# pass that verifies a draft also computes look-ahead tokens below the root and below every drafted
# token, as `pad` does.
#
# The look-ahead tokens have ids after the target's vocabulary (`Network.extend`). The target never
# writes such a token, so they are never accepted.


MODEL_TYPE = "tokenleap_pass"
_EMBEDDINGS = "look_ahead"

_Size = Annotated[int, Gt(0)]


class PassDrafter(PadDrafter):
    """See `PadDrafter`, with another padding token at each place.

    Args:
        first: id of the first of the look-ahead tokens; the others follow.
    """

    def __init__(self, first: int, count: int) -> None:
        super().__init__(first)
        self.most_guesses = count
        self.traits = DrafterTraits(drafts_trees=True, token_limit=first + count)

    def padding(self, place: int) -> int:
        return self._pad + place


@dataclass(frozen=True)
class _Sizes:
    """Of look-ahead embeddings."""

    hidden_size: _Size
    vocab_size: _Size
    num_tokens: Annotated[_Size, Le(MOST_PADDING)]


def read_pass_tokens(path: str | Path, target: Target) -> Tensor:
    """The look-ahead embeddings [L, E] of a folder."""
    folder = existing_folder(path)
    fields = read_json(folder / CONFIG)
    if fields.get("model_type") != MODEL_TYPE:
        raise ModelError(
            f"{folder / CONFIG} does not describe look-ahead embeddings: is this a folder that "
            "`tokenleap train pass` has written?"
        )
    sizes = validated(_Sizes, fields.get("config"), folder / CONFIG)
    verifier, notes = noted(fields, folder / CONFIG)
    check_layers(folder, verifier, target.network.num_layers)
    found = (target.vocab_size, target.hidden_size)
    check_sizes(folder, verifier, (sizes.vocab_size, sizes.hidden_size), found)
    check_target(folder, verifier, notes, target)
    tensors = read_tensors(folder / WEIGHTS)
    wanted = {_EMBEDDINGS: torch.empty(sizes.num_tokens, sizes.hidden_size)}
    check_tensors(folder / WEIGHTS, tensors, wanted, "look-ahead embeddings")
    return tensors[_EMBEDDINGS]


def write_pass_tokens(
    folder: Path, rows: Tensor, vocab_size: int, verifier: Verifier, notes: Mapping[str, Any]
) -> None:
    """Write look-ahead embeddings; each file appears complete or not at all.

    Args:
        rows: [L, E] the embeddings.
    """
    fields = {
        "model_type": MODEL_TYPE,
        "config": asdict(_Sizes(rows.shape[1], vocab_size, len(rows))),
        **notes_of(verifier, notes),
    }
    write_folder(folder, {_EMBEDDINGS: rows.detach().contiguous()}, fields)
