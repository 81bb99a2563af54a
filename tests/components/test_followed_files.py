import logging
from pathlib import Path

import pytest

from components.followed_files import FollowedFiles, read_file
from components.startup import WrongSettings


def number(path: Path) -> int:
    text = read_file(path, "MESH_NUMBER")
    if not text.isdigit():
        raise WrongSettings(f"MESH_NUMBER {path}: no number")
    return int(text)


def test_a_file_is_read_again_after_a_change_and_only_then(tmp_path: Path) -> None:
    path = tmp_path / "number"
    reads: list[int] = []

    def read() -> int:
        reads.append(number(path))
        return reads[-1]

    path.write_text("1")
    followed = FollowedFiles([path], read)
    assert (followed.current(), followed.current(), reads) == (1, 1, [1])
    path.write_text("22")
    assert (followed.current(), followed.current(), reads) == (22, 22, [1, 22])


def test_a_bad_change_is_logged_once_and_the_last_good_content_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    followed = FollowedFiles([path], lambda: number(path))
    assert followed.current() == 1
    path.write_text("none")
    assert [followed.current() for _ in range(3)] == [1, 1, 1]
    path.unlink()
    assert followed.current() == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    path.write_text("333")
    assert followed.current() == 333


def test_files_that_change_while_they_are_read_are_read_once_more(tmp_path: Path) -> None:
    """A certificate and its key are two files: half of a pair must not stay in use."""
    path = tmp_path / "number"
    path.write_text("1")
    changes = iter(["22"])

    def read() -> int:
        found = number(path)
        if (change := next(changes, None)) is not None:
            path.write_text(change)
        return found

    followed = FollowedFiles([path], read)
    assert followed.current() == 1
    assert followed.current() == 22


def test_without_a_first_content_the_file_and_its_setting_are_named(tmp_path: Path) -> None:
    followed = FollowedFiles([tmp_path / "gone"], lambda: number(tmp_path / "gone"))
    with pytest.raises(WrongSettings, match=r"MESH_NUMBER .*/gone: No such file or directory"):
        followed.current()
