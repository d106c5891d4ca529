"""IPython in a terminal and plain scripts: the same runs, as text."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.notebooks.kernel import environment

SCRIPT = """\
import sys

import distmagic


def train(steps):
    for step in distmagic.track(range(steps)):
        distmagic.report(loss=1 / (step + 1))
    if steps > 20:
        raise ValueError("too many")
    print("bye")
    return steps


if __name__ == "__main__":
    print(dict(distmagic.run(train, int(sys.argv[1]), hosts="localhost:2").results))
"""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


def typed(ipython: pexpect.spawn, text: str, until: str) -> str:
    """Type text and return what is to be read afterwards up to a pattern, without what moves the cursor."""
    ipython.send(text)
    ipython.expect(until)
    return (
        _ESCAPE.sub("", ipython.before + ipython.after)
        .replace("\r\n", "\n")
        .replace("\r", "\n")
    )


@pytest.fixture
def ipython(tmp_path: Path) -> Iterator[pexpect.spawn]:
    """IPython in a terminal, with the extension loaded; its next cell is the second."""
    env = environment({"TERM": "xterm-256color", "IPYTHONDIR": str(tmp_path)})
    argv = ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor"]
    spawned = pexpect.spawn(
        sys.executable,
        argv,
        cwd=tmp_path,
        env=env,
        dimensions=(30, 100),
        encoding="utf-8",
        timeout=240,
    )
    try:
        typed(spawned, "%load_ext distmagic\n", r"In \[2\]: ")
        yield spawned
    finally:
        spawned.close(force=True)


@pytest.mark.quick
def test_a_cell_and_an_interrupt_in_ipython(ipython):
    text = typed(
        ipython,
        "%%distributed --hosts localhost:2\nprint('hel' + 'lo')\n\n\n",
        r"In \[3\]: ",
    )
    assert "[rank 1 localhost] hello\n" in text
    assert re.search(
        r"\ndone 100% · 2 ranks on localhost · took .*\nrank  host .*\n +0  localhost  done ",
        text,
    )
    assert re.search(r"\nOut\[2\]: <run [\w-]+: done>\n", text)
    divides = "from pathlib import Path\nparts = [1, 0]\nprint(1 / parts[1])"
    text = typed(
        ipython, f"%%distributed --hosts localhost:1\n{divides}\n\n\n", r"In \[4\]: "
    )
    assert re.search(r"%distributed debug [\w-]+ opens pdb where rank 0 failed", text)
    typed(ipython, "%distributed debug\n", r"\(Pdb\) ")
    typed(ipython, "p parts * 2\n", r"\[1, 0, 1, 0\]")
    typed(ipython, "q\n", r"In \[5\]: ")
    typed(
        ipython,
        "%%distributed --hosts localhost:1\n__import__('time').sleep(print('be' + 'gun') or 99)\n\n\n",
        "begun",
    )
    text = typed(ipython, "\x03", r"In \[6\]: ")
    assert "\nCancelled: The run was interrupted" in text
    assert "'stopped'" in typed(ipython, "_run.state.phase\n", r"In \[7\]: ")


def test_ranks_that_stay_their_debugger_and_an_interrupt_in_ipython(ipython):
    first = "import distmagic, os, time\ncount, rank = 1, int(os.environ['RANK'])"
    typed(ipython, f"%%ranks --hosts localhost:2\n{first}\n\n\n", r"In \[3\]: ")
    text = typed(ipython, "%%ranks\ncount += 1\ncount\n\n\n", r"In \[4\]: ")
    assert "\nranks 0-1: 2\n" in text

    stops = "%%ranks 1\nbreakpoint()\ncount = 7\n\n\n"
    typed(ipython, stops, r"rank 1 at Cell In\[4\], line [23]: \(Pdb\) ")
    typed(ipython, "p count * 100\n", r"\(Pdb\) 200")
    typed(ipython, "c\n", r"In \[5\]: ")

    steps = """\
for step in distmagic.track(range(10**6)):
    time.sleep(0.012 if rank else 0.01)
    if step == 5: print('be' + 'gun')
"""
    typed(ipython, f"%%ranks\n{steps}\n\n", "begun")
    text = typed(ipython, "\x03", r"In \[6\]: ")
    assert "Cancelled: The cell was interrupted. Its ranks stay" in text
    stopped = re.search(r"Stopped after iteration ([\d,]+) on all ranks", text)
    assert stopped is not None
    at = int(stopped[1].replace(",", "")) - 1
    text = typed(ipython, "ranks['step'], ranks['count']\n", r"In \[7\]: ")
    assert f"([{at}, {at}], [2, 7])" in text


def test_a_script_without_a_terminal(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "script.py"]
    good = subprocess.run(
        [*argv, "20"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert good.stderr == ""
    lines = good.stdout.splitlines()
    assert lines[0] == "connecting · localhost · 0 s"
    assert lines.count("[rank 0 localhost] bye") == 1
    assert lines[-8].startswith("done 100% · 2 ranks on localhost · took ")
    assert lines[-4].startswith("! no rank was in a process group")
    assert lines[-1] == "{0: 20, 1: 20}"
    assert "\x1b" not in good.stdout
    assert "\r" not in good.stdout
    bad = subprocess.run(
        [*argv, "30"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert bad.returncode == 1
    assert re.search(
        r'File ".*script.py", line 10, in train\n    raise ValueError\("too many"\)\n',
        bad.stderr,
    )
    assert re.search(
        r"rank [01] \(localhost, local_rank [01]\) raised ValueError: too many\n",
        bad.stderr,
    )
