"""Drafters, rules and controllers from outside: as instances, and through entry points."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner, Result

from tests.drafting import RandomTrees, Scripted, drafter_of
from tests.matrix import PROMPTS, tiny_llm
from tests.tiny import VOCAB_SIZE, tiny_model
from tokenleap import (
    LLM,
    CompatibilityError,
    ConfigError,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
)
from tokenleap.cli import app
from tokenleap.control import CONTROLLERS, Budget, Controller, controller_class, within
from tokenleap.control.cost_model import CostModel
from tokenleap.control.lookup_models import HybridModel, LookupModel
from tokenleap.core.acceptance import RULES, AcceptanceRule, Accepted, TargetDistributions
from tokenleap.core.acceptance.rules import Block, Lenient
from tokenleap.core.noise import StepNoise
from tokenleap.core.tree import Draft
from tokenleap.drafters.base import Drafter
from tokenleap.drafters.registry import METHODS
from tokenleap.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=12)

MODULE = '''
"""A package with a drafter, a rule and a controller."""

from tokenleap.control import Controller, within
from tokenleap.core.acceptance.base import AcceptanceRule, Accepted
from tokenleap.core.config import Config
from tokenleap.core.tree import Draft, chain
from tokenleap.drafters.base import Drafter, DrafterOptions
from tokenleap.drafters.spec import DrafterSpec


class ParrotOptions(DrafterOptions):
    parrot_token: int = 7


class Parrot(Drafter):
    def __init__(self, options):
        self.options = options

    def propose(self, batch, budgets):
        token = self.options.parrot_token
        return [
            Draft.deterministic(chain([request.root, *[token] * budget.chain]))
            for request, budget in zip(batch, budgets, strict=True)
        ]


SPEC = DrafterSpec(
    ParrotOptions,
    lambda parts: Parrot(parts.options),
    3,
    summary="always the same token, as parrots do",
)


class Shy(AcceptanceRule):
    """Accepts nothing, however probable it is.

    More about it.
    """

    name = "shy"
    lossless = True
    takes_trees = True

    def accept(self, draft, p, noise):
        return Accepted((), noise.draw(p[0], 0), draft.tree.children[0], "too shy")


class Steady(Controller):
    class Options(Config):
        steady_length: int = 2

    name = "steady"
    summary = "always the same, if it fits"

    def budgets(self, batch, rows):
        return [within(request, self.options.steady_length) for request in batch]


NOT_A_PART = "neither a drafter nor a rule"
'''

Install = Callable[..., str]
_numbers = count()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with these entry points on the path; `{module}` is its module."""

    def installed(
        drafters: dict[str, str] | None = None,
        acceptance: dict[str, str] | None = None,
        controllers: dict[str, str] | None = None,
        source: str = MODULE,
    ) -> str:
        module = f"tokenleap_plugin_{next(_numbers)}"
        folder = tmp_path / module
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = []
        groups = {"drafters": drafters, "acceptance": acceptance, "controllers": controllers}
        for group, points in groups.items():
            lines.append(f"[tokenleap.{group}]")
            lines += [f"{name} = {value}" for name, value in (points or {}).items()]
        text = "\n".join(lines).replace("{module}", module)
        (info / "entry_points.txt").write_text(text + "\n")
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        monkeypatch.setitem(sys.modules, module, None)  # so that it is taken out afterwards
        del sys.modules[module]
        return module

    return installed


@pytest.fixture
def parrots(install: Install) -> str:
    """A distribution with a drafter, a rule and a controller that work."""
    return install(
        {"parrot": "{module}:SPEC"}, {"shy": "{module}:Shy"}, {"steady": "{module}:Steady"}
    )


def tokens(llm: LLM, params: SamplingParams = SEEDED) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# Instances


class Never(AcceptanceRule):
    """Accepts nothing."""

    name: ClassVar[str] = "never"
    lossless: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True

    def accept(self, draft: Draft, p: TargetDistributions, noise: StepNoise) -> Accepted:
        return Accepted((), noise.draw(p[0], 0), draft.tree.children[0], "never")


@pytest.mark.parametrize("name", ["drafts_trees", "hidden_layers"])
def test_traits_are_no_class_attributes(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Own\.{name}: set traits = DrafterTraits\({name}=...\)"):
        type("Own", (Drafter,), {name: True})


def test_a_rule_of_the_users_own() -> None:
    model = tiny_model()
    config = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
    llm = LLM(model, speculative_config={**config, "acceptance": Never()})
    outputs = llm.generate(PROMPTS, SEEDED)
    assert [output.token_ids for output in outputs] == tokens(LLM(model))
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
    assert sum(output.metrics.num_accepted_tokens for output in outputs) == 0
    assert llm.speculative_config.as_dict()["acceptance"] == {"rule": "never"}


def test_a_rule_with_options_as_an_instance() -> None:
    model = tiny_model()
    config = {"method": "ngram_table", "controller": "fixed"}
    given = Lenient(Lenient.Options(lenience=0.4))
    by_name = {"rule": "lenient", "lenience": 0.4}
    ours, named = (
        LLM(model, speculative_config={**config, "acceptance": rule}) for rule in (given, by_name)
    )
    assert tokens(ours) == tokens(named)
    assert ours.speculative_config.rule is given
    assert ours.speculative_config.as_dict() == named.speculative_config.as_dict()


def test_a_rule_of_one_request() -> None:
    llm = LLM(tiny_model(), speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    expected = tokens(LLM(tiny_model()))
    own = {"method": "ngram", "prompt_lookup_min": 1, "acceptance": Never(), "controller": "fixed"}
    outputs = llm.generate(PROMPTS, SEEDED, speculative_config=[own, None, own, None, own])
    assert [output.token_ids for output in outputs] == expected
    assert outputs[0].metrics.num_draft_tokens > 0 == outputs[0].metrics.num_accepted_tokens


def test_a_rule_that_does_not_fit_the_drafter() -> None:
    drafter = RandomTrees(lambda _: [], VOCAB_SIZE)
    with pytest.raises(CompatibilityError, match=r"'block' takes chains only.*RandomTrees"):
        LLM(tiny_model(), speculative_config={"method": drafter, "acceptance": Block()})


@pytest.mark.parametrize("wrong", [Never, 3, object()])
def test_what_is_no_rule(wrong: object) -> None:
    with pytest.raises(ConfigError, match="acceptance") as caught:
        LLM(tiny_model(), speculative_config={"method": "ngram", "acceptance": wrong})
    assert "\n" not in str(caught.value)


def known_drafter(model_tokens: list[tuple[int, ...]]) -> Scripted:
    of_prompt = dict(zip(map(tuple, PROMPTS), model_tokens, strict=True))
    return Scripted(lambda request: of_prompt[request.prompt_ids], VOCAB_SIZE)


def test_a_drafter_of_the_users_own() -> None:
    model = tiny_model()
    plain = tokens(LLM(model), GREEDY)
    drafter = known_drafter(plain)
    llm = LLM(model, speculative_config={"method": drafter, "controller": "fixed"})
    assert drafter_of(llm) is drafter
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == plain
    assert all(output.metrics.acceptance_rate == 1 for output in outputs)
    described = llm.speculative_config.as_dict()
    assert described["method"] == "Scripted"
    assert described["num_speculative_tokens"] == 5
    json.dumps(described)


def test_a_drafter_of_one_request() -> None:
    """The same instance is one strategy, however often it is given."""
    llm = LLM(tiny_model())
    drafter = known_drafter(tokens(LLM(tiny_model()), GREEDY))
    config = {"method": drafter, "controller": "fixed", "num_speculative_tokens": 3}
    for _ in range(2):
        first, second = llm.generate(PROMPTS[:2], GREEDY, speculative_config=[config, None])
        assert first.metrics.acceptance_rate == 1
        assert second.metrics.num_drafts == 0
    assert [each.drafter for each in llm.engine.strategies.kept()] == [drafter]


def test_a_drafter_inside_another() -> None:
    plain = tokens(LLM(tiny_model()), GREEDY)
    drafters = [{"method": "ngram"}, {"method": known_drafter(plain)}]
    llm = LLM(tiny_model(), speculative_config={"method": "ensemble", "drafters": drafters})
    assert tokens(llm, GREEDY) == plain
    described = json.dumps(llm.speculative_config.as_dict())
    assert "Scripted" in described


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_lookup_max": 3}, "method 'Scripted' has no field 'prompt_lookup_max'"),
        ({"model": "smollm2-135m"}, "method 'Scripted' takes no draft model"),
    ],
)
def test_a_drafter_is_given_with_its_options(fields: dict[str, object], message: str) -> None:
    drafter = Scripted(lambda _: [], VOCAB_SIZE)
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(method=drafter, **fields)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("wrong", [Scripted, 3, object()])
def test_what_is_no_drafter(wrong: object) -> None:
    with pytest.raises(ConfigError, match="method") as caught:
        LLM(tiny_model(), speculative_config={"method": wrong})
    assert "\n" not in str(caught.value)


class Growing(Controller):
    """Drafts one token more in every step."""

    name: ClassVar[str] = "growing"
    summary: ClassVar[str] = "one token more in every step"

    def setup(self) -> None:
        self.steps = 0

    def budgets(self, batch: Sequence[Request], rows: int) -> list[Budget]:
        self.steps += 1
        return [within(request, min(self.steps, self.num_speculative_tokens)) for request in batch]


def drafted_lengths(output: RequestOutput) -> list[int]:
    return [len(step.drafted) for step in output.trace]


def test_a_controller_of_the_users_own() -> None:
    """It is a template: two `LLM`s have a copy each."""
    model, given = tiny_model(), Growing(3)
    for _ in range(2):
        llm = LLM(model, speculative_config={"method": "random", "controller": given})
        (output,) = llm.generate(PROMPTS[:1], GREEDY)
        assert output.token_ids == tokens(LLM(model), GREEDY)[0]
        assert drafted_lengths(output)[:5] == [1, 2, 3, 3, 3]
        assert llm.speculative_config.gamma == 3
        assert llm.speculative_config.as_dict()["controller"] == {"rule": "growing"}
    assert given.steps == 0


def test_a_controller_of_one_request() -> None:
    llm = LLM(tiny_model(), speculative_config={"method": "random", "controller": "fixed"})
    own = {"method": "random", "controller": Growing(4)}
    outputs = llm.generate(PROMPTS[:2], GREEDY, speculative_config=[own, None])
    assert drafted_lengths(outputs[0])[:4] == [1, 2, 3, 4]
    assert set(drafted_lengths(outputs[1])[:4]) == {1}


@pytest.mark.parametrize("method", ["ngram", "draft_model", "hybrid"])
def test_cost_model_as_an_instance(method: str) -> None:
    kind = controller_class("cost_model", looks_up=method == "ngram", hybrid=method == "hybrid")
    given = kind(6, CostModel.Options(probe_every=5))
    llm = tiny_llm(tiny_model(), method, gamma=None, controller=given)
    assert llm.controller == "cost_model"
    assert tokens(llm) == tokens(LLM(tiny_model()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"controller": Growing}, "controller"),
        ({"controller": 3}, "controller"),
        ({"controller": Growing(2), "num_speculative_tokens": 4}, "has its own (2)"),
        ({"controller": LookupModel(4)}, "LookupModel does not fit RandomDrafter"),
        ({"controller": HybridModel(4)}, "HybridModel does not fit RandomDrafter"),
    ],
)
def test_what_is_no_controller_or_does_not_fit(fields: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, CompatibilityError), match="controller") as caught:
        LLM(tiny_model(), speculative_config={"method": "random", **fields})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Entry points


@pytest.mark.usefixtures("parrots")
def test_a_drafter_of_another_package() -> None:
    model = tiny_model()
    config = {"method": "parrot", "parrot_token": 9, "controller": "fixed"}
    llm = LLM(model, speculative_config=config)
    assert type(drafter_of(llm)).__name__ == "Parrot"
    assert llm.speculative_config.gamma == 3
    assert llm.speculative_config.as_dict()["parrot_token"] == 9
    outputs = llm.generate(PROMPTS, SEEDED)
    assert [output.token_ids for output in outputs] == tokens(LLM(model))
    drafted = [token for step in outputs[0].trace for token in step.drafted]
    assert set(drafted) == {9}


@pytest.mark.usefixtures("parrots")
def test_a_rule_of_another_package() -> None:
    config = {"method": "ngram", "prompt_lookup_min": 1, "acceptance": "shy"}
    llm = LLM(tiny_model(), speculative_config={**config, "controller": "fixed"})
    outputs = llm.generate(PROMPTS, SEEDED)
    assert [output.token_ids for output in outputs] == tokens(LLM(tiny_model()))
    assert outputs[0].metrics.num_draft_tokens > 0 == outputs[0].metrics.num_accepted_tokens


@pytest.mark.usefixtures("parrots")
def test_a_controller_of_another_package() -> None:
    controller = {"rule": "steady", "steady_length": 3}
    llm = LLM(tiny_model(), speculative_config={"method": "random", "controller": controller})
    (output,) = llm.generate(PROMPTS[:1], SEEDED)
    assert set(drafted_lengths(output)[:4]) == {3}
    assert llm.controller == "steady"
    assert llm.speculative_config.as_dict()["controller"] == controller


@pytest.mark.usefixtures("parrots")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "parot"}, "unknown method 'parot': did you mean 'parrot'?"),
        ({"acceptance": "shyy"}, "unknown acceptance rule 'shyy': did you mean 'shy'?"),
        ({"method": "zzz"}, "parrot"),  # among the known
        ({"acceptance": "zzz"}, "shy"),
        ({"method": "ngram", "controller": "stedy"}, "did you mean 'steady'?"),
        ({"method": "ngram", "controller": {"rule": "steady", "x": 1}}, "no field 'x'"),
        ({"method": "parrot", "parrot_tokn": 1}, "did you mean 'parrot_token'?"),
        ({"method": "parrot", "parrot_token": "x"}, "parrot_token"),
        ({"acceptance": {"rule": "shy", "x": 1}}, "no field 'x'"),
    ],
)
def test_their_names_are_known_where_names_are_wrong(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("parrots")
def test_they_are_listed() -> None:
    shown = cli("methods")
    assert shown.exit_code == 0
    assert "parrot" in shown.stdout
    assert "always the same token, as parrots do" in shown.stdout
    assert "parrot_token" in shown.stdout
    assert "Accepts nothing, however probable it is" in shown.stdout
    listed = json.loads(cli("methods", "--json").stdout)
    assert listed["methods"][-1] == {
        "name": "parrot",
        "num_speculative_tokens": 3,
        "summary": "always the same token, as parrots do",
        "fields": ["parrot_token"],
    }
    assert listed["acceptance"][-1] == {
        "name": "shy",
        "lossless": True,
        "summary": "Accepts nothing, however probable it is",
        "fields": [],
    }
    assert listed["controllers"][-1] == {
        "name": "steady",
        "summary": "always the same, if it fits",
        "fields": ["steady_length"],
    }


def test_our_own_names_come_first(install: Install) -> None:
    """A package cannot put something else in the place of ours."""
    install({"ngram": "{module}:SPEC"}, {"coupled": "{module}:Shy"}, {"fixed": "{module}:Steady"})
    assert controller_class("fixed") is CONTROLLERS["fixed"]
    config = SpeculativeConfig(method="ngram")
    assert config.drafter_spec is METHODS["ngram"]
    assert type(config.rule) is RULES["coupled"]
    listed = json.loads(cli("methods", "--json").stdout)
    assert [one["name"] for one in listed["methods"]] == list(METHODS)
    assert [one["name"] for one in listed["acceptance"]] == list(RULES)
    assert [one["name"] for one in listed["controllers"]] == list(CONTROLLERS)


BROKEN = {
    "a module that is not there": ("no_such_module_at_all:SPEC", MODULE, "no_such_module_at_all"),
    "a name that is not there": ("{module}:NOTHING", MODULE, "NOTHING"),
    "no module at all": ("not a module", MODULE, "not a module"),
    "a module that fails": ("{module}:SPEC", "raise RuntimeError('bad\\nluck')", "bad"),
    "a module that is not Python": ("{module}:SPEC", "def (", "invalid syntax"),
    "something else": ("{module}:NOT_A_PART", MODULE, "neither a drafter nor a rule"),
    "something hard to describe": ("{module}:X", "X = 'two\\nlines'", "has to name"),
}


GROUPS = {
    "drafters": ("methods", {"method": "broken"}),
    "acceptance": ("acceptance", {"acceptance": "broken"}),
    "controllers": ("controllers", {"method": "ngram", "controller": "broken"}),
}
"""Of each group of entry points: its part of the listing, and a configuration."""


@pytest.mark.parametrize("case", list(BROKEN))
@pytest.mark.parametrize("group", list(GROUPS))
def test_broken_entry_points_give_one_line(install: Install, case: str, group: str) -> None:
    point, source, said = BROKEN[case]
    module = install(**{group: {"broken": point}}, source=source)
    listing, fields = GROUPS[group]
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(fields)
    message = str(caught.value)
    assert "'broken'" in message
    assert f"tokenleap.{group}" in message
    assert said.replace("{module}", module) in message
    assert "\n" not in message
    # What works goes on working, and the listing says what does not.
    assert SpeculativeConfig(method="ngram").rule.name == "coupled"
    shown = cli("methods", "--json")
    assert shown.exit_code == 0
    listed = json.loads(shown.stdout)[listing]
    assert listed[-1]["name"] == "broken"
    assert message in listed[-1]["summary"]
    assert cli("methods").exit_code == 0


def test_a_drafter_is_no_rule(install: Install) -> None:
    install({"wrong": "{module}:Shy"}, {"wrong": "{module}:SPEC"}, {"wrong": "{module}:Shy"})
    with pytest.raises(ConfigError, match="has to name a subclass of Controller"):
        SpeculativeConfig(method="ngram", controller="wrong")
    with pytest.raises(ConfigError, match="has to name a DrafterSpec"):
        SpeculativeConfig(method="wrong")
    with pytest.raises(ConfigError, match="has to name a subclass of AcceptanceRule"):
        SpeculativeConfig(acceptance="wrong")
