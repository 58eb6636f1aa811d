"""The cache shows complete models or none, whichever process is interrupted, killed or first."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from tests.programs import TIMEOUT, Program
from tokenleap.core.files import FIRST_NAME
from tokenleap.errors import ModelError
from tokenleap.models import cache_dir, cached, load_tokenizer, remove, resolve, store

Fill = Callable[[Path, Path], dict[str, str]]


def fill_one_file(scratch: Path, product: Path) -> dict[str, str]:
    (scratch / "download").write_text("something large")
    (product / "config.json").write_text("{}")
    return {"sha256": "00"}


def raising(error: BaseException) -> Fill:
    def fill(scratch: Path, product: Path) -> dict[str, str]:
        (product / "model.safetensors").write_text("half of it")
        raise error

    return fill


@pytest.mark.parametrize("configured", [False, True])
def test_a_cache_with_the_projects_first_name_is_moved_once(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    now, then = (tmp_path / ".cache" / name for name in ("tokenleap", FIRST_NAME))
    monkeypatch.setenv("TOKENLEAP_CACHE", str(then))
    for name, source in (("tiny", "a test"), ("tiny.int4", f"{then}/models/tiny")):
        folder = store.build(name, source, 0, fill_one_file)
        (folder / "manifest.json").rename(folder / f"{FIRST_NAME}.json")
    if not configured:
        monkeypatch.delenv("TOKENLEAP_CACHE")
    assert cache_dir() == (then if configured else now)
    assert then.exists() == configured
    assert now.exists() != configured
    if not configured:
        assert [(each.name, each.source) for each in cached()] == [("tiny", "a test")]
        then.mkdir()  # of an older version that is used beside
        assert cache_dir() == now
        assert then.exists()


def start(script: str, stdin: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Run Python code in another process that uses the same cache."""
    assert store.__file__ is not None
    path = os.pathsep.join([str(Path(store.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", "from tokenleap.models import store\n" + script],
        env=os.environ | {"PYTHONPATH": path},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


BUILD_WHEN_TOLD = """
def fill(scratch, product):
    (product / "config.json").write_text("{}")
    print("building", flush=True)
    input()
    return {}
print(store.build("slow", "a test", 0, fill))
"""


def start_build() -> subprocess.Popen[str]:
    """Another process in the middle of a build, holding the lock until it gets a line."""
    process = start(BUILD_WHEN_TOLD)
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    return process


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLEAP_CACHE", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"
    monkeypatch.delenv("TOKENLEAP_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "tokenleap"
    monkeypatch.setenv("TOKENLEAP_CACHE", "")
    assert cache_dir() == Path.home() / ".cache" / "tokenleap"


def test_a_built_model_is_found_listed_and_removed(cache: Path) -> None:
    assert cached() == []
    folder = store.build("tiny", "a test", 0, fill_one_file)
    assert store.find("tiny") == folder == cache / "models" / "tiny"
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".verified", "config.json", "manifest.json"]
    model = store.CachedModel("tiny", folder, 2, "a test")
    assert cached() == [model]
    assert remove("tiny") == model
    assert cached() == []
    assert not list((cache / "models").iterdir())


def test_removing_an_unknown_model_names_the_known_ones() -> None:
    store.build("tiny", "a test", 0, fill_one_file)
    with pytest.raises(ModelError, match=r"no cached model 'huge'.* holds tiny"):
        remove("huge")
    with pytest.raises(ModelError, match=r"no cached model '\.\./models/tiny'"):
        remove("../models/tiny")


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), ModelError("no")])
def test_a_failed_build_leaves_nothing(error: BaseException, cache: Path) -> None:
    with pytest.raises(type(error)):
        store.build("tiny", "a test", 0, raising(error))
    assert store.find("tiny") is None
    assert not list((cache / "models").iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_with_what_is_needed(number: int, cache: Path) -> None:
    error = OSError(number, os.strerror(number))
    with pytest.raises(ModelError, match=r"disk is full: .* needs 3 kB free and has .*; free some"):
        store.build("tiny", "a test", 3000, raising(error))
    assert not list((cache / "models").iterdir())


def test_free_space_is_checked_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))(total=10**9, used=10**9 - 1000, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match=r"needs 2 GB free and has 1 kB"):
        store.build("tiny", "a test", 2 * 10**9, raising(AssertionError("never called")))


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (
            "safetensors.torch.save_file",
            SafetensorError("I/O error: No space left on device (os error 28)"),
        ),
        (
            "transformers.PreTrainedTokenizerFast.save_pretrained",
            Exception("No space left on device (os error 28)"),
        ),
        (
            "transformers.GenerationConfig.save_pretrained",
            OSError(errno.ENOSPC, "No space left on device"),
        ),
    ],
)
def test_a_disk_that_fills_up_while_converting(
    target: str, error: Exception, make_gguf: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise error

    path = make_gguf()
    monkeypatch.setattr(target, fail)
    with pytest.raises(ModelError, match=r"the disk is full: .* needs .* free and has"):
        resolve(path)
    assert not list((cache / "models").iterdir())


def test_a_cache_that_is_a_file_is_reported(cache: Path) -> None:
    cache.write_text("not a folder")
    with pytest.raises(ModelError, match=r"cannot write the cache folder .*TOKENLEAP_CACHE"):
        store.build("tiny", "a test", 0, fill_one_file)
    assert cached() == []


def test_a_cache_that_cannot_be_written_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ModelError, match=r"cannot write the cache folder .*: Permission denied"):
        store.build("tiny", "a test", 0, fill_one_file)


def writable(path: Path) -> Path:
    path.chmod(0o644)
    return path


def flip(path: Path, place: int = 0, bit: int = 0) -> None:
    """Change one bit of a file."""
    with writable(path).open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("damage", ["truncated", "deleted", "manifest", "format", "bit"])
def test_a_damaged_model_is_built_again(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = store.build("tiny", "a test", 0, fill_one_file)
    manifest = writable(folder / "manifest.json")
    writable(folder / "config.json")
    if damage == "bit":
        flip(folder / "config.json")
    elif damage == "truncated":
        (folder / "config.json").write_text("{")
    elif damage == "deleted":
        (folder / "config.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(
            manifest.read_text().replace('"format_version": 1', '"format_version": 0')
        )
    assert store.find("tiny") is None
    assert store.build("tiny", "a test", 0, fill_one_file) == folder
    assert store.find("tiny") == folder
    assert (folder / "config.json").read_text() == "{}"
    made_again = [f"{folder} is damaged, and is made again from a test"]
    assert caplog.messages == ([] if damage in ("manifest", "format") else made_again)


def test_files_are_compared_when_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary loads read nothing; a copy of a cache is read once."""
    folder = store.build("tiny", "a test", 0, fill_one_file)
    sum_of, read = store._sum_of, []

    def reading(path: Path) -> int:
        read.append(path.name)
        return sum_of(path)

    monkeypatch.setattr(store, "_sum_of", reading)
    assert store.find("tiny") == folder
    assert not read
    os.utime(folder / "config.json", ns=(1, 1))
    assert [store.find("tiny"), store.find("tiny")] == [folder, folder]
    assert read == ["config.json"]
    copy = folder / "copy"
    shutil.copy2(folder / "config.json", copy)
    copy.replace(folder / "config.json")
    assert [store.find("tiny"), store.find("tiny")] == [folder, folder]
    assert read == ["config.json"] * 2
    writable(folder / ".verified").write_text("{damaged")
    assert store.find("tiny") == folder
    assert read == ["config.json"] * 3


def test_check_finds_what_no_time_tells() -> None:
    """A bit that the disk has flipped changes no modification time."""
    folder = store.build("tiny", "a test", 0, fill_one_file)
    assert store.check("tiny") == []
    at = (folder / "config.json").stat()
    flip(folder / "config.json")
    os.utime(folder / "config.json", ns=(at.st_atime_ns, at.st_mtime_ns))
    assert store.find("tiny") == folder
    assert store.check("tiny") == ["config.json"]
    assert store.find("tiny") is None
    with pytest.raises(ModelError, match="no cached model 'huge'"):
        store.check("huge")


@pytest.mark.parametrize(
    "change",
    [
        {"files": None},
        {"files": {"config.json": "2"}},
        {"sums": [1]},
        {"sums": {"config.json": None}},
        {"notes": {"runs": 1}},
        {"source": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_manifest_with_wrong_values(change: dict[str, Any]) -> None:
    folder = store.build("tiny", "a test", 0, fill_one_file)
    manifest = writable(folder / "manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    assert store.find("tiny") is None
    (damaged,) = cached()
    assert (damaged.name, damaged.kind) == ("tiny", store.DAMAGED)
    assert damaged.size_bytes > 0
    assert store.check("tiny") == ["manifest.json"]
    store.remove("tiny")
    assert cached() == []


def test_a_model_of_an_older_version_has_no_checksums() -> None:
    folder = store.build("tiny", "a test", 0, fill_one_file)
    manifest = writable(folder / "manifest.json")
    content = json.loads(manifest.read_text())
    del content["sums"]
    manifest.write_text(json.dumps(content))
    assert store.find("tiny") == folder
    assert store.check("tiny") is None
    (writable(folder / "config.json")).write_text("{")
    assert store.check("tiny") == ["config.json"]


def test_files_may_be_read_by_whoever_may_read_the_cache(make_gguf: Any) -> None:
    folder = resolve(make_gguf())
    assert len({path.stat().st_mode & 0o444 for path in folder.iterdir()}) == 1


def test_a_second_process_waits_and_uses_the_result(cache: Path) -> None:
    # The second one would fail, for want of a line, if it did build.
    first, second = start_build(), start(BUILD_WHEN_TOLD, subprocess.DEVNULL)
    assert second.stderr is not None
    assert "Waiting for another process" in second.stderr.readline()
    folder = f"{cache / 'models' / 'slow'}\n"
    assert first.communicate("go on\n", timeout=TIMEOUT) == (folder, "")
    assert second.communicate(timeout=TIMEOUT) == (folder, "")


def test_two_processes_convert_one_file_once(make_gguf: Any, cache: Path) -> None:
    script = f"from tokenleap.models import resolve\nprint(resolve({str(make_gguf())!r}))"
    with Program(script) as one, Program(script) as other:
        outputs = [program.communicate() for program in (one, other)]
        assert [program.returncode for program in (one, other)] == [0, 0]
    assert len({output for output, _ in outputs}) == 1
    assert "".join(errors for _, errors in outputs).count("Converting tiny.gguf") == 1
    assert len(cached()) == 1
    assert load_tokenizer(cached()[0].folder) is not None


def test_a_killed_build_is_invisible_and_cleaned_up(cache: Path) -> None:
    process = start_build()
    process.kill()
    process.communicate()
    assert cached() == []
    assert store.find("slow") is None
    assert len(list((cache / "models").iterdir())) == 1  # what the killed process left
    store.build("tiny", "a test", 0, fill_one_file)
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny"]


def test_an_interrupted_build_cleans_up_after_itself(cache: Path) -> None:
    process = start_build()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert not list((cache / "models").iterdir())


def test_another_builds_folder_is_safe_while_it_lasts(cache: Path) -> None:
    process = start_build()
    store.build("tiny", "a test", 0, fill_one_file)  # it waits for no other name
    assert [model.name for model in cached()] == ["tiny"]
    output, errors = process.communicate("go on\n", timeout=TIMEOUT)
    assert (output, errors) == (f"{cache / 'models' / 'slow'}\n", "")
    assert [model.name for model in cached()] == ["slow", "tiny"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (92_871_040, "92.9 MB"),
        (10**9 - 1, "1 GB"),
    ],
)
def test_sizes_are_written_as_people_write_them(count: int, text: str) -> None:
    assert store.bytes_text(count) == text


def test_older_folders_are_replaced() -> None:
    store.build("tiny-old", "a test", 0, fill_one_file)
    store.build("tiny-new", "a test", 0, fill_one_file, replaces="tiny-")
    assert [model.name for model in cached()] == ["tiny-new"]
