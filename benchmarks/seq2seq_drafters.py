"""The drafters that `benchmarks.seq2seq` compares, trained by `tokenleap train`.

All of them learn the same: what the target answers to the sentences of `data/train`. The first
training writes these answers, and the others are given its files.

    python -m benchmarks.seq2seq drafters OUT
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge

from benchmarks import BenchmarkError
from tokenleap.core.config import Config
from tokenleap.training.run import TrainingFolder

__all__ = ["MAIN", "SHAPES", "DrafterOptions", "drafters_in", "train_command", "train_drafters"]

Shape = Literal["shared", "full", "balanced", "small"]
SHAPES: tuple[Shape, ...] = ("shared", "full", "balanced", "small")
"""Of Spec-Drafters. `shared` reads the target's encoder and is a decoder of two layers; the others
have an encoder of their own, as the paper's (see `new_masked_lm`)."""
MAIN = "specdec-shared"
"""The drafter of most tables: on a CPU, it learns most in a given time."""


class DrafterOptions(Config):
    """Which drafters are trained, and how.

    Args:
        heads: numbers of blockwise heads, for a drafter each.
        shapes: of Spec-Drafters.
        num_masks: their masks, as many as the longest drafts measured.
        masks: numbers of masks of further Spec-Drafters, of the shape `shared`.
        answers: how the target writes what they learn.
        spec_set: `--set` of `tokenleap train spec_drafter`. The published steps are far too many
            for a CPU. From the target's encoder, the drafter learns faster.
        heads_set: the same of `tokenleap train blockwise`.
        tokens: most tokens of answers to learn; the default is more than there are.
        held_out_tokens: of answers for evaluations while they learn.
    """

    heads: tuple[int, ...] = (10, 25)
    shapes: tuple[Shape, ...] = SHAPES
    num_masks: Annotated[int, Ge(25)] = 25
    masks: tuple[int, ...] = ()
    answers: Literal["greedy", "beam"] = "greedy"
    spec_set: tuple[str, ...] = (
        *("size=0.25", "max_steps=5000", "warmup_steps=500", "accumulation=1"),
        *("from_target=true", "evaluate_every=500"),
    )
    heads_set: tuple[str, ...] = ("max_steps=3000", "batch_tokens=1024", "evaluate_every=250")
    tokens: int = 2_000_000
    held_out_tokens: int = 2000

    def methods(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Of each drafter by its name: the method, and its `--set`."""
        answers = f"answers={self.answers}"
        spec = {f"specdec-{shape}": (shape, self.num_masks) for shape in self.shapes}
        spec |= {f"{MAIN}-{masks}": ("shared", masks) for masks in self.masks}
        found: dict[str, tuple[str, tuple[str, ...]]] = {
            name: (
                "spec_drafter",
                (*_shape(shape), f"num_masks={masks}", answers, *self.spec_set),
            )
            for name, (shape, masks) in spec.items()
        }
        return found | {
            f"blockwise-{heads}": ("blockwise", (f"num_heads={heads}", *self.heads_set))
            for heads in self.heads
        }

    def drafter_of(self, k: int, drafters: Container[str]) -> str | None:
        """Which of these drafts k tokens: one with k masks, or `MAIN` with its first ones."""
        if (own := f"{MAIN}-{k}") in drafters:
            return own
        return MAIN if MAIN in drafters and k <= self.num_masks else None


def _shape(shape: Shape) -> tuple[str, ...]:
    return ("shape=full", "encoder=target") if shape == "shared" else (f"shape={shape}",)


def train_command(name: str, out: Path, options: DrafterOptions) -> list[str]:
    """The command line that trains a drafter of the target in `out`, without the interpreter.

    Raises:
        BenchmarkError: there is no drafter of this name.
    """
    methods = options.methods()
    if name not in methods:
        raise BenchmarkError(f"no drafter {name!r}: choose from {', '.join(methods)}.")
    method, given = methods[name]
    return [
        *("tokenleap", "train", method, "--model", str(out / "target")),
        *("--source", str(out / "data/train.en"), "--target", str(out / "data/train.de")),
        *("--tokens", str(options.tokens), "--held-out-tokens", str(options.held_out_tokens)),
        *("--out", str(out / "drafters" / name)),
        *(word for each in given for word in ("--set", each)),
    ]


def train_drafters(out: Path, options: DrafterOptions, only: Sequence[str] = ()) -> None:
    """Train all drafters, or some; each goes on where it stopped, and nothing ends twice.

    Raises:
        BenchmarkError: a training has failed.
    """
    for name in only or options.methods():
        command = train_command(name, out, options)
        if TrainingFolder(out / "drafters" / name).report.exists():
            continue
        share_answers(out / "drafters", name)
        print(shlex.join(command), file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, "-m", *command], check=False)
        if done.returncode:
            raise BenchmarkError(f"the training of {name} has failed; run it again to go on.")


def share_answers(folder: Path, name: str) -> None:
    """Give a drafter the answers that a Spec-Drafter has learnt, if it has none yet."""
    own = TrainingFolder(folder / name)
    for other in sorted(folder.glob("specdec-*/training/report.json")):
        if own.conversations("train").exists():
            return
        for part in ("train", "held_out"):
            there = TrainingFolder(other.parents[1]).conversations(part)
            own.conversations(part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(there, own.conversations(part))


def drafters_in(out: Path, options: DrafterOptions) -> Mapping[str, Path]:
    """By name, the folders of those that are written; a training may still make them better."""
    folders = {name: out / "drafters" / name for name in options.methods()}
    return {name: path for name, path in folders.items() if (path / "config.json").exists()}
