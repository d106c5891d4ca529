"""Run a function on hosts of the lab, watch it, and see that nothing is left. For the tests of this folder."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import distmagic
from distmagic.api import session
from distmagic.connection.first_links import FirstLinks
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.planning.jobs import Job, whereabouts
from distmagic.request.access import Access
from distmagic.request.hosts import Host, parse_hosts
from distmagic.state.model import RunState
from tests.lab import Lab
from tests.lab.waiting import HANG_S


class Watch:
    """A screen that keeps the last state, and calls `act` once when `when` first holds."""

    def __init__(
        self,
        when: Callable[[RunState], bool] = lambda _: False,
        act: Callable[[], object] = lambda: None,
    ) -> None:
        self._when, self._act = when, act
        self.states: list[RunState] = []
        self.last: RunState | None = None

    def announce(self, text: str) -> None:
        """Keep nothing."""

    def show(self, state: RunState) -> None:
        """Keep a state."""
        self.last = state
        if self._when(state):
            self._when = lambda _: False
            self._act()

    def finish(self, state: RunState) -> None:
        """Keep the last state."""
        self.last = state

    def can_type(self) -> bool:
        """Say that nobody can."""
        return False

    def requests(self) -> tuple[str, ...]:
        return ()


def access(lab: Lab, **more: Any) -> Access:
    """Return the way to the hosts of a lab; they keep nothing loaded unless `warm_idle_s` says so.

    The lab says how long a host is tried: briefly only one that can't answer.
    """
    way = Access(
        ssh_config=str(lab.ssh_config), warm_idle_s=0.0, connect_timeout_s=HANG_S
    )
    return dataclasses.replace(way, **more)


def run(
    lab: Lab,
    hosts: str,
    fn: Callable[..., Any],
    *args: Any,
    screen: Watch | None = None,
    **spec: Any,
) -> Run:
    """Run a function on hosts of the lab and assert that nothing is left on any, however it ended."""
    way = spec.pop("access", None) or access(lab)
    try:
        return distmagic.run(
            as_value(fn),
            *args,
            hosts=hosts,
            access=way,
            screen=screen or Watch(),
            **spec,
        )
    finally:
        lab.assert_clean()


def run_warm(
    lab: Lab,
    hosts: str,
    fn: Callable[..., Any],
    *args: Any,
    screen: Watch | None = None,
    **spec: Any,
) -> Run:
    """Run a function on hosts that keep torch loaded for the next test, which are the fixture `warm_lab`."""
    way = access(lab, warm_idle_s=900.0)
    return distmagic.run(
        as_value(fn), *args, hosts=hosts, access=way, screen=screen or Watch(), **spec
    )


def failure(
    lab: Lab, hosts: str, fn: Callable[..., Any], *args: Any, **spec: Any
) -> DistmagicError:
    """Run a function that must fail, and return the error."""
    return _error_of(run, lab, hosts, fn, *args, **spec)


def failure_warm(
    lab: Lab, hosts: str, fn: Callable[..., Any], *args: Any, **spec: Any
) -> DistmagicError:
    """Run a function that must fail as `run_warm` does, and return the error."""
    return _error_of(run_warm, lab, hosts, fn, *args, **spec)


def _error_of(act: Callable[..., Run], *args: Any, **spec: Any) -> DistmagicError:
    try:
        act(*args, **spec)
    except DistmagicError as error:
        return error
    raise AssertionError("the run did not fail")


def all_reduce() -> dict[str, Any]:
    """Sum the ranks over gloo; return who and where this rank is."""
    import os
    import socket

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    size = dist.get_world_size()
    dist.destroy_process_group()
    return {
        "rank": int(os.environ["RANK"]),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "world_size": size,
        "host": socket.gethostname(),
        "total": total,
    }


def as_value(function: Callable[..., object]) -> Callable[..., object]:
    """Return a twin of a function that is pickled by value, as those of a notebook's cells are.

    By reference all of tests/ would travel, where its module is: to look through it takes three seconds of CPU each time.
    """
    if not isinstance(function, types.FunctionType):
        return function
    own = ("__file__", "__package__", "__spec__", "__path__")
    found = {name: it for name, it in function.__globals__.items() if name not in own}
    twin = types.FunctionType(
        function.__code__,
        {**found, "__name__": "__main__"},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def at_work(count: int) -> Callable[[RunState], bool]:
    """Hold when this many ranks have reported a step."""
    return lambda state: (
        sum(worker.step is not None for worker in state.workers.values()) >= count
    )


def reach(lab: Lab, hosts: tuple[Host, ...], **way: Any) -> FirstLinks:
    return session().reach(hosts, access(lab, **way), NotebookAsker(can_ask=False))


def the_job(lab: Lab, hosts: str) -> tuple[Job, tuple[Host, ...]]:
    asked = parse_hosts(hosts)
    job = session().housekeeping.jobs(reach(lab, asked))[-1]
    return job, whereabouts(job, asked)


def detach(lab: Lab, hosts: str, fn: Any, *args: Any, **spec: Any) -> Detached:
    """Start a detached job and return; this process has no part in it afterwards."""
    left = distmagic.run(
        as_value(fn), *args, hosts=hosts, access=access(lab), screen=Watch(), detach=True, **spec,
    )  # fmt: skip
    assert isinstance(left, Detached)
    return left
