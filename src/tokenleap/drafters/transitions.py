"""What a drafted token says about the next one, for drafters that compute all levels at once.

A block of masks is predicted in one pass, each of its tokens without a look at the others. Where
several continuations are likely, such a draft mixes them, or repeats a token. `Transitions` adds
what depends on the token before: the logit of a token w behind a token u is

    logit(w | u) = logit(w) + W_w^T M W_u

with the rows W of the output layer, and a learnt matrix M [E, E] that is zero at first. Sun et al.,
"Fast Structured Decoding for Sequence Models", arXiv 1910.11555, have such terms between the tokens
of a parallel decoder, of two low-rank tables.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

__all__ = ["MATRIX", "TRANSITIONS_FILE", "TokenTransitions", "Transitions", "save_transitions"]

TRANSITIONS_FILE, MATRIX = "transitions.safetensors", "matrix"
"""The file, and the name of its only tensor."""


class Transitions(nn.Module):
    """The matrix M, which is learnt.

    Args:
        size: E, of the output layer's rows.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(size, size))

    def forward(self, rows: Tensor) -> Tensor:
        """What is added to states behind tokens.

        Args:
            rows: [..., E] the output layer's rows of the tokens.

        Returns:
            [..., E].
        """
        return rows @ self.matrix.T.to(rows)


class TokenTransitions:
    """Transitions between the tokens of a drafter: two tables of the size of its output layer.

    What a token adds to all logits alike is left out. It changes no distribution, but it would
    count where transitions are added to some tokens only, see `between`.

    Args:
        matrix: [E, E] M.
        rows: [V, E] W.
    """

    def __init__(self, matrix: Tensor, rows: Tensor) -> None:
        self._added = rows @ matrix.T.to(rows)
        self._rows = (rows - rows.float().mean(0)).to(rows)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """[V, E] what tokens add to states behind them, and [V, E] W minus its mean."""
        return self._added, self._rows

    def behind(self, tokens: Tensor) -> Tensor:
        """[N, V] what is added to the logits behind tokens [N]."""
        return (self._added[tokens] @ self._rows.T).float()

    def between(self, candidates: Tensor) -> Tensor:
        """What candidates for a place add to the logits of those for the next.

        Args:
            candidates: [K, C] tokens.

        Returns:
            [K - 1, C, C] for each of a place, the logits that those of the next place get.
        """
        above, below = self._added[candidates[:-1]], self._rows[candidates[1:]]
        return torch.bmm(above.float(), below.float().transpose(1, 2))


def save_transitions(transitions: Transitions, folder: Path) -> None:
    """Write them as a file of their own."""
    matrix = transitions.matrix.detach().to("cpu", torch.bfloat16)
    save_file({MATRIX: matrix}, folder / TRANSITIONS_FILE)
