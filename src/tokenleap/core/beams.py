"""Beam search in one token tree.

A search keeps the `width` most probable beginnings of the output, the live beams, and the best
outputs that have ended, its hypotheses. The live beams are leaves of a token tree after the
committed tokens. Only what all live beams and all hypotheses begin with is committed, since a
committed token is never taken back. The target keeps the KV of the other nodes (`KVSlab.commit`),
so a pass computes only the new leaves.

`Beams.advance` is one step of the search. It has the rules of `generate(num_beams=width)` of
Transformers 5 (`GenerationMixin._beam_search`), so both find the same outputs with the same scores.
`search` takes as many steps as one pass of the target allows: one, or several if the draft has
nodes for the new beams (Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding", appendix A.4). The outputs are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tokenleap.core.params import SamplingParams
from tokenleap.core.sampler import Sampler, check_finite
from tokenleap.core.tree import Draft, TokenTree

_UNBEATEN = -1e9  # the worst hypothesis's score in `generate` while there are fewer than `width`

Scores: TypeAlias = Callable[[Sequence[int]], Tensor]
"""Nodes of a draft -> [n, V] log-probabilities of the tokens after each of them, in float32."""


@dataclass(frozen=True)
class BeamSettings:
    """Settings of a search, as in `generate`.

    It ends with `early_stopping` as soon as there are `width` hypotheses; without, when the best
    live beam scores less, at its present length, than the worst hypothesis; if "never", the same at
    the length at which it would score best.
    """

    width: int  # number of live beams, and of hypotheses that are kept
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0  # a score is the sum of n log-probabilities / n ** this
    early_stopping: bool | Literal["never"] = False
    renormalize: bool = False

    @staticmethod
    def of(params: SamplingParams, max_tokens: int, eos_ids: Iterable[int]) -> BeamSettings:
        return BeamSettings(
            params.beam_width,
            max_tokens,
            frozenset(eos_ids),
            1.0 if params.length_penalty is None else params.length_penalty,
            params.early_stopping or False,
            params.renormalize_logits or False,
        )

    @property
    def num_candidates(self) -> int:
        """Continuations that a step looks at: `width` of them can always go on."""
        return max(2, 1 + len(self.eos_ids)) * self.width


@dataclass(frozen=True)
class Hypothesis:
    """An output that has ended."""

    tokens: tuple[int, ...]
    log_prob: float
    score: float


@dataclass(frozen=True)
class Beams:
    """The state of a search."""

    settings: BeamSettings
    tree: TokenTree  # the last committed token, and nodes that lead to the live beams, its leaves
    # summed log-probability and node of each, best first
    live: tuple[tuple[float, int], ...] = ((0.0, 0),)
    finished: tuple[Hypothesis, ...] = ()
    length: int = 0  # tokens of each live beam, from the output's first one
    done: bool = False

    @property
    def draft(self) -> BeamDraft:
        """A draft without proposals: the pass computes the live beams."""
        return BeamDraft.of(self, self.tree)

    def advance(self, log_probs: Tensor) -> Beams:
        """Take one step, with the log-probabilities [live beams, V] of next tokens, in float32."""
        settings, length = self.settings, self.length + 1
        sums, nodes, tokens = self._candidates(log_probs)
        ends = [length >= settings.max_tokens or token in settings.eos_ids for token in tokens]
        total, scores = sums.tolist(), (sums / length**settings.length_penalty).tolist()
        fresh = [
            Hypothesis((*self.tree.path_tokens(nodes[i]), tokens[i]), total[i], scores[i])
            for i in range(min(settings.width, len(tokens)))
            if ends[i]
        ]
        merged = sorted([*self.finished, *fresh], key=lambda h: -h.score)
        going = [i for i, end in enumerate(ends) if not end][: settings.width]
        first_leaf = len(self.tree)
        tree = TokenTree(
            (*self.tree.tokens, *(tokens[i] for i in going)),
            (*self.tree.parents, *(nodes[i] for i in going)),
        )
        after = replace(
            self,
            tree=tree,
            live=tuple((total[i], first_leaf + n) for n, i in enumerate(going)),
            finished=tuple(merged[: settings.width]),
            length=length,
        )
        best = sums[going[0]] if going else None
        return replace(after, done=best is None or not after._may_improve(best))

    def _candidates(self, log_probs: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """The best continuations: summed log-probabilities [n], the nodes and tokens of each."""
        so_far = torch.tensor([total for total, _ in self.live], device=log_probs.device)
        totals = (log_probs + so_far[:, None]).flatten()
        best = totals.topk(min(self.settings.num_candidates, len(totals)))
        check_finite(best.values[0])
        possible = int((best.values > -torch.inf).sum())
        vocab_size = log_probs.shape[1]
        found = best.indices[:possible].tolist()
        nodes = [self.live[index // vocab_size][1] for index in found]
        return best.values[:possible].cpu(), nodes, [index % vocab_size for index in found]

    def _may_improve(self, best: Tensor) -> bool:
        """Whether to go on, if the best live beam has this log-probability [] in all."""
        settings, full = self.settings, len(self.finished) == self.settings.width
        if full and settings.early_stopping is True:
            return False
        longest = settings.early_stopping == "never" and settings.length_penalty > 0
        length = settings.max_tokens if longest else self.length
        hoped_for = float(best / length**settings.length_penalty)
        return hoped_for > (self.finished[-1].score if full else _UNBEATEN)

    def _shared(self, alive: Mapping[int, Sequence[int]]) -> list[int]:
        """Nodes that all live beams and all hypotheses begin with, from the root's child on."""
        shared: list[int] = []
        node = 0
        while len(alive.get(node, ())) == 1:
            (node,) = alive[node]
            depth, token = len(shared), self.tree.tokens[node]
            if any(hypothesis.tokens[depth] != token for hypothesis in self.finished):
                break
            shared.append(node)
        return shared


@dataclass(frozen=True)
class BeamDraft(Draft):
    """The tree of a search, and below its leaves what a drafter proposes."""

    beams: Beams = field(kw_only=True)  # the tree begins with all nodes of `beams.tree`

    @staticmethod
    def of(beams: Beams, tree: TokenTree) -> BeamDraft:
        plain = Draft.deterministic(tree)
        return BeamDraft(plain.tree, plain.q, beams=beams)

    @property
    def num_proposed(self) -> int:
        """Nodes that are proposals, not part of the search."""
        return len(self.tree) - len(self.beams.tree)


@dataclass(frozen=True)
class Searched:
    """The result of a pass for a search."""

    beams: Beams
    tokens: tuple[int, ...]  # to commit, maybe none; at the end all of the best hypothesis
    cached: tuple[int, ...]  # nodes whose KV is committed (see `KVSlab.commit`)
    kept: tuple[int, ...]  # nodes whose KV is kept, the first of `beams.tree`
    steps: int


def scores_of(
    draft: BeamDraft, logits: Tensor, sampler: Sampler, output_ids: Sequence[int]
) -> Scores:
    """The scores that a search reads, from the logits [n, V] after the draft's last n nodes.

    Masks, bias and penalties act on log-probabilities, as in `generate`.
    """
    first = len(draft.tree) - len(logits)

    def scores(nodes: Sequence[int]) -> Tensor:
        log_probs = logits[[node - first for node in nodes]].float().log_softmax(-1)
        if not sampler.changes_logits:
            return log_probs
        paths = [[*output_ids, *draft.tree.path_tokens(node)] for node in nodes]
        shaped = [sampler.shaped(*each) for each in zip(log_probs, paths, strict=True)]
        found = torch.stack(shaped)
        if not draft.beams.settings.renormalize:
            return found
        possible = found.amax(-1, keepdim=True) > -torch.inf
        return torch.where(possible, found.log_softmax(-1), found)

    return scores


def search(draft: BeamDraft, scores: Scores) -> Searched:
    """Advance a search as far as the nodes of a verified draft reach."""
    beams, steps = draft.beams, 0
    place = {node: node for node in range(len(beams.tree))}  # node of the search -> of the draft
    proposed = {
        (draft.tree.parents[node], draft.tree.tokens[node]): node
        for node in range(len(beams.tree), len(draft.tree))
    }
    while True:
        beams, steps = beams.advance(scores([place[node] for _, node in beams.live])), steps + 1
        if beams.done:
            return Searched(beams, beams.finished[0].tokens, (), (), steps)
        for _, node in beams.live:
            found = proposed.get((place[beams.tree.parents[node]], beams.tree.tokens[node]))
            if found is not None:
                place[node] = found
        if any(node not in place for _, node in beams.live):
            return _committed(beams, place, steps)


def _committed(beams: Beams, place: Mapping[int, int], steps: int) -> Searched:
    """Commit what is shared, and forget nodes that lead to no live beam.

    The live leaves are computed in the next pass, even if the last one has computed some of them:
    it needs their logits.
    """
    leaves = [node for _, node in beams.live]
    alive = _children(beams.tree, leaves)
    shared = beams._shared(alive)
    path = [0, *shared]
    root = path[-1]
    kept = sorted((n for n in alive if n not in path[:-1]), key=lambda node: place[node])
    order = [*kept, *leaves] if root in alive else leaves
    index = {node: new for new, node in enumerate(order)}
    tree = beams.tree
    moved = replace(
        beams,
        tree=TokenTree(
            tuple(tree.tokens[node] for node in order),
            tuple(-1 if node == root else index[tree.parents[node]] for node in order),
        ),
        live=tuple((total, index[node]) for total, node in beams.live),
        finished=tuple(replace(h, tokens=h.tokens[len(shared) :]) for h in beams.finished),
    )
    return Searched(
        moved,
        tuple(tree.tokens[node] for node in shared),
        tuple(place[node] for node in path[:-1]),
        tuple(place[node] for node in kept),
        steps,
    )


def _children(tree: TokenTree, leaves: Sequence[int]) -> dict[int, list[int]]:
    """The ancestors of these leaves, each with its children that lead to one of them."""
    children: dict[int, list[int]] = {}
    for leaf in leaves:
        node = leaf
        while node:
            parent = tree.parents[node]
            siblings = children.setdefault(parent, [])
            if node in siblings:
                break
            siblings.append(node)
            node = parent
    return children
