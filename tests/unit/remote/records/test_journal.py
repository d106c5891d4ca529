"""The journal: every event numbered and kept, across memory, disk and a disk that is full."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distmagic.remote.records import journal as journals
from distmagic.remote.records.journal import (
    FILE,
    Journal,
    expand,
    log_name,
    read,
    replay,
)
from distmagic.remote.wire import protocol as p


def notice(i: int) -> p.Notice:
    return p.Notice(text=f"event {i}")


def filled(folder: Path, count: int) -> Journal:
    found = Journal(folder)
    for i in range(1, count + 1):
        found.add(notice(i))
    return found


def decoded(data: bytes) -> list[tuple[int, p.Message]]:
    return [p.decode(line) for line in data.splitlines()]


def everything(
    journal: Journal, after: int = 0, max_bytes: int = 1000
) -> list[tuple[int, p.Message]]:
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


@pytest.fixture(scope="module")
def long_journal(tmp_path_factory):
    """A journal of a thousand events, of which about 20 are in memory. For readers only."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journals, "_IN_MEMORY_BYTES", 1000)
        return filled(tmp_path_factory.mktemp("journal"), 1000)


@pytest.mark.parametrize("after", [0, 1, 255, 256, 257, 511, 700, 980, 999])
@pytest.mark.parametrize("max_bytes", [1, 300, 1 << 20])
def test_a_reader_begins_anywhere(long_journal, after, max_bytes):
    assert long_journal._first > 900
    assert everything(long_journal, after, max_bytes) == [
        (i, notice(i)) for i in range(after + 1, 1001)
    ]


def test_a_long_journal_is_not_read_from_its_beginning_again_and_again(
    tmp_path, small_memory, monkeypatch
):
    journal = filled(tmp_path, 5000)
    seen = 0
    real = journals.read

    def counting(folder, after=0, mark=(0, 0), owed=()):
        nonlocal seen
        for number, line in real(folder, 0, mark, owed):
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
    assert journal.error == "No space left on device"
    assert everything(journal) == [(i, notice(i)) for i in range(1, 51)]


def report(i: int) -> p.Progress:
    return p.Progress(rank=0, restart=0, at_s=float(i))


def filling_up(folder: Path, monkeypatch, event: Callable[[int], p.Message]) -> Journal:
    """Return a journal of 500 events, of which the disk took no whole line from 100 to 399."""
    journal = Journal(folder)
    real = os.write
    for i in range(1, 501):
        # The disk takes half a line, as a disk that is nearly full does.
        if 100 <= i < 400:
            monkeypatch.setattr(
                os, "write", lambda fd, data: real(fd, data[: len(data) // 2])
            )
        journal.add(event(i))
        assert journal.error == ("No space left on device" if 100 <= i < 400 else "")
        monkeypatch.setattr(os, "write", real)
    return journal


def test_numbers_go_on_where_disk_and_memory_have_both_lost_an_event(
    tmp_path, small_memory, monkeypatch
):
    journal = filling_up(tmp_path, monkeypatch, report)
    there = [*range(1, 100), *range(400, 501)]
    assert [n for n, _ in read(tmp_path)] == there
    expected = [(i, report(i)) for i in there]
    expected.insert(99, (100, p.Skipped(through=399)))
    assert everything(journal) == expected
    assert [p.decode(line) for line in replay(tmp_path, 0)] == expected
    assert [p.decode(line) for line in replay(tmp_path, 250)] == [
        (251, p.Skipped(through=399)),
        *expected[100:],
    ]


def test_how_the_job_goes_is_written_when_there_is_room_again(tmp_path, monkeypatch):
    journal = filling_up(tmp_path, monkeypatch, notice)
    assert everything(journal) == [(i, notice(i)) for i in range(1, 501)]
    assert [p.decode(line) for line in replay(tmp_path, 0)] == everything(journal)


def test_what_waits_for_room_is_bounded_too(tmp_path, small_memory, monkeypatch):
    journal = Journal(tmp_path)
    monkeypatch.setattr(os, "write", lambda *_: 0)
    for i in range(1, 501):
        journal.add(notice(i))
    assert sum(len(line) for _, line in journal._owed) <= 1000
    found = everything(journal)
    assert found[0] == (1, p.Skipped(through=500 - len(found) + 1))


def test_the_last_words_find_room_on_a_full_disk(tmp_path, monkeypatch):
    """The reserve makes it: a disk on which there is just as much room as was set aside."""
    journal = Journal(tmp_path)
    assert (tmp_path / "reserve").stat().st_size == 256 << 10
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if (tmp_path / "reserve").exists():
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    journal.add(notice(1))
    journal.add(report(2))
    assert list(read(tmp_path)) == []
    journal.add(p.Final(reason="done"))
    assert [p.decode(line) for line in replay(tmp_path, 0)] == [
        (1, notice(1)),
        (2, p.Skipped(through=2)),
        (3, p.Final(reason="done")),
    ]


def test_the_reserve_goes_with_the_job(tmp_path):
    Journal(tmp_path).add(p.Final(reason="done"))
    assert not (tmp_path / "reserve").exists()


@pytest.fixture
def small_limit(monkeypatch):
    """Keep about 8 KiB of reports and output."""
    monkeypatch.setattr(journals, "CHATTER_LIMIT_BYTES", 8192)


@pytest.mark.parametrize("after", [0, 1, 300, 301, 1500, 2999])
def test_reports_of_weeks_leave_the_rest_whole(
    tmp_path, small_memory, small_limit, after
):
    journal = Journal(tmp_path)
    for i in range(1, 3001):
        journal.add(notice(i) if i % 100 == 1 else report(i))
    assert (
        sum(
            path.stat().st_size for path in tmp_path.iterdir() if path.name != "reserve"
        )
        < 8192 + 30 * 60
    )
    found = everything(journal, after)
    assert found == [p.decode(line) for line in replay(tmp_path, after)]
    seen = after
    for n, event in found:  # every number once, or told as skipped
        assert n == seen + 1
        seen = event.through if isinstance(event, p.Skipped) else n
    assert seen == 3000
    assert [n for n, event in found if isinstance(event, p.Notice)] == [
        n for n in range(1, 3000, 100) if n > after
    ]
    kept = [n for n, event in found if isinstance(event, p.Progress)]
    assert (
        kept[-50:] == [n for n in range(2949, 3001) if n % 100 != 1][-len(kept[-50:]) :]
    )
    assert after > 0 or kept[:10] == list(range(2, 12))


def test_a_torn_last_line_is_left_out(tmp_path):
    filled(tmp_path, 3)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-5])
    assert [n for n, _ in read(tmp_path)] == [1, 2]
    assert [n for n, _ in read(tmp_path, after=1)] == [2]


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
    _, event = p.decode(
        expand(placed(offset=1, size_bytes=5, skipped_bytes=1), tmp_path)
    )
    assert event.text == "uro"
    _, event = p.decode(expand(placed(offset=1, size_bytes=5), tmp_path))
    assert event.text == "\ufffd\ufffduro"


def test_a_log_that_is_gone_says_so(tmp_path, golden):
    _, event = p.decode(expand(placed(offset=0, size_bytes=5), tmp_path))
    golden(event.text)


def test_text_that_the_log_could_not_take_stands_in_the_event(tmp_path):
    line = p.encode(p.Output(rank=0, stream="stdout", offset=9, text="still here\n"), 7)
    assert expand(line, tmp_path) is line


def test_text_that_is_no_longer_kept_is_told(tmp_path, golden):
    (tmp_path / log_name(0, "stdout")).write_bytes(b"one\n")
    (tmp_path / (log_name(0, "stdout") + ".100")).write_bytes(b"new\n")
    _, event = p.decode(expand(placed(offset=50, size_bytes=54), tmp_path))
    golden(event.text)


def test_other_events_stay_as_they_are(tmp_path):
    line = p.encode(notice(1), 1)
    assert expand(line, tmp_path) is line
