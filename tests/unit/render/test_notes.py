"""The note at the end of a run whose ranks had nothing to do with each other."""

from __future__ import annotations

import pytest

from distmagic.remote.wire import protocol as p
from distmagic.render.notes import notes
from distmagic.render.overview import overview
from distmagic.state.events import Event, Gone
from distmagic.state.model import RunState
from tests.builders.events import at, begun, raised

IN_NONE = (
    "no rank was in a process group: the 4 ranks each worked on their own. If they are to train together, call "
    "torch.distributed.init_process_group, or make the Accelerator or Trainer, in what the ranks run"
)
UNUSED = (
    "no rank made a collective call, though there was a process group: the 4 ranks each worked on their own. If they are to "
    "train together, wrap the model, in DistributedDataParallel for example"
)


def over(*events: Event, code: int = 0) -> RunState:
    ends = [
        at(what, node)
        for node in (0, 1)
        for what in (p.EngineEnded(code=code), p.Final(reason="done"), Gone())
    ]
    return begun(*events, *ends)


def end(rank: int, use: str) -> Event:
    return at(
        p.Ended(
            rank=rank, restart=0, outcome="returned", result_bytes=0, group_use=use
        ),
        rank // 2,
    )


@pytest.mark.parametrize(
    ("uses", "note"),
    [
        (("none", "none", "none", "none"), IN_NONE),
        (("none", "unused", "unused", "unused"), UNUSED),
        (("unused", "unused", "unused", "unused"), UNUSED),
        (("none", "none", "none", "used"), ""),
        (("used", "used", "used", "used"), ""),
        (("none", "none", "none", ""), ""),
        (("", "", "", ""), ""),
    ],
)
def test_ranks_that_worked_alone_are_told_of(uses, note):
    state = over(*(end(rank, use) for rank, use in enumerate(uses)))
    assert notes(state) == ((note,) if note else ())
    assert [alert.text for alert in overview(state).alerts] == ([note] if note else [])


def test_nothing_is_said_before_the_end_nor_of_a_run_that_failed():
    ends = [end(rank, "none") for rank in range(3)]
    assert notes(begun(*ends, end(3, "none"))) == ()
    assert notes(over(*ends, raised(3, 1), code=1)) == ()
    assert notes(over(*ends)) == (), "one rank told nothing of its end"


def test_one_rank_has_nobody_to_work_with():
    worker = p.Worker(rank=0, local_rank=0, world_size=1, restart=0, pid=1)
    state = over(end(0, "none"))
    assert len(state.workers) == 4
    alone = RunState(
        job="j",
        nodes=state.nodes,
        workers={0: state.workers[0]},
        world_size=worker.world_size,
    )
    assert alone.phase == "done"
    assert notes(alone) == ()
