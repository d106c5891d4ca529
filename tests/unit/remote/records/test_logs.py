"""A log within its limit: the beginning and the newest part stay, places stay places, gaps are told."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.records import logs
from distmagic.remote.records.logs import PIECES, Log

LIMIT = 8 * 100  # pieces of 100 bytes


def filled(path: Path, size: int, step: int = 10) -> Log:
    """Return a log into which the bytes 0, 1, ... 250, 0, 1 ... were written."""
    log = Log(path, LIMIT)
    for at in range(0, size, step):
        assert log.append(content(at, min(step, size - at))) == min(step, size - at)
    return log


def content(offset: int, size: int) -> bytes:
    return bytes(at % 251 for at in range(offset, offset + size))


def gap(size: int) -> bytes:
    text = f"\n[distmagic: {size:,} bytes are not kept: of a log this long only the beginning and the newest part are]\n"
    return text.encode()


def on_disk(path: Path) -> int:
    return sum(file.stat().st_size for _, file in logs.pieces(path))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "rank1.stdout.log"


def test_what_fits_is_one_file(path):
    log = filled(path, 100)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert (path.read_bytes(), log.end, path.stat().st_mode & 0o777) == (
        content(0, 100),
        100,
        0o600,
    )


@pytest.mark.parametrize("step", [1, 7, 10, 99, 100, 101, 350, 5000])
def test_beyond_it_the_beginning_and_the_newest_part_stay(path, step):
    log = filled(path, 5000, step)
    offsets = [offset for offset, _ in logs.pieces(path)]
    assert len(offsets) == PIECES
    assert on_disk(path) <= LIMIT
    assert (log.end, logs.end(path), offsets[0]) == (5000, 5000, 0)
    first = (path.stat().st_size, offsets[1])
    assert logs.read(path, 0, first[0]) == content(0, first[0])
    assert logs.read(path, first[1], 5000 - first[1]) == content(
        first[1], 5000 - first[1]
    )
    assert first[0] == 100
    assert 600 < 5000 - first[1] <= 700
    whole = (
        content(0, first[0])
        + gap(first[1] - first[0])
        + content(first[1], 5000 - first[1])
    )
    assert logs.read(path, 0, 5000) == whole
    with contextlib.ExitStack() as stack:
        parts = logs.open_all(path, stack)
        assert b"".join(file.read(size) for file, size in parts) == whole


def test_what_is_gone_is_told_where_it_is_read(path):
    filled(path, 5000, 100)
    assert logs.read(path, 90, 20) == content(90, 10) + gap(10)
    assert logs.read(path, 150, 20) == gap(20)
    assert logs.read(path, 4280, 40) == gap(20) + content(4300, 20)
    assert logs.read(path, 4990, 30) == content(4990, 10) + gap(20)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        logs.read(path, 0, 10)


@given(
    st.lists(st.integers(1, 350), max_size=60),
    st.integers(0, 4000),
    st.integers(1, 500),
    st.booleans(),
)
def test_any_writes_are_read_again_or_known_to_be_gone(sizes, offset, size, whole):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        log, end = Log(path, LIMIT), 0
        for each in sizes:
            assert log.append(content(end, each), whole=whole) == each
            end += each
        log.close()
        size = min(size, end - offset)
        if size <= 0:
            return
        there = sorted(
            (start, start + piece.stat().st_size) for start, piece in logs.pieces(path)
        )
        kept = [
            at
            for at in range(offset, offset + size)
            if any(start <= at < stop for start, stop in there)
        ]
        found = logs.read(path, offset, size)
        for hole in (
            {size - len(kept)}
            if kept and kept == list(range(kept[0], kept[-1] + 1))
            else set()
        ):
            found = found.replace(gap(hole), b"")
            assert found == bytes(at % 251 for at in kept)
        assert (len(kept) == size) == (
            logs.read(path, offset, size) == content(offset, size)
        )


def test_lines_stay_whole(path):
    log = Log(path, LIMIT)
    for i in range(200):
        assert log.append(b"line %d\n" % i, whole=True)
    found = [int(line.split()[1]) for line in logs.lines(path)]
    beginning = len(path.read_bytes().splitlines())
    assert found == [*range(beginning), *range(200 - len(found) + beginning, 200)]
    assert len(found) > 60
    assert all(piece.read_bytes().endswith(b"\n") for _, piece in logs.pieces(path))


def test_lines_from_an_offset_on(path):
    log = Log(path, LIMIT)
    starts = []
    for i in range(70):
        starts.append(log.end)
        log.append(b"line %d\n" % i, whole=True)
    for i, start in enumerate(starts):
        assert [int(line.split()[1]) for line in logs.lines(path, start)] == list(
            range(i, 70)
        )
    assert list(logs.lines(path, log.end)) == []


def test_a_torn_line_is_left_out(path):
    path.write_bytes(b"one\ntw")
    assert list(logs.lines(path)) == [b"one\n"]


def test_another_writer_goes_on_at_the_end(path):
    filled(path, 5000).close()
    log = Log(path, LIMIT)
    assert log.end == 5000
    log.append(content(5000, 350))
    assert logs.read(path, 4900, 450) == content(4900, 450)
    assert on_disk(path) <= LIMIT


def test_other_files_are_no_pieces(path):
    for name in (
        "rank1.stdout.log.x",
        "rank1.stdout.log.²",
        "rank1.stdout.log2",
        "rank10.stdout.log",
        "result",
    ):
        (path.parent / name).write_bytes(b"x" * 7)
    log = filled(path, 150)
    assert [offset for offset, _ in logs.pieces(path)] == [0, 100]
    assert log.end == 150


def test_a_piece_that_goes_while_it_is_looked_for(path, monkeypatch):
    filled(path, 5000)
    there = logs.pieces(path)
    there[1][1].unlink()
    monkeypatch.setattr(logs, "pieces", lambda _: there)
    assert logs.read(path, 4300, 200) == gap(100) + content(4400, 100)
    with contextlib.ExitStack() as stack:
        sizes = [size for _, size in logs.open_all(path, stack)]
    assert sizes == [100, len(gap(4300)), *[100] * 6]
    assert sum(1 for _ in logs.lines(path)) > 0


def test_nothing_there(path):
    with contextlib.ExitStack() as stack:
        assert logs.open_all(path, stack) == []
    with pytest.raises(FileNotFoundError):
        logs.end(path)
    assert list(logs.lines(path)) == []


def test_a_full_disk_is_told_and_forgotten(path, monkeypatch):
    log = filled(path, 50)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    assert (log.append(content(50, 20)), log.error) == (10, "No space left on device")
    assert log.append(b"a whole line\n", whole=True) == 0
    assert (log.end, path.read_bytes()) == (60, content(0, 60))
    monkeypatch.setattr(os, "write", real)
    assert (log.append(content(60, 90)), log.error) == (90, "")
    assert logs.read(path, 0, 150) == content(0, 150)


def test_where_no_new_piece_can_be_made_the_old_one_stays(path, monkeypatch):
    log = filled(path, 100)
    real = os.open
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "no")))
    assert (log.append(b"x"), log.error, log.end) == (0, "No space left on device", 100)
    monkeypatch.setattr(os, "open", real)
    assert (log.append(content(100, 50)), log.error) == (50, "")
    assert logs.read(path, 0, 150) == content(0, 150)


def test_a_log_that_can_not_be_opened_raises_nothing_and_goes_on_when_it_can(tmp_path):
    """A rank that is started again after its folder was removed, or on a full disk."""
    path = tmp_path / "gone" / "rank0.log"
    log = logs.Log(path, 1 << 20)
    assert log.append(b"lost") == 0
    assert log.error == "No such file or directory"
    path.parent.mkdir()
    assert log.append(b"kept") == 4
    assert (log.error, log.end, path.read_bytes()) == ("", 4, b"kept")
    log.close()


def test_a_piece_whose_close_fails_is_let_go_of_all_the_same(path, monkeypatch):
    """A file server may report a full quota only there; by then the descriptor's number is free for somebody else."""
    log = Log(path, LIMIT)
    assert log.append(content(0, 100)) == 100
    real = os.close

    def over_quota(descriptor: int) -> None:
        real(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", over_quota)
        assert log.append(content(100, 50)) == 50
    reading, writing = os.pipe()  # they get the lowest free number
    for at in range(150, 350, 50):
        assert log.append(content(at, 50)) == 50
    os.write(writing, b"still open")
    assert os.read(reading, 100) == b"still open"
    assert logs.read(path, 0, 350) == content(0, 350)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", over_quota)
        log.close()
    for descriptor in (reading, writing):
        os.close(descriptor)
