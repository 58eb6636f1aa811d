"""Finds the learner of a drafter that learns while it serves.

The networks with their losses are in `training/`, which stands above the engine: it also trains by
running it. So the learner is loaded by its name, and only if somebody asks for it.
"""

from __future__ import annotations

from importlib import import_module

from tokenleap.drafters.base import Drafter
from tokenleap.drafters.online import Learner, OnlineOptions
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.runtime.target import Target

__all__ = ["learner_for"]

_MODULE, _CLASS = "tokenleap.training.online", "OnlineLearner"


def learner_for(
    method: str, drafter: Drafter, options: OnlineOptions, target: Target, *, same_bits: bool
) -> Learner:
    """The learner of a drafter.

    Args:
        method: the drafter's, for messages.
        drafter: what drafts.
        options: how it learns.
        target: the target.
        same_bits: whether the output has the same bits for any drafts.

    Raises:
        CompatibilityError: the drafter has nothing that could learn.
        ConfigError: an option does not fit, or the clock would decide the output's bits.
    """
    if drafter.learnable is None:
        raise CompatibilityError(
            f"online: method '{method}' has nothing that learns while it serves: use 'eagle', "
            "'medusa', 'hydra', 'blockwise', 'mlp_speculator', a 'hybrid' with one of these, or "
            "'draft_model' with the target's vocabulary (not an LLM of a loaded module)."
        )
    if not same_bits and options.every is None:
        raise ConfigError(
            "online: with this target or acceptance rule, the output's bits depend on the drafts, "
            "and learning for a 'share' of the time would make them depend on the clock: set "
            "'every', or use the rule 'coupled' on a target that is bit-exact."
        )
    made: Learner = getattr(import_module(_MODULE), _CLASS)(drafter.learnable, options, target)
    return made
