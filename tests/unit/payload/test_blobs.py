"""Files on this machine that are on their way to hosts."""

import os

from distmagic.payload import blobs
from tests.lab.waiting import wait_until


def test_files_are_touched_as_long_as_they_are_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(blobs, "_TOUCH_S", 0.01)
    files = [blobs.keep(data, tmp_path) for data in (b"call", b"code")]
    for local in files:
        os.utime(local.path, (1, 1))
    with blobs.in_use(files):
        wait_until(
            lambda: all(local.path.stat().st_mtime > 1 for local in files),
            "both files to be young",
        )
