"""`Metrics`: counts and times of one output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tokenleap.trace import StepTrace

__all__ = ["Metrics"]


@dataclass
class Metrics:
    """Counts and times of one output. Times are wall-clock seconds.

    The prompt of an encoder-decoder is the decoder's; what the encoder reads is the source.

    `num_drafts` counts the steps in which at least one token was drafted. In a batch, the full time
    of a step counts for every request that took part in it. In a beam search, `num_accepted_tokens`
    counts the steps of the search that drafts have saved a pass for.
    """

    prompt_tokens: int = 0
    source_tokens: int = 0
    """Tokens that the encoder reads, or frames of audio; 0 for a decoder-only model."""
    generated_tokens: int = 0
    target_passes: int = 0
    num_drafts: int = 0
    num_cut_drafts: int = 0
    """Steps with a draft whose last token is not part of the output, because a stop came first."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    accepted_prediction_tokens: int = 0
    """Drafted tokens of the request's prediction that became part of the output."""
    rejected_prediction_tokens: int = 0
    """Drafted tokens of it that were verified and did not."""
    accepted_earlier_tokens: int = 0
    """Drafted tokens that a drafter had from earlier requests and that became part of the output. A
    repeated prompt has many."""
    accepted_per_position: list[int] = field(default_factory=list)
    """How often the drafted token at each depth was accepted."""
    prefill_seconds: float = 0.0
    encode_seconds: float = 0.0
    """Time in the encoder, which is part of `prefill_seconds`."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    seconds: float = 0.0
    """From admission to the last token, prefill included."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    cached_source_tokens: int = 0
    """`source_tokens` if an earlier request had read the same source, else 0."""
    preemptions: int = 0
    """How often the request lost its row to older requests and was computed again."""
    drafter_failure: str | None = None
    """Why the request continued without drafts, in one line; None if its drafter did not fail."""

    def count(self, step: StepTrace) -> None:
        """Count a step. If a stop cut it, what lies behind the end of the output does not count."""
        self.generated_tokens += step.committed
        self.target_passes += 1
        if not step.drafted:
            return
        kept = len(step.kept)
        self.num_drafts += 1
        self.num_cut_drafts += step.committed <= len(step.accepted)
        self.num_draft_tokens += len(step.drafted)
        self.num_accepted_tokens += kept
        self.num_rejected_tokens += len(step.refused)
        missing = max(step.depths) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(kept):
            self.accepted_per_position[position] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass that had a draft: 1 + accepted / drafts, unless a stop cut one."""
        if not self.num_drafts:
            return 1.0
        return 1 + (self.num_accepted_tokens - self.num_cut_drafts) / self.num_drafts

    @property
    def acceptance_rate(self) -> float:
        """Measured alpha: accepted / (accepted + rejected), without tokens that no rule reached."""
        tried = self.num_accepted_tokens + self.num_rejected_tokens
        return self.num_accepted_tokens / tried if tried else 0.0

    @property
    def step_seconds(self) -> float:
        """Time of the request's steps; those of a batch count wholly for each of its requests."""
        return self.draft_seconds + self.verify_seconds + self.accept_seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second after prefill."""
        seconds = self.seconds - self.prefill_seconds
        return self.generated_tokens / seconds if seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and properties but `step_seconds`, for JSON."""
        return {
            **asdict(self),
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }
