"""A sweep: which runs it has, where they go, and what becomes of those that wait, fail or are stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from distmagic.errors import Cancelled, UsageError, WorkerFailed
from distmagic.request.hosts import parse_hosts
from distmagic.session.background import BackgroundRun
from distmagic.state.model import RunState
from distmagic.sweeps import sweep as module
from distmagic.sweeps.sweep import Slot, Sweep, combinations, slots
from tests.builders.terms import on_terms
from tests.lab.waiting import HANG_S, wait_until
from tests.scenes import done, failed, running

TITLES = {f"nb-{seed}": f"train(lr=0.1, seed={seed})" for seed in range(4)}
TWO = slots(parse_hosts("gpu-a,gpu-b"), [1, 1], 1)


def test_a_run_for_each_combination_the_last_name_fastest():
    assert combinations({"lr": (0.1, 0.2), "seed": range(2)}) == (
        {"lr": 0.1, "seed": 0},
        {"lr": 0.1, "seed": 1},
        {"lr": 0.2, "seed": 0},
        {"lr": 0.2, "seed": 1},
    )


@pytest.mark.parametrize("grid", [{}, {"lr": []}, {"lr": 0.1}, {"name": "adam"}])
def test_a_grid_without_lists_of_values_is_refused(grid, golden):
    with golden.raises(UsageError):
        combinations(grid)


def where(found: tuple[Slot, ...]) -> list[str]:
    return [
        f"{one.host.name}:{one.host.slots} {','.join(one.devices)}" for one in found
    ]


@pytest.mark.parametrize(
    ("hosts", "gpus", "ranks", "devices", "found"),
    [
        ("a,b", [2, 1], 1, (), ["a:1 0", "a:1 1", "b:1 0"]),
        ("a:1,b", [2, 1], 1, (), ["a:1 0", "b:1 0"]),
        ("a,b", [5, 1], 2, (), ["a:2 0,1", "a:2 2,3"]),
        ("a:3,b", [0, 0], 1, (), ["a:1 ", "a:1 ", "a:1 ", "b:1 "]),
        ("a", [0], 4, (), ["a:4 "]),
        ("a", [8], 1, ("2", "7"), ["a:1 2", "a:1 7"]),
    ],
)
def test_runs_go_to_devices_that_no_other_run_has(hosts, gpus, ranks, devices, found):
    assert where(slots(parse_hosts(hosts), gpus, ranks, devices)) == found


@pytest.mark.parametrize(("hosts", "ranks"), [("a:3", 1), ("a", 4)])
def test_a_host_without_room_is_refused(hosts, ranks, golden):
    with golden.raises(UsageError):
        slots(parse_hosts(hosts), [2], ranks)


class FakeRun:
    """A run in the background that ends when it is told to."""

    def __init__(self, name: str, title: str) -> None:
        self._name, self._title = name, title
        self._show(running())
        self.error: BaseException | None = None
        self._is_over = threading.Event()

    @property
    def done(self) -> bool:
        return self._is_over.is_set()

    def wait(self) -> None:
        assert self._is_over.wait(HANG_S)
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self._show(failed() if error else done())
        self._is_over.set()

    def _show(self, state: RunState) -> None:
        named = replace(state, name=self._name, job=f"job-{self._name}")
        self.state = on_terms(named, call=self._title)

    def ask_to_stop(self) -> None:
        self.end(Cancelled("stopped"))

    def stop_waiting(self) -> None: ...


class Kernel:
    """What begins the runs of a sweep; `slots` are where each one went, in the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[FakeRun] = []
        self.slots: list[tuple[str, str]] = []
        self.refuses: set[str] = set()
        self.sweep = Sweep(TITLES, TWO, self.start)

    def start(self, name: str, slot: Slot) -> BackgroundRun:
        if name in self.refuses:
            raise UsageError("no")
        self.begun.append(FakeRun(name, TITLES[name]))
        self.slots.append((name, slot.host.name))
        return cast("BackgroundRun", self.begun[-1])

    def has_begun(self, count: int) -> None:
        wait_until(lambda: len(self.begun) >= count, f"run {count}")


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.sweep.stop()


def test_runs_begin_where_room_is_and_the_others_when_one_ends(kernel):
    assert kernel.slots == [("nb-0", "gpu-a"), ("nb-1", "gpu-b")]
    assert list(kernel.sweep.runs) == ["nb-0", "nb-1"]
    kernel.begun[1].end()
    kernel.has_begun(3)
    kernel.begun[0].end(WorkerFailed("rank 0 raised"))
    kernel.has_begun(4)
    assert kernel.slots[2:] == [("nb-2", "gpu-b"), ("nb-3", "gpu-a")]
    assert not kernel.sweep.done
    with pytest.raises(TimeoutError):
        kernel.sweep.wait(timeout_s=0.0)
    for run in kernel.begun[2:]:
        run.end()
    assert kernel.sweep.wait() is kernel.sweep
    assert kernel.sweep.done
    assert list(kernel.sweep.failed) == ["nb-0"]


def test_an_interrupt_of_its_start_leaves_no_run():
    begun = []

    def start(name: str, slot: Slot) -> BackgroundRun:
        if begun:
            raise KeyboardInterrupt
        begun.append(FakeRun(name, TITLES[name]))
        return cast("BackgroundRun", begun[0])

    with pytest.raises(KeyboardInterrupt):
        Sweep(TITLES, TWO, start)
    assert begun[0].done
    wait_until(lambda: not following(), "the thread that follows it")
    assert len(begun) == 1, "none of the queue began when it was over"


def following() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "distmagic-sweep"]


def test_the_table_has_all_runs_from_the_beginning(kernel, golden):
    kernel.begun[0].end(WorkerFailed("rank 0 raised"))
    kernel.has_begun(3)
    golden(*[line.rstrip() for line in repr(kernel.sweep).splitlines()])
    assert "queued" in kernel.sweep._repr_html_()


def test_what_failed_runs_again_by_name_or_all_at_once(kernel, golden):
    with golden.raises(UsageError):
        kernel.sweep.rerun("nb-0")
    with golden.raises(UsageError):
        kernel.sweep.rerun("nb-7")
    for number in range(4):
        kernel.begun[number].end(WorkerFailed("no") if number % 2 else None)
        kernel.has_begun(min(number + 3, 4))
    kernel.sweep.wait()
    with pytest.raises(UsageError):
        kernel.sweep.rerun("nb-1", "nb-7")  # and nb-1 is not queued
    kernel.sweep.rerun()
    # Each where it was before: both were on one host.
    assert len(kernel.begun) == 5
    kernel.begun[4].end()
    kernel.has_begun(6)
    assert [name for name, _ in kernel.slots[4:]] == ["nb-1", "nb-3"]
    assert kernel.sweep.failed == {}
    kernel.begun[5].end()
    kernel.sweep.wait().rerun("nb-0")
    kernel.has_begun(7)
    assert kernel.slots[-1][0] == "nb-0"
    hosts = dict(kernel.slots[:4])
    assert all(hosts[name] == host for name, host in kernel.slots[4:])


def test_a_stop_ends_what_runs_and_begins_nothing_more(kernel):
    kernel.sweep.stop()
    assert kernel.sweep.done
    assert len(kernel.begun) == 2
    assert [row.phase for row in kernel.sweep.table.runs[2:]] == ["stopped", "stopped"]
    assert sorted(kernel.sweep.failed) == ["nb-0", "nb-1"]


def test_a_run_that_cant_begin_is_a_failed_one_and_the_others_go_on():
    made = Kernel()
    made.refuses = {"nb-2"}
    for number in range(3):
        made.has_begun(min(number + 1, 2) if number < 2 else 3)
        made.begun[number].end()
    made.sweep.wait()
    assert list(made.sweep.failed) == ["nb-2"]
    table = made.sweep.table
    assert [(run.phase, run.note) for run in table.runs[2:]] == [("failed", "no"), ("done", "")]  # fmt: skip
    assert "note" in repr(table).splitlines()[0]
    assert '<td class="dm-note">no</td>' in table._repr_html_()


def test_a_notebook_has_one_table_that_is_renewed(kernel, monkeypatch):
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "kernel", object)
    monkeypatch.setattr(module, "cell_number", lambda: 7)
    monkeypatch.setattr(module, "_SHOW_S", 0.0)
    monkeypatch.setattr(
        "IPython.display.display", lambda page, **more: shown.append({**page, **more})
    )
    kernel.sweep.show()
    kernel.sweep._ipython_display_()  # the same cell
    kernel.sweep.stop()
    wait_until(lambda: "running" not in shown[-1]["text/plain"], "the last table")
    assert [one["update"] for one in shown[:2]] == [False, True]
    assert len({one["display_id"] for one in shown}) == 1


def test_outside_of_a_notebook_its_text_is_shown(kernel):
    with pytest.raises(NotImplementedError):
        kernel.sweep._ipython_display_()
