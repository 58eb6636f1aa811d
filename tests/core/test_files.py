"""A file appears complete or not at all."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from tokenleap.core.files import write_whole


def broken(path: Path) -> None:
    path.write_text("half")
    raise OSError("the disk is full")


def test_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("first", "second"):
        write_whole(path, lambda beside, text=text: beside.write_text(text))  # type: ignore[misc]
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("existing", [None, "before"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, existing: str | None) -> None:
    path = tmp_path / "file"
    if existing is not None:
        path.write_text(existing)
    with pytest.raises(OSError, match="full"):
        write_whole(path, broken)
    assert [each.read_text() for each in tmp_path.iterdir()] == ([existing] if existing else [])


def test_the_mode_is_the_usual_one(tmp_path: Path) -> None:
    """Whatever the writer makes of it."""

    def private(path: Path) -> None:
        path.unlink()
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))

    write_whole(tmp_path / "file", private)
    (tmp_path / "usual").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "usual")}
    assert len(modes) == 1


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", lambda beside: beside.write_text("after"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "after"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_whole(path, lambda beside: beside.write_text("text"))
    reader.join()
    assert read == ["text"]


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_whole(tmp_path / "nowhere" / "file", broken)
