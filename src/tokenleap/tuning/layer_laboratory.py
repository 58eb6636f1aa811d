"""Measure skip sets on a model: alpha by teacher forcing, c by timing, speed by generating.

`layer_skip` drafts on the target's own KV. So the first drafted token at a position depends on the
target's KV of the positions before it and on no other draft. Therefore one pass can score all
positions of a text. The whole model computes the text's KV once, which is kept. Then every position
is computed again without the skipped sublayers. Its nodes are appended to that KV, and each sees
only the KV of the positions before it. The result equals drafting at one position after the other,
at the cost of a prefill. `tokenleap tune-layers` gives a laboratory to `LayerSearch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from tokenleap.analysis.measure import Laboratory
from tokenleap.config import SpeculativeConfig
from tokenleap.control import Fixed
from tokenleap.core.distribution import Distribution
from tokenleap.core.params import SamplingParams
from tokenleap.core.sampler import TreeDistributions
from tokenleap.core.tree import chain
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.lookups import NoDrafter
from tokenleap.drafters.self_draft import leave_out
from tokenleap.errors import CompatibilityError, ConfigError
from tokenleap.llm import LLM
from tokenleap.request import Request
from tokenleap.runtime.cuda import eager_network
from tokenleap.runtime.inputs import PassInputs, RowNodes
from tokenleap.runtime.kv_slab import KVSlab
from tokenleap.runtime.network import LOGITS, Network
from tokenleap.runtime.passes import INTERNAL_KEY
from tokenleap.runtime.target import Target
from tokenleap.speculation import Strategy
from tokenleap.tuning.skip_sets import KINDS, Run, SkipSet

__all__ = ["LayerLaboratory", "Text", "layers_of"]

MAX_GAMMA = 10
"""Longest draft that the search considers."""
MAX_TEXTS = 32
"""Maximum prompts that are used, since their KV stays in memory."""
PASSES = 11
"""Timed passes per skip set, in turn with the whole model; the median counts."""
CHUNK = 256
"""Positions per pass."""


def layers_of(skip: SkipSet) -> dict[str, tuple[int, ...]]:
    """The layers of a skip set as options of `layer_skip`."""
    return {
        f"skip_{kind}": tuple(sorted(s.layer for s in skip if s.kind == kind)) for kind in KINDS
    }


class Text:
    """A prompt and the target's continuation, with the target's distributions and KV."""

    def __init__(self, request: Request, model: Target) -> None:
        self.prompt = list(request.prompt_ids)
        self.average = self.prompt + request.output_ids[: len(request.output_ids) // 2]
        """Context of the average length while generating."""
        self._sampler = request.sampler
        self._roots = range(len(self.prompt) - 1, len(request.token_ids) - 1)
        self._tokens = torch.tensor(request.token_ids)
        self._slab = KVSlab()
        self._slab.add_row()
        for part in _chunks(range(self._roots.start)):
            self._pass(model, part, commit=True)
        self._p = self._distributions(model, commit=True)

    @property
    def positions(self) -> int:
        """The number of generated tokens."""
        return len(self._roots)

    def betas(self, model: Target) -> list[float]:
        """Sum of min(p, q) for every generated token, with q from `model` on the target's KV."""
        drafted = self._distributions(model, commit=False)
        return [p.overlap(q) for p, q in zip(self._p, drafted, strict=True)]

    def _distributions(self, model: Target, *, commit: bool) -> list[Distribution]:
        """The sampler's distribution of every generated token, by this model."""
        passes = [self._pass(model, part, commit=commit) for part in _chunks(self._roots)]
        tokens = self._tokens[self._roots.start : self._roots.stop].tolist()
        distributions = TreeDistributions(torch.cat(passes), chain(tokens), self._sampler, ())
        return [distributions[node] for node in range(len(tokens))]

    @torch.inference_mode()
    def _pass(self, model: Target, part: range, *, commit: bool) -> Tensor:
        """Logits [n, V] of one pass, whose KV is appended to the committed KV.

        A position sees its own new KV and the KV of all positions before it. That is the committed
        KV if it exists, and otherwise the new KV of this pass.
        """
        committed, network = self._slab.lengths[0], eager_network(model.network)
        nodes = RowNodes(
            start=committed,
            tokens=self._tokens[part.start : part.stop].tolist(),
            positions=part,
            prefixes=part,
            tails=[[committed + node] for node in range(len(part))],
        )
        size = max(len(part), network.least_nodes)
        span = self._slab.begin(0, [committed], [len(part)], size)
        inputs = PassInputs([nodes], 0, size, span, model.dtype, model.device)
        logits = network.forward(inputs, self._slab, LOGITS).scores
        if commit:
            self._slab.commit(0, range(len(part)))
        return logits[: len(part)]


def _chunks(positions: range) -> list[range]:
    return [positions[first : first + CHUNK] for first in range(0, len(positions), CHUNK)]


class LayerLaboratory(Laboratory):
    """A model with calibration texts: the `Objective` of the search."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        if self._target.reads_source:
            raise CompatibilityError(
                "layers are chosen for decoder-only models, and this is an encoder-decoder."
            )
        self.num_layers = self._target.network.num_layers
        every = range(self.num_layers)
        self._target.network.without(every, every)  # refuse the architecture before any work
        self._texts: list[Text] = []
        self._params = SamplingParams()
        self.verify_cost: Sequence[float] = ()

    @property
    def num_texts(self) -> int:
        """The number of calibration texts."""
        return len(self._texts)

    @property
    def temperature(self) -> float:
        """The temperature of the texts."""
        return self._params.temperature

    @property
    def positions(self) -> int:
        """The number of generated tokens of all texts."""
        return sum(text.positions for text in self._texts)

    def calibrate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Generate the texts that the other methods measure on."""
        assert params.seed is not None
        self._params = params
        self._texts = []
        for prompt in prompts[:MAX_TEXTS]:
            if self._texts and enough():
                break
            self._texts.append(Text(self._continue(prompt, NoDrafter(), 0), self._target))
        if self.positions == len(self._texts):
            raise ConfigError(
                "every output ends at its first token, so there is nothing to draft. Take other "
                "prompts or more tokens."
            )
        seconds = self._time_passes(self._texts[0].average, MAX_GAMMA)
        self.verify_cost = tuple(costs / seconds[0] for costs in seconds)

    def alpha(self, skip: SkipSet) -> float:
        """See `Objective.alpha`: corollary 3.6 of Leviathan et al. (2023), over all positions."""
        model = self._target.with_network(self._without(skip))
        return fmean(beta for text in self._texts for beta in text.betas(model))

    def cost(self, skip: SkipSet) -> float:
        model = self._target.with_network(self._without(skip))
        *context, root = self._texts[0].average
        key = INTERNAL_KEY
        seconds: dict[Any, list[float]] = {self._target: [], model: []}
        self._target.add(key)
        try:
            self._target.prefill(key, context)
            for _ in range(PASSES):
                for scorer, times in seconds.items():
                    began = time.perf_counter()
                    scorer.verify([key], [chain([root])])
                    self._wait()
                    times.append(time.perf_counter() - began)
        finally:
            self._target.remove(key)
        return median(seconds[model]) / median(seconds[self._target])

    def measure(self, skip: SkipSet, gamma: int) -> Run:
        """See `Objective.measure`; every text runs with and without drafts, under the same load."""
        fields: dict[str, Any] = {"method": "layer_skip", **layers_of(skip)}
        drafter = self._strategies.drafter(SpeculativeConfig.parse(fields), self._rule)
        plain, drafted = _Speed(), _Speed()
        ways: list[tuple[Drafter, int, _Speed]]
        ways = [(NoDrafter(), 0, plain), (drafter, gamma, drafted)]
        if eager_network(self._target.network) is not self._target.network:
            # Capture the drafter's CUDA graphs before the timed runs.
            self._continue(self._texts[0].prompt, drafter, gamma)
        for text in self._texts:
            for how, length, speed in ways:
                speed.add(self._continue(text.prompt, how, length))
            ways.reverse()
        return Run(drafted.tokens_per_second, plain.tokens_per_second)

    def _without(self, skip: SkipSet) -> Network:
        return leave_out(self._target.network, layers_of(skip))

    def _continue(self, prompt: Sequence[int], drafter: Drafter, gamma: int) -> Request:
        strategy = Strategy(drafter, Fixed(gamma), self._rule)
        return self._generate(prompt, self._params, strategy)[0]


class _Speed:
    """Tokens and seconds of several outputs, without their prefill."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0, 0.0

    def add(self, request: Request) -> None:
        """Count one output."""
        self._tokens += request.metrics.generated_tokens
        self._seconds += request.metrics.seconds - request.metrics.prefill_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all outputs."""
        return self._tokens / self._seconds
