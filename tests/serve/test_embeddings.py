"""`/v1/embeddings`, as OpenAI's client and others call it."""

from __future__ import annotations

import math
import struct
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.test_embeddings import pooled_folder
from tests.serve.support import MODEL, Served, served
from tokenleap import LLM


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = pooled_folder(tmp_path_factory.mktemp("embeds"), "mean_tokens")
    with served(LLM(folder, dtype="float32", max_model_len=64), max_prompts=4) as running:
        yield running


def test_openais_client_gets_the_engines_vectors(embedding: Served) -> None:
    texts = ["hello", "a longer text"]
    wanted = [vector.tolist() for vector in embedding.llm.engine.embed(texts)]
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model=MODEL, input=texts)  # it asks for base64
    assert [each.embedding for each in made.data] == wanted
    assert [each.index for each in made.data] == [0, 1]
    assert made.usage.prompt_tokens == made.usage.total_tokens == len("".join(texts))
    assert made.model == MODEL


def test_token_ids_and_dimensions(embedding: Served) -> None:
    ids = embedding.llm.encode("hello")
    (text,), (listed,), (one,) = (
        embedding.post("/v1/embeddings", input=given).json()["data"]
        for given in ("hello", [ids], ids)
    )
    assert text == listed == one
    cut = embedding.post("/v1/embeddings", input=ids, dimensions=8, encoding_format="base64")
    numbers = struct.unpack("<8f", b64decode(cut.json()["data"][0]["embedding"]))
    length = math.hypot(*text["embedding"][:8])
    assert numbers == pytest.approx([each / length for each in text["embedding"][:8]], abs=1e-6)


def test_wrong_requests_are_refused(embedding: Served) -> None:
    for fields, param, says in (
        ({"input": ["a"] * 5}, "input", "1 to 4 prompts"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "1 to 4 prompts"),
        ({"input": "x" * 500}, "input", "no room in the context"),
        ({"input": [10**6]}, "input", "outside the vocabulary"),
        ({"input": "a", "dimensions": 65}, "dimensions", "at most 64, got 65"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "stream": True}, "stream", "unknown field"),
    ):
        error = embedding.refused("/v1/embeddings", **fields)
        assert error["param"] == param
        assert says in error["message"]


def test_a_model_that_overflows_says_so(embedding: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    norm: Any = embedding.llm.engine.pooler._norm
    monkeypatch.setattr(norm.weight, "data", norm.weight.data * math.nan)
    error = embedding.refused("/v1/embeddings", 500, input="hello")
    assert error["message"].startswith("the embedding is not finite")


def test_a_model_without_pooling_says_so(server: Served) -> None:
    error = server.refused("/v1/embeddings", input="a text")
    assert "this model makes no embeddings" in error["message"]
    assert "\n" not in error["message"]
    assert server.complete()["choices"][0]["text"]
