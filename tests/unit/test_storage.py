"""What cannot be written is known before work starts, and nothing is left where it was tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from specq.errors import UsageError
from specq.storage import build_folder, require_writable, require_writable_file
from specq.workspace import check_output


def test_a_file_that_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    require_writable_file(tmp_path / "new.csv")
    for path in (tmp_path, tmp_path / "none" / "new.csv"):
        with pytest.raises(UsageError, match="cannot be written"):
            require_writable_file(path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_made_where_files_can_be() -> None:
    hint = "choose another"
    with pytest.raises(UsageError, match="`/proc` cannot be written") as caught:
        require_writable(Path("/proc/none/deeper"), hint=hint)
    assert caught.value.hint == hint


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="file` cannot be written: it is not a folder"):
        check_output(tmp_path / "file" / "out", overwrite=True)
    check_output(tmp_path / "new" / "out", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_no_model_is_not_overwritten(tmp_path: Path) -> None:
    check_output(tmp_path, overwrite=True)
    (tmp_path / "thesis.txt").write_text("hello")
    with pytest.raises(UsageError, match=r"holds no model for --overwrite to replace, but thesis\.txt"):
        check_output(tmp_path, overwrite=True)
    (tmp_path / "config.json").write_text("{}")
    check_output(tmp_path, overwrite=True)


def test_a_cache_that_cannot_be_made_is_one_message() -> None:
    with pytest.raises(UsageError, match="`/proc` cannot be written") as caught:
        build_folder(Path("/proc/cache/demo"), lambda folder: None)
    assert "SPECQ_CACHE" in str(caught.value.hint)
