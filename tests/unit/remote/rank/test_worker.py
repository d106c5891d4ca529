"""What a rank says besides its progress: warnings under the cell's label, and a result that finds no room."""

from __future__ import annotations

import asyncio
import errno
import os
import runpy
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distmagic.remote.rank import ending
from distmagic.remote.training import frames
from distmagic.remote.values import call, parcel
from tests.builders.shell import completed
from tests.lab.waiting import HANG_S

# In a process of its own: pytest takes warnings for itself.
WARN = """
import logging, warnings
warnings.simplefilter("always")
from distmagic.remote.rank import sources
sources.label_warnings({"/tmp/ipykernel_71/123.py": "Cell In[3]"})
for name in ("/tmp/ipykernel_71/123.py", "/somewhere/train.py"):
    exec(compile("import warnings\\n\\nwarnings.warn('too hot')", name, "exec"))
logging.captureWarnings(True)
logging.basicConfig(format="log: %(message)s")
warnings.warn_explicit("too late", RuntimeWarning, "/tmp/ipykernel_71/123.py", 9)
"""


def test_a_warning_of_a_cell_names_the_cell_as_tracebacks_do(golden):
    done = subprocess.run(
        [sys.executable, "-c", WARN], capture_output=True, text=True, check=True
    )
    golden(
        *[
            line
            for line in done.stderr.splitlines()
            if line.strip() and (not line.startswith(" "))
        ]
    )


def rank_in(folder: Path) -> ending.Rank:
    return ending.Rank(
        rank=3,
        restart=0,
        folder=folder,
        call=folder,
        code=folder,
        socket="",
        pid=os.getpid(),
    )


def test_a_result_is_kept(tmp_path):
    ended = ending.keep(rank_in(tmp_path), {"loss": 0.5})
    assert (ended.outcome, ended.meaning) == ("returned", "")
    assert ended.result_bytes == (tmp_path / "rank3.result").stat().st_size


def test_a_result_that_finds_no_room_says_how_much_it_needs(tmp_path, monkeypatch):
    def dump(value: object, path: Path, **_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    value = bytes(1_000_000)
    monkeypatch.setattr(parcel, "dump", dump)
    monkeypatch.setattr(
        ending.shutil, "disk_usage", lambda _: type("", (), {"free": 4096})()
    )
    ended = ending.keep(rank_in(tmp_path), value)
    assert (ended.outcome, ended.code, ended.result_bytes) == ("returned", 0, None)
    assert f"it takes {parcel.measure(value):,} bytes" in ended.meaning
    assert "4,096 bytes free" in ended.meaning


class Odd:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


def test_a_result_that_can_not_be_pickled_fails_no_rank(tmp_path, golden):
    ended = ending.keep(rank_in(tmp_path), Odd(RuntimeError("I stay here")))
    assert (ended.outcome, ended.code, ended.result_bytes, ended.failure) == (
        "returned",
        0,
        None,
        None,
    )
    golden(ended.meaning)


def test_a_result_for_which_there_is_no_memory_fails_no_rank(tmp_path, golden):
    ended = ending.keep(rank_in(tmp_path), {"a": Odd(MemoryError())})
    assert (ended.outcome, ended.code, ended.result_bytes) == ("returned", 0, None)
    golden(ended.meaning)


def test_a_result_is_kept_without_the_part_that_can_not_be_pickled(tmp_path):
    ended = ending.keep(
        rank_in(tmp_path), {"loss": 0.5, "trainer": Odd(RuntimeError("I stay here"))}
    )
    assert (ended.outcome, ended.result_bytes) == (
        "returned",
        (tmp_path / "rank3.result").stat().st_size,
    )
    assert ended.meaning.startswith(
        "this was left out of its result: result['trainer'] is a tests.unit"
    )
    assert parcel.load(tmp_path / "rank3.result")["loss"] == 0.5


OWN_STREAM = """
import atexit, sys, types
from distmagic.remote.rank import ending
from distmagic.remote.training import frames
main = sys.modules["__main__"] = types.ModuleType("__main__")
atexit.register(ending.clear_main, main)
exec(sys.argv[1], main.__dict__)
"""
TEE = """
import sys
log = open("log", "w")
class Tee:
    def write(self, text):
        log.write(text)
    def flush(self):
        sys.__stdout__.write("flushed")
        log.flush()
sys.stdout = Tee()
print("hello")
"""


@pytest.mark.parametrize(("code", "end"), [(TEE, 0), (f"{TEE}log.close()", 120)])
def test_a_stream_of_main_is_flushed_before_main_is_cleared(tmp_path, code, end):
    command = [sys.executable, "-c", OWN_STREAM, code]
    done = completed(command, check=False, cwd=tmp_path)
    assert done.returncode == end, done.stderr
    assert done.stdout.startswith("flushed")
    assert end or (tmp_path / "log").read_text() == "hello\n"


def test_the_globals_of_a_program_are_no_result(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import threading\nlock = threading.Lock()\n")
    ended = ending.keep(
        rank_in(tmp_path), runpy.run_path(str(program), run_name="__main__")
    )
    assert (ended.outcome, ended.meaning, ended.result_bytes) == ("returned", "", 0)


def test_a_result_is_kept_though_the_file_server_fails_once(tmp_path, monkeypatch):
    errors, dump = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))], parcel.dump

    def failing_once(value: object, path: Path, **more: object) -> int:
        if errors:
            raise errors.pop()
        return dump(value, path, **more)

    monkeypatch.setattr(parcel, "dump", failing_once)
    ended = ending.keep(rank_in(tmp_path), {"loss": 0.5})
    assert ended.result_bytes == (tmp_path / "rank3.result").stat().st_size


def test_a_full_home_has_no_part_in_the_file_of_spawned_children(tmp_path):
    home = tmp_path / "a-file"
    home.touch()
    file = call.write_main(home / "main.py", "/a/call", spare=tmp_path)
    assert file == str(tmp_path / "main.py")
    assert "/a/call" in Path(file).read_text()


class Pickled:
    """Its pickling does what a test says."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __reduce__(self) -> tuple[type, tuple[int]]:
        self.act()
        return int, (5,)


def kept(folder: Path, **values: object) -> int | None:
    """Return the size of the frames that a rank keeps of an exception beside these values."""
    rank = rank_in(folder)
    with zipfile.ZipFile(folder / "code", "w") as archive:
        archive.writestr("sources.json", "{}")
    try:
        exec("1 / 0", dict(values))
    except ZeroDivisionError as error:
        return ending.keep_frames(replace(rank, code=folder / "code"), {}, error)
    raise AssertionError


def leaves() -> None:
    sys.exit(4)


def cancelled() -> None:
    raise asyncio.CancelledError


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(ending, "_PATIENCE_S", HANG_S)
    monkeypatch.setattr(frames, "_PATIENCE_S", HANG_S)


def values_in(folder: Path) -> dict[str, object]:
    """Return the values that the rank has kept, by name."""
    found = parcel.load(folder / "rank3.result")
    return {
        name: one if isinstance(one := found.values[number], str) else parcel.load_bytes(one, name)
        for name, number in found.frames[-1].local_names.items()
    }  # fmt: skip


@pytest.mark.parametrize("act", [leaves, cancelled])
def test_a_value_whose_pickling_raises_anything_is_described(tmp_path, patient, act):
    size = kept(tmp_path, odd=Pickled(act), lr=5)
    assert size == (tmp_path / "rank3.result").stat().st_size
    assert values_in(tmp_path) == {"odd": "Pickled", "lr": 5}


def test_a_value_whose_pickling_does_not_return_delays_no_report_for_long(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ending, "_PATIENCE_S", 0.05)
    is_over = threading.Event()
    try:
        assert kept(tmp_path, slow=Pickled(is_over.wait)) is None
    finally:
        is_over.set()
        for thread in threading.enumerate():
            if thread.name == "distmagic-frames":
                thread.join()


def test_a_deep_value_ends_no_rank(tmp_path, patient):
    """A recursion limit that the user has raised would let the pickler use the whole stack."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        size = kept(tmp_path, deep=deep, lr=5)
        assert sys.getrecursionlimit() == 10**6
    finally:
        sys.setrecursionlimit(before)
    assert size == (tmp_path / "rank3.result").stat().st_size
    assert values_in(tmp_path) == {"deep": "list", "lr": 5}


def test_the_signals_of_torchrun_end_no_rank_that_keeps_its_frames(tmp_path, patient):
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    kept(tmp_path, odd=Pickled(stop))
    assert values_in(tmp_path) == {"odd": 5}
    assert signal.getsignal(signal.SIGTERM) is before
