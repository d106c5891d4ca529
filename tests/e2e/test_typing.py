"""Somebody types to a rank: debuggers and `input` work in it, on two hosts of two ranks, while the others wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

import distmagic
from distmagic.api import session
from distmagic.errors import UsageError, WorkerFailed
from distmagic.outcome.detached import Detached
from distmagic.outcome.post_mortem import FailedRuns
from distmagic.outcome.run import Run
from distmagic.render.screen import TypedLine
from distmagic.state.model import RunState
from distmagic.staying.ranks import Ranks
from tests.e2e import runner
from tests.e2e.runner import Watch, as_value, reach, the_job
from tests.e2e.staying import ranks_that_stay
from tests.lab import Lab

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]
HOSTS = "dm1:2,dm2:2"


class Typist(runner.Watch):
    """Types one line a prompt, and notes where ranks wait; without lines it calls `stuck`, which may ask for something."""

    def __init__(
        self,
        lines: Sequence[str],
        stuck: Callable[[RunState], str | None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._lines, self._stuck = list(lines), stuck
        self._answered: set[tuple[int, int]] = set()
        self.places: list[tuple[int, str, int]] = []

    def can_type(self) -> bool:
        return True

    def requests(self) -> tuple[Any, ...]:
        state = self.last
        for rank, paused in {} if state is None else dict(state.paused).items():
            if (rank, paused.prompt) in self._answered:
                continue
            self._answered.add((rank, paused.prompt))
            self.places.append((rank, paused.file.rpartition("/")[2], paused.line))
            if self._lines:
                text = self._lines.pop(0)
                return (TypedLine(rank=rank, prompt=paused.prompt, text=text),)
            asked = self._stuck(state)
            return (asked,) if asked else ()
        return ()


def stops_on_rank_1() -> float:
    import os

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([1.0 + int(os.environ["RANK"])])
    if dist.get_rank() == 1:
        breakpoint()  # noqa: T100
    dist.all_reduce(total)
    return total.item()


def stops_as_torch_does() -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    secret = 7
    dist.breakpoint(rank=1)
    return secret


def asks_for_a_number(wanted: str) -> str:
    import os

    return input("which? ") if os.environ["RANK"] == wanted else ""


@pytest.mark.promise("a breakpoint in one rank makes the others wait")
def test_a_breakpoint_on_one_rank_while_the_others_wait(warm_lab):
    typist = Typist(["p total * 100", "total += 10", "c"])
    run = runner.run_warm(warm_lab, HOSTS, stops_on_rank_1, screen=typist)
    assert dict(run.results) == dict.fromkeys(range(4), 20.0)
    ranks, files, lines = zip(*typist.places, strict=True)
    assert (set(ranks), set(files)) == ({1}, {"test_typing.py"})
    assert set(lines) <= {stops_on_rank_1.__code__.co_firstlineno + n for n in (9, 10)}
    said = [line.text for line in run.state.lines if line.rank == 1]
    assert any(line.endswith("tensor([200.])") for line in said)
    assert run.state.paused == {}


def test_torchs_own_breakpoint_stops_one_rank(warm_lab):
    typist = Typist(["up", "p secret * 11", "secret = 8", "c"])
    run = runner.run_warm(warm_lab, HOSTS, stops_as_torch_does, screen=typist)
    assert {rank for rank, _, _ in typist.places} == {1}
    assert any("77" in line.text for line in run.state.lines if line.rank == 1)


def test_input_gets_what_is_typed(warm_lab):
    typist = Typist(["élan 9"])
    run = runner.run_warm(warm_lab, HOSTS, asks_for_a_number, "2", screen=typist)
    assert dict(run.results) == {0: "", 1: "", 2: "élan 9", 3: ""}


def test_q_ends_the_run_and_nobody_waits(warm_lab, golden):
    error = runner.failure_warm(warm_lab, HOSTS, stops_on_rank_1, screen=Typist(["q"]))
    assert isinstance(error, WorkerFailed)
    assert error.run.state.first_failure == 1
    golden(error.message, error.hint)


def test_a_stop_ends_a_rank_that_waits_in_a_debugger(warm_lab):
    typist = Typist([], lambda _: "stop")
    error = runner.failure_warm(warm_lab, HOSTS, stops_on_rank_1, screen=typist)
    state = error.run.state
    assert (state.phase, state.stopping) == ("stopped", "interrupted")
    assert {worker.phase for worker in state.workers.values()} == {"stopped"}


@pytest.mark.parametrize("function", [stops_on_rank_1, asks_for_a_number])
def test_where_nobody_can_type_it_ends_at_once(warm_lab, golden, function):
    args = () if function is stops_on_rank_1 else ("1",)
    error = runner.failure_warm(warm_lab, HOSTS, function, *args)
    assert isinstance(error, WorkerFailed)
    golden(error.message, error.hint)


def test_a_job_is_left_while_a_rank_waits_and_another_one_types(lab):
    left = session_run(lab, Typist([], lambda _: "detach"))
    assert isinstance(left, Detached)
    job, hosts = the_job(lab, "dm1,dm2")
    typist = Typist(["total += 10", "c"])
    run = session().attach(reach(lab, hosts), job, typist)
    assert dict(run.results) == dict.fromkeys(range(4), 20.0)
    lab.assert_clean()


FAILS = """\
import os, weakref
held = []
class Batch: size = 7
def step(rank):
    batch = Batch()
    held.append(weakref.ref(batch))
    if rank == 2:
        raise ValueError("no such batch")
step(int(os.environ["RANK"]))
"""


def test_a_debugger_opens_where_a_cell_on_ranks_that_stay_has_failed(warm_lab, golden):
    typist = Typist(["p batch.size * 11", "up", "q"])
    with staying(warm_lab) as (ranks, run_cell):
        with pytest.raises(WorkerFailed):
            run_cell(FAILS, Watch())
        with golden.raises(UsageError):
            ranks.debug(1, typist)
        ranks.debug(None, typist)
        assert typist.places == [(2, "cell", 8), (2, "cell", 8), (2, "cell", 9)]
        assert typist.last is not None
        assert any(line.text.endswith("77") for line in typist.last.lines)
        ranks.debug(2, Typist(["q"]))  # as often as somebody likes
        freed = run_cell("held[0]() is None, len(held)", Watch())
        assert dict(freed.results) == dict.fromkeys(range(4), (True, 1))
        with golden.raises(UsageError):
            ranks.debug(None, typist)
        with pytest.raises(WorkerFailed):
            run_cell("raise MemoryError", Watch())
        watch = Watch()
        ranks.debug(None, watch)
        assert watch.last is not None
        assert "The frames of that exception are gone" in watch.last.lines[0].text


STOPS = """\
import os
import torch
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo")
total = torch.tensor([1.0 + int(os.environ["RANK"])])
if dist.get_rank() == 1:
    breakpoint()
dist.all_reduce(total)
total.item()
"""


def test_a_breakpoint_in_a_cell_of_ranks_that_stay(warm_lab):
    """`c` goes on, and `q` fails the cell: nobody waits, and the next cell works."""
    with staying(warm_lab) as (_, run_cell):
        typist = Typist(["p total * 100", "total += 10", "c"])
        run = run_cell(STOPS, typist)
        assert dict(run.results) == dict.fromkeys(range(4), 20.0)
        assert {(rank, file) for rank, file, _ in typist.places} == {(1, "cell")}
        with pytest.raises(WorkerFailed) as failed:
            run_cell(STOPS, Typist(["q"]))
        assert failed.value.run.state.first_failure == 1
        run = run_cell("dist.all_reduce(total := torch.ones(1)); total.item()", Watch())
        assert dict(run.results) == dict.fromkeys(range(4), 4.0)


def staying(
    lab: Lab,
) -> AbstractContextManager[tuple[Ranks, Callable[[str, Watch], Run]]]:
    return ranks_that_stay(runner.access(lab, warm_idle_s=900.0), HOSTS)


def divides(parts: list[float]) -> float:
    import os

    import torch
    import torch.distributed as dist

    weights = torch.tensor(parts)
    dist.init_process_group("gloo")
    dist.barrier()
    huge = torch.zeros(1_000_000)
    if int(os.environ["RANK"]) < 2:
        import time

        time.sleep(3600)

    def share(part: float) -> float:
        return weights.sum().item() / part + huge.sum().item()

    return max(map(share, parts))


def test_a_debugger_opens_in_a_run_whose_ranks_have_ended(
    warm_lab, monkeypatch, capsys
):
    """Both ranks of one host fail at once; the frames come with the run, and again with an attach."""
    lines = ["p part, weights", "p huge", "up", "p parts", "q"]
    monkeypatch.setattr("builtins.input", lambda *_: lines.pop(0))
    access = runner.access(warm_lab, warm_idle_s=900.0)
    with pytest.raises(WorkerFailed) as failed:
        distmagic.run(
            as_value(divides), [1.0, 0.0], hosts=HOSTS, access=access, screen=Typist([])
        )
    job = failed.value.run.job
    assert "%distributed debug" not in failed.value.hint  # outside of IPython
    outcomes = {one.rank: one.ended.outcome for one in failed.value.run.state.workers.values()}  # fmt: skip
    assert (outcomes[2], outcomes[3]) == ("raised", "raised")
    assert list(failed.value.run.results) == []
    capsys.readouterr()
    failed_runs = session().failed_runs
    failed_runs.debug(job, 3)
    shown = capsys.readouterr().out
    assert "(0.0, tensor([1., 0.]))" in shown
    assert "<left out: Tensor [1000000] float32 on cpu>" in shown
    assert "[1.0, 0.0]" in shown
    assert not lines
    with pytest.raises(UsageError, match="Rank 1 of run"):
        failed_runs.debug(job, 1)

    monkeypatch.setattr(session(), "failed_runs", FailedRuns())
    found, hosts = the_job(warm_lab, "dm1,dm2")
    assert found.name == job
    with pytest.raises(WorkerFailed):
        session().attach(reach(warm_lab, hosts), found, Typist([]))
    lines += ["p part", "q"]
    session().failed_runs.debug(job, 2)
    assert capsys.readouterr().out.endswith("0.0\n")


def session_run(lab: Lab, screen: runner.Watch) -> object:
    return distmagic.run(
        as_value(stops_on_rank_1), hosts=HOSTS, access=runner.access(lab), screen=screen
    )
