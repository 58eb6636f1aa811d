"""Names of what can be trained; without PyTorch, for help pages."""

from __future__ import annotations

__all__ = ["TRAINABLE"]

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
