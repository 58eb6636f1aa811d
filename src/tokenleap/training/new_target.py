"""The model that a training wrote in place of the target: served as the target is, and compared.

It writes something else than the target, and no drafter can make up for what it lost. So its
perplexity on the held-out answers is set beside the target's:

    exp(-mean over all tokens of log p(token | tokens before)).

The target wrote these answers, half of them by its most probable tokens, so its own is low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenleap.llm import LLM
from tokenleap.runtime.network import Need
from tokenleap.runtime.target import Target
from tokenleap.training.conversations import Conversation
from tokenleap.training.feature_passes import passes

__all__ = ["Perplexity", "perplexity", "served_alike"]

_CONVERSATIONS = 64
"""Most conversations that are compared."""


@dataclass(frozen=True)
class Perplexity:
    """Of the target and of the new model, on the same held-out answers.

    Args:
        target: that of the target.
        new: that of the model that was made of it.
    """

    target: float
    new: float

    @classmethod
    def of(cls, target: LLM, new: LLM, held_out: Sequence[Conversation]) -> Perplexity:
        """Both of them, on the first conversations."""
        chosen = held_out[:_CONVERSATIONS]
        return cls(*(perplexity(each.engine.target, chosen) for each in (target, new)))


def served_alike(llm: LLM, folder: Path) -> LLM:
    """A model in a folder, with the options with which another one is served.

    Args:
        llm: the other one.
        folder: of the model.
    """
    options = llm.engine.options
    return LLM(
        folder,
        speculative_config={"method": "none"},
        dtype=llm.dtype,
        device=llm.device,
        max_model_len=options.max_model_len,
        max_num_seqs=1,
        quantization=options.quantization,
        runtime=options.runtime,
    )


def perplexity(target: Target, conversations: Sequence[Conversation]) -> float:
    """A model's perplexity on the parts of conversations that are to be learnt."""
    found = []
    for each in conversations:
        logprobs = _logprobs(target, each.tokens)
        found += [logprobs[max(0, first - 1) : stop - 1] for first, stop in each.answers]
    return float((-torch.cat(found).mean()).exp())


@torch.inference_mode()
def _logprobs(target: Target, tokens: Sequence[int]) -> Tensor:
    """[n - 1] the log-probability of every token but the first one."""
    following, found, at = torch.tensor(tokens[1:]), [], 0
    for output in passes(target, tokens[:-1], Need()):
        logits = output.scores.float().cpu()
        chosen = following[at : at + len(logits)].unsqueeze(-1)
        found.append(logits.log_softmax(-1).gather(1, chosen).squeeze(-1))
        at += len(logits)
    return torch.cat(found)
