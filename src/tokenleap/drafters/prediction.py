"""`prediction`: the draft is the text that the user expects, such as the file before an edit.

OpenAI's "predicted outputs": a request brings a text that its output will mostly repeat. The draft
goes on in this text from the place that the output has reached (`drafters.follower`). Unlike a
reference, a prediction is followed from its beginning, and edits that were made before are drafted
where they come again.

A request has at most one prediction, and the methods need not know of it: `with_prediction` puts it
in front of any other drafter. Which of the two drafts is verified is decided like that between
lookups and trained drafts (`drafters.hybrid`), or, beside another lookup, by `BetterLookup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenleap.control import Budget
from tokenleap.control.evidence import AcceptanceRates, path_probs
from tokenleap.core.tree import Draft, chain
from tokenleap.decode import Outcome, StepTimes
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.combine import Several
from tokenleap.drafters.follower import Follower, PredictedText
from tokenleap.drafters.hybrid import Hybrid
from tokenleap.drafters.none import NoDrafter
from tokenleap.request import Request

__all__ = ["BetterLookup", "PredictionDrafter", "with_prediction"]


class PredictionDrafter(Drafter):
    """Chains that continue the request's prediction; q is one-hot.

    It proposes nothing for requests without one, and counts in their metrics what became of the
    proposed tokens.
    """

    looks_up = True
    follows_prediction = True

    def __init__(self) -> None:
        self._followers: dict[int, Follower] = {}
        self._proposed: dict[int, list[int]] = {}  # key -> the tokens of this step's proposal

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Chains from the place in the prediction that the output has reached."""
        return [
            self._propose(request, budget.chain)
            for request, budget in zip(batch, budgets, strict=True)
        ]

    def _propose(self, request: Request, length: int) -> Draft:
        self._proposed.pop(request.key, None)
        if not request.prediction:
            return Draft.empty(request.root)
        follower = self._followers.get(request.key)
        if follower is None:
            text = request.prediction.indexed("prediction", lambda: _text_of(request))
            follower = self._followers[request.key] = Follower(text, len(request.given_ids))
        follower.catch_up(request.token_ids)
        if not length or len(request.token_ids) < follower.seen:  # a first token is forced
            return Draft.empty(request.root)
        tokens, features = follower.expected(length)
        self._proposed[request.key] = tokens
        return Draft.deterministic(chain([request.root, *tokens]), tuple(features))

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Count which of the proposed tokens were verified, and which of these were kept."""
        for outcome in outcomes:
            proposed = self._proposed.pop(outcome.request.key, None)
            if proposed:
                _count(outcome, proposed)

    def release(self, request: Request) -> None:
        """Forget where the request is."""
        self._followers.pop(request.key, None)
        self._proposed.pop(request.key, None)


def _text_of(request: Request) -> PredictedText:
    (tokens,) = request.prediction.texts
    return PredictedText(tokens)


def _count(outcome: Outcome, proposed: Sequence[int]) -> None:
    """Count the nodes of the verified draft that are tokens of the prediction."""
    tree, metrics, node = outcome.draft.tree, outcome.request.metrics, 0
    kept = outcome.accepted.path[: len(outcome.committed)]
    for token in proposed:
        among = tree.children[node]
        node = next((child for child in among if tree.tokens[child] == token), 0)
        if not node:
            return
        if node in kept:
            metrics.accepted_prediction_tokens += 1
        else:
            metrics.rejected_prediction_tokens += 1


class BetterLookup(Several):
    """Two drafters that look tokens up; each request gets the draft with more expected tokens.

    How often the tokens of either are right is learnt from what is generated, by their features.

    Args:
        first: it is taken in doubt.
        second: the other one.
        most: most drafted nodes of the other one.
    """

    looks_up = True

    def __init__(self, first: Drafter, second: Drafter, most: int) -> None:
        assert first.looks_up
        assert second.looks_up
        super().__init__([first, second])
        self._first, self._second, self._most = first, second, most
        self._rates = AcceptanceRates(), AcceptanceRates()
        self._proposed: dict[int, tuple[Draft, Draft]] = {}
        self.drafts_trees = second.drafts_trees
        self.independent_siblings = second.independent_siblings

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """The better draft of the two for each request."""
        others = [replace(budget, nodes=min(budget.nodes, self._most)) for budget in budgets]
        pairs = zip(
            self._first.propose(batch, budgets), self._second.propose(batch, others), strict=True
        )
        self._proposed = dict(zip((request.key for request in batch), pairs, strict=True))
        return [self._better(*pair) for pair in self._proposed.values()]

    def _better(self, first: Draft, second: Draft) -> Draft:
        ours, theirs = (
            sum(path_probs(draft, rates.of)) if draft.features else 0.0
            for draft, rates in zip((first, second), self._rates, strict=True)
        )
        return first if ours >= theirs and first.features else second

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:
        """Both see every outcome; and it is learnt which tokens were right, verified or not."""
        for outcome in outcomes:
            if pair := self._proposed.pop(outcome.request.key, None):
                for draft, rates in zip(pair, self._rates, strict=True):
                    rates.learn(draft, outcome)
        self._first.observe(outcomes, times)
        self._second.observe(outcomes, times)

    def release(self, request: Request) -> None:
        """Both forget the request."""
        self._proposed.pop(request.key, None)
        super().release(request)

    def forget(self) -> None:
        """Both forget earlier requests, and so does the choice between them."""
        self._rates = AcceptanceRates(), AcceptanceRates()
        super().forget()


def with_prediction(drafter: Drafter, most: int) -> Drafter:
    """A drafter that takes its drafts from the requests' predictions, too.

    Args:
        drafter: what drafts where there is no prediction, or where it is of no use. It may serve
            other requests as well, for its state belongs to requests.
        most: most nodes of its drafts.
    """
    prediction = PredictionDrafter()
    if isinstance(drafter, NoDrafter):
        return prediction
    if isinstance(drafter, Hybrid):
        return drafter.with_lookup(lambda lookup: BetterLookup(prediction, lookup, most))
    if drafter.looks_up:
        return BetterLookup(prediction, drafter, most)
    return Hybrid(prediction, drafter, most)
