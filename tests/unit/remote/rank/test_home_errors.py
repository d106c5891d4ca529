"""What a rank writes to a home whose file server fails: once it is whole, a half that can't be removed is no error."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from distmagic.payload.pack import dumped
from distmagic.remote.rank import checkpoint, stay
from distmagic.remote.values import parcel
from distmagic.remote.values.call import Cell
from distmagic.remote.values.pickling import Seen
from distmagic.remote.wire.cells import RunCell
from tests.builders.file_server import FileServer, each_error


def a_snapshot(home: Path) -> None:
    checkpoint.save({}, home / "snapshot.pt", step=1)


def a_side_file(home: Path) -> None:
    parcel.dump(bytes(2 << 20), home / "value", beside=home)


def a_cell(home: Path) -> None:
    loop = SimpleNamespace(
        _this=SimpleNamespace(folder=home, call=home / "call"), _rank=0,
        _main=sys.modules["__main__"], _own=set(), _defining={}, _main_file=None, _labels={},
    )  # fmt: skip
    made = dumped(Cell("x = 1", "cell 1"), Seen(), None)
    data = base64.b64encode(made.path.read_bytes()).decode()
    stay.CellLoop._load(cast(Any, loop), RunCell(cell=1, ranks=(0,), data=data))


@each_error
@pytest.mark.parametrize("write", [a_snapshot, a_side_file, a_cell])
def test_what_is_whole_is_no_error(
    home_in_memory, tmp_path, monkeypatch, write, home_error
):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))  # the notebook's
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    home_in_memory.mkdir()
    server = FileServer(monkeypatch, home_in_memory, home_error)
    ends = [
        (call, raised)
        for call, raised in server.each_call(lambda: write(home_in_memory))
        if call.startswith("unlink")
    ]
    assert ends
    assert [raised for _, raised in ends if raised] == []
