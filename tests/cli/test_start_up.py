"""Commands that need no model do not load PyTorch: the loaded modules tell."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from tokenleap.drafters.registry import METHODS

HEAVY = [
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy"),
    *("scipy", "pandas", "matplotlib", "gguf", "llguidance", "accelerate", "prompt_toolkit"),
    *("fastapi", "starlette", "uvicorn", "prometheus_client"),
]

RUN = """
import contextlib, io, json, sys
import tokenleap

heavy, commands = json.loads(sys.argv[1])
loaded = lambda: [name for name in heavy if name in sys.modules]
print(json.dumps([0, "the package itself", "", loaded()]))
from tokenleap.cli import app

for argv in commands:
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(argv)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue(), loaded()]))
"""

NAMES = (
    "generate chat serve demo trace plan bench tree tune-layers train export check models ngrams "
    "datastore methods doctor"
)
PAGES = [
    *([], ["--help"], ["--version"], ["models"]),
    *([name, "--help"] for name in NAMES.split()),
    *(["train", "eagle", "--help"], ["ngrams", "build", "--help"], ["generate", "--help-all"]),
    *(["pull", "--help"], ["list"], ["rm", "--help"], ["run", "--help"], ["ps", "--help"]),
]
LISTS = [["methods"], ["methods", "--json"]]
WRONG = {
    ("generate", "Hi", "--nope"): "--nope",
    ("generate", "Hi", "--method", "nogram"): "did you mean 'ngram'?",
    ("generate", "Hi", "--acceptance", "copuled"): "did you mean 'coupled'?",
    ("generate", "Hi", "--controller", "fixde"): "did you mean 'fixed'?",
    ("generate", "Hi", "--temperature", "-1"): "--temperature",
    ("generate", "Hi", "--runtime", "fast"): "--runtime",
    ("generate", "Hi", "--method", "ngram", "--speculative-config", '{"prompt_lookup": 3}'): (
        "did you mean 'prompt_lookup_m"
    ),
    ("generate", "Hi", "--method", "layer_skip", "--draft-model", "x"): "--draft-model",
    ("generate", "Hi", "--method", "medusa"): "add --draft-model with its folder",
    ("generate", "Hi", "--method", "eagle", "--draft-model", "x"): "there is no folder x",
    ("bench", "PROMPTS", "--method", "eagle", "--draft-model", "x"): "there is no folder x",
    ("run", "smollm2-135m", " ", "--json"): "the prompt is empty",
    ("chat", "--method", "nogram"): "did you mean 'ngram'?",
    ("serve", "smollm2-135m", "--method", "nogram"): "did you mean 'ngram'?",
    ("demo", "--method", "nogram"): "did you mean 'ngram'?",
    ("tree", "--method", "nogram"): "did you mean 'ngram'?",
    ("plan", "--measure", "--method", "nogram"): "did you mean 'ngram'?",
    ("bench", "PROMPTS", "--method", "nogram"): "did you mean 'ngram'?",
    ("bench", "PROMPTS", "--peers", "nobody"): "nobody",
    ("train", "eagel", "--out", "out"): "eagle",
    ("generat",): "generate",
}
THEORY = [["plan", "--alpha", "0.5"], ["tree", "--acceptance-vector", "0.7,0.1", "--nodes", "5"]]


class Ran(NamedTuple):
    """A command line's end, and the `HEAVY` modules that were there after it."""

    code: int
    out: str
    err: str
    loaded: list[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Ran]:
    """All commands, one after the other in one new process; the package itself as `import`."""
    prompts = tmp_path_factory.mktemp("start") / "prompts.txt"
    prompts.write_text("Hello\n")
    commands = [*PAGES, *LISTS, *map(list, WRONG), *THEORY]
    given = [[str(prompts) if word == "PROMPTS" else word for word in argv] for argv in commands]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([HEAVY, given])],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = [Ran(*json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip([("import",), *map(tuple, commands)], lines, strict=True))


def test_nothing_heavy_is_loaded(ran: dict[tuple[str, ...], Ran]) -> None:
    """NumPy is for the theory, which comes last."""
    for argv, result in ran.items():
        allowed = {"numpy"} if list(argv) in THEORY else set()
        assert {*result.loaded} <= allowed, argv


def test_help_pages(ran: dict[tuple[str, ...], Ran]) -> None:
    for argv in (*PAGES, *THEORY):
        assert ran[tuple(argv)].code == 0, argv
        assert ran[tuple(argv)].out, argv


def test_the_list_of_methods(ran: dict[tuple[str, ...], Ran]) -> None:
    table, text = (ran[tuple(argv)] for argv in LISTS)
    assert table.code == text.code == 0
    assert "prompt_lookup_max" in table.out
    listed = {method["name"]: method["fields"] for method in json.loads(text.out)["methods"]}
    assert listed.keys() >= METHODS.keys()
    assert {name: listed[name] for name in METHODS} == {
        name: spec.options.field_names() for name, spec in METHODS.items()
    }


@pytest.mark.parametrize(("argv", "message"), WRONG.items())
def test_wrong_options_and_names(
    ran: dict[tuple[str, ...], Ran], argv: tuple[str, ...], message: str
) -> None:
    assert ran[argv].code == 2
    assert message in ran[argv].err
