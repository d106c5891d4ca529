"""What a host notes of its jobs."""

from __future__ import annotations

import json
from dataclasses import replace

from distmagic.remote.records import listing
from tests.builders.messages import START


def test_an_elastic_job_s_hosts_are_noted_as_they_come(tmp_path):
    listing.remember(tmp_path, replace(START, hosts=("a", "b")))
    before = json.loads((tmp_path / listing.FILE).read_text())
    listing.enlisted(tmp_path, ("a", "b", "c"))
    assert json.loads((tmp_path / listing.FILE).read_text()) == {**before, "hosts": ["a", "b", "c"]}
    assert [path.name for path in tmp_path.iterdir()] == [listing.FILE]


def test_what_can_not_be_noted_makes_no_job_fail(tmp_path):
    listing.enlisted(tmp_path / "gone", ("a",))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / listing.FILE).write_text("torn")
    listing.enlisted(tmp_path, ("a",))
