"""Cells that fail: they fail for nbconvert too, show the user's lines, and say what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.lab import Lab
from tests.notebooks.kernel import LiveNotebook, environment, live_notebook

pytestmark = pytest.mark.needs("lab")

EARLIER = """\
def halve(x):
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x // 2"""
FAILING = """\
%%distributed --hosts dm1:1,dm2:1
import os

def work(x):
    return halve(x + int(os.environ["RANK"]))

work(4)"""


@pytest.mark.promise("its traceback fails the cell")
def test_traceback_under_nbconvert(session_lab: Lab, tmp_path: Path):
    """For nbconvert, too: it ends with the lines of the cells, in which the first rank failed."""
    session_lab.mend()
    config = f'%load_ext distmagic\n%config Distmagic.ssh_config = "{session_lab.ssh_config}"'
    cells = [
        nbformat.v4.new_code_cell(source)
        for source in (config, EARLIER, FAILING, "print('never')")
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "training.ipynb")
    command = [
        sys.executable,
        "-m",
        "nbconvert",
        "--to",
        "notebook",
        "--execute",
        "training.ipynb",
    ]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "nbclient.exceptions.CellExecutionError" in ran.stderr
    lines = ran.stderr.splitlines()
    start = lines.index(
        "WorkerFailed: rank 1 (dm2, local_rank 0) raised ValueError: 5 is odd"
    )
    assert lines[start + 1 : start + 3] == [
        "  Cell In[2], line 3, in halve",
        '--> raise ValueError(f"{x} is odd")',
    ]
    assert lines[start + 3].startswith(
        "Its whole output: _run.logs(1), on dm2 under ~/.distmagic/jobs/"
    )
    assert (
        ran.stderr.count("Traceback (most recent call last):\n  Cell In[3], line 7")
        == 0
    )
    session_lab.assert_clean()


# ---- cells that start nothing


@pytest.fixture(scope="module")
def notebook(
    session_lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveNotebook]:
    """A notebook with hosts, on which nothing is ever started."""
    session_lab.mend()
    with live_notebook(tmp_path_factory.mktemp("notebook")) as made:
        made.run(
            f'%config Distmagic.ssh_config = "{session_lab.ssh_config}"\n%distributed hosts dm1:1,dm2:1'
        )
        made.run("import threading\nlock = threading.Lock()\ndata = bytes(3_000_000)")
        yield made
    assert [
        path
        for host in session_lab.hosts
        for path in host.files("/home/node/.distmagic/jobs")
    ] == []
    session_lab.assert_clean()


LAST = "What every rank executes is the cell's last expression: end the cell with a call, such as"
LOCK = """\
PayloadError: f uses `lock`, a lock, which can't be pickled.
Create it inside the function; or write %%distributed --whole, and every rank runs the whole cell by itself."""
LARGE = """\
PayloadTooLarge: The call takes 3.0 MB to send to every host; at most 1.0 MB are allowed. The largest: `data` (3.0 MB, used by the call).
Load it inside the function, from the hosts' own disks; or allow it with --payload-limit 1G."""
TWO = f"""\
SpecError: The cell defines train (line 2) and test (line 4), and calls neither.
{LAST} test(x=...)."""
NONE = f"""\
SpecError: line 2: the cell has no function and no call, so there is nothing to run.
{LAST} train()."""
SYNTAX = """\
  Cell In[{number}], line 2
    def train(:
              ^
SyntaxError: invalid syntax
"""


@pytest.mark.quick
@pytest.mark.parametrize(("cell", "text"), [
    ("def f():\n    with lock:\n        pass\nf()", LOCK),
    ("def f(x):\n    return len(x)\nf(data)", LARGE),
    ("def train():\n    pass\ndef test(x):\n    pass", TWO),
    ("class Model:\n    pass", NONE),
    ("def train(:\n    pass", SYNTAX),
])  # fmt: skip
def test_a_wrong_cell_says_what_to_write(notebook: LiveNotebook, cell: str, text: str):
    shown = notebook.fail(f"%%distributed --payload-limit 1M\n{cell}")
    number = notebook.node.cells[-1].execution_count
    # On a busy machine its lines take so long that they are announced.
    announced = "nothing was started: the cell's own lines did not come to their end\n"
    assert shown.removeprefix(announced) == text.replace("{number}", str(number))


def test_a_statement_that_fails_here_looks_as_in_any_cell(notebook: LiveNotebook):
    text = notebook.fail(
        "%%distributed\nready = True\nsteps = 1 / 0\n\ndef train():\n    pass"
    )
    number = notebook.node.cells[-1].execution_count
    assert f"Cell In[{number}], line 3\n" in text
    assert "----> 3 steps = 1 / 0" in text
    assert "distmagic/" not in text
    assert notebook.run("ready") == "True"


def test_a_package_that_only_the_hosts_have(notebook: LiveNotebook):
    text = notebook.fail(
        "%%distributed\nimport package_of_the_hosts\npackage_of_the_hosts.train()"
    )
    assert text.endswith(
        "ModuleNotFoundError: No module named 'package_of_the_hosts'\n"
        "This statement ran in the notebook; with %%distributed --whole the cell runs on the hosts alone."
    )


FLAG = """\
SpecError: --host is not a flag of %%distributed.
Did you mean --hosts? %distributed --help lists all flags."""
UNKNOWN = """\
Unreachable: nowhere: no address is known for nowhere port 22.
Check the spelling, and that a Host block in your ssh config gives its HostName."""
REFUSED = """\
Unreachable: 127.0.0.1: 127.0.0.1 port 2299 refused the connection: nothing listens on that port.
Check the port, and that sshd runs there: systemctl status ssh"""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--host dm1", FLAG),
        ("--hosts nowhere", UNKNOWN),
        ("--hosts 127.0.0.1:2299", REFUSED),
    ],
)
def test_a_wrong_line_says_what_to_write(notebook: LiveNotebook, line: str, text: str):
    shown = notebook.fail(f"%%distributed {line}\nlen([])")
    view, _, error = f"\n{shown}".rpartition("\n" + text)
    assert error == ""
    # Where hosts are tried, they are shown.
    assert ("failed · " in view) == text.startswith("Unreachable")


def test_a_question_that_nobody_can_answer_is_an_error(
    session_lab: Lab, notebook: LiveNotebook, tmp_path: Path
):
    key = shutil.copy(session_lab.identity, tmp_path / "locked")
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", key],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    text = (
        session_lab.ssh_config.read_text()
        .replace(str(session_lab.identity), str(key))
        .replace("BatchMode yes", "")
    )
    (tmp_path / "ssh_config").write_text(text)
    shown = notebook.fail(
        f"%%distributed --hosts dm1 --ssh-config {tmp_path}/ssh_config\nlen([])"
    )
    assert "\nAuthenticationError: dm1: " in shown
    assert "locked" in shown
