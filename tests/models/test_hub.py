"""Models of the Hugging Face Hub, against a server on this machine that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.tiny import tiny_model
from tokenleap.errors import ModelError
from tokenleap.models import load_model, resolve
from tokenleap.models.resolver import is_hub_id

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
    import torch

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
    with pytest.raises(ModelError, match="has no weights in safetensors on the Hugging Face Hub"):
        resolve(NAME)
    hub.files["model.safetensors"] = weights
    COMMITS["main"] = "c" * 40
    try:
        assert resolve(NAME).name == "c" * 40
    finally:
        COMMITS["main"] = "a" * 40


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
