"""`Estimates`: what `cost_model` learns from the steps: what drafts bring and what they cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, takewhile
from math import inf, isfinite
from operator import mul
from typing import TYPE_CHECKING

from tokenleap.control.base import within
from tokenleap.control.planner import Chances, Plan, levels_of_one
from tokenleap.core.per_request import PerRequest

if TYPE_CHECKING:
    from tokenleap.core.tree import Draft, TokenTree
    from tokenleap.decode import Outcome
    from tokenleap.request import Request
    from tokenleap.runtime.costs import CostCurve

_MEMORY_OF_ONE, _MEMORY_OF_ALL = 0.9, 0.96
"""Weight of the past after each draft, in the estimates of one request and of all requests."""

_EARLY = 4
"""So many requests of a draft model try before the drafts of others can discourage them."""

_FIRST_DRAFTS = 8
"""So many drafts of a model are made before bad ones can discourage any request. The first two of
an output are often wrong, and would else end the drafts of all that follow."""

_PRIOR_OF_STOPPING = 4.0
"""Weight of the prior acceptance rates of chains that may end early, in drafts. A request's first
drafts are often wrong: answers begin with phrases of which there are many."""


class Estimates:
    """Estimates of what one drafter's drafts bring and cost.

    Args:
        levels: number of nodes at each level of a full draft.

    Attributes:
        varied: whether drafts are as long as they deserve: trees, and chains that end early.
        stopping: by whether requests are greedy, where chains should end; empty unless they can. It
            learns from products of probabilities for greedy requests, and with the rule `coupled`
            from products of clarity for the others.
    """

    def __init__(
        self,
        levels: Sequence[int],
        costs: CostCurve,
        *,
        trees: bool,
        level_share: float,
        stops_early: bool,
    ) -> None:
        self.costs = costs
        self._trees, self._at_once = trees, level_share == 0
        self.varied = trees or stops_early
        self._sizes = DraftSizes(levels)
        self._num_levels = len(levels)
        self.drafting = DraftingCosts()
        self._deeper_levels = DeeperLevels(level_share)
        self.stopping = {True: Stopping(), False: Stopping()} if stops_early else {}
        self.lengths = OutputLengths()
        self.requests_tried = self._drafts_made = 0
        self._histories = PerRequest(lambda: self._new(_MEMORY_OF_ONE))
        self._overall = self._new(_MEMORY_OF_ALL)

    def _new(self, memory: float) -> History:
        if self.stopping:
            return History(memory, self._num_levels, alike=False, prior_weight=_PRIOR_OF_STOPPING)
        return History(memory, self._num_levels, alike=not self._trees)

    @property
    def first_nodes(self) -> float:
        return self._sizes.of_levels[0]

    @property
    def acceptance_rates(self) -> list[float]:
        return self._overall.acceptance_rates()

    @property
    def level_seconds(self) -> float:
        """Seconds of drafting one level of one request."""
        return self.drafting.level * self.costs(1, 1)

    def reading_seconds(self, request: Request) -> float | None:
        """Seconds that the first draft of a request takes longer; None if not known yet."""
        token = self.drafting.token
        return None if token is None else token * reading(request) * self.costs(1, 1)

    def history(self, request: Request) -> History:
        return self._histories[request.key]

    def chances(self, batch: Sequence[Request]) -> Chances:
        nodes = self._sizes.of_levels
        prior, prior_drafts = self.acceptance_rates, self._overall.draft_rate()
        hoped = hopeful(prior)
        histories = [self.history(request) for request in batch]
        drafts = [history.draft_rate(prior_drafts) for history in histories]
        rates = [h.acceptance_rates(hoped if self.is_early(h) else prior) for h in histories]
        if self.varied and self._drafts_made < _FIRST_DRAFTS:
            rates = list(map(hopeful, rates))
        passed = [list(accumulate(each, mul)) for each in rates]
        return Chances(drafts, passed, nodes, self._times(nodes))

    def _times(self, nodes: Sequence[float]) -> Sequence[float]:
        """[L] time of each level of a draft, in first levels."""
        share = self._deeper_levels.share
        likely = self.stopping and not self._at_once
        first, *others = nodes if likely else [1.0] * len(nodes)  # the share that get so deep
        return [first, *(share * each for each in others)]

    def is_early(self, history: History) -> bool:
        """Whether the request has not drafted yet, and would be one of the first few that do.

        It expects at least what is expected before anything is known. Otherwise a few bad drafts
        at the beginning of one output would keep all that follow from trying. Only requests of
        models are early. Other drafters try at hardly any price.
        """
        return self.varied and not history.tried and self.requests_tried < _EARLY

    def price_of_a_token(self, plan: Plan, requests: int, rows: int, per_level: float) -> float:
        """The time of drafting and verifying one more token of a draft, in tokens of the plan."""
        depths = plan.depths(requests)
        deepest, drafting = max(depths), sum(depth > 0 for depth in depths)
        if deepest < 2:
            return 0.0
        fewest, most = rows + drafting, rows + sum(depths)
        node = (self.costs(most, rows) - self.costs(fewest, rows)) / (most - fewest)
        shared = levels_of_one(1.0, float(drafting)) / drafting
        return plan.rate * (node + per_level * shared * self._deeper_levels.share)

    def rest(self, waiting: Sequence[int], steps: int) -> None:
        for key in waiting:
            if history := self._histories.get(key):
                history.rest(steps)

    def observe(
        self, outcomes: Sequence[Outcome], draft_seconds: float, proposals: Mapping[int, Draft]
    ) -> bool:
        """Learn from a step; whether there was anything to learn.

        Args:
            proposals: by the keys of requests, drafts of which not all was verified.
        """
        may_draft, caught_up, read = False, True, 0
        depths: list[int] = []  # of what drafting took time for
        for outcome in outcomes:
            tree, history = outcome.draft.tree, self.history(outcome.request)
            proposed = proposals.get(outcome.request.key, outcome.draft).tree
            depth = max(proposed.depths) if self._trees else proposed.num_drafted
            allowed = max(depth, history.depth)
            if allowed:
                if depth and not history.tried:
                    read += reading(outcome.request)
                    self.requests_tried += 1
                history.add(outcome, allowed, drafted=depth > 0)
                self._overall.add(outcome, allowed, drafted=depth > 0)
                may_draft, caught_up = True, caught_up and history.caught_up
            if depth and self.varied:
                self._sizes.learn(tree, allowed)
            if depth and self.stopping:
                self.stopping[outcome.request.params.greedy].learn(outcome)
            if depth:
                self._drafts_made += 1
                depths.append(allowed if self._at_once else depth)
        if may_draft:
            cost = self.costs.agreed(draft_seconds) / self.costs(1, 1)
            levels = self._levels_of(depths, cost if caught_up else None)
            self.drafting.add(cost, levels, caught_up=caught_up, read=read)
        return may_draft

    def _levels_of(self, depths: Sequence[int], cost: float | None) -> float:
        """The cost of drafts so deep, in levels of one request."""
        if depths and cost is not None:
            rows = levels_of_one(1.0, float(len(depths)))
            self._deeper_levels.add(sum(depths) / len(depths), cost / rows)
        levels = [self._deeper_levels.levels(depth) for depth in depths]
        return levels_of_one(max(levels, default=0.0), sum(levels))

    def release(self, request: Request) -> None:
        if self._histories.pop(request.key, None) is not None:
            self.lengths.add(len(request.token_ids) - len(request.prompt_ids))


class Decayed:
    """A mean whose past counts less with every value: of times, rates and sizes.

    Args:
        memory: weight of the past after each value.
        prior_weight: weight of the prior, which does not decay.
    """

    __slots__ = ("_memory", "_prior_weight", "_total", "_weight")

    def __init__(self, memory: float, prior_weight: float = 0.0) -> None:
        self._memory, self._prior_weight = memory, prior_weight
        self._total = self._weight = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add to the total and to the weight that divides it."""
        self._total = self._memory * self._total + value
        self._weight = self._memory * self._weight + weight

    def given(self, prior: float) -> float:
        """The mean, if `prior` was expected before there was any value."""
        weight = self._prior_weight
        return (self._total + weight * prior) / (self._weight + weight)

    @property
    def mean(self) -> float:
        """The mean without a prior; infinite without weight."""
        return self._total / self._weight if self._weight else inf


def moved(known: float, measured: float, share: float = 0.1) -> float:
    """A running mean, moved towards one more value."""
    return known + share * (measured - known)


def smoothed(known: float, measured: float) -> float:
    """The same of a time, which counts as at most twice the mean: it may be an outlier."""
    return moved(known, min(measured, 2 * known))


UNKNOWN = 0.5
"""Acceptance rate before anything was observed: high enough to try drafts."""


def hopeful(rates: Sequence[float]) -> list[float]:
    """Acceptance rates, at least as good as unknown ones."""
    return [max(rate, UNKNOWN) for rate in rates]


class History:
    """How the drafts of one request, or of all requests, were accepted.

    Args:
        alike: whether all levels share one acceptance rate, alpha. Each level of a tree, or of a
            chain that may end early, has its own: the share of drafts that pass it, of those that
            pass the level above.

    Attributes:
        depth: how deep the request may draft in the current step.
        plain_steps: number of steps since it could last draft; served ones count less.
        missed: seconds that drafts would have saved before the first one.
        misses: latest drafts in a row of which nothing was accepted.
    """

    def __init__(
        self, memory: float, levels: int, *, alike: bool, prior_weight: float = 2.0
    ) -> None:
        self._levels = levels
        self._alike = alike
        # A draft counts once for each level, but once per token for alpha.
        memory_of_rates = memory if alike else memory**0.5
        self._passed = [
            Decayed(memory_of_rates, prior_weight) for _ in range(1 if alike else levels)
        ]
        self._drafted = Decayed(memory, 2.0)
        self.depth, self.plain_steps, self.missed = 0, 0.0, 0.0
        self.caught_up, self.tried, self.misses = False, False, 0

    @property
    def just_started(self) -> bool:
        """Whether the last step drafted and the one before did not; only valid between steps.

        The drafter then had to read the text first.
        """
        return self.depth > 0 and not self.caught_up

    def allow(self, depth: int, *, wanted: bool, counts: float = 1.0) -> None:
        """Record how deep the request may draft in the current step."""
        self.plain_steps = 0.0 if wanted else self.plain_steps + counts
        self.caught_up, self.depth = self.depth > 0, depth

    def rest(self, steps: int) -> None:
        self.plain_steps, self.caught_up, self.depth = self.plain_steps + steps, False, 0

    def skip(self) -> None:
        """Record a step in which a draft from elsewhere cannot be beaten."""
        self.plain_steps += SERVED
        self.caught_up, self.depth = self.depth > 0, 0

    def add(self, outcome: Outcome, allowed: int, *, drafted: bool) -> None:
        """Count a draft; of trees, what was cut off counts as not accepted."""
        passed = len(outcome.accepted.path)
        self._drafted.add(drafted)
        if not drafted:
            return
        self.tried = True
        self.misses = 0 if passed else self.misses + 1
        if self._alike:
            self._passed[0].add(passed, passed + len(outcome.accepted.rejected))
            return
        for level, rate in enumerate(self._passed):
            reached = level <= passed and level < allowed  # else its counts only decay
            rate.add(reached and level < passed, reached)

    def draft_rate(self, prior: float = 1.0) -> float:
        return self._drafted.given(prior)

    def acceptance_rates(self, prior: Sequence[float] = ()) -> list[float]:
        """For each level, the probability that it is passed, given that the level above was.

        A level without observations gets the rate of the level above.
        """
        if self._alike:
            return [self._passed[0].given(prior[0] if prior else UNKNOWN)] * self._levels
        rates, above = list[float](), UNKNOWN
        for level, rate in enumerate(self._passed):
            above = rate.given(prior[level] if prior else above)
            rates.append(above)
        return rates


_LEAST_NODES = 0.01
"""A level is taken to add at least this many nodes, even if noisy averages say less."""


class DraftSizes:
    """How many nodes drafts have by the depth of their budgets.

    Trees may be smaller than their shape, and chains may end early. So each level has a ratio: its
    nodes over those of the level above, learnt from the drafts that had nodes above and whose
    budgets had the level. A level that no budget had keeps the ratio that was expected. So however
    early drafts end, deeper ones do not seem larger than they would be, and may be tried again.

    Attributes:
        of_levels: mean number of nodes of each level, if the budget has it.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = [below / above for above, below in pairwise((1, *expected))]
        self._ratios = [Decayed(memory=0.9, prior_weight=1.0) for _ in expected]
        self.of_levels = [float(nodes) for nodes in expected]

    def learn(self, tree: TokenTree, allowed: int) -> None:
        levels = len(self._expected)
        nodes = [1, *[0] * levels]
        for depth in tree.depths[1:]:
            nodes[min(depth, levels)] += 1
        for level in range(min(allowed, levels)):
            if not nodes[level]:
                break
            self._ratios[level].add(nodes[level + 1], nodes[level])
        pairs = zip(self._ratios, self._expected, strict=True)
        learnt = accumulate((ratio.given(expected) for ratio, expected in pairs), mul)
        self.of_levels = [max(_LEAST_NODES, nodes) for nodes in learnt]


_SHORTEST = 32
"""Tokens that a pass reads in the time of one: a part of what reading costs is the same for all."""


def reading(request: Request) -> int:
    """Tokens of text and source that the first draft of a request has to read."""
    source = 0 if request.source is None else len(request.source)
    return max(_SHORTEST, source + len(request.token_ids))


class DraftingCosts:
    """The cost of drafting, without the target's pass, in plain passes over one row.

    The unit makes costs comparable that were measured at different times: another load of the
    machine changes both in the same way, and what is not drafted is not measured. A level is the
    first one of a draft (see `DeeperLevels`).

    Attributes:
        level: of one level of one request. It is an upper bound as long as all timed drafts
            included reading a text.
        token: of reading one token (see `reading`); None before it can be told apart from `level`.
    """

    def __init__(self) -> None:
        self.level, self.bound = 0.0, True
        self.token: float | None = None
        self.known = False
        self._readings: list[tuple[float, float, int]] = []  # as long as `level` is a bound

    def add(self, cost: float, levels: float, *, caught_up: bool, read: int = 0) -> None:
        per_level = cost / max(1.0, levels)
        self.known = True
        if read:
            self._readings.append((cost, levels, read))
        if self.bound:  # the first ones may be outliers, and what seems dear is not tried again
            self.level, self.bound = min(per_level, self.level or per_level), not caught_up
        elif caught_up or per_level < self.level:
            self.level = smoothed(self.level, per_level)
        self._learn_readings()

    def _learn_readings(self) -> None:
        """Reading costs what is left of a first draft without its levels."""
        if self.bound:
            del self._readings[:-1]
            return
        for cost, levels, read in self._readings:
            per_token = max(0.0, cost - levels * self.level) / read
            self.token = smoothed(self.token or per_token, per_token)
        self._readings.clear()


_OF_LATEST, _FEWEST = 0.03, 8
"""Weight of the latest draft in the regression, and fewest drafts of one."""


class DeeperLevels:
    """The cost of each further level of a draft, as a share of the first one.

    Of drafts that are made in one call, it is the slope of a running regression line of costs on
    depths: near 0 where one pass makes all levels and spends its time reading weights.

    Args:
        expected: the share before any draft; 1 where each level is a call, which costs the same.
    """

    def __init__(self, expected: float) -> None:
        self.share, self._learns = expected, expected < 1
        self._count = 0
        self._depth = self._cost = self._variance = self._covariance = 0.0

    def add(self, depth: float, cost: float) -> None:
        """Learn from the drafts of a step: their mean depth, and the cost of one."""
        if not self._learns:
            return
        self._count += 1
        weight = max(_OF_LATEST, 1 / self._count)
        cost = min(cost, 2 * self._cost) if self._count > 1 else cost  # it may be an outlier
        deeper, dearer = depth - self._depth, cost - self._cost
        self._depth += weight * deeper
        self._cost += weight * dearer
        self._variance = (1 - weight) * (self._variance + weight * deeper * deeper)
        self._covariance = (1 - weight) * (self._covariance + weight * deeper * dearer)
        if self._count >= _FEWEST and self._variance >= 1:
            slope = max(0.0, self._covariance / self._variance)
            first = self._cost - slope * (self._depth - 1)
            self.share = min(1.0, slope / first) if first > 0 else 1.0

    def levels(self, depth: float) -> float:
        return 1 + self.share * (depth - 1) if depth > 0 else 0.0


class OutputLengths:
    """The lengths of the last outputs, in tokens."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=32)

    def add(self, length: int) -> None:
        self._ended.append(length)

    def left(self, generated: int, most: int) -> float:
        """Tokens that an output is expected to have before it.

        It is the mean of what followed in the remembered outputs that became longer. An output that
        is longer than all of them is expected to double.
        """
        if not self._ended:
            return float(most)
        longer = [length - generated for length in self._ended if length > generated]
        expected = sum(longer) / len(longer) if longer else float(generated)
        return min(float(most), expected)


PRICE, SOONEST = 0.01, 8
"""Share of the time that plain steps and first drafts may cost; fewest steps between two."""

_SOONEST_AGAIN = 2
"""Fewest steps until a request tries again."""

SERVED = 0.5
"""A step with a draft from elsewhere counts as half of a plain one until the next probe, which has
to be better than that draft."""

_CHANCES = 2
"""So many bad drafts may be bad luck. If there are lookups, each further one doubles the time until
the next probe."""


class Probing:
    """Says in which steps a request without drafts tries one, so that it is known what that brings.

    A request that has drafted nothing for `probe_every` steps drafts one level; this notices a text
    that has become predictable. If drafts are `varied`, it does so as soon as that costs one
    percent of the time since its last draft; beside lookups, only if it is alone. Requests that
    have never drafted pay for trials together: one of them tries once its first draft, reading
    included, costs at most one percent of the steps since the last trial.

    Attributes:
        patient: whether there are lookups in the meantime.
    """

    def __init__(self, every: int, estimates: Estimates) -> None:
        self._every = every
        self._estimates = estimates
        self._costs = estimates.costs
        self.patient = False
        self._since_trial = 0.0  # steps since a request tried its first draft

    def wait(self, steps: float) -> None:
        self._since_trial += steps

    def idle_steps(self, batch: Sequence[Request]) -> int:
        """How many steps follow in which none of these requests probes, if none drafts."""
        left = (self._steps_left(request, len(batch), len(batch)) for request in batch)
        return max(0, int(min(left, default=float(self._every))) - 1)

    def probes(self, request: Request, rows: int, num_requests: int) -> bool:
        if self._steps_left(request, rows, num_requests) > 1:
            return False
        if self._is_trial(self._estimates.history(request)):
            if not within(request, 1).depth:
                return False  # the trial is left to another request
            self._since_trial = 0.0
        return True

    def _is_trial(self, history: History) -> bool:
        """Whether its next draft is its first one, of a price that is known."""
        return not history.tried and self._estimates.drafting.known

    def _steps_left(self, request: Request, rows: int, num_requests: int) -> float:
        """In how many steps a request without drafts tries one; up to 1, in this one."""
        estimates = self._estimates
        history = estimates.history(request)
        if not self._is_trial(history):
            soon = estimates.varied and not (self.patient and num_requests > 1)
            again = self._soon(history, rows) if soon else self._every
            return again - history.plain_steps
        nodes, plain = num_requests * estimates.first_nodes, self._costs(rows, rows)
        drafting = estimates.level_seconds + (estimates.reading_seconds(request) or 0.0)
        price = (drafting + self._costs(rows + nodes, rows)) / plain - 1
        unpaid = price / PRICE - self._since_trial
        return max(SOONEST - history.plain_steps, unpaid + 1 if unpaid > 0 else 0.0)

    def _soon(self, history: History, rows: int) -> float:
        """In how many plain steps a request tries again whose drafts may only have had bad luck.

        It need not wait for `probe_every` steps if that costs at most one percent of the time
        since its last draft.
        """
        estimates, plain = self._estimates, self._costs(rows, rows)
        rates = history.acceptance_rates(estimates.acceptance_rates)
        seconds = estimates.level_seconds + self._costs(rows + estimates.first_nodes, rows)
        lost = seconds / plain - 1 - history.draft_rate() * rates[0] / rows
        rarer = 2 ** min(max(0, history.misses - _CHANCES), 6) if self.patient else 1
        return min(self._every, max(_SOONEST_AGAIN, rarer * lost / PRICE))


_LOWEST, _HIGHEST, _PRIOR_WEIGHT = 0.4, 0.9, 20.0
"""Prior acceptance rate below paths of probability 0 and 1 (Qwen2.5-Coder: drafters are right more
often than they say where they are unsure), and its weight in tokens."""

_FLAT = 0.05
"""With a smaller slope, path probabilities tell nothing."""


class Stopping:
    """The path probability below which a chain is not worth another token.

    Some drafters say how probable they find their tokens (`Draft.path_probs`). Whether one more
    token pays then depends on the draft itself, and this beats every fixed length. SVIP (Zhang et
    al., "Draft Model Knows When to Stop") and `confidence` stop by such probabilities, too. Here
    the threshold follows from the costs, and the drafter's word is not taken for it: a line is
    fitted to how often the next token was accepted, given the path's probability. So it need not be
    one: of sampled drafts under the rule `coupled`, it is the product of their clarity.

    A token is worth drafting if it is accepted so often that its time brings at least as many
    tokens as the time of the whole steps does.
    """

    _MEMORY = 0.995  # weight of the past after each draft token

    def __init__(self) -> None:
        # Sums over tokens: 1, s, s^2, y and s y, where s is the path's probability above a token,
        # and y whether it was accepted.
        self._sums = [0.0] * 5
        # The prior is a line over evenly spread s, whose mean square is 1/3.
        low, slope, weight = _LOWEST, _HIGHEST - _LOWEST, _PRIOR_WEIGHT
        sums = (1.0, 1 / 2, 1 / 3, low + slope / 2, low / 2 + slope / 3)
        self._prior = [weight * each for each in sums]

    def learn(self, outcome: Outcome) -> None:
        passed = len(outcome.accepted.path)
        probs = list(takewhile(isfinite, outcome.draft.path_probs))  # of no appended tokens
        # The past counts less after the last token, too: if all drafts end at their first one,
        # nothing is learnt, and what was learnt of an earlier text must not keep it so.
        self._sums = [self._MEMORY ** len(probs) * old for old in self._sums]
        for depth, s in enumerate(probs[:-1], 1):
            y = float(depth < passed)
            new = (1.0, s, s * s, y, s * y)
            self._sums = [old + each for old, each in zip(self._sums, new, strict=True)]

    def least_path_prob(self, price: float) -> float:
        n, s, ss, y, sy = (a + b for a, b in zip(self._sums, self._prior, strict=True))
        slope = (n * sy - s * y) / (n * ss - s * s)  # the prior alone spreads s
        low = (y - slope * s) / n
        if slope < _FLAT:
            return 0.0 if y >= price * n else 1.0
        return min(1.0, max(0.0, (price - low) / slope))
