from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from specq.errors import DiskFullError, UsageError
from specq.files import (
    is_text,
    is_there,
    named_path,
    read_text,
    refusal,
    require_readable,
    write_atomically,
    write_text,
)


def write_half(path: Path, error: Exception) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text("half")
        raise error


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("old")
    with pytest.raises(KeyError):
        write_half(path, KeyError("interrupted"))
    assert path.read_text() == "old"
    with write_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["model.json"]


def test_a_full_disk_has_its_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="no room left"):
        write_half(tmp_path / "model.json", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link_to_the_file_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_text(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_a_device_is_written_and_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(tmp_path / "pipe", "row\n")
        assert os.read(reader, 10) == b"row\n"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800"])
def test_a_text_that_is_no_path_is_one_error_and_not_there(name: str) -> None:
    assert not is_there(name)
    for use in (named_path, read_text, lambda file: write_text(file, "")):
        with pytest.raises(UsageError, match="cannot be opened"):
            use(name)


def test_home_is_found_and_nobody_is_a_name_as_any_other(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert named_path("~/notes.txt") == tmp_path / "notes.txt"
    assert named_path("~20 people came") == Path("~20 people came")


def test_what_cannot_be_read_or_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for use, name, why in (
        (read_text, "none.txt", "cannot be read: no such file or directory"),
        (read_text, "", "cannot be read: is a directory"),
        (read_text, "latin.txt", "is not UTF-8 text"),
        (lambda file: write_text(file, "x"), "none/a.txt", "cannot be written: no such file or directory"),
        (lambda file: write_text(file, "x"), "", "cannot be written: is a directory"),
    ):
        with pytest.raises(UsageError, match=why):
            use(tmp_path / name)


def test_what_the_system_refuses_is_an_error_of_its_kind(tmp_path: Path) -> None:
    for number, kind in ((errno.EACCES, UsageError), (errno.EROFS, UsageError), (errno.ENOSPC, DiskFullError)):
        found = refusal(OSError(number, os.strerror(number), "/place"))
        assert type(found) is kind
        assert "`/place`" in found.message
    nameless = refusal(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert nameless is not None
    assert "None" not in nameless.message
    assert refusal(FileNotFoundError(errno.ENOENT, "none", "/place")) is None  # may be a fault of ours
    with pytest.raises(UsageError, match="is a directory"):
        require_readable(tmp_path)


def test_half_a_pair_of_surrogates_is_no_text() -> None:
    assert is_text("né 🙂")
    assert not is_text(os.fsdecode(b"\xff\xfe"))
