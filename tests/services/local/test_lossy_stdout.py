"""Lines for a reader that is slow, gone, or has another encoding."""

import errno
import os
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from services.local import lossy_stdout
from services.local.lossy_stdout import LossyFile
from services.local.output import Output
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_slow_reader_loses_lines_and_reads_their_number(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writer waited for the reader."""
    monkeypatch.setattr(lossy_stdout, "LIMIT_CHARS", 200_000)
    file = LossyFile(pipe[1])
    for number in range(10_000):
        file.write(f"{number:099}\n")
    expected, notes = 0, 0
    with os.fdopen(os.dup(pipe[0])) as reader:
        while expected < 10_000:
            line = reader.readline()
            note = re.fullmatch(r"\((\d+) lines were not shown: the reader of this output was too slow\)\n", line)
            if note is None:
                assert int(line) == expected
            expected, notes = expected + (1 if note is None else int(note[1])), notes + (note is not None)
        assert notes
        file.write("after\n")
        assert reader.readline() == "after\n"
    file.close()


def test_the_end_waits_for_lines_but_not_long(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    file = LossyFile(pipe[1])
    file.write("last words\n")
    file.close()
    assert os.read(pipe[0], 100) == b"last words\n"
    monkeypatch.setattr(lossy_stdout, "CLOSE_WAIT_S", 0.05)
    file = LossyFile(pipe[1])
    file.write("x" * 100_000)  # more than the pipe takes
    file.close()  # the rest stays unread
    os.read(pipe[0], 100_000)  # so that the thread ends


def test_lines_that_a_full_disk_refuses_are_dropped_and_the_next_ones_shown(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the reading of a child's pipe, or the whole mesh."""
    monkeypatch.setattr(lossy_stdout, "CLOSE_WAIT_S", PATIENCE_S)
    is_full, write, refused = True, os.write, bytearray()

    def on_disk(fd: int, data: bytes) -> int:
        if is_full:
            refused.extend(data)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", on_disk)
    file = LossyFile(pipe[1])
    output = Output(["decode-0"], Console(file=file, soft_wrap=True, highlight=False))
    assert output.show("decode-0", '{"event": "ready"}') == "ready"
    output.show("decode-0", "no JSON")
    output.error("cannot start")
    wait_until(lambda: b"cannot start" in refused)
    is_full = False
    output.show("decode-0", '{"event": "room again"}')
    output.show("decode-0", "no JSON again")
    file.close()
    shown = os.read(pipe[0], 65536).decode().splitlines()
    assert [line.split("decode-0  ")[1] for line in shown] == ["room again", "no JSON again"]


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"caf\\xe9 \\ud800\n"), ("utf-8", "café \\ud800\n".encode())]
)
def test_characters_that_the_encoding_lacks_are_escaped(pipe: tuple[int, int], encoding: str, shown: bytes) -> None:
    """The error ended the reading of the child that wrote the line."""
    file = LossyFile(pipe[1], encoding)
    assert file.encoding == encoding
    file.write("café \ud800\n")
    file.close()
    assert os.read(pipe[0], 100) == shown
