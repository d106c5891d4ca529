"""The forms of a cell, and where hosts come from, in one kernel after the other; every run on a real host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.notebooks.kernel import LiveNotebook, live_notebook

pytestmark = [pytest.mark.needs("lab"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def notebook(session_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNotebook]:
    """A notebook whose hosts come from its environment."""
    session_lab.mend()
    with live_notebook(tmp_path_factory.mktemp("notebook"), {"DISTMAGIC_HOSTS": "dm1:1"}) as made:
        made.run(f'%config Distmagic.ssh_config = "{session_lab.ssh_config}"')
        yield made
    session_lab.assert_clean()


def test_an_assigned_await(notebook: LiveNotebook):
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


def test_whole_cells_run_nothing_here(notebook: LiveNotebook):
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


def test_a_call_of_an_earlier_cell_twice(notebook: LiveNotebook):
    notebook.run("import os\n\ndef rank():\n    print('here I am')\n    return os.environ['RANK']")
    for _ in range(2):
        text = notebook.run("%%distributed --hosts dm2:1,dm3:1 -o run\nprint(rank())")
        assert text.count("here I am") == 2
        assert "[rank 1 dm3] 1" in text
    assert notebook.run("dict(run.results)") == "{0: None, 1: None}"


def test_this_machine_where_nobody_is_named(tmp_path: Path):
    with live_notebook(tmp_path) as notebook:
        assert notebook.run("%distributed hosts") == "localhost  (no hosts are named: this machine)\n"
        text = notebook.run("%%distributed\ndef where():\n    import os\n    print(os.getcwd())\n")
        assert f"[rank 0 localhost] {tmp_path}" in text


def test_where_hosts_come_from(session_lab: Lab, notebook: LiveNotebook, tmp_path: Path):
    assert notebook.run("%distributed hosts") == "dm1:1  (DISTMAGIC_HOSTS)\n"
    (tmp_path / "hosts").write_text("# the lab\ndm1 slots=1\ndm2 slots=two\n")
    assert notebook.fail(f"%distributed hosts --hostfile {tmp_path}/hosts").startswith(
        f"SpecError: {tmp_path}/hosts, line 3: "
    )
    (tmp_path / "hosts").write_text("# the lab\ndm1 slots=1\ndm2 slots=2\n")
    shown = notebook.run(f'%config Distmagic.hostfile = "{tmp_path}/hosts"\n%distributed hosts')
    assert shown == "dm1:1, dm2:2  (%config Distmagic.hostfile)\n"
    assert notebook.run("%distributed hosts dm3 dm1:2") == "dm3, dm1:2  (%distributed hosts)\n"
    commands = notebook.run(f"%%distributed --hostfile {tmp_path}/hosts --dry-run --master-port 29555\nrank()")
    assert "# dm2 (node_rank 1, 2 ranks)" in commands
    assert "--nnodes=2 --nproc-per-node=2 --max-restarts=0 --rdzv-backend=static" in commands
    assert f"--master-addr={session_lab.hosts[0].address} --master-port=29555" in commands
    assert notebook.run("%distributed down") == ""
