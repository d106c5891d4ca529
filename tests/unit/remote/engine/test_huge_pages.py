"""Memory on huge pages: the same bytes, in fewer pages."""

from __future__ import annotations

import platform
import re
import sys

import pytest

from tests.builders.shell import completed

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="hosts run Linux"
)

_PROGRAM = """
from pathlib import Path
from distmagic.remote.engine import huge_pages

def huge_kb():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("AnonHugePages:")[2].split()[0])

held = [bytearray(b"%07d" % number) * 512 for number in range(8_000)]  # 28 MB in small pages
before_kb = huge_kb()
steps = [*huge_pages.collapse()]
assert held == [bytearray(b"%07d" % number) * 512 for number in range(8_000)]
print(len(steps), all(steps), huge_kb() - before_kb)
"""


def test_memory_moves_to_huge_pages_and_keeps_its_bytes():
    done = completed([sys.executable, "-c", _PROGRAM])
    steps, are_true, moved_kb = done.stdout.split()
    assert int(steps) >= 13
    assert are_true == "True"
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    assert version is not None
    if (int(version[1]), int(version[2])) >= (6, 1):
        assert int(moved_kb) >= 8 * 2048


_ODD_NAME = r"""
import mmap, os, sys
from distmagic.remote.engine import huge_pages

name = os.fsencode(sys.argv[1]) + b"/m\xfcl\rler.so"
with open(name, "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
print(all(huge_pages.collapse()))
"""


def test_a_library_may_be_in_a_folder_whose_name_is_no_text(tmp_path):
    done = completed([sys.executable, "-c", _ODD_NAME, str(tmp_path)])
    assert done.stdout.strip() == "True"
