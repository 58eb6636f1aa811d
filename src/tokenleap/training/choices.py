"""Names of what can be trained; without PyTorch, for help pages."""

from __future__ import annotations

from tokenleap.core.config import nearest
from tokenleap.errors import ConfigError

__all__ = ["TRAINABLE", "check_trainable"]

TRAINABLE = (
    "eagle",
    "eagle1",
    "parallel",
    "medusa",
    "hydra",
    "blockwise",
    "mlp_speculator",
    "distill",
    "boost",
    "early_exit",
    "pad",
    "pass",
    "spec_drafter",
    "medusa_2",
    "blockwise_tuned",
)
"""The names in `methods.TRAINING_METHODS`."""


def check_trainable(name: str) -> None:
    """Refuse a name that stands for nothing that can be trained.

    Raises:
        ConfigError: it is none of `TRAINABLE`.
    """
    if name not in TRAINABLE:
        known = nearest(name, list(TRAINABLE))
        raise ConfigError(f"nothing can be trained as '{name}': {known}")
