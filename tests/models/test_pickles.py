"""Pickles become safetensors, without running what is in them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.folders import CPU, refusal
from tokenleap.errors import ModelError
from tokenleap.models import load_model, resolve
from tokenleap.models.pickles import convert_pickles


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


def pickled(folder: Path, model: Any, shards: int = 0, **others: Any) -> Path:
    """A folder as older versions of Transformers wrote it."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    torch.save({"rate": 1}, folder / "optimizer.pt")
    weights = {**model.state_dict(), **others}
    if not shards:
        torch.save(weights, folder / "pytorch_model.bin")
        return folder
    names = {name: f"pytorch_model-{at % shards}.bin" for at, name in enumerate(weights)}
    for shard in set(names.values()):
        part = {name: weights[name] for name, held in names.items() if held == shard}
        torch.save(part, folder / shard)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def test_the_refusal_names_the_command_that_helps(make_model: Any, tmp_path: Path) -> None:
    source = pickled(tmp_path / "it's old", model := make_model(tied=True).bfloat16())
    message = refusal(source)
    assert message.startswith(f"{source} holds its weights only as pickle files")
    with pytest.raises(ModelError, match=r"is one of the pickle files .* tokenleap models convert"):
        resolve(source / "pytorch_model.bin")
    command = shlex.split(message[message.index("tokenleap models convert") :])
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = tmp_path / "it's old-safetensors"
    assert done.stdout == f"{made.name} is ready\n"
    assert {path.name for path in made.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
    }
    written = load_file(made / "model.safetensors")
    assert "lm_head.weight" not in written
    assert {each.dtype for each in written.values()} == {torch.bfloat16}
    loaded = load_model(made, torch.bfloat16, CPU).state_dict()
    assert all(torch.equal(loaded[name], each) for name, each in model.state_dict().items())
    with pytest.raises(ModelError, match="exists already: name a new folder"):
        convert_pickles(source, made)


def test_shards(make_model: Any, tmp_path: Path) -> None:
    model = make_model(tied=False)
    source = pickled(tmp_path / "model", model, shards=2)
    convert_pickles(source, tmp_path / "made")
    assert len(list((tmp_path / "made").glob("model-*-of-00002.safetensors"))) == 2
    loaded = load_model(tmp_path / "made", torch.float32, CPU).state_dict()
    assert all(torch.equal(loaded[name], each) for name, each in model.state_dict().items())
    (source / "pytorch_model-1.bin").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of its 2 weight files, pytorch_model-1\.bin"):
        convert_pickles(source, tmp_path / "again")


def test_no_weight_is_lost(tmp_path: Path) -> None:
    """Views and shared tensors are whole, unless the model's class says that they are one."""
    whole = torch.arange(12.0).view(3, 4)
    weights = {"a": whole, "b": whole, "rows": whole[1:], "turned": whole.t()}
    for legacy, name in ((False, "new.pt"), (True, "old.pth")):
        file = tmp_path / name
        torch.save(weights, file, _use_new_zipfile_serialization=not legacy)
        convert_pickles(file, tmp_path / file.stem)
        found = load_file(tmp_path / file.stem / "model.safetensors")
        assert all(torch.equal(found[name], each) for name, each in weights.items())
        assert found.keys() == weights.keys()


def test_pickles_that_are_refused(make_model: Any, tmp_path: Path) -> None:
    folder, proof = tmp_path / "models", tmp_path / "exploded"
    folder.mkdir()
    cases = {
        "code.bin": ({"x": torch.ones(1), "y": Bomb(proof)}, "holds more than tensors.*run code"),
        "other.bin": ({"x": torch.ones(1), "step": 3}, "'step' is a int; save the model's state"),
        "list.bin": ([torch.ones(1)], "holds no tensors by their names, but a list"),
        "huge.bin": ({"x": torch.zeros(1).expand(10**11)}, "needs more than .* of memory"),
    }
    for name, (content, message) in cases.items():
        torch.save(content, folder / name)
        with pytest.raises(ModelError, match=message) as raised:
            convert_pickles(folder / name, folder / "made")
        assert str(raised.value).startswith(str(folder / name))
        assert "\n" not in str(raised.value)
    (folder / "damaged.bin").write_bytes((folder / "list.bin").read_bytes()[:500])
    with pytest.raises(ModelError, match=r"damaged\.bin cannot be converted: "):
        convert_pickles(folder / "damaged.bin", folder / "made")
    with pytest.raises(ModelError, match="several pickle files, and no pytorch_model"):
        convert_pickles(folder, folder / "made")
    assert not proof.exists()
    assert {path.name for path in folder.iterdir()} == {*cases, "damaged.bin"}


def test_small_files_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these fits into memory. A number may stand for as many as a tensor's shape says."""
    source = tmp_path / "model"
    source.mkdir()
    names = {f"w{number}": f"{number}.bin" for number in range(4)}
    for name, file in names.items():
        torch.save({name: torch.zeros(1).expand(2**24)}, source / file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    monkeypatch.setattr("tokenleap.models.pickles._MEGABYTES", 250)
    with pytest.raises(ModelError, match="would become 268435456 bytes, far more than its files"):
        convert_pickles(source, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after an interruption, nor on a full disk, nor of a run that was killed."""
    torch.save({"x": torch.ones(1)}, tmp_path / "a.bin")

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def full(process: Any, _tick: Any) -> tuple[str, str]:
        process.kill()
        process.wait()
        return "", "Error: No space left on device (os error 28)"

    with monkeypatch.context() as patch:
        patch.setattr("tokenleap.models.pickles.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_pickles(tmp_path / "a.bin", tmp_path / "made")
        patch.setattr("tokenleap.models.pickles.wait", full)
        with pytest.raises(ModelError, match="the disk is full: "):
            convert_pickles(tmp_path / "a.bin", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f".made.tokenleap-{ended.pid}").mkdir()
    (tmp_path / ".made.2023").mkdir()  # somebody's
    convert_pickles(tmp_path / "a.bin", tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".made.2023", "a.bin", "made"]


def test_only_what_belongs_to_a_file_is_copied(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "a.bin")
    for name in ("passwords.txt", "bank.json", "tokenizer.json", "notes.model"):
        (tmp_path / name).write_text("{}")
    convert_pickles(tmp_path / "a.bin", tmp_path / "made")
    made = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert made == ["model.safetensors", "notes.model", "tokenizer.json"]
