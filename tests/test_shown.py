"""Outputs and models as shown in a shell, a notebook and on Rich's console."""

from __future__ import annotations

import io
import re
from html import escape, unescape

import pytest
from rich.console import Console

from tests.core.test_detokenizer import TOKENIZER
from tests.tiny import tiny_model
from tokenleap import LLM, CompletionOutput, SamplingParams
from tokenleap.core.shown import colours_as_html, shortened

GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> LLM:
    config = {"method": "ngram", "prompt_lookup_min": 1, "controller": "fixed"}
    return LLM(tiny_model("lean", vocab_size=256), tokenizer=TOKENIZER, speculative_config=config)


@pytest.fixture(scope="module")
def output(llm: LLM) -> CompletionOutput:
    return llm.generate("hello", GREEDY)[0].outputs[0]


def test_a_bare_result_is_one_short_line(llm: LLM) -> None:
    (result,) = llm.generate("hello", GREEDY)
    line = repr(result)
    assert "\n" not in line
    assert len(line) < 500
    assert line.startswith("RequestOutput(prompt='hello', outputs=[CompletionOutput(index=0, text=")
    assert "finish_reason='length', tokens=40, tokens_per_second=" in line
    assert "mean_acceptance_length=" in line


def test_the_model_says_what_it_is(llm: LLM) -> None:
    assert repr(llm) == (
        "LLM('LlamaForCausalLM', dtype='float32', device='cpu', runtime='lean', method='ngram')"
    )


def test_tokens_have_the_text_that_they_added(llm: LLM, output: CompletionOutput) -> None:
    assert "".join(output.token_texts) == output.text
    chunks = list(llm.stream("hello", GREEDY))
    assert output.tokens == tuple(token for chunk in chunks for token in chunk.tokens)


def test_an_aborted_output_has_the_text_that_was_held_back(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=["\x00" * 50, "zzzz"])
    request_id = llm.engine.add_request("hello", params)
    for _ in range(4):
        llm.engine.step()
    (job,) = llm.engine._added.jobs.values()
    llm.engine.abort(request_id)
    (output,) = job.result().outputs
    assert output.token_ids
    assert "".join(output.token_texts) == output.text


def test_notebooks_show_origins(output: CompletionOutput) -> None:
    """As the colour behind the text, whose own is that of a light or dark theme."""
    html = output._repr_html_()
    shown, summary = re.findall(r"<div style=[^>]*>(.*)</div><small>(.*)</small>", html, re.S)[0]
    assert unescape(re.sub("<[^>]*>", "", shown)) == output.text
    drafted = re.findall(r'<span title="draft" style="background: [^"]*">(.*?)</span>', shown, re.S)
    texts = zip(output.token_texts, output.origins, strict=True)
    assert unescape("".join(drafted)) == "".join(
        text for text, origin in texts if origin == "draft"
    )
    assert output.metrics.num_accepted_tokens > 0
    assert "color:" not in html
    assert summary.startswith(f"40 tokens in {output.metrics.target_passes} passes, ")


def test_notebooks_run_and_typeset_nothing_that_a_model_wrote() -> None:
    script = '<script>alert("x")</script> & $x$'
    html = colours_as_html([(script, "draft"), (script, "plain")], script)
    assert "<script>" not in html
    assert html.count(escape(script)) == 3
    assert html.startswith('<div class="tex2jax_ignore mathjax_ignore">')


def test_long_outputs_stay_small() -> None:
    """A span for each run of drafted tokens, none for others, in a box that scrolls."""
    steps = [("one ", "draft"), ("two ", "draft"), ("three ", "bonus")] * 1000
    html = colours_as_html(steps, "")
    assert html.count("<span") == 1000 + 2
    assert "max-height: 40em; overflow: auto" in html


def test_rich_shows_origins(output: CompletionOutput) -> None:
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="256", width=200).print(output)
    assert "\x1b[38;5;28m" in file.getvalue()


def test_long_texts_show_their_ends() -> None:
    assert shortened("short\n") == r"'short\n'"
    assert shortened("a" * 100 + "b" * 100) == f"'{'a' * 40}'...'{'b' * 40}'"
