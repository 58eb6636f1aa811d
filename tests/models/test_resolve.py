"""A model's name becomes a folder, or an error that says what was looked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import tokenleap.models
from tests.models.conftest import MakeGguf
from tokenleap.errors import ModelError
from tokenleap.models import cached, resolve


def test_every_public_name_exists() -> None:
    for name in tokenleap.models.__all__:
        assert hasattr(tokenleap.models, name)
    assert sorted(tokenleap.models.__all__) == tokenleap.models.__all__


def test_a_folder_is_returned_as_it_is(
    make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    assert resolve(tmp_path / "model") == tmp_path / "model"
    assert resolve(str(tmp_path / "model")) == tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve("model") == Path("model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model") == tmp_path / "model"


def test_an_alias_wins_over_a_folder_of_that_name(
    make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model().save_pretrained(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokenleap.models.store.find", lambda name: Path("/cached") / name)
    assert resolve("smollm2-135m") == Path("/cached/smollm2-135m")
    assert resolve("./smollm2-135m") == Path("smollm2-135m")
    assert resolve(Path("smollm2-135m")) == Path("smollm2-135m")


def test_a_gguf_file_is_converted_once(make_gguf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_gguf(name="My Model (v2).GGUF")
    folder = resolve(path)
    assert folder.name.startswith("my-model-v2-")
    assert [model.source for model in cached()] == [str(path)]

    def never(*_arguments: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr("tokenleap.models.resolver._build_gguf", never)
    monkeypatch.chdir(path.parent)
    assert resolve(path.name) == folder


def test_a_changed_gguf_file_is_converted_anew(make_gguf: Any) -> None:
    path = make_gguf()
    first = resolve(path)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    second = resolve(path)
    assert first != second
    assert len(cached()) == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2-135M", "no model 'smolm2-135M': .*did you mean smollm2-135m"),
        ("missing.gguf", "no model 'missing.gguf'"),
        ("", "no model ''"),
        ("~nobody-of-that-name/model", "no model"),
        ("x" * 5000, "no model 'xxx"),
        ("nul\0byte", "no model"),
    ],
)
def test_what_is_not_there_is_named(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message) as raised:
        resolve(model)
    assert "\n" not in str(raised.value)


def test_folders_and_files_without_a_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"neither a Hugging Face folder nor a \.gguf file"):
        resolve(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has no weights"):
        resolve(tmp_path)
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match=r"to use its GGUF file, name the file: .*model\.gguf"):
        resolve(tmp_path)


def test_a_cached_model_has_a_name(make_gguf: MakeGguf) -> None:
    folder = resolve(make_gguf())
    assert resolve(folder.name) == folder
    with pytest.raises(ModelError, match=f"did you mean {folder.name}"):
        resolve(folder.name[:-1])
