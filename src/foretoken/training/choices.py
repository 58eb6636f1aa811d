"""Names of what can be trained; without PyTorch, for help pages."""

from __future__ import annotations

__all__ = ["TRAINABLE"]

TRAINABLE = ("eagle", "medusa", "hydra", "blockwise", "mlp_speculator", "distill")
"""The names in `methods.TRAINING_METHODS`."""
