"""The interface `Drafter`: what the engine needs of a drafting method.

`speculation.Speculation` calls it. Every method derives from `Drafter`, and its options derive from
`DrafterOptions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator

from tokenleap.core.config import Config
from tokenleap.core.per_request import PerRequest as PerRequest  # for drafters of others, too
from tokenleap.core.per_request import drop_request

if TYPE_CHECKING:
    from torch import Tensor

    from tokenleap.control.base import Budget
    from tokenleap.core.tree import Draft
    from tokenleap.decode import Outcome, StepTimes
    from tokenleap.drafters.online import Learnable
    from tokenleap.request import Request

Way: TypeAlias = Literal["same", "intersection", "text"]
"""How a draft model drafts (see `DraftModelOptions.vocabulary`)."""


@dataclass(frozen=True)
class VocabularyOverlap:
    """How a draft model's vocabulary compares with the target's, and how it therefore drafts.

    Args:
        way: "same", "intersection" or "text" (see `DraftModelOptions.vocabulary`).
        shared: number of tokens that both have.
        target: number of tokens of the target.
        draft: number of tokens of the draft model.
    """

    way: Way
    shared: int
    target: int
    draft: int

    def __str__(self) -> str:
        return (
            f"{self.shared:,} of the target's {self.target:,} tokens are among the draft model's "
            f"{self.draft:,} (vocabulary '{self.way}')"
        )


def with_method(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A drafter's configuration with its method: `draft_model` if only `model` is given.

    Args:
        fields: what the user wrote; without both it is returned as it is.
    """
    if fields.get("model") is not None and "method" not in fields:
        return {**fields, "method": "draft_model"}
    return fields


def _inner(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    found = with_method(fields)
    if "method" not in found:
        raise ValueError(
            "a drafter needs a 'method', such as 'suffix' or 'eagle', or the 'model' that drafts"
        )
    return found


InnerConfig: TypeAlias = Annotated[Mapping[str, Any], AfterValidator(_inner)]
"""The type of an option that configures another drafter: `method` and that method's own fields. If
only `model` is given, the method is `draft_model`, as in `SpeculativeConfig`."""


class DrafterOptions(Config):
    """Base of a method's own options.

    Raises:
        ConfigError: an option is unknown, out of range, or contradicts another one.
    """

    def longest_chain(self) -> int | None:
        """The default draft length where `cost_model` chooses each draft's own; None: the same."""
        return None

    def default_num_speculative_tokens(self) -> int | None:
        """The draft length that these options imply, in tokens; None for the method's default."""
        return None


@dataclass(frozen=True)
class DrafterTraits:
    """The fixed facts that the engine, controllers and other drafters read of a drafter.

    Args:
        drafts_trees: whether a node of its drafts may have several children.
        independent_siblings: whether the children of a node are independent draws from one shared q
            object.
        looks_up: whether it looks its tokens up: every q is one-hot, a lookup takes much less time
            than a target pass, and its drafts have `Draft.features`. Such a drafter is not called
            in steps in which every budget is 0.
        level_share: what each further level of a draft is expected to take, as a share of the time
            of the first one: 1 if each is a pass of its model, 0 if one pass makes all of them.
        stops_early: whether its drafts are chains that have `Draft.path_probs` and end below an
            improbable token, which saves the time of those that would follow
            (`Budget.min_path_prob`).
        reads_target_kv: whether it drafts on the target's own KV. It can then continue only the
            committed tokens, not another drafter's tokens.
        quotes_references: whether it drafts from `Request.references`, too.
        follows_prediction: whether it drafts from `Request.prediction`, too.
        only_counts: whether `observe` counts, and no draft depends on it. Beams have no outcomes to
            show.
        hidden_layers: layers of the target whose hidden states it needs (ids as in
            `runtime.network.Need`). `observe_prefill` and `Outcome.hidden` then show it those of
            all committed tokens but the last. Chunked prefill, preemption and prefix caching do not
            change this.
        token_limit: ids of its tokens are below this, or in the target's vocabulary (see
            `Network.extend`).
        vocabulary_overlap: how the tokens of its draft model compare with the target's; None
            without a draft model, or if one of the two has no tokenizer.
        learnable: the part that can learn while it serves; None if there is none.
    """

    drafts_trees: bool = False
    independent_siblings: bool = False
    looks_up: bool = False
    level_share: float = 1.0
    stops_early: bool = False
    reads_target_kv: bool = False
    quotes_references: bool = False
    follows_prediction: bool = False
    only_counts: bool = False
    hidden_layers: tuple[int, ...] = ()
    token_limit: int = 0
    vocabulary_overlap: VocabularyOverlap | None = None
    learnable: Learnable | None = None


class Drafter(ABC):
    """Proposes the next tokens of each request.

    A drafter owns its state and catches up from the committed tokens of each request (invariant 4).
    They tell it what was accepted, so a draft that was accepted whole is no special case. It sees
    the target's output only through `observe` and `observe_prefill`. What it remembers of a request
    is for requests with the same `Request.memory`, and for no others.

    Attributes:
        traits: the drafter's description, of the class or of an instance.
        inner: drafters that serve the same requests for this one. They forget what it forgets.
    """

    traits: DrafterTraits = DrafterTraits()
    inner: Sequence[Drafter] = ()

    def __init_subclass__(cls) -> None:
        """Refuse traits as class attributes, where nobody would read them.

        Raises:
            TypeError: a class attribute has the name of a trait.
        """
        for name in DrafterTraits.__dataclass_fields__.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{name}: set traits = DrafterTraits({name}=...).")

    def level_sizes(self, limit: int) -> Sequence[int] | None:
        """The number of nodes at each level of a full draft, for controllers.

        A drafter of trees that cannot tell in advance returns 1 for each level. Controllers then
        measure the sizes of its drafts.

        Args:
            limit: most drafted nodes.

        Returns:
            Nodes at depths 1, 2, ...; None for a drafter of chains.
        """
        return [1] * limit if self.traits.drafts_trees else None

    @abstractmethod
    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """Draft for every request.

        The q of a node is the distribution it was drawn from (invariant 2). A drafter must not drop
        a sampled node because of its value.

        Args:
            batch: the requests of this step that use this drafter.
            budgets: the limits of each request's draft.

        Returns:
            One draft per request, within its budget; `Draft.empty` if there is nothing to propose.
        """

    def observe(self, outcomes: Sequence[Outcome], times: StepTimes) -> None:  # noqa: B027
        """Learn from a step; most drafters ignore it.

        Args:
            outcomes: for each request: the verified draft, what was accepted, the target's output.
            times: seconds of the step's parts.
        """

    def observe_prefill(  # noqa: B027
        self, request: Request, start: int, hidden: Mapping[int, Tensor]
    ) -> None:
        """Learn from the hidden states of tokens that were computed before the first step.

        A preempted request is computed again. Its tokens may therefore be shown twice, with the
        same bits.

        Args:
            request: the request whose tokens `token_ids[start : start + n]` were computed.
            start: index of the first of these n tokens.
            hidden: layer id -> [n, E] hidden states, of at least `hidden_layers`.
        """

    def rewind(self, request: Request) -> None:
        """Committed tokens were taken back.

        This happens to the inner drafter of a cascade: its requests continue with tokens that the
        outer rule may reject. The default releases the request, which is always correct. Drafters
        with expensive state override it.
        """
        self.release(request)

    def release(self, request: Request) -> None:
        """Forget a request that has ended: all `PerRequest` state, and that of `inner`."""
        drop_request(self, request.key)
        for drafter in self.inner:
            drafter.release(request)

    def forget(self) -> None:
        """Forget everything that ended requests left for later ones."""
        for drafter in self.inner:
            drafter.forget()

    def ignore_times(self) -> None:
        """From now on, let no measured time decide what is drafted.

        It is called before the first draft of a strategy under which the output's bits depend on
        the drafts: seeded runs are then reproducible only if drafts do not depend on the clock.
        """
        for drafter in self.inner:
            drafter.ignore_times()


class OneByOne(Drafter):
    """Drafts for one request after the other."""

    def propose(self, batch: Sequence[Request], budgets: Sequence[Budget]) -> list[Draft]:
        """See `Drafter.propose`."""
        return [self.draft(request, budget) for request, budget in zip(batch, budgets, strict=True)]

    @abstractmethod
    def draft(self, request: Request, budget: Budget) -> Draft:
        """Draft for a request, within its budget."""


def layers_of(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Ids of all layers whose hidden states these drafters need, ascending."""
    return tuple(sorted({layer for drafter in drafters for layer in drafter.traits.hidden_layers}))
