"""Cells that fail, are interrupted or leave ranks out of step, in a random order: the next plain cell works all the same.

Two hosts of two ranks, with gloo. A seed draws the same cells each time. Ranks that a cell kills end with their cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import pytest
from nbclient.exceptions import CellExecutionError

from tests.lab import Lab
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import LiveNotebook, notebook_on, text_of

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

RANKS = (0, 1, 2, 3)
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

def here(place):
    (Path.home() / f"{place}-{rank}").touch()

def summed():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
"""
PLAIN = """\
%%ranks
if not dist.is_initialized():
    dist.init_process_group("gloo")
summed()
"""
TRAINING = """\
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({steps}):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 20)).square().mean()
    {before}
    loss.backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Drawn:
    """A cell's text. It is interrupted when the ranks `at` have come to their place; with `cause` it ends all ranks."""

    text: str
    at: tuple[int, ...] = ()
    cause: str = ""


def raises_while_others_wait(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn(f"%%ranks\nif rank in {some}:\n    raise ValueError(rank)\nsummed()")


def raises_in_a_step(some: tuple[int, ...], place: str) -> Drawn:
    before = f"assert step < 3 or rank not in {some}"
    return Drawn("%%ranks\n" + TRAINING.format(steps=6, before=before))


def exits(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn(f"%%ranks\nif rank in {some}:\n    raise SystemExit(3)\nsummed()")


def swallows_everything(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn(f"""\
%%ranks
if rank in {some}:
    raise ValueError(rank)
try:
    summed()
except BaseException:
    pass
""")


def leaves_a_call_of_some(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn(f"""\
%%ranks
if rank in {some}:
    work = dist.all_reduce(torch.ones(1), async_op=True)
""")


def destroys_the_group_of_some(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn(f"%%ranks\nif rank in {some}:\n    dist.destroy_process_group()")


def makes_the_group_again(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn('%%ranks\ndist.init_process_group("gloo")\nsummed()')


def makes_another_group(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn("""\
%%ranks
if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("gloo")
pair = dist.new_group([0, 2])
summed()
""")


def is_interrupted_in_a_call_of_some(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn(
        f'%%ranks\nif rank in {some}:\n    here("{place}")\n    summed()', some
    )


def is_interrupted_in_a_cell_of_some(some: tuple[int, ...], place: str) -> Drawn:
    ranks = ",".join(map(str, some))
    return Drawn(f'%%ranks {ranks}\nhere("{place}")\nsummed()', some)


def is_interrupted_in_a_sleep(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn(
        f'%%ranks\nif rank in {some}:\n    here("{place}")\n    time.sleep(3600)', some
    )


def is_interrupted_in_a_step(some: tuple[int, ...], place: str) -> Drawn:
    before = f'step == 3 and here("{place}")'
    return Drawn("%%ranks\n" + TRAINING.format(steps=10**9, before=before), RANKS)


def is_interrupted_when_some_make_the_group(some: tuple[int, ...], place: str) -> Drawn:
    return Drawn(
        f"""\
%%ranks
dist.destroy_process_group()
if rank in {some}:
    here("{place}")
    dist.init_process_group("gloo")
""",
        some,
    )


def kills_a_rank(some: tuple[int, ...], place: str) -> Drawn:
    text = f"%%ranks\nif rank == {some[0]}:\n    os.kill(os.getpid(), 9)\nsummed()"
    return Drawn(text, cause=f"rank {some[0]} (dm{some[0] // 2 + 1}, local_rank")


KINDS: tuple[Callable[[tuple[int, ...], str], Drawn], ...] = (
    raises_while_others_wait,
    raises_in_a_step,
    exits,
    swallows_everything,
    leaves_a_call_of_some,
    destroys_the_group_of_some,
    makes_the_group_again,
    makes_another_group,
    is_interrupted_in_a_call_of_some,
    is_interrupted_in_a_cell_of_some,
    is_interrupted_in_a_sleep,
    is_interrupted_in_a_step,
    is_interrupted_when_some_make_the_group,
    kills_a_rank,
)


@pytest.fixture(scope="module")
def notebook(
    session_lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveNotebook]:
    """A notebook on whose hosts ranks stay."""
    folder = tmp_path_factory.mktemp("notebook")
    with notebook_on(session_lab, folder, "dm1:2,dm2:2") as made:
        made.run(FIRST)
        yield made


def shown(notebook: LiveNotebook, text: str) -> str:
    """Return what a cell shows, whether it fails or not."""
    try:
        return notebook.run(text)
    except CellExecutionError:
        return text_of(notebook.node.cells[-1])


def interrupted(notebook: LiveNotebook, lab: Lab, drawn: Drawn, place: str) -> str:
    """Return what a cell shows that is interrupted when its ranks are at a place."""
    files = [lab.hosts[rank // 2].home / f"{place}-{rank}" for rank in drawn.at]

    def interrupt() -> None:
        wait_until(lambda: all(file.exists() for file in files), place)
        notebook.interrupt()

    with notebook.meanwhile(interrupt):
        text = notebook.fail(drawn.text)
    for file in files:
        file.unlink()
    return text


def works(notebook: LiveNotebook) -> None:
    assert notebook.run(PLAIN).endswith("ranks 0-3: 4.0\n")


@pytest.mark.parametrize("seed", range(3))
def test_the_next_plain_cell_works_whatever_the_cells_before_did(
    notebook: LiveNotebook, session_lab: Lab, seed: int
) -> None:
    random = Random(seed)
    kinds = random.sample(KINDS, len(KINDS))
    for number, kind in enumerate(kinds):
        some = tuple(sorted(random.sample(RANKS, random.randint(1, 3))))
        place = f"fuzz-{seed}-{number}"
        drawn = kind(some, place)
        print(seed, number, kind.__name__, some)  # pytest shows it of a failed test
        if drawn.at or random.random() < 0.5:
            works(notebook)
        if drawn.at:
            interrupted(notebook, session_lab, drawn, place)
        else:
            text = shown(notebook, drawn.text)
            assert drawn.cause in text
            assert ("Lost with" in text) == bool(drawn.cause)
        if drawn.cause:
            notebook.run(FIRST)
    works(notebook)
