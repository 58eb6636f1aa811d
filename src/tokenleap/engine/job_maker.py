"""Makes the engine's jobs: the requests of a prompt, and how they speculate."""

from __future__ import annotations

from collections.abc import Sequence

from tokenleap.config import SpeculativeConfig
from tokenleap.core.params import SamplingParams
from tokenleap.engine.job_spec import JobSpec, ReadSpec
from tokenleap.engine.jobs import Job
from tokenleap.engine.references import ReferenceReader, check_quotes
from tokenleap.engine.request_maker import RequestMaker
from tokenleap.engine.strategies import StrategyFactory
from tokenleap.engine.turns import Turns
from tokenleap.errors import CompatibilityError
from tokenleap.speculation import Speculation, Strategy

__all__ = ["JobMaker"]


class JobMaker:
    """Makes jobs for one engine, in three stages.

    `read` and `make` may take long (tokens, grammars) and need no turn of the engine. `strategies`
    takes one turn for all prompts, or none if all speculate by default.

    Args:
        maker: makes their requests.
        references: reads what their drafts may quote.
        strategies: builds their strategies.
        speculation: has the default one.
        turns: the engine's.
        chose_drafter: whether the default was chosen by the user, so that it is for beams, too.
    """

    def __init__(
        self,
        maker: RequestMaker,
        references: ReferenceReader,
        strategies: StrategyFactory,
        speculation: Speculation,
        turns: Turns,
        *,
        chose_drafter: bool,
    ) -> None:
        self._maker = maker
        self._references = references
        self._strategies = strategies
        self._speculation = speculation
        self._turns = turns
        self._chose_drafter = chose_drafter

    def jobs(self, specs: Sequence[JobSpec]) -> list[Job]:
        """The jobs of some prompts, by all three stages; errors are those of `LLM.generate`."""
        read = self.read(specs)
        return self.make(read, self.strategies(read))

    def read(self, specs: Sequence[JobSpec]) -> list[ReadSpec]:
        """Check parameters and read texts; a text that several prompts share is read once.

        Raises:
            ConfigError: parameters or a configuration are out of range.
            PromptError: references or a prediction are malformed.
            CompatibilityError: a beam search has a prediction.
        """
        found = [
            ReadSpec(
                spec,
                SamplingParams.parse(spec.params, self._maker.sampling_defaults),
                None
                if spec.speculative_config is None
                else SpeculativeConfig.parse(spec.speculative_config),
                references,
                prediction,
            )
            for spec, references, prediction in zip(
                specs,
                self._references.read_all([spec.references for spec in specs]),
                self._references.predictions([spec.prediction for spec in specs]),
                strict=True,
            )
        ]
        if any(read.searches_beams and read.prediction for read in found):
            raise CompatibilityError(
                "prediction: a beam search follows none: give the text as `references`."
            )
        return found

    def strategies(self, specs: Sequence[ReadSpec]) -> list[Strategy | None]:
        """How the requests of each prompt speculate; None is the default.

        Building may load a model or time passes, so no thread may run a step meanwhile. What rows
        keep of a source, and so whether a request fits, depends on the drafters: call it before
        `make`.

        Raises:
            ConfigError, CompatibilityError: as `StrategyFactory`.
        """
        if not any(spec.needs_strategy for spec in specs):
            return [None] * len(specs)
        configs: list[SpeculativeConfig] = []
        for spec in specs:
            if spec.config is not None and spec.config not in configs:
                configs.append(spec.config)
        # Before the turn: it waits for those of other engines.
        lent = [self._strategies.lent_to(config) for config in configs]
        built: list[Strategy | None] = []

        def build() -> None:
            named = [
                self._strategies.strategy(config, models)
                for config, models in zip(configs, lent, strict=True)
            ]
            for spec in specs:
                strategy = None if spec.config is None else named[configs.index(spec.config)]
                if spec.prediction:
                    own = strategy or self._speculation.default
                    strategy = self._strategies.for_prediction(spec.config, own)
                built.append(self._beam_strategy(strategy) if spec.searches_beams else strategy)

        self._turns.take(build)
        return built

    def make(self, specs: Sequence[ReadSpec], strategies: Sequence[Strategy | None]) -> list[Job]:
        """The jobs of prompts whose strategies are built.

        Raises:
            PromptError: a prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: parameters need something that the model does not have.
            CompatibilityError: a drafter quotes no references.
        """
        pairs = enumerate(zip(specs, strategies, strict=True))
        return [self._job(spec, strategy, index) for index, (spec, strategy) in pairs]

    def _job(self, spec: ReadSpec, strategy: Strategy | None, index: int) -> Job:
        requests = self._maker.make(spec)
        if spec.given.trace:
            for request in requests:
                request.pass_costs = self._strategies.costs
        if spec.references:
            own = self._strategies.config
            default = own if self._chose_drafter or not spec.searches_beams else None
            method = SpeculativeConfig.parse(spec.config or default).method_name
            check_quotes(method, (strategy or self._speculation.default).drafter)
        return Job(spec.given.prompt, requests, strategy, prompt_index=index)

    def _beam_strategy(self, given: Strategy | None) -> Strategy:
        """How a beam search speculates: with the drafter that the user chose, if there is one."""
        if given is None and self._chose_drafter:
            given = self._speculation.default
        return self._strategies.for_beams(given)
