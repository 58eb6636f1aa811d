"""`SpeculativeConfig`: how to draft and what to accept, in one validated object.

Each drafter and each acceptance rule declares its own options in its own file. This file finds them
through the registries and knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from annotated_types import Ge, Le
from pydantic import ConfigDict, Strict, model_validator

from tokenleap.control import Controller, Fixed, controller_class
from tokenleap.control.cost_model import CostModel
from tokenleap.core.acceptance import AcceptanceRule, rule_class
from tokenleap.core.config import Config
from tokenleap.drafters.base import Drafter, DrafterOptions, with_method
from tokenleap.drafters.online import OnlineOptions
from tokenleap.drafters.registry import drafter_spec, spec_of
from tokenleap.drafters.shapes import MAX_NODES
from tokenleap.drafters.spec import DrafterSpec
from tokenleap.errors import ConfigError

_SYNTHETIC = "use 'acceptance': {{'rule': 'synthetic', 'acceptance_{name}': ...}}."


class SpeculativeConfig(Config):
    """How to draft, how much, and what to accept.

    Args:
        method: a name that `tokenleap methods` lists, or a `Drafter`. If only `model` is given, it
            is `draft_model`; without both it is `none`.
        num_speculative_tokens: most tokens drafted per step (gamma); None takes the method's
            default.
        model: the draft model for methods that use one: a path, an alias, a loaded
            `PreTrainedModel`, or an `LLM`, whose weights both then share. For `eagle`, `parallel`,
            `medusa`, `hydra`, `blockwise`, `mlp_speculator` and `pass`, the folder of what was
            trained.
        acceptance: a rule's name, a dict of its name (`rule`) and its options, or an
            `AcceptanceRule`.
        controller: how much to draft from step to step: a controller's name, a dict of its name
            (`rule`) and its options, or a `Controller`, which has its own
            `num_speculative_tokens`. The default is `cost_model` where the output does not
            depend on draft lengths (rule `coupled`). It drafts only where that pays. Elsewhere the
            default is `fixed`, because `cost_model` reads the clock, and the clock must not change
            the output. Methods that read their next draft from the pass over the last one
            (`lookahead`, `pad`, `pass`) also default to `fixed`.
        online: how the drafter learns while it serves: a dict of `OnlineOptions`. None is off.

    The method's own fields (`prompt_lookup_max`, `draft_temperature`, ...) are given in the same
    way. The method's options class validates them, and `options` holds them.
    """

    model_config = ConfigDict(frozen=True, extra="allow", arbitrary_types_allowed=True)

    foreign_names: ClassVar[Mapping[str, str]] = {
        "assistant_model": "use 'model'.",
        "speculative_model": "use 'model'.",
        "draft_model": "use 'model'.",
        "prompt_lookup_num_tokens": "use method 'ngram' with 'num_speculative_tokens'.",
        "num_assistant_tokens": "use 'num_speculative_tokens'.",
        "rejection_sample_method": "use 'acceptance': 'rejection', 'block' or 'synthetic'.",
        "synthetic_acceptance_rates": _SYNTHETIC.format(name="rates"),
        "synthetic_acceptance_length": _SYNTHETIC.format(name="length"),
    }

    method: str | Drafter = "none"
    num_speculative_tokens: Annotated[int, Strict(), Ge(0), Le(MAX_NODES)] | None = None
    model: Any = None
    acceptance: str | dict[str, Any] | AcceptanceRule = "coupled"
    controller: str | dict[str, Any] | Controller | None = None
    online: OnlineOptions | None = None

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig:
        """Convert what `LLM(speculative_config=...)` takes; None means no speculation."""
        if isinstance(value, SpeculativeConfig):
            return value
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                "speculative_config must be a dict or a SpeculativeConfig, "
                f"got {type(value).__name__}."
            )
        return cls(**dict(value or {}))

    @model_validator(mode="before")
    @classmethod
    def _infer_method(cls, value: Any) -> Any:
        return with_method(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        _ = self.options, self.rule, self.controller_options
        spec, name = self.drafter_spec, self.method_name
        if "method" not in self.model_fields_set:
            for field in ("num_speculative_tokens", "controller", "online"):
                if getattr(self, field):
                    raise ConfigError(
                        f"{field} needs a method that drafts, such as 'method': 'ngram', or a "
                        "draft model as 'model'. `tokenleap methods` lists all."
                    )
        given = self.controller
        if isinstance(given, Controller) and self.num_speculative_tokens is not None:
            raise ConfigError(
                f"num_speculative_tokens: the controller that was given, {type(given).__name__}, "
                f"has its own ({given.num_speculative_tokens}): remove one of the two."
            )
        implied = self.options.default_num_speculative_tokens() or 0
        if self.num_speculative_tokens is None and implied > MAX_NODES:
            raise ConfigError(
                f"method '{name}' would draft {implied} tokens with these options, more than "
                f"{MAX_NODES}: lower them, or set num_speculative_tokens."
            )
        if spec.takes_model and self.model is None:
            raise ConfigError(f"method '{name}' needs a draft model: set 'model'.")
        if self.takes_head and not isinstance(self.model, str | Path):
            raise ConfigError(f"method '{name}' needs a trained head: set 'model' to its folder.")
        if self.model is not None and not (spec.takes_model or spec.takes_head):
            raise ConfigError(f"method '{name}' takes no draft model: remove 'model'.")
        return self

    @property
    def takes_head(self) -> bool:
        """Whether `model` names the folder of a trained head, and not a draft model."""
        return self.drafter_spec.takes_head and not self._passes_a_model_on

    @property
    def _passes_a_model_on(self) -> bool:
        """Whether its inner drafter takes the model, and takes draft models of all kinds."""
        inner = dict(self.options).get("drafter")
        if not self.drafter_spec.takes_head or inner is None:
            return False
        SpeculativeConfig.parse({**inner, "model": self.model})
        return drafter_spec(inner["method"]).takes_model

    @property
    def drafter_spec(self) -> DrafterSpec:
        """The registry's entry for `method`."""
        if isinstance(self.method, Drafter):
            return spec_of(self.method)
        return drafter_spec(self.method)

    @property
    def method_name(self) -> str:
        """The method's name, or the class name of a `Drafter`."""
        return type(self.method).__name__ if isinstance(self.method, Drafter) else self.method

    @cached_property
    def options(self) -> DrafterOptions:
        """The method's own fields, validated."""
        options_class = self.drafter_spec.options
        extra = self.model_extra or {}
        for name in extra:
            known = [*self.field_names(), *options_class.field_names()]
            if name not in known:
                raise ConfigError(
                    f"speculative_config for method '{self.method_name}' has no field '{name}': "
                    f"{self.advice(name, known)}"
                )
        return options_class(**extra)

    @property
    def gamma(self) -> int:
        """`gamma_under` its own controller."""
        return self.gamma_under(self.controller_name)

    def gamma_under(self, controller: str) -> int:
        """`num_speculative_tokens`, else what the method's options imply, else its default."""
        if isinstance(self.controller, Controller):
            return self.controller.num_speculative_tokens
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if controller == CostModel.name and (longest := self.options.longest_chain()) is not None:
            return longest
        implied = self.options.default_num_speculative_tokens()
        return self.drafter_spec.default_num_speculative_tokens if implied is None else implied

    @property
    def names_rule(self) -> bool:
        """Whether an acceptance rule was given."""
        return "acceptance" in self.model_fields_set

    @cached_property
    def rule(self) -> AcceptanceRule:
        """The acceptance rule with its options, validated."""
        if isinstance(self.acceptance, AcceptanceRule):
            return self.acceptance
        kind = rule_class(_name_in("acceptance", self.acceptance))
        return kind(kind.Options(**_options_in(self.acceptance)))

    @property
    def controller_name(self) -> str:
        """The controller's name under the configuration's own rule."""
        return self.controller_under(self.rule)

    def controller_under(self, rule: AcceptanceRule) -> str:
        """The controller's name under an acceptance rule; the default depends on the rule."""
        if isinstance(self.controller, Controller):
            return self.controller.name
        if self.controller is not None:
            return _name_in("controller", self.controller)
        may_vary = rule.ignores_draft_lengths and not self.steady
        return (CostModel if may_vary and self.gamma_under(Fixed.name) else Fixed).name

    @cached_property  # else a configuration at depth n would be read 2^n times
    def steady(self) -> bool:
        """Whether the method, or one that it combines, needs drafts of constant size."""
        options = dict(self.options)
        combined = (SpeculativeConfig.parse(fields) for fields in options.get("drafters") or ())
        # That of a cascade drafts for the draft model.
        beside = None if self.method_name == "cascade" else options.get("drafter")
        return (
            self.drafter_spec.steady
            or any(config.steady for config in combined)
            or (beside is not None and drafter_spec(beside["method"]).steady)
        )

    @property
    def controller_options(self) -> Config:
        """The controller's own options, validated."""
        if isinstance(self.controller, Controller):
            return self.controller.options
        return controller_class(self.controller_name).Options(**_options_in(self.controller))

    def as_dict(self) -> dict[str, Any]:
        """All fields with their effective values, for JSON; loaded models become class names."""
        return {
            "method": self.method_name,
            "num_speculative_tokens": self.gamma,
            "model": _for_json(self.model),
            "acceptance": {"rule": self.rule.name, **self.rule.options.model_dump()},
            "controller": {"rule": self.controller_name, **self.controller_options.model_dump()},
            **({} if self.online is None else {"online": self.online.model_dump()}),
            **_for_json(self.options.model_dump(by_alias=True)),
        }


def _for_json(value: Any) -> Any:
    """Convert a value for JSON; loaded models at any depth become class names."""
    if isinstance(value, Mapping):
        return {key: _for_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value) if isinstance(value, Path) else type(value).__name__


def _name_in(field: str, value: str | Mapping[str, Any]) -> str:
    name = value if isinstance(value, str) else value.get("rule")
    if not isinstance(name, str):
        raise ConfigError(f"{field} given as a dict needs its name under 'rule'.")
    return name


def _options_in(value: object) -> dict[str, Any]:
    return {k: v for k, v in value.items() if k != "rule"} if isinstance(value, dict) else {}
