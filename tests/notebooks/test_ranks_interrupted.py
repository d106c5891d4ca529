"""Cells of ranks that stay which are interrupted, fail or leave ranks out of step: two hosts of two ranks, with gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.lab import Lab
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import LiveNotebook, live_notebook

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

FIRST = """\
%%ranks
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def here(what):
    (Path.home() / f"{what}-{rank}").touch()

def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        if step == 5:
            here("training")
"""
SUM = """\
%%ranks
total = torch.ones(1)
dist.all_reduce(total)
total.item()
"""


@pytest.fixture(scope="module")
def notebook(
    session_lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveNotebook]:
    """A notebook on whose hosts ranks stay."""
    session_lab.mend()
    with live_notebook(
        tmp_path_factory.mktemp("notebook"), {"DISTMAGIC_HOSTS": "dm1:2,dm2:2"}
    ) as made:
        made.run(f'%config Distmagic.ssh_config = "{session_lab.ssh_config}"')
        made.run(FIRST)
        yield made
    session_lab.assert_clean()


@pytest.fixture
def interrupt_when_there(
    notebook: LiveNotebook, session_lab: Lab
) -> Iterator[Callable[[str], None]]:
    """Return a function that interrupts the notebook when these ranks are at a place."""
    seen = []

    def interrupt(what: str, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        files = [session_lab.hosts[rank // 2].home / f"{what}-{rank}" for rank in ranks]
        seen.extend(files)
        wait_until(lambda: all(file.exists() for file in files), what)
        notebook.interrupt()

    yield interrupt
    for file in seen:
        file.unlink()


def works(notebook: LiveNotebook) -> None:
    assert notebook.run(SUM).endswith("ranks 0-3: 4.0\n")


def test_an_interrupt_stops_all_ranks_after_the_same_step(
    notebook, interrupt_when_there
):
    with notebook.meanwhile(lambda: interrupt_when_there("training")):
        text = notebook.fail("%%ranks\ntrain(10**9)")
    assert "Stopped after step" in text
    assert "on all ranks" in text
    assert "made anew" not in text
    assert "made anew" not in notebook.run("%%ranks\ntrain(3)")
    text = notebook.run(
        "%%ranks\nround(sum(float(p.detach().sum()) for p in model.parameters()), 4)"
    )
    assert text.splitlines()[-1].startswith("ranks 0-3: ")  # the same weights
    works(notebook)


def test_an_interrupt_breaks_a_deadlock_and_the_group_is_made_anew(
    notebook, interrupt_when_there
):
    with notebook.meanwhile(lambda: interrupt_when_there("waiting")):
        text = notebook.fail("""\
%%ranks
here("waiting")
dist.recv(torch.ones(1), 0) if rank == 3 else dist.all_reduce(torch.ones(1))
""")
    assert "The cell was interrupted. Its ranks stay, with all names." in text
    assert "A process group was aborted" in text
    advice = "Create again what uses the old group: model (DistributedDataParallel)."
    assert advice in " ".join(text.split())
    works(notebook)
    notebook.run(FIRST)  # as people do
    notebook.run("%%ranks\ntrain(3)")


def test_a_rank_that_fails_lets_the_others_go_from_their_collective(notebook):
    text = notebook.fail("""\
%%ranks
if rank == 2:
    raise ValueError("no such batch")
try:
    dist.all_reduce(torch.ones(1))
except BaseException as error:
    caught = type(error).__mro__[:2]
    raise
""")
    assert "rank 2 (dm2, local_rank 0) raised ValueError: no such batch" in text
    assert "A process group was aborted" in text
    works(notebook)
    text = notebook.run("%%ranks 0\n[one.__name__ for one in caught]")
    assert "['PeerFailed', 'KeyboardInterrupt']" in text


def test_a_process_group_is_made_again_by_the_same_cell(notebook):
    for _ in range(2):
        notebook.run('%%ranks\ndist.init_process_group("gloo")')
        works(notebook)
    notebook.run("""\
%%ranks
dist.destroy_process_group()
time.sleep(0.1 * rank)
dist.init_process_group("gloo")
""")
    works(notebook)


def test_the_last_interrupt_ends_the_ranks_and_says_what_is_lost(
    notebook, interrupt_when_there
):
    def twice() -> None:
        interrupt_when_there("stubborn")
        interrupt_when_there("caught")

    with notebook.meanwhile(twice):
        text = notebook.fail("""\
%%ranks
here("stubborn")
while True:
    try:
        time.sleep(3600)
    except KeyboardInterrupt:
        here("caught")
""")
    assert "The next interrupt ends them" in text
    assert "Lost with the ranks:" in text
    assert "model" in text
    assert notebook.run("%%ranks\n1 + 1").endswith("ranks 0-3: 2\n")
