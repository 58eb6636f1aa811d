"""Outputs and models as shown in a shell, a notebook and on Rich's console."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.core.test_detokenizer import TOKENIZER
from tests.tiny import tiny_model
from tokenleap import LLM, CompletionOutput, SamplingParams
from tokenleap.core.shown import shortened

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
    html = output._repr_html_()
    assert html.count("<span") == len(output.token_ids)
    assert html.count('title="draft"') == output.metrics.num_accepted_tokens > 0


def test_notebooks_are_not_scripted(output: CompletionOutput) -> None:
    script = '<script>alert("x")</script>'
    object.__setattr__(copied := _copy(output), "token_texts", (script,) * len(output.token_ids))
    assert script not in copied._repr_html_()


def _copy(output: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(**{name: getattr(output, name) for name in vars(output)})


def test_rich_shows_origins(output: CompletionOutput) -> None:
    file = io.StringIO()
    Console(file=file, force_terminal=True, color_system="256", width=200).print(output)
    assert "\x1b[38;5;28m" in file.getvalue()


def test_long_texts_show_their_ends() -> None:
    assert shortened("short\n") == r"'short\n'"
    assert shortened("a" * 100 + "b" * 100) == f"'{'a' * 40}'...'{'b' * 40}'"
