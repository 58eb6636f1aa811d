"""The examples run as their docstrings say, with less to do."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from ipykernel.kernelspec import install
from nbclient import NotebookClient

import tokenleap
from tests.spec_drafters import random_spec_drafter
from tests.tiny import tiny_tokenizer
from tests.tiny_seq2seq import tiny_seq2seq
from tokenleap import LLM

EXAMPLES = Path(__file__).parents[1] / "examples"
STOCHASTIC = EXAMPLES / "stochastic"
NOTEBOOK = EXAMPLES / "tour.ipynb"

on_the_default_model = [pytest.mark.model, pytest.mark.usefixtures("smollm2_path")]


_loaded: dict[str, LLM] = {}


def loaded(*model: str, **fields: Any) -> LLM:
    name = repr((model, fields))
    if name not in _loaded:
        _loaded[name] = LLM(*model, **fields)
    return _loaded[name]


def run(path: Path, *arguments: str) -> None:
    module(path).main(arguments)


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class TestOnTheDefaultModel:
    pytestmark = on_the_default_model

    @pytest.fixture(autouse=True)
    def loaded_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Several examples load the same."""
        monkeypatch.setattr(tokenleap, "LLM", loaded)

    def test_chat_loop(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nWhat is 1+1?\n\nnot read\n"))
        run(EXAMPLES / "chat_loop.py", "--max-tokens", "8")
        assert len(re.findall(r"\[\d+ tokens in \d+ passes\]", capsys.readouterr().out)) == 2

    def test_structured_output(self, capsys: pytest.CaptureFixture[str]) -> None:
        run(EXAMPLES / "structured_output.py")
        text, parsed, _ = capsys.readouterr().out.splitlines()
        assert text.startswith('{"name":"')
        assert "'born': " in parsed

    def test_streaming(self, capsys: pytest.CaptureFixture[str]) -> None:
        run(EXAMPLES / "streaming.py", "--max-tokens", "8")
        out = capsys.readouterr().out
        assert "counting: ended (length)" in out
        assert "story: ended (length)" in out

    def test_predicted_edit(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "area.py"
        file.write_text("def area(w, h):\n    return w * h\n")
        run(EXAMPLES / "predicted_edit.py", str(file), "Rename w to width.", "--max-tokens", "8")
        assert " tokens in " in capsys.readouterr().out

    def test_compare_methods(self, capsys: pytest.CaptureFixture[str]) -> None:
        run(EXAMPLES / "compare_methods.py", "--max-tokens", "8", "--methods", "none,ngram")
        _, *rows = capsys.readouterr().out.splitlines()
        assert [row.split()[0] for row in rows] == ["none", "ngram"]
        assert all(row.endswith("True") for row in rows)

    def test_the_notebook(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Its code but the last cell, which closes the model."""
        cells = nbformat.read(NOTEBOOK, as_version=4).cells
        *sources, last = [cell.source for cell in cells if cell.cell_type == "code"]
        assert "llm.close()" in last
        names: dict[str, Any] = {}
        for source in sources:
            less = source.replace("max_tokens=64", "max_tokens=8")
            code = compile(less, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            awaited = eval(code, names)
            if awaited is not None:
                asyncio.run(awaited)
        assert names["fast"].token_ids == names["plain"].token_ids
        assert "{'name': 'Ada Lovelace', 'born': 1815}" in capsys.readouterr().out
        assert all(cell.outputs for cell in cells if cell.cell_type == "code"), "`make notebook`"

    def test_custom_drafter(self, capsys: pytest.CaptureFixture[str]) -> None:
        run(EXAMPLES / "custom_drafter.py", "--max-tokens", "12")
        assert "second time" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("smollm2_path")
def test_the_notebook_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this interpreter. Nothing warns, and a bar is one of characters."""
    install(prefix=str(tmp_path))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share/jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(Path(tokenleap.__file__).parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    bar = "_ = llm.generate([[1], [2]], SamplingParams(max_tokens=1), use_tqdm=True)"
    notebook.cells.insert(-1, nbformat.v4.new_code_cell(bar))
    NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True).execute()

    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    (progress,) = outputs.pop(bar)
    assert progress.name == "stderr"
    assert "Processed prompts: 100%" in progress.text
    assert "Warning" not in progress.text
    shown = [output for each in outputs.values() for output in each]
    assert all(output.get("name") != "stderr" for output in shown)
    pages = [output.data["text/html"] for output in shown if "data" in output]
    assert '<span title="draft"' in pages[0]
    assert "64 tokens in 64 passes" in pages[1]  # without speculation
    freed = re.search(r"(\d+) MiB were freed", shown[-1].text)
    assert freed is not None
    assert int(freed[1]) > 300


@pytest.mark.parametrize("drafter", [None, "spec_drafter"])
def test_translate(drafter: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tiny model, which translates nothing."""
    tiny_seq2seq("bart", eos_bias=1.0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    more = [] if drafter is None else ["--drafter", random_spec_drafter()]
    run(EXAMPLES / "translate.py", "--model", str(tmp_path), "--max-tokens", "8", *more)
    out = capsys.readouterr().out
    assert out.count("same: True") == 3
    assert out.count("(score ") == 3
    assert out.startswith("The weather is nice today.\n  plain")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("prefetch", ["--visitors", "5"]), ("kinetic_monte_carlo", ["--hops", "2"])],
)
def test_stochastic(
    name: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(STOCHASTIC))
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")  # so that what the example sets is undone
    comparison = module(STOCHASTIC / "comparison.py")
    monkeypatch.setattr(comparison, "DRAWS", 100)
    monkeypatch.setitem(sys.modules, "comparison", comparison)
    run(STOCHASTIC / f"{name}.py", *arguments)
    out = capsys.readouterr().out
    assert "speed-up" in out
    assert "chosen in 100" in out


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if "__main__" in text:
        assert f"    python {path.relative_to(EXAMPLES.parent)}" in text
