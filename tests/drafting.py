"""Drafters for tests: trees of every shape, drafts that are known to be accepted, hidden states.

Also what tests need to run them: schedulers over a target, and the parts of an `LLM`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenleap import LLM, SamplingParams
from tokenleap.control import Budget, Fixed
from tokenleap.core.acceptance import RULES
from tokenleap.core.references import common_prefix
from tokenleap.core.tree import Draft, TokenTree, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter, DrafterTraits
from tokenleap.engine.scheduler import Scheduler
from tokenleap.request import Request
from tokenleap.runtime.kv_slab import OverBudget
from tokenleap.runtime.target import Target
from tokenleap.speculation import Speculation, Strategy


def drafter_of(llm: LLM) -> Drafter:
    """The drafter of requests that bring none."""
    return llm.engine._speculation.default.drafter


def request_of(
    tokens: Sequence[int],
    params: SamplingParams | None = None,
    vocab_size: int = 100,
    **fields: Any,
) -> Request:
    """A request that has as much room as it wants."""
    params = params or SamplingParams()
    return Request(tokens, params, vocab_size=vocab_size, max_model_len=10**6, **fields)


def draft_of(drafter: Drafter, request: Request, nodes: int, depth: int | None = None) -> Draft:
    """A drafter's proposal for one request."""
    (draft,) = drafter.propose([request], [Budget(nodes, nodes if depth is None else depth)])
    return draft


def tokens_of(drafter: Drafter, request: Request, length: int = 3) -> list[int]:
    """The drafted tokens of `draft_of`."""
    return list(draft_of(drafter, request, length).tree.tokens[1:])


def scheduler_of(
    target: Target, drafter: Drafter, rule: str = "coupled", gamma: int = 4, **fields: Any
) -> Scheduler:
    """Runs requests with a drafter of the tests and drafts of one length."""
    strategy = Strategy(drafter, Fixed(gamma), RULES[rule]())
    return Scheduler(target, Speculation(strategy), **fields)


class Scripted(Drafter):
    """Chains that follow a known continuation, with every `wrong`-th position spoilt.

    Args:
        continuation: output tokens, by prompt.
        vocab_size: V.
        wrong: 0 never errs.
    """

    def __init__(
        self, continuation: Callable[[Request], Sequence[int]], vocab_size: int, wrong: int = 0
    ) -> None:
        self._continuation = continuation
        self._vocab_size = vocab_size
        self._wrong = wrong

    def expected(self, request: Request, length: int) -> list[int]:
        """The next tokens, spoilt ones included."""
        start = len(request.output_ids)
        tokens = list(self._continuation(request)[start : start + length])
        for offset in range(len(tokens)):
            if self._wrong and (start + offset) % self._wrong == self._wrong - 1:
                tokens[offset] = (tokens[offset] + 1) % self._vocab_size
        return tokens

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [
            Draft.deterministic(chain([r.root, *self.expected(r, budget.chain)]))
            for r, budget in zip(batch, budgets, strict=True)
        ]


class RandomTrees(Scripted):
    """Random deterministic trees that contain the expected path at random places."""

    traits = DrafterTraits(drafts_trees=True)

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._tree(r, budget) for r, budget in zip(batch, budgets, strict=True)]

    def _tree(self, request: Request, budget: Budget) -> Draft:
        dice = random.Random(f"{request.prompt_ids}{len(request.token_ids)}")
        tokens, parents, depths = [request.root], [-1], [0]
        expected = self.expected(request, budget.depth)
        on_path = 0  # the deepest node of the expected path that is in the tree
        for _ in range(budget.nodes if budget.depth > 0 else 0):
            if dice.random() < 0.5 and depths[on_path] < len(expected):
                parent, token = on_path, expected[depths[on_path]]
            else:
                parent = dice.choice([i for i, depth in enumerate(depths) if depth < budget.depth])
                token = dice.randrange(self._vocab_size)
            siblings = [tokens[i] for i, p in enumerate(parents) if p == parent]
            if token in siblings:
                continue
            if (
                parent == on_path
                and depths[on_path] < len(expected)
                and token == expected[depths[on_path]]
            ):
                on_path = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return Draft.deterministic(TokenTree(tuple(tokens), tuple(parents)))


class Reader(Drafter):
    """Collects the hidden states that it is shown, and checks that none is missing.

    Args:
        inner: drafts; None drafts nothing.
        layers: whose hidden states it asks for.
        full_every: every so many proposals fail for want of memory, so that a plain step follows;
            0 for none.

    Attributes:
        ended: of every released request its tokens and layer id -> [n, E], of all tokens but the
            last.
        shown_again: positions that were shown a second time, with the same bits.
    """

    def __init__(
        self,
        inner: Drafter | None = None,
        layers: tuple[int, ...] = (0, 1, 2),
        full_every: int = 0,
    ) -> None:
        self.ended: list[tuple[list[int], dict[int, Tensor]]] = []
        self.shown_again = 0
        trees = inner is not None and inner.traits.drafts_trees
        self.traits = DrafterTraits(drafts_trees=trees, hidden_layers=layers)
        self._layers = layers
        self._inner = inner
        self._full_every = full_every
        self._proposals = 0
        self._seen: dict[int, list[tuple[int, dict[int, Tensor]]]] = {}  # token, layer -> [E]

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        self._proposals += 1
        if self._full_every and self._proposals % self._full_every == 0:
            raise OverBudget("as the test wants it")
        for request in batch:
            self._check(request)
        if self._inner is None:
            return [Draft.empty(request.root) for request in batch]
        return self._inner.propose(batch, budgets)

    def observe_prefill(self, request: Request, start: int, hidden: Mapping[int, Tensor]) -> None:
        length = len(hidden[self._layers[0]])
        self._keep(request, start, request.token_ids[start : start + length], hidden)

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        for outcome in outcomes:
            request = outcome.request
            # The end of the output may cut the accepted path.
            tokens = request.token_ids[outcome.root : -1][: 1 + len(outcome.accepted.path)]
            self._keep(request, outcome.root, tokens, outcome.hidden)
            self._check(request)

    def rewind(self, request: Request) -> None:
        seen = self._seen.get(request.key, [])
        del seen[common_prefix([token for token, _ in seen], request.token_ids) :]

    def release(self, request: Request) -> None:
        seen = self._seen.pop(request.key, [])
        states = {
            layer: torch.stack([each[layer] for _, each in seen]) for layer in self._layers if seen
        }
        self.ended.append((list(request.token_ids), states))

    def _keep(
        self, request: Request, start: int, tokens: Sequence[int], hidden: Mapping[int, Tensor]
    ) -> None:
        seen = self._seen.setdefault(request.key, [])
        assert start <= len(seen), "states of tokens before these are missing"
        for offset, token in enumerate(tokens):
            # Copies, as they are valid until the next pass.
            states = {layer: hidden[layer][offset].clone() for layer in self._layers}
            if start + offset == len(seen):
                seen.append((token, states))
                continue
            before, known = seen[start + offset]
            assert before == token
            assert all(torch.equal(known[layer], states[layer]) for layer in states)
            self.shown_again += 1

    def _check(self, request: Request) -> None:
        seen = [token for token, _ in self._seen.get(request.key, [])]
        assert seen == request.token_ids[:-1], "the states of all committed tokens but the last"
