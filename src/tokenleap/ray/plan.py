"""How many replicas there are, and how many cores each has: without Ray."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenleap.errors import ConfigError

__all__ = ["Replicas", "Share", "beside", "share_of"]


@dataclass(frozen=True)
class Replicas:
    """How many replicas: a number, or a range in which load decides.

    Args:
        least: at any time.
        most: under load.
    """

    least: int
    most: int

    @classmethod
    def parse(cls, text: str | int) -> Replicas:
        """`"2"`, or `"1:4"`.

        Raises:
            ConfigError: it is neither.
        """
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", str(text).strip(), re.ASCII)
        if found is None:
            raise ConfigError(f"replicas: must be a number, or MIN:MAX such as 1:4, got {text}")
        least = int(found[1])
        most = int(found[2] or least)
        if least < 1:
            raise ConfigError(f"replicas: there must be at least 1, got {text}")
        if most < least:
            raise ConfigError(f"replicas: MIN is above MAX in {text}")
        return cls(least, most)

    def __str__(self) -> str:
        if self.scales:
            return f"{self.least} to {self.most} replicas"
        return "1 replica" if self.most == 1 else f"{self.most} replicas"

    @property
    def scales(self) -> bool:
        """Whether load decides."""
        return self.least < self.most


@dataclass(frozen=True)
class Share:
    """What Ray sets aside for a replica.

    Args:
        cores: which are also the threads of its passes.
        gpus: GPUs.
    """

    cores: int
    gpus: int = 0


def share_of(
    cores: Sequence[float],
    gpus: Sequence[float],
    replicas: Replicas,
    *,
    device: str,
    threads: int | None,
) -> Share:
    """An equal share of the cluster for each replica, of which none is spread over machines.

    Args:
        cores: of each machine.
        gpus: of each machine.
        replicas: how many there are to be.
        device: of the model; with "auto" each replica gets a GPU if there is one.
        threads: cores of a replica; None for as many as there are.

    Raises:
        ConfigError: there are more replicas than cores, or than GPUs.
    """
    wanted = 1 if device.startswith("cuda") or (device == "auto" and sum(gpus) >= 1) else 0
    if wanted and sum(int(each) for each in gpus) < replicas.most:
        raise ConfigError(
            f"replicas: {replicas.most} need a GPU each, and there are "
            f"{sum(int(each) for each in gpus)}: take fewer replicas, or device cpu"
        )
    most = threads or max((int(each) for each in cores), default=0)
    for count in range(most, 0 if threads is None else threads - 1, -1):
        if sum(int(each // count) for each in cores) >= replicas.most:
            return Share(count, wanted)
    total = sum(int(each) for each in cores)
    need = "a core each" if threads is None else f"{threads} cores each"
    raise ConfigError(
        f"replicas: {replicas.most} need {need}, and there are {total}: take fewer"
        + ("" if threads is None else ", or fewer threads")
    )


def beside(share: Share, cores: Sequence[float]) -> float:
    """Cores that Ray sets aside for a replica, so that some machine has one for other work.

    A replica has as many threads as its share has cores all the same. They wait for nobody, but a
    task that reads a file would wait forever for a core of its own.

    Args:
        share: of each replica.
        cores: of each machine.
    """
    if share.cores > 1:
        return share.cores - 1
    return 0.5 if max(cores, default=0) >= 2 else 0
