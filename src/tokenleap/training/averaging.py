"""`Averages`: the weights of the last evaluations, and their mean (checkpoint averaging).

Vaswani et al., "Attention Is All You Need" (2017), section 6.1. The weights are files beside the
checkpoints, so a run that was killed finds them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenleap.core.files import write_whole
from tokenleap.errors import TrainingError, in_one_line

__all__ = ["Averages"]

_SUFFIX = ".safetensors"


class Averages:
    """Keeps the weights of the last evaluations.

    Args:
        folder: for the files.
        number: how many are kept.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number

    def _files(self) -> list[Path]:
        """In the order of their steps."""
        return sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: int(path.stem))

    def keep(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights after a step, and forget the oldest.

        Raises:
            TrainingError: they cannot be written.
        """
        tensors = {name: each.detach().cpu().contiguous() for name, each in weights.items()}
        path = self._folder / f"{step}{_SUFFIX}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, partial(save_file, tensors))
        except OSError as error:
            raise TrainingError(f"{path} cannot be written: {in_one_line(error)}.") from None
        for old in self._files()[: -self._number]:
            old.unlink()

    def mean(self) -> dict[str, Tensor]:
        """The mean of what is kept, in float32."""
        files = self._files()
        total = {name: each.float() for name, each in load_file(files[0]).items()}
        for file in files[1:]:
            for name, each in load_file(file).items():
                total[name] += each.float()
        return {name: each / len(files) for name, each in total.items()}

    @torch.no_grad()
    def load_into(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite weights with the mean."""
        for name, mean in self.mean().items():
            weights[name].copy_(mean)
