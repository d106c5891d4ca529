"""Requests for which a host looks at all files of a folder: they take as long as they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distmagic.connection.link import Link
from distmagic.connection.requests import file_requests, host_requests
from distmagic.remote.wire import protocol as p
from tests.builders.hosts import FakeHost, after, reach

WALKS: dict[type, tuple[Callable[[Link], object], p.Message]] = {
    p.RemoveJob: (
        lambda link: host_requests.remove_job(link, "j"),
        p.Removed(size_bytes=1),
    ),
    p.PruneBlobs: (
        lambda link: host_requests.prune_blobs(link, removes=True),
        p.Removed(size_bytes=1),
    ),
    p.ListWorkDirs: (host_requests.list_work_dirs, p.WorkDirs()),
    p.RemoveWorkDir: (
        lambda link: host_requests.remove_work_dir(link, "w"),
        p.Removed(size_bytes=1),
    ),
    p.ListFiles: (
        lambda link: file_requests.find_files(link, p.Folder(path="a"), "**"),
        p.FoundFiles(),
    ),
}


@pytest.mark.parametrize("kind", WALKS, ids=lambda kind: kind.__name__)
def test_a_healthy_host_with_very_many_files_is_not_given_up(kind):
    ask, answer = WALKS[kind]
    host = FakeHost("gpu-a")
    host.answers[kind] = after(300.0, answer)
    (link,) = reach(host).wait().values()
    ask(link)
    assert len(host.requests_of(kind)) == 1
    link.finish()
