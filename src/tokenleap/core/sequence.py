"""The part of a request that drafters read: tokens, distribution, noise; and copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import Self

from tokenleap.core.beams import Beams
from tokenleap.core.noise import Noise
from tokenleap.core.params import SamplingParams
from tokenleap.core.references import NO_REFERENCES, References, Source
from tokenleap.core.sampler import Sampler
from tokenleap.core.tree import Draft

_keys = count()


def new_key() -> int:
    return next(_keys)


@dataclass(frozen=True)
class Scope:
    """Which earlier requests a request may read what was kept of, and which later ones may read it.

    Requests with different salts have nothing in common, neither the KV of prompts nor what
    drafters remember (vLLM's `cache_salt`). Of and for a private one, drafters remember nothing.
    """

    salt: str = ""
    private: bool = False


SHARED = Scope()  # the scope of requests that are not kept apart


class SequenceState:
    """A sequence as it is now; `Request` lets it grow.

    `references` are texts that drafters may quote, and `prediction` is the text that its output is
    expected to repeat.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sampler: Sampler,
        noise: Noise,
        source: Source | None,
    ) -> None:
        self.key = new_key()
        self.params = params
        self.prompt_ids = tuple(prompt_ids)
        self.source = source
        self.token_ids = list(prompt_ids)
        self.sampler = sampler
        self.noise = noise
        self.references: References = NO_REFERENCES
        self.prediction: References = NO_REFERENCES
        self.beams: Beams | None = None
        self.scope = SHARED

    @property
    def input_ids(self) -> Sequence[int]:
        """The text that the encoder reads, or else the prompt."""
        return self.prompt_ids if self.source is None else self.source.tokens

    @property
    def given_ids(self) -> tuple[int, ...]:
        """The prompt, and the token that must come first by an encoder-decoder's rules."""
        rules = self.sampler.rules
        forced = () if rules is None or rules.first is None else (rules.first,)
        return (*self.prompt_ids, *forced)

    @property
    def memory(self) -> str | int:
        """Identifies what a drafter may remember for it: by its salt, or by itself if private."""
        return self.key if self.scope.private else self.scope.salt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def root(self) -> int:
        """The last committed token: the root of the next tree."""
        return self.token_ids[-1]

    def undrafted(self) -> Draft:
        """The draft without proposals: the root alone, or the tree of the beam search."""
        return Draft.empty(self.root) if self.beams is None else self.beams.draft

    def with_noise(self, noise: Noise) -> Self:
        other = copy(self)
        other.noise = noise
        return other

    def extended(self, tokens: Sequence[int], noise: Noise) -> Self:
        """The request as if these tokens were committed, for a drafter that continues them."""
        other = self.with_noise(replace(noise, ahead=noise.ahead + len(tokens)))
        other.token_ids = [*self.token_ids, *tokens]
        return other

    def view(self, tokens: Sequence[int], key: int | None = None) -> Self:
        """A beam as a request of its own, for a drafter that continues it."""
        other = copy(self)
        other.key = new_key() if key is None else key
        other.token_ids = list(tokens)
        other.beams = None
        return other
