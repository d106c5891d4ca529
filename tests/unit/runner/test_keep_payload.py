"""A payload that lies on the notebook's machine is not expired while its run goes on."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from distmagic.errors import ConnectionLost
from distmagic.payload import blobs
from distmagic.payload.pack import Payload
from distmagic.planning.plan import make_plan
from distmagic.request.spec import JobSpec
from distmagic.runner import launch as launching
from distmagic.runner.launch import Launch
from tests.lab.waiting import wait_until
from tests.unit.planning.test_plan import A


class LostLink:
    """A link whose connection is lost at the first word."""

    def __init__(self) -> None:
        self.host, self.warm = A.host, None

    def deliver(self, *_: object) -> None:
        raise ConnectionLost("gone")

    def close(self) -> None:
        """Do nothing."""


def test_a_payload_is_touched_as_long_as_its_run_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "_TOUCH_S", 0.01)
    call, code = (blobs.keep(data, tmp_path) for data in (b"call", b"code"))
    for local in (call, code):
        os.utime(local.path, (1, 1))
    plan = make_plan(JobSpec(), (A,), job="j-1", lease_s=60.0, owner="", local_cwd="/nb")
    with closing(Launch("j-1", {0: LostLink()}, (0,), 60.0, lambda place: LostLink())) as launch:
        with pytest.raises(ConnectionLost):
            launch.start(plan, Payload(call=call, code=code, side_files=()))
        wait_until(lambda: all(local.path.stat().st_mtime > 1 for local in (call, code)), "both files to be young")
