"""Models of the Hugging Face Hub, against a server on this machine that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.tiny import tiny_model
from tokenleap import LLM
from tokenleap.cli import app
from tokenleap.errors import ModelError
from tokenleap.models import aliases, cached, gguf_of, load_model, resolve, resolver, short_names
from tokenleap.models.resolver import gguf_file, is_hub_id

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
NAME = "org/tiny"


@dataclass
class Hub:
    """A server's files, and the requests that it got."""

    files: dict[str, bytes]
    asked: list[str] = field(default_factory=list)
    error: tuple[int, str] | None = None

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        self.asked.append(path)
        if self.error is not None:
            status, code = self.error
            return status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"}
        path, _, _ = path.partition("?")
        if path.startswith(f"/api/models/{NAME}/revision/"):
            revision = path.rpartition("/")[2]
            if revision not in COMMITS:
                return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": NAME, "sha": COMMITS[revision], "siblings": siblings}
            return 200, json.dumps(info).encode(), {}
        if path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": digest(content)}
                for name, content in self.files.items()
            ]
            return 200, json.dumps(listed).encode(), {}
        if path.startswith(f"/{NAME}/resolve/"):
            commit, _, name = path.removeprefix(f"/{NAME}/resolve/").partition("/")
            content = self.files[name]
            return 200, content, {"ETag": f'"{digest(content)}"', "X-Repo-Commit": commit}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}


def digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("contents")
    tiny_model().save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    others = ("original/other.safetensors", "model.fp32.safetensors", "pytorch_model.bin")
    return {**files, **dict.fromkeys(others, b"x")}


@pytest.fixture
def hub(
    contents: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    hub = Hub(dict(contents))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content, headers = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", here)
    template = here + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield hub
    server.shutdown()
    server.server_close()


def test_a_model_is_downloaded_once(hub: Hub) -> None:
    folder = resolve(NAME)
    assert load_model(folder, torch.float32, torch.device("cpu")).num_parameters() > 0
    assert {path.name for path in folder.iterdir()} <= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    hub.asked.clear()
    assert resolve(NAME) == folder
    assert hub.asked == []


def test_a_revision(hub: Hub) -> None:
    assert resolve(f"{NAME}@v1").name == COMMITS["v1"]
    assert resolve(NAME).name == COMMITS["main"]
    with pytest.raises(ModelError, match="it has no revision 'v2'"):
        resolve(f"{NAME}@v2")


def test_half_a_download_goes_on(hub: Hub) -> None:
    weights = hub.files.pop("model.safetensors")
    with pytest.raises(ModelError, match=r"has only pickle files .* models convert org"):
        resolve(NAME)
    hub.files["model.safetensors"] = weights
    COMMITS["main"] = "c" * 40
    try:
        assert resolve(NAME).name == "c" * 40
    finally:
        COMMITS["main"] = "a" * 40


def test_pickles_of_the_hub_are_converted(hub: Hub, tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(2)}
    torch.save(tensors, tmp_path / "saved")
    del hub.files["model.safetensors"]
    hub.files["pytorch_model.bin"] = (tmp_path / "saved").read_bytes()
    with pytest.raises(ModelError) as raised:
        resolve(NAME)
    command = shlex.split(str(raised.value).partition("process: tokenleap ")[2])
    assert CliRunner().invoke(app, command).exit_code == 0
    made = tmp_path / "tiny-safetensors"
    assert torch.equal(load_file(made / "model.safetensors")["weight"], tensors["weight"])
    assert (made / "config.json").read_bytes() == hub.files["config.json"]


@pytest.fixture
def gguf(hub: Hub, make_gguf: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a GGUF file on the Hub, which `tiny-q8` stands for."""
    path = make_gguf(name="tiny-Q8_0.gguf")
    hub.files = {each: path.read_bytes() for each in (path.name, "tiny-Q4_K_M.gguf")}
    path.unlink()
    name = f"{NAME}/{path.name}"
    short = resolver.ShortName("tiny-q8", name, 1, "Q8_0", "Apache-2.0")
    monkeypatch.setattr(resolver, "_SHORT_NAMES", (short,))
    return name


def test_a_gguf_file(hub: Hub, gguf: str, tmp_path: Path) -> None:
    """It is downloaded alone, once, and keeps its name and its quantization."""
    file = gguf_file(gguf)
    assert file is not None
    assert file.name == "tiny-Q8_0.gguf"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    llm = LLM(gguf, dtype="float32")
    (cache,) = [model.name for model in cached()]
    assert cache.startswith("tiny-q8-0")
    hub.asked.clear()
    assert LLM("tiny-q8", dtype="float32").runtime == llm.runtime
    assert gguf_file(file) == gguf_file("tiny-q8") == gguf_of("tiny-q8") == file
    assert [model.name for model in cached()] == [cache]
    assert hub.asked == []


def test_a_revision_of_a_gguf_file(hub: Hub, gguf: str) -> None:
    file = gguf_file(gguf.replace("/tiny-Q8", "@v1/tiny-Q8"))
    assert file is not None
    assert file.parent.name == COMMITS["v1"]


def test_gguf_files_that_are_not_there(hub: Hub, gguf: str) -> None:
    with pytest.raises(ModelError, match=r"no file tiny-q4_k_m\.gguf; its GGUF files: tiny-Q4_K_M"):
        resolve(f"{NAME}/tiny-q4_k_m.gguf")
    with pytest.raises(ModelError, match=f"GGUF files, name it: .*{gguf}"):
        resolve(NAME)
    with pytest.raises(ModelError, match="did you mean tiny-q8"):
        resolve("tiny-q9")
    hub.error = 404, "RepoNotFound"
    with pytest.raises(ModelError, match="it has none of this name"):
        resolve("org/other/a.gguf")


def test_short_names() -> None:
    """Each stands for a GGUF file, and is in the table of docs/models.md."""
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    for name, short in short_names().items():
        assert name == short.name == name.lower()
        assert is_hub_id(short.model)
        assert short.quantization.lower() in short.model.lower()
        assert name not in aliases()
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` "))
        assert f"| {short.quantization} | {short.download_bytes / 1e9:.2f} |" in row


def test_a_folder_comes_first(hub: Hub, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / NAME)
    assert resolve(NAME) == Path(NAME)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "it has none of this name, or it is private"),
        (403, "GatedRepo", "agree to its licence"),
        (500, "", "500 Server Error|it cannot be reached"),
    ],
)
def test_what_the_hub_refuses(
    hub: Hub, status: int, code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.error = status, code
    with pytest.raises(ModelError, match=message) as raised:
        resolve(NAME)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"there is no folder '{NAME}', and the Hugging Face Hub")


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        resolve(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = resolve(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(NAME) == folder


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="it cannot be reached"):
        resolve(NAME)


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("org/name", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("org/name@v1.0", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("./org/name", False),
        ("../name", False),
        ("/org/name", False),
        ("~user/name", False),
        ("a/b/c", False),
        ("a/b/c.gguf", True),
        ("a/b@v1/c.Q4_K_M.gguf", True),
        ("a/b/c/d.gguf", False),
        ("org/name ", False),
        ("org/a--b", False),
        ("org/n..m", False),
        ("org/name.git", False),
        ("org/n\u00e4me", False),
        ("org/name@..", False),
        ("org/name@../../ref", False),
        ("org/name@a/../../b", False),
        ("org/name@/etc", False),
        ("org/" + "x" * 100, False),
    ],
)
def test_what_is_an_id(name: str, is_id: bool) -> None:
    assert is_hub_id(name) is is_id
