"""Programs are parsed in several threads at once, as two runs that begin at once do."""

from __future__ import annotations

import ast
import gc
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from distmagic.remote.system.gc_pause import parsed, parsed_expression
from tests import REPOSITORY

TEXT = "\n".join(
    f"def f{i}(a, b=({i}, [1, {{2: 3}}])):\n    return a + b * (a - (b / a))"
    for i in range(30)
)


class LetsOthersRun:
    """Garbage whose end lets another thread run."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0)


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(50)
    yield
    gc.set_threshold(*before)


def test_threads_parse_at_once(eager_collector):
    def parse_often(number: int) -> list[int]:
        found = []
        for _ in range(60):
            LetsOthersRun()
            found.append(len(parsed(TEXT).body))
        return found

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(parse_often, range(3))) == [[30] * 60] * 3
    assert gc.isenabled()


def test_a_parser_leaves_the_collector_as_it_was():
    gc.disable()
    try:
        assert isinstance(parsed_expression("a + 1"), ast.BinOp)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(SyntaxError):
        parsed("a +")
    assert gc.isenabled()


def test_all_code_parses_this_way():
    parses = re.compile(r"\bast\.parse\(")
    files = (REPOSITORY / "distmagic").rglob("*.py")
    found = [file.name for file in files if parses.search(file.read_text())]
    assert found == ["gc_pause.py"]
