"""Checks of logits and token ids, with errors that say what to change."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from tokenleap.errors import ConfigError, RequestError

__all__ = ["check_finite", "check_token_ids"]


def check_finite(logit: Tensor) -> None:
    """Check that the largest logit of a position is finite.

    Args:
        logit: [] the largest logit.

    Raises:
        RequestError: the model overflowed, or masks left no token.
    """
    if not math.isfinite(logit):
        raise RequestError(
            f"the largest logit is {float(logit)}, so no token can be drawn: if you set "
            "logit_bias, penalties or masks, relax them; if you set none, the model overflows in "
            "this dtype: use float32 or bfloat16."
        )


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Check that all token ids of a parameter lie in the vocabulary.

    Args:
        field: the parameter's name, for the message.
        token_ids: its token ids.
        vocab_size: V, the width of the logits.

    Raises:
        ConfigError: a token id is outside the vocabulary.
    """
    for token in token_ids:
        if token >= vocab_size:
            raise ConfigError(
                f"{field}: token id {token} is outside the vocabulary (0 to {vocab_size - 1})."
            )
