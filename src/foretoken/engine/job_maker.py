"""Makes the engine's jobs: the requests of a prompt, and how they speculate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretoken.config import SpeculativeConfig
from foretoken.core.params import Sampling, SamplingParams
from foretoken.core.references import NO_REFERENCES, References
from foretoken.engine.jobs import Job
from foretoken.engine.prompts import Prompt, as_list, one_per_prompt
from foretoken.engine.references import ReferenceReader, check_quotes
from foretoken.engine.strategies import Speculative, StrategyFactory
from foretoken.engine.turns import Turns
from foretoken.errors import CompatibilityError
from foretoken.request import Request
from foretoken.speculation import Speculation, Strategy

__all__ = ["JobMaker"]


class JobMaker:
    """Makes jobs for one engine.

    Args:
        make: makes their requests (see `LLMEngine.make_requests`).
        references: reads what their drafts may quote.
        strategies: builds their strategies.
        speculation: has the default one.
        turns: the engine's.
        chose_drafter: whether the default was chosen by the user, so that it is for beams, too.
    """

    def __init__(
        self,
        make: Callable[..., list[Request]],
        references: ReferenceReader,
        strategies: StrategyFactory,
        speculation: Speculation,
        turns: Turns,
        *,
        chose_drafter: bool,
    ) -> None:
        self._make = make
        self._references = references
        self._strategies = strategies
        self._speculation = speculation
        self._turns = turns
        self._chose_drafter = chose_drafter

    def jobs(
        self,
        prompts: Any,
        params: Any,
        configs: Any,
        references: Any,
        prediction: Any,
        *,
        trace: bool,
    ) -> list[Job]:
        """The jobs of a call of `LLM.generate`; arguments and errors as there."""
        listed = as_list(prompts)
        all_params = one_per_prompt("sampling_params", listed, params)
        all_configs = one_per_prompt("speculative_config", listed, configs)
        texts = self._references.read_all(len(listed), references)
        expected = self._references.predictions(len(listed), prediction)
        jobs = []
        columns = (listed, all_params, all_configs, texts, expected)
        for index, each in enumerate(zip(*columns, strict=True)):
            jobs.append(self.job(*each, trace=trace))
            jobs[-1].prompt_index = index
        return jobs

    def job(
        self,
        prompt: Prompt,
        params: Sampling = None,
        speculative_config: Speculative = None,
        references: References = NO_REFERENCES,
        prediction: References = NO_REFERENCES,
        *,
        trace: bool = False,
    ) -> Job:
        """Check a prompt and make its requests.

        Arguments and errors are those of `LLMEngine.add_request`.
        """
        params = SamplingParams.parse(params)
        beams, built = params.beam_width > 1, list[Strategy | None]()
        if beams and prediction:
            raise CompatibilityError(
                "prediction: a beam search follows none: give the text as `references`."
            )

        lent = self._strategies.lent_to(speculative_config)

        def build() -> None:
            strategy = self._strategies.strategy(speculative_config, lent)
            if prediction:
                own = strategy or self._speculation.default
                strategy = self._strategies.for_prediction(speculative_config, own)
            built.append(self._beam_strategy(strategy) if beams else strategy)

        if speculative_config is not None or beams or prediction:
            # Building may load a model or time passes, so no thread may run a step meanwhile. What
            # rows keep of a source, and so whether a request fits, depends on the drafters.
            self._turns.take(build)
        requests = self._make(prompt, params, references, prediction, trace=trace)
        if trace:
            for request in requests:
                request.pass_costs = self._strategies.costs
        job = Job(prompt, requests, built[0] if built else None)
        if references:
            strategy = job.strategy or self._speculation.default
            default = self._strategies.config if self._chose_drafter or not beams else None
            named = SpeculativeConfig.parse(speculative_config or default)
            check_quotes(named.method_name, strategy.drafter)
        return job

    def _beam_strategy(self, given: Strategy | None) -> Strategy:
        """How a beam search speculates: with the drafter that the user chose, if there is one."""
        if given is None and self._chose_drafter:
            given = self._speculation.default
        return self._strategies.for_beams(given)
