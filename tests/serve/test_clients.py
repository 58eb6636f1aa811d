"""Clients that others wrote: curl, llm, litellm, lm-eval, schemathesis. Each is optional.

pip install llm litellm 'lm-eval[api]' schemathesis
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.serve.support import MODEL, Served, served
from tokenleap import SamplingParams

KEY = "a-key"
GREEDY = SamplingParams(temperature=0, max_tokens=8)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with served(api_keys=(KEY,)) as running:
        running.http.headers["Authorization"] = f"Bearer {KEY}"
        yield running


def expected_chat(server: Served) -> str:
    """The answer of the library itself."""
    (result,) = server.llm.generate([HELLO], GREEDY)
    return result.text


def needs(package: str) -> pytest.MarkDecorator:
    """The test needs this package, which the project does not install."""
    missing = find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: see this file's head")


def python(code: str, *arguments: str, at: Path | None = None, **environment: str) -> str:
    """The output of a separate Python process: these packages give warnings, and set up much."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=at,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        timeout=240,
    )
    assert found.returncode == 0, found.stderr + found.stdout
    return found.stdout


# curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
class TestCurl:
    def curl(self, server: Served, path: str, key: str, *arguments: str) -> str:
        header = f"Authorization: Bearer {key}"
        command = ["curl", "-sS", "--noproxy", "*", "-H", header, *arguments, server.url + path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer(self, keyed: Served, stream: bool) -> None:
        body = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 8}
        sent = json.dumps({**body, "stream": stream})
        answer = self.curl(keyed, "/v1/chat/completions", KEY, "-N", "-d", sent)
        if stream:
            *lines, last, end = answer.split("\n\n")
            assert (last, end) == ("data: [DONE]", "")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
            said = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        else:
            said = [choice["message"] for choice in json.loads(answer)["choices"]]
        assert "".join(each.get("content", "") for each in said) == expected_chat(keyed)

    def test_a_wrong_key(self, keyed: Served) -> None:
        only_status = ("-w", "%{http_code}", "-o", os.devnull)
        assert self.curl(keyed, "/v1/models", "wrong", *only_status) == "401"


# llm, of Simon Willison

LLM_MODELS = """\
- model_id: ours
  model_name: tiny
  api_base: {url}/v1
  api_key_name: ours
"""


@needs("llm")
@pytest.mark.parametrize("stream", [True, False])
def test_llm(keyed: Served, tmp_path: Path, stream: bool) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(LLM_MODELS.format(url=keyed.url))
    (tmp_path / "keys.json").write_text(json.dumps({"ours": KEY}))
    arguments = ["hello", "-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "8"]
    arguments += [] if stream else ["--no-stream"]
    code = "import sys; from llm.cli import cli; cli(sys.argv[1:])"
    found = python(code, *arguments, LLM_USER_PATH=str(tmp_path))
    assert found.removesuffix("\n") == expected_chat(keyed)


# litellm

LITELLM = """
import json, sys, litellm
url, key = sys.argv[1:]
common = dict(model="hosted_vllm/tiny", api_base=url + "/v1", api_key=key, temperature=0,
              max_tokens=8, messages=[{"role": "user", "content": "hello"}])
whole = litellm.completion(**common)
pieces = litellm.completion(**common, stream=True)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
print(json.dumps([whole.choices[0].message.content, text, whole.usage.completion_tokens]))
"""


@needs("litellm")
def test_litellm(keyed: Served) -> None:
    # Without the variable it asks another host.
    printed = python(LITELLM, keyed.url, KEY, LITELLM_LOCAL_MODEL_COST_MAP="True")
    whole, streamed, tokens = json.loads(printed)
    assert whole == streamed == expected_chat(keyed)
    assert tokens == 8


# lm-eval

LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
url, tokenizer, pairs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = LocalCompletionsAPI(
    base_url=url + "/v1/completions", model="tiny", tokenizer_backend="huggingface",
    tokenizer=tokenizer, max_length=512, batch_size=2,
)
asked = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
until = {"until": ["~"], "max_gen_toks": 8}
begun = enumerate(context for context, _ in pairs)
written = [Instance("generate_until", {}, (context, until), i) for i, context in begun]
print(json.dumps([model.loglikelihood(asked), model.generate_until(written)]))
"""
PAIRS = [("hello", " world"), ("one two", " three"), ("a", "b"), ("aaaa", "aa")]


@needs("lm_eval")
def test_lm_eval(keyed: Served, tmp_path: Path) -> None:
    """Scores and texts are those that the library has without a server."""
    tokenizer = keyed.llm.tokenizer
    assert tokenizer is not None
    tokenizer.save_pretrained(tmp_path)
    given = keyed.url, str(tmp_path), json.dumps(PAIRS)
    printed = python(LM_EVAL, *given, OPENAI_API_KEY=KEY).splitlines()[-1]
    scores, texts = json.loads(printed)
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1, stop="~")
    for (context, rest), (score, greedy), text in zip(PAIRS, scores, texts, strict=True):
        (result,) = keyed.llm.generate([keyed.llm.encode(context + rest)], params)
        assert result.prompt_logprobs is not None
        ids = result.prompt_token_ids
        first = len(ids) - len(keyed.llm.encode(rest))
        listed = list(zip(ids, result.prompt_logprobs, strict=True))[first:]
        values = [position[token].logprob for token, position in listed if position]
        assert math.isclose(score, sum(values), rel_tol=1e-6)
        assert greedy == all(position[token].rank == 1 for token, position in listed if position)
        (written,) = keyed.llm.generate([keyed.llm.encode(context)], params)
        assert text == written.text


# schemathesis


@needs("schemathesis")
def test_schemathesis(server: Served, tmp_path: Path) -> None:
    """Requests made from the OpenAPI description: no status of 500 or more, and no crash."""
    code = "import sys; from schemathesis.cli import schemathesis; schemathesis(sys.argv[1:])"
    arguments = ["run", f"{server.url}/openapi.json", "--checks", "not_a_server_error"]
    arguments += ["--max-examples", "5", "--seed", "1", "--phases", "examples,fuzzing"]
    found = python(code, *arguments, "--no-color", at=tmp_path)  # it writes a cache there
    assert "generated" in found
