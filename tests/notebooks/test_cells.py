"""The forms of a cell, and where hosts come from, in one kernel after the other; every run on a real host."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.lab import Lab
from tests.notebooks.kernel import LiveNotebook, live_notebook, notebook_on

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]


@pytest.fixture(scope="module")
def notebook(
    session_lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveNotebook]:
    """A notebook whose hosts come from its environment."""
    with notebook_on(session_lab, tmp_path_factory.mktemp("notebook"), "dm1:1") as made:
        yield made


@pytest.mark.quick
def test_an_assigned_await(notebook):
    text = notebook.run("""\
%%distributed
import asyncio
import os

async def where(word):
    await asyncio.sleep(0)
    return f"{word} {os.uname().nodename}"

found = await where("at")
""")
    assert text.startswith("done 100% · 1 rank on dm1 · took ")
    assert notebook.run("found.results[0]") == "'at dm1'"


def test_a_run_draws_no_number_of_the_notebook(notebook):
    notebook.run("""\
import random, torch

def drawn():
    return hash(random.getstate()), torch.get_rng_state().tolist()

before = drawn()
""")
    notebook.run("%%distributed\nprint('hello')")
    notebook.run("%distributed jobs")
    assert notebook.run("drawn() == before") == "True"


def test_whole_cells_run_nothing_here(notebook):
    text = notebook.run("""\
%%distributed --whole --nproc-per-node 2 --env WORD="two words" --cwd /tmp
import os
import sys

only_there = os.environ["WORD"]

def speak():
    print(only_there, os.getcwd(), sys.argv, __name__)

if __name__ == "__main__":
    speak()
""")
    assert "[rank 0 dm1] two words /tmp ['distmagic'] __main__" in text
    assert "[rank 1 dm1] two words /tmp ['distmagic'] __main__" in text
    assert "NameError: name 'only_there' is not defined" in notebook.fail("only_there")


@pytest.mark.quick
def test_a_call_of_an_earlier_cell_twice(notebook):
    notebook.run(
        "import os\n\ndef rank():\n    print('here I am')\n    return os.environ['RANK']"
    )
    for _ in range(2):
        text = notebook.run("%%distributed --hosts dm1:2 -o run\nprint(rank())")
        assert text.count("here I am") == 2
        assert "[rank 1 dm1] 1" in text
    assert notebook.run("dict(run.results)") == "{0: None, 1: None}"


def test_this_machine_where_nobody_is_named(tmp_path):
    with live_notebook(tmp_path) as notebook:
        assert (
            notebook.run("%distributed hosts")
            == "localhost  (no hosts are named: this machine)\n"
        )
        text = notebook.run(
            "%%distributed\ndef where():\n    import os\n    print(os.getcwd())\n"
        )
        assert f"[rank 0 localhost] {tmp_path}" in text


@pytest.mark.quick
def test_what_a_cell_defines_is_on_the_ranks_what_it_is_here(notebook):
    text = notebook.run("""\
%%distributed --hosts dm1:1 -o defined
import builtins
import functools
import inspect
import typing

UserId = typing.NewType("UserId", int)

class Data:
    @functools.cached_property
    def rows(self):
        return [UserId(1)]

@functools.lru_cache
def load():
    return Data().rows

@functools.singledispatch
def size(value):
    return 0

@size.register
def _(value: list):
    return len(value)

def look():
    with open("/proc/self/comm") as file:
        file.read()
    return size(load()), inspect.getsource(Data), open is builtins.open, exit is builtins.exit

look()
""")
    assert text.startswith("done 100% · 1 rank on dm1 · took ")
    assert "!" not in text
    source = "class Data:\n    @functools.cached_property\n    def rows(self):\n        return [UserId(1)]\n"
    assert ast.literal_eval(notebook.run("defined.results[0]")) == (
        1,
        source,
        True,
        True,
    )


LONE = (
    "! no rank was in a process group: the 2 ranks each worked on their own. If they are to train together, call "
    "torch.distributed.init_process_group, or make the Accelerator or Trainer, in what the ranks run"
)


def test_ranks_that_worked_alone_are_told_of_once(notebook):
    text = notebook.run("%%distributed --hosts dm1:2\nlen([])")
    assert " ".join(text.split()).count(LONE) == 1
    assert "process group" not in notebook.run("%%distributed --hosts dm1:1\nlen([])")
    text = notebook.run("""\
%%distributed --hosts dm1:2
import torch.distributed as dist
def train(uses):
    dist.init_process_group("gloo")
    if uses:
        dist.barrier()
    # Without a collective call: a group that one rank leaves while another still connects breaks there.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {dist.get_rank()}", "here")
    store.wait(["rank 0", "rank 1"])
    dist.destroy_process_group()
train(uses=True)
""")
    assert "!" not in text
    text = notebook.run("%%distributed --hosts dm1:2\ntrain(uses=False)")
    assert "! no rank made a collective call" in text


def test_what_stays_in_the_notebook_and_what_stays_on_the_ranks_is_noted(notebook):
    notebook.run("""\
import json, logging
json.BATCH = 512
logging.basicConfig(level="INFO")
losses, kept, best = [], [], 0
def train():
    global best
    best = 1
    losses.append(getattr(json, "BATCH", 32))
    logging.info("seen")
""")
    text = notebook.run("%%distributed --hosts dm1:2 -o run\ntrain()")
    assert "Cell In[" in text
    assert "sets json.BATCH in the notebook" in text
    assert "logging (the root logger at INFO)" in text
    shown = " ".join(text.split())
    assert "changes of best, losses stay on the rank" in shown
    assert shown.count("stay on the rank") == 1
    assert "INFO:root:seen" in notebook.run("print(run.logs(0))")
    text = notebook.run("%%distributed --hosts dm1:1 --no-settings\nlen(losses)")
    assert "calls logging.basicConfig in the notebook" in text
    assert "start with this process's settings" not in text
    assert "stay on the rank" not in text
    text = notebook.run("%%distributed --hosts dm1:1\nkept = sorted(kept)")
    assert "! kept is the run now" in text
    assert notebook.run("kept.results[0]") == "[]"
