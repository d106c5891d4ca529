"""What the doctor says by itself below the error of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distmagic.connection.link_opener import Fleet
from distmagic.errors import Unreachable
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.request.hosts import parse_hosts
from distmagic.session import session as session_module
from distmagic.session.allocations import Allocations
from tests.builders.events import begin
from tests.builders.hosts import FakeHost, reach

FLEET = Fleet(hosts=parse_hosts("gpu-a,gpu-b"), access=Access())


def diagnosed(reach: Any, allocations: Any = None) -> str:
    nothing: Any = None
    session: Any = SimpleNamespace(
        reach=reach, allocations=allocations or Allocations(nothing)
    )
    return session_module.diagnosed(session, begin("j", ("gpu-a", "gpu-b")), FLEET)


def of(name: str, **odd: Any) -> FakeHost:
    host = FakeHost(name)
    route = p.Route(address="10.0.0.1", interface="eth0")
    usual = {"hostname": name, "name_addresses": ("10.0.0.1",), "shm_bytes": 1 << 40}
    found = p.Examined(**{**usual, "route": route, **odd})
    host.answers[p.Examine] = lambda _: [found]
    return host


def test_memory_and_dead_processes_of_another_run_explain_no_hang():
    gpu = p.GpuHealth(model="H100", used_bytes=40 << 30, total_bytes=80 << 30)
    dead = "Process 7 on node 10.0.0.9 is unreachable"
    odd = {"gpus": (gpu,), "torch_cuda": "12.8", "nccl": dead}
    a, b = of("gpu-a", **odd), of("gpu-b", **odd, shm_bytes=0)
    said = diagnosed(lambda *_: reach(a, b))
    assert "gpu-b: /dev/shm has only 0 MiB" in said
    assert "held" not in said
    assert "NCCL reports" not in said


def test_hosts_that_can_not_be_asked_hide_no_error():
    def fail(*_: object) -> None:
        raise Unreachable("gpu-a", "is gone.", "")

    assert diagnosed(fail) == ""


def test_the_scheduler_is_asked_before_any_connection_starts():
    class Failing(Allocations):
        def findings(self, *_: object) -> Any:
            raise Unreachable("login", "is gone.", "")

    begun: list[object] = []
    nothing: Any = None
    assert diagnosed(lambda *asked: begun.append(asked), Failing(nothing)) == ""
    assert begun == []
