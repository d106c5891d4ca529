"""One pipe of a rank: everything into the log, events that say where, letters whole, floods cut."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmagic.remote.agent.rank_stream import RankStream
from distmagic.remote.records import logs
from distmagic.remote.records.journal import expand, log_name
from distmagic.remote.wire import protocol as p


class Pipe:
    """A rank's stdout: its writing end, and the stream at the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        reading, self.writing = os.pipe()
        self.stream = RankStream(reading, folder, 3, "stdout", now=0.0)
        self.is_open = True

    def write(self, data: bytes) -> None:
        os.write(self.writing, data)

    def end(self) -> None:
        if self.is_open:
            os.close(self.writing)
            self.is_open = False

    def drain(self) -> None:
        while self.stream.drain():
            pass

    def text(self, event: p.Output) -> str:
        """Return an event's text as it reaches the notebook."""
        _, travelled = p.decode(expand(p.encode(event, 1), self.folder))
        return travelled.text

    def told(self) -> list[str]:
        """Return the texts of all events that are due, as they reach the notebook."""
        return [
            self.text(event) for event in iter(lambda: self.stream.event(0.0), None)
        ]

    @property
    def log(self) -> bytes:
        return (self.folder / log_name(3, "stdout")).read_bytes()


@pytest.fixture
def pipe(tmp_path) -> Iterator[Pipe]:
    made = Pipe(tmp_path)
    yield made
    made.end()
    made.stream.close()


def test_what_is_written_is_in_the_log_and_told_once(pipe):
    assert pipe.stream.event(0.0) is None
    assert not pipe.stream.drain()
    pipe.write(b"hello\n")
    pipe.drain()
    event = pipe.stream.event(0.1)
    assert event == p.Output(rank=3, stream="stdout", offset=0, size_bytes=6)
    assert pipe.stream.event(0.2) is None
    pipe.write(b"world\n")
    pipe.drain()
    assert pipe.text(pipe.stream.event(0.3)) == "world\n"
    assert pipe.log == b"hello\nworld\n"
    assert (pipe.folder / log_name(3, "stdout")).stat().st_mode & 0o777 == 0o600


def test_the_end_of_the_pipe(pipe):
    pipe.write(b"last")
    pipe.end()
    assert pipe.stream.drain()
    assert pipe.stream.is_open
    assert not pipe.stream.drain()
    assert not pipe.stream.is_open
    assert not pipe.stream.drain()
    assert pipe.text(pipe.stream.event(0.0)) == "last"


def test_a_torn_colour_waits_for_its_rest(pipe):
    data = b"\x1b[1;38;5;208m"
    for cut in range(1, len(data)):
        pipe.write(b"ab" + data[:cut])
        pipe.drain()
        first = pipe.text(pipe.stream.event(0.0))
        pipe.write(data[cut:] + b"c")
        pipe.drain()
        assert (first, pipe.text(pipe.stream.event(0.0))) == ("ab", data.decode() + "c")


def test_what_begins_like_a_colour_does_not_wait_for_ever(pipe):
    pipe.write(b"ab\x1b[" + b"1" * 100)
    pipe.drain()
    assert pipe.text(pipe.stream.event(0.0)) == "ab\x1b[" + "1" * 100
    pipe.write(b"\x1b")
    pipe.drain()
    assert pipe.stream.event(0.0) is None
    assert pipe.text(pipe.stream.event(0.0, last=True)) == "\x1b"


def test_a_torn_letter_at_the_end_goes_too(pipe):
    pipe.write(b"ab\xe2\x82")
    pipe.drain()
    assert pipe.text(pipe.stream.event(0.0)) == "ab"
    assert pipe.stream.event(0.0) is None
    assert pipe.text(pipe.stream.event(0.0, last=True)) == "\ufffd"


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x80\x80\x80\x80", b"a\xc3\x28", b"\xf0\x9f\x99"]
)
def test_what_is_no_utf8_comes_through_in_the_end(pipe, data):
    pipe.write(data)
    pipe.drain()
    events = [pipe.stream.event(0.0), pipe.stream.event(0.0, last=True)]
    assert "".join(pipe.text(event) for event in events if event) == data.decode(
        errors="replace"
    )


def test_any_cutting_gives_the_same_text(pipe):
    dice = random.Random(7)
    text = "".join(dice.choice(["a", "é", "€", "🙂", "\n"]) for _ in range(2000))
    data, found, now = text.encode(), "", 0.0
    while data:
        size = dice.randint(1, 40)
        pipe.write(data[:size])
        data = data[size:]
        pipe.drain()
        now += 1.0
        event = pipe.stream.event(now)
        found += pipe.text(event) if event else ""
    assert found == text


def test_a_flood_is_whole_in_the_log_and_its_end_is_sent(pipe):
    for i in range(40):
        pipe.write(bytes([65 + i % 26]) * 50_000 + b"\n")
        pipe.drain()
    event = pipe.stream.event(0.0)
    assert event.skipped_bytes + event.size_bytes == len(pipe.log) == 40 * 50_001
    assert event.size_bytes == 128 << 10
    assert pipe.text(event) == pipe.log[-event.size_bytes :].decode()
    pipe.write(b"x" * 60_000)
    pipe.drain()
    event = pipe.stream.event(0.0)
    assert event.size_bytes == 4096  # nothing left to spend, but a little always comes
    pipe.write(b"y" * 60_000)
    pipe.drain()
    assert pipe.stream.event(1.0).size_bytes == 60_000


@pytest.mark.parametrize("byte", [b"\0", b"\xff", b"\x1b"])
def test_the_worst_text_fits_into_a_line(pipe, byte):
    """As JSON a zero byte is six letters; a line that is too long would end the whole run."""
    for _ in range(10):
        pipe.write(byte * 60_000)
        pipe.drain()
    line = expand(p.encode(pipe.stream.event(0.0, last=True), 10**9), pipe.folder)
    assert len(line) < p.MAX_LINE_BYTES


def test_somebody_who_writes_for_ever_does_not_hold_us_up(tmp_path):
    stream = RankStream(os.open("/dev/zero", os.O_RDONLY), tmp_path, 0, "stdout", 0.0)
    stream.drain_all()
    assert stream.is_open
    stream.close()


def test_a_restarted_rank_goes_on_in_the_same_log(pipe, tmp_path):
    pipe.write(b"first\n")
    pipe.drain()
    again = Pipe(tmp_path)
    again.write(b"second\n")
    again.drain()
    event = again.stream.event(0.0)
    assert (event.offset, again.text(event), again.log) == (
        6,
        "second\n",
        b"first\nsecond\n",
    )
    again.end()
    again.stream.close()


def test_a_full_disk_loses_output_but_not_the_rank(tmp_path):
    (tmp_path / log_name(3, "stdout")).symlink_to("/dev/full")
    pipe = Pipe(tmp_path)
    pipe.write(b"x" * 1000)
    pipe.drain()
    assert pipe.stream.error == "No space left on device"
    event = pipe.stream.event(0.0)
    assert (event.text, event.size_bytes, event.skipped_bytes) == ("x" * 1000, 0, 0)
    assert pipe.stream.event(0.0) is None
    pipe.end()
    pipe.drain()
    assert not pipe.stream.is_open
    pipe.stream.close()


def test_a_flood_on_a_full_disk_is_cut_and_counted(tmp_path):
    (tmp_path / log_name(3, "stdout")).symlink_to("/dev/full")
    pipe = Pipe(tmp_path)
    for _ in range(20):
        pipe.write(b"x" * 60_000)
        pipe.drain()
    event = pipe.stream.event(0.0, last=True)
    assert (event.text, event.skipped_bytes) == (
        "x" * (128 << 10),
        20 * 60_000 - (128 << 10),
    )
    pipe.end()
    pipe.stream.close()


def test_a_rank_that_prints_for_weeks_stays_within_its_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_LOG_BYTES", "65536")
    pipe, sent = Pipe(tmp_path), b""
    for i in range(60):
        pipe.write(bytes([65 + i % 26]) * 5000 + b"\n")
        sent += bytes([65 + i % 26]) * 5000 + b"\n"
        pipe.drain()
        # Then it is too much to be shown.
        assert pipe.told() == [chr(65 + i % 26) * 5000 + "\n"] or i > 20
    kept = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 50_000 < kept <= 65536
    assert pipe.log == sent[: len(pipe.log)]
    assert (
        logs.read(tmp_path / log_name(3, "stdout"), len(sent) - 40_000, 40_000)
        == sent[-40_000:]
    )
    pipe.end()
    pipe.stream.close()


@pytest.fixture
def tiny_disk(tmp_path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True
    )
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.needs("lab")
def test_a_disk_that_becomes_full_and_empty_again(tiny_disk):
    filler = tiny_disk / "filler"
    filler.write_bytes(b"x" * (48 << 10))
    pipe = Pipe(tiny_disk)
    pipe.write(b"y" * 40_000)
    pipe.drain()
    kept = len(pipe.log)
    assert 0 < kept < 40_000
    assert pipe.told() == ["y" * kept, "y" * (40_000 - kept)]
    pipe.write(b"more\n")
    pipe.drain()
    assert pipe.told() == ["more\n"]
    filler.unlink()
    pipe.write("z€\n".encode())
    pipe.drain()
    note = f"\n[distmagic: {40_005 - kept:,} bytes are missing in this log: the disk was full]\n"
    assert pipe.told() == [f"{note}z€\n"]
    assert pipe.log.decode() == "y" * kept + note + "z€\n"
    assert pipe.stream.error == ""
    pipe.end()
    pipe.stream.close()
