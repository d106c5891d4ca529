"""The journal: every event numbered and kept, across memory, disk and a disk that is full."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distmagic.remote import journal as journals
from distmagic.remote import protocol as p
from distmagic.remote.journal import FILE, Journal, expand, log_name, read


def notice(i: int) -> p.Notice:
    return p.Notice(level="info", text=f"event {i}")


def filled(folder: Path, count: int) -> Journal:
    found = Journal(folder)
    for i in range(1, count + 1):
        found.add(notice(i))
    return found


def decoded(data: bytes) -> list[tuple[int, p.Message]]:
    return [p.decode(line) for line in data.splitlines()]


def everything(journal: Journal, after: int = 0, max_bytes: int = 1000) -> list[tuple[int, p.Message]]:
    """Read as a slow reader does: piece by piece."""
    found = []
    while after < journal.last:
        n, data = journal.after(after, max_bytes)
        assert n > after
        found += decoded(data)
        after = n
    return found


@pytest.fixture
def small_memory(monkeypatch):
    """Keep only about 20 of these events in memory."""
    monkeypatch.setattr(journals, "_IN_MEMORY_BYTES", 1000)


def test_events_are_numbered_from_1_and_on_disk(tmp_path):
    journal = filled(tmp_path, 3)
    assert journal.last == 3
    expected = [(i, notice(i)) for i in (1, 2, 3)]
    assert decoded((tmp_path / FILE).read_bytes()) == expected
    assert everything(journal) == expected
    assert journal.after(1, 0)[0] == 2
    assert journal.after(3, 1000) == (3, b"")


def test_only_the_user_may_read_it(tmp_path):
    filled(tmp_path, 1)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("after", [0, 1, 255, 256, 257, 511, 700, 980, 999])
@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
def test_a_reader_begins_anywhere(tmp_path, small_memory, after, max_bytes):
    journal = filled(tmp_path, 1000)
    assert journal._first > 900
    assert everything(journal, after, max_bytes) == [(i, notice(i)) for i in range(after + 1, 1001)]


def test_a_long_journal_is_not_read_from_its_beginning_again_and_again(tmp_path, small_memory, monkeypatch):
    journal = filled(tmp_path, 5000)
    seen = 0
    real = journals.read

    def counting(path, after=0, offset=0):
        nonlocal seen
        for number, line in real(path, 0, offset):
            seen += 1
            if number > after:
                yield number, line

    monkeypatch.setattr(journals, "read", counting)
    assert len(everything(journal, 0, 2000)) == 5000
    assert seen < 5000 * 10


def test_memory_is_bounded(tmp_path, small_memory):
    journal = filled(tmp_path, 2000)
    assert sum(map(len, journal._recent)) <= 1000


def test_a_full_disk_loses_nothing_that_fits_into_memory(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    journal = filled(tmp_path, 50)
    assert journal.error == "[Errno 28] No space left on device"
    assert everything(journal) == [(i, notice(i)) for i in range(1, 51)]


def test_numbers_go_on_where_disk_and_memory_have_both_lost_an_event(tmp_path, small_memory, monkeypatch):
    journal = Journal(tmp_path)
    real = os.write
    for i in range(1, 501):
        full = 100 <= i < 400
        if full:  # the disk takes half a line, as a disk that is nearly full does
            monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
        journal.add(notice(i))
        monkeypatch.setattr(os, "write", real)
    assert journal.error == "No space left on device"
    found = everything(journal)
    assert [n for n, _ in found] == list(range(1, 501))
    assert [m for _, m in found[:99]] == [notice(i) for i in range(1, 100)]
    assert {m.text for _, m in found[99:399]} == {"an event was lost: the disk was full"}
    assert [m for _, m in found[399:]] == [notice(i) for i in range(400, 501)]
    assert [n for n, _ in read(tmp_path / FILE)] == [*range(1, 100), *range(400, 501)]


def test_a_torn_last_line_is_left_out(tmp_path):
    filled(tmp_path, 3)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-5])
    assert [n for n, _ in read(path)] == [1, 2]
    assert [n for n, _ in read(path, after=1)] == [2]


# ---- text stands in the logs


def placed(rank: int = 0, **more: int) -> bytes:
    return p.encode(p.Output(rank=rank, stream="stdout", **more), 7)


def test_text_comes_out_of_the_log(tmp_path):
    (tmp_path / log_name(0, "stdout")).write_bytes("grün und blau\n".encode())
    line = placed(offset=6, size_bytes=4)
    assert json.loads(line).get("text") is None
    n, event = p.decode(expand(line, tmp_path))
    assert (n, event.text, event.offset, event.size_bytes) == (7, "und ", 6, 0)


def test_torchruns_own_log(tmp_path):
    assert log_name(-1, "stderr") == "torchrun.stderr.log"
    (tmp_path / "torchrun.stdout.log").write_bytes(b"hi")
    _, event = p.decode(expand(placed(-1, offset=0, size_bytes=2), tmp_path))
    assert event.text == "hi"


def test_half_a_character_behind_a_gap_is_left_out(tmp_path):
    (tmp_path / log_name(0, "stdout")).write_bytes("€uro".encode())
    _, event = p.decode(expand(placed(offset=1, size_bytes=5, skipped_bytes=1), tmp_path))
    assert event.text == "uro"
    _, event = p.decode(expand(placed(offset=1, size_bytes=5), tmp_path))
    assert event.text == "\ufffd\ufffduro"


def test_a_log_that_is_gone_says_so(tmp_path):
    _, event = p.decode(expand(placed(offset=0, size_bytes=5), tmp_path))
    assert event.text.startswith("[distmagic: the log can't be read: [Errno 2] No such file or directory")


def test_other_events_stay_as_they_are(tmp_path):
    line = p.encode(notice(1), 1)
    assert expand(line, tmp_path) is line
