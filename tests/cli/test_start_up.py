"""Commands that need no model do not load PyTorch: the loaded modules tell."""

import json
import subprocess
import sys
from pathlib import Path

from tokenleap.drafters.registry import METHODS

HEAVY = [
    *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy"),
    *("scipy", "pandas", "matplotlib", "gguf", "llguidance", "accelerate", "prompt_toolkit"),
    *("fastapi", "starlette", "uvicorn", "prometheus_client"),
]

RUN = """
import contextlib, io, json, sys
from tokenleap.cli import app

heavy, commands = json.loads(sys.argv[1])
for argv in commands:
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(argv)
        except SystemExit as end:
            code = end.code
    loaded = [name for name in heavy if name in sys.modules]
    print(json.dumps([argv, code, out.getvalue(), err.getvalue(), loaded]))
"""


def ran(commands: list[list[str]]) -> list[tuple[list[str], int, str, str]]:
    """Run command lines in one new process: each with its code, what it printed, and its error.

    None of them may load one of the `HEAVY` modules.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([HEAVY, commands])],
        check=True,
        capture_output=True,
        text=True,
    )
    results = []
    for line in done.stdout.splitlines():
        argv, code, out, err, loaded = json.loads(line)
        assert not loaded, f"tokenleap {' '.join(argv)} imports {loaded}"
        results.append((argv, code, out, err))
    assert len(results) == len(commands)
    return results


def test_help_pages() -> None:
    names = "generate chat demo trace plan bench tree tune-layers train export check models ngrams"
    more = ["serve", "datastore", "methods", "doctor"]
    single = [[name, "--help"] for name in [*names.split(), *more]]
    nested = [["train", "eagle", "--help"], ["ngrams", "build", "--help"]]
    for argv, code, out, _ in ran([["--help"], [], ["--version"], *single, *nested]):
        assert code == 0, argv
        assert out, argv


def test_the_list_of_methods() -> None:
    (_, code, table, _), (_, _, text, _) = ran([["methods"], ["methods", "--json"]])
    assert code == 0
    assert "prompt_lookup_max" in table
    listed = {method["name"]: method["fields"] for method in json.loads(text)["methods"]}
    assert listed.keys() >= METHODS.keys()
    assert {name: listed[name] for name in METHODS} == {
        name: spec.options.field_names() for name, spec in METHODS.items()
    }


def test_wrong_options_and_names(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    wrong = {
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
        ("chat", "--method", "nogram"): "did you mean 'ngram'?",
        ("serve", "smollm2-135m", "--method", "nogram"): "did you mean 'ngram'?",
        ("demo", "--method", "nogram"): "did you mean 'ngram'?",
        ("tree", "--method", "nogram"): "did you mean 'ngram'?",
        ("plan", "--measure", "--method", "nogram"): "did you mean 'ngram'?",
        ("bench", str(prompts), "--method", "nogram"): "did you mean 'ngram'?",
        ("bench", str(prompts), "--peers", "nobody"): "nobody",
        ("train", "eagel", "--out", str(tmp_path / "out")): "eagle",
        ("generat",): "generate",
    }
    for argv, code, _, err in ran([list(command) for command in wrong]):
        assert code == 2, (argv, err)
        assert wrong[tuple(argv)] in err, (argv, err)


def test_the_package_itself() -> None:
    code = f"import tokenleap, sys; print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
