"""Ranks that stay, in a real kernel that nbclient drives as nbconvert does: two hosts of two ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.lab import Lab
from tests.lab.waiting import wait_until
from tests.notebooks.kernel import LiveNotebook, live_notebook, notebook_on

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]

FIRST = """\
%%ranks
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
calls = 0
os.uname().nodename, os.getpid()
"""


@pytest.fixture(scope="module")
def notebook(
    session_lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveNotebook]:
    """A notebook on whose hosts ranks stay."""
    folder = tmp_path_factory.mktemp("notebook")
    with notebook_on(session_lab, folder, "dm1:2,dm2:2") as made:
        made.pids = made.run(FIRST).splitlines()[-4:]
        yield made
        assert made.run("%distributed end") == "The ranks have ended.\n"


def still_there(notebook: LiveNotebook) -> None:
    """See that the same processes run the next cell, and that their group works."""
    text = notebook.run("""\
%%ranks
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 4
os.uname().nodename, os.getpid()
""")
    assert text.splitlines()[-4:] == notebook.pids


@pytest.mark.promise(
    "ranks can stay for the next cell with their model and process group"
)
def test_the_next_cell_has_model_and_group(notebook):
    text = notebook.run("""\
%%ranks
total = torch.tensor([1.0])
dist.all_reduce(total)
calls += 1
print("summed")
total.item(), calls, type(model).__name__
""")
    assert text.endswith("ranks 0-3: (4.0, 1, 'Linear')\n")
    assert text.count("summed") == 4
    assert notebook.run("_run.results[3]") == "(4.0, 1, 'Linear')"
    shown = notebook.run("%distributed stay")
    assert "\n  model: " in shown
    assert " parameters on cpu, " in shown
    assert "\n  calls: int" in shown
    still_there(notebook)


def test_an_exception_fails_the_cell_alone(notebook):
    text = notebook.fail("""\
%%ranks
kept = 5
if os.environ["RANK"] == "2":
    raise ValueError("no such batch")
if os.environ["RANK"] == "1":
    time.sleep(3600)
""")
    assert "rank 2 (dm2, local_rank 0) raised ValueError: no such batch" in text
    assert "--> raise ValueError" in text
    assert "needs a place to type" in notebook.fail("%distributed debug")
    assert notebook.run("%%ranks 1-2\nkept").endswith("ranks 1-2: 5\n")
    still_there(notebook)


def test_an_exit_ends_the_cell_and_not_the_rank(notebook):
    assert "ended with exit code 3" in notebook.fail("%%ranks\nraise SystemExit(3)")
    still_there(notebook)


def test_a_cell_for_some_ranks(notebook):
    text = notebook.run('%%ranks 0,2-3 -o some\nint(os.environ["RANK"]) ** 2')
    assert text.splitlines()[-3:] == ["rank 0: 0", "rank 2: 4", "rank 3: 9"]
    assert "3 ranks on dm1, dm2" in text
    assert notebook.run("dict(some.results)") == "{0: 0, 2: 4, 3: 9}"
    assert "no rank 4" in notebook.fail("%%ranks 4\n1")


def test_a_collective_of_all_ranks_in_a_cell_for_some_fails_it(notebook):
    text = notebook.fail("%%ranks 0\ntotal = torch.ones(1)\ndist.all_reduce(total)")
    assert "rank 0 (dm1, local_rank 0) raised RuntimeError: all_reduce waits for ranks 1-3" in text  # fmt: skip
    assert "dist.all_reduce(total)" in text
    still_there(notebook)
    text = notebook.fail('%%ranks\nif os.environ["RANK"] == "1":\n    dist.barrier()')
    assert "raised RuntimeError: barrier waits for ranks 0,2-3: not in" in text
    still_there(notebook)


def test_commands_run_on_the_hosts_of_ranks(notebook):
    text = notebook.run("%%ranks 0,3\n!echo on $(uname -n)\nfiles = !ls /\n'tmp' in files")  # fmt: skip
    assert "on dm1" in text
    assert "on dm2" in text
    assert text.endswith("ranks 0,3: True\n")
    assert "`%time 1` is IPython's" in notebook.fail("%%ranks\n!ls\n%time 1")


def test_names_follow_the_notebook_until_they_are_the_ranks_own(notebook):
    notebook.run("import math\nlr = 0.5\ndef step(x):\n    return math.floor(x * lr)")
    text = notebook.run("%%ranks\nstep(9)")
    assert re.search(
        r"From the notebook: step \(Cell In\[\d+\]\), math, lr = 0\.5", text
    )
    assert text.endswith("ranks 0-3: 4\n")
    assert "From the notebook" not in notebook.run("%%ranks\nstep(9)")
    notebook.run("lr = 0.25")
    text = notebook.run("%%ranks\nstep(9)")
    assert "From the notebook: lr = 0.25." in text
    assert text.endswith("ranks 0-3: 2\n")
    notebook.run("%%ranks\nlr = 1.0")
    notebook.run("lr = 7.0")
    assert notebook.run("%%ranks\nstep(9)").endswith("ranks 0-3: 9\n")


def test_all_cells_of_ranks_are_exported_as_one_program(notebook, tmp_path):
    notebook.run("rate = 0.5\ndef half(x):\n    return x * rate * scale")
    notebook.run("%%ranks apart\nscale = 1.0\nfirst = half(8)")
    notebook.fail("%%ranks apart\nthird = 3\nraise ValueError('by mistake')")
    notebook.run("%%ranks apart\nsecond = first + 1")
    folder = tmp_path / "out"
    text = notebook.run(
        f"%%ranks apart --export torchrun {folder}\nprint('got', second)"
    )
    assert "Exported to" in text
    lines = (folder / "program" / "cell.py").read_text()
    assert "rate = 0.5" in lines
    assert lines.index("def half(x)") < lines.index("scale = 1.0\nfirst = half(8)")
    assert lines.index("second = first + 1") < lines.index("print('got', second)")
    assert "\n# third = 3\n# raise ValueError('by mistake')\n" in lines
    assert "1 failed cell left out: comments in the program have the text." in text
    assert "got" not in text, "nothing runs"
    assert "ranks of apart" in notebook.run("%distributed end apart")
    still_there(notebook)


def test_functions_on_the_ranks_have_the_changed_values_of_the_notebook(notebook):
    notebook.run("pace = 0.5")
    notebook.run("%%ranks\ndef speed():\n    return pace\nspeed()")
    notebook.run("pace = 0.25")
    text = notebook.run("%%ranks\nspeed()")
    assert "From the notebook: pace = 0.25." in text
    assert text.endswith("ranks 0-3: 0.25\n")
    text = notebook.run("%%ranks\npace = pace / 2\nspeed()")
    assert text.endswith("ranks 0-3: 0.125\n")


def test_a_name_of_one_rank_hides_no_name_of_the_notebook_from_the_others(notebook):
    notebook.run("%%ranks 0\nshare = 1")
    notebook.run("share = 2")
    text = notebook.run("%%ranks\nshare")
    assert text.splitlines()[-2:] == ["rank 0: 1", "ranks 1-3: 2"]
    assert "From the notebook" not in notebook.run("%%ranks\nshare")


def test_a_value_that_could_not_be_loaded_is_sent_again(notebook):
    notebook.run("""\
import os
class Needs:
    def __reduce__(self):
        return os.listdir, ("/tmp/needed",)

needs = Needs()
""")
    assert "/tmp/needed" in notebook.fail("%%ranks\nneeds")
    notebook.run('%%ranks\nos.makedirs("/tmp/needed", exist_ok=True)')
    assert notebook.run("%%ranks\nneeds").endswith("ranks 0-3: []\n")
    # Child processes load the newest value alone.
    notebook.run("needs = 5")
    assert notebook.run("%%ranks\nneeds").endswith("ranks 0-3: 5\n")
    notebook.run('%%ranks\nif os.environ["RANK"] in "02":\n    os.rmdir("/tmp/needed")')


def test_the_logs_of_a_cell_are_its_own_output(notebook):
    notebook.run('%%ranks\nprint("the first cell")')
    notebook.run("""\
%%ranks -o second
import sys
print("the second cell")
print("its warning", file=sys.stderr)
""")
    notebook.run('%%ranks\nprint("the third cell")')
    text = repr("the second cell\nits warning\n")
    assert notebook.run("second.logs(2)") == text
    assert notebook.run('second.logs(2, "stderr")') == repr("its warning\n")
    by_time = notebook.run("sorted(second.logs(2, by_time=True).splitlines())")
    assert by_time == "['its warning', 'the second cell']"
    assert "the first cell" in notebook.run("ranks.logs(2)")


def test_cells_of_ranks_are_compared_by_what_they_report(notebook):
    for loss in (3, 5):
        notebook.run(f"%%ranks -o idea{loss}\nimport distmagic\ndistmagic.report(loss={loss})")  # fmt: skip
    table = notebook.run("import distmagic\ndistmagic.compare(idea3, idea5)")
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line}
    assert "loss" in rows["run"]
    assert "3" in rows["distmagic.report(loss=3)"]
    assert "5" in rows["distmagic.report(loss=5)"]


def test_a_long_cell_is_brought_before_it_runs(notebook):
    notebook.run("import random\ntext = random.Random(5).randbytes(400_000)")
    text = notebook.run("%%ranks\nlen(text)")
    assert "From the notebook: text." in text
    assert text.endswith("ranks 0-3: 400000\n")


def test_several_values_of_a_cell_may_be_larger_together(notebook):
    notebook.run("import torch\nparts = [torch.ones(90_000) for _ in range(5)]")
    notebook.run("part1, part2, part3, part4, part5 = parts")
    text = notebook.run("%%ranks\nsum(map(len, (part1, part2, part3, part4, part5)))")
    assert text.endswith("ranks 0-3: 450000\n")


def test_values_are_read_and_set_by_name_and_by_rank(notebook):
    notebook.run("""\
%%ranks
rank = int(os.environ["RANK"])
large = torch.full((300_000,), float(rank))
""")
    values = 'ranks["rank"], ranks[2]["rank"], ranks["large"][3][0].item()'
    assert notebook.run(values).endswith("\n([0, 1, 2, 3], 2, 3.0)")
    notebook.run('rate = 9; ranks["rate"] = 0.5; ranks[1]["rate"] = 0.25')
    text = notebook.run("%%ranks\nrate")
    assert text.splitlines()[-2:] == ["ranks 0,2-3: 0.5", "rank 1: 0.25"]
    assert notebook.run('"rate" in ranks, "RATE" in ranks') == "(True, False)"
    still_there(notebook)


def test_a_large_value_leaves_the_notebook_once(notebook):
    text = notebook.run("""\
import torch
from distmagic.connection.link import Link
plain, poured = Link.pour, []

def pour(*args):
    for size in plain(*args):
        poured.append(size)
        yield size

Link.pour = pour
ranks["large"] = torch.ones(3_000_000)
Link.pour = plain
sum(poured) // 12_000_000
""")
    assert text == "1"
    text = notebook.run("%%ranks\nlarge.sum().item()")
    assert text.endswith("ranks 0-3: 3000000.0\n")


def test_what_is_no_value_is_named(notebook):
    notebook.run("%%ranks\nimport threading\nlock = threading.Lock()")
    notebook.run("%%ranks 2\nalone = 5")
    text = notebook.fail('ranks["lock"]')
    assert "rank 0 (dm1, local_rank 0) left no result" in text
    text = notebook.fail('ranks["alone"]')
    assert "raised NameError: name 'alone' is not defined" in text
    assert "'a.b' can't be the name of a variable" in notebook.fail('ranks["a.b"]')
    assert "There is no rank 4" in notebook.fail("ranks[4]")
    text = notebook.fail('import threading\nranks["lock"] = threading.Lock()')
    assert "PayloadError" in text
    notebook.run("""\
%%ranks
class Bad:
    def __reduce__(self):
        return eval, ("1/0",)

bad = Bad()
""")
    assert "ZeroDivisionError" in notebook.fail('ranks["bad"]')
    notebook.run('%%ranks\nboth = {"good": 5, "lock": lock}')
    text = notebook.run('ranks[0]["both"]["good"]')
    assert "rank 0: this was left out of its result: result['lock']" in text
    assert text.endswith("5")
    still_there(notebook)


WRITE = "from pathlib import Path\n_ = Path('ideas.py').write_text('step = {}\\n')"


def see_that_changed_modules_are_loaded_again(notebook: LiveNotebook) -> None:
    notebook.run(WRITE.format(1))
    text = notebook.run("%%ranks\nimport ideas\nideas.step")
    assert "Modules as they are on disk now: ideas." in text
    assert text.endswith(": 1\n")
    assert "on disk" not in notebook.run("%%ranks\nideas.step")
    notebook.run(WRITE.format(2))
    text = notebook.run("%%ranks\nideas.step")
    assert "ideas. Objects that were made before keep their old class." in text
    assert text.endswith(": 2\n")
    notebook.run(WRITE.format("("))
    assert "raised SyntaxError" in notebook.fail("%%ranks\nideas.step")
    notebook.run(WRITE.format(3))
    assert notebook.run("%%ranks\nideas.step").endswith(": 3\n")


def test_modules_that_have_changed_on_disk_are_loaded_again(notebook):
    see_that_changed_modules_are_loaded_again(notebook)


def test_modules_of_the_notebooks_own_machine_are_loaded_again(tmp_path):
    with live_notebook(tmp_path, {"DISTMAGIC_HOSTS": "localhost:2"}) as notebook:
        notebook.run("%%ranks\nfirst = 1")
        see_that_changed_modules_are_loaded_again(notebook)
        notebook.run("%distributed end ranks")


def test_a_click_on_detach_leaves_ranks_to_the_notebook(notebook):
    notebook.run('ranks._run.screen.ask("detach")')
    still_there(notebook)
    assert "detached" not in notebook.run("%distributed jobs")
    still_there(notebook)


def test_spawned_children_find_what_earlier_cells_define(notebook):
    notebook.run("""\
%%ranks 0
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index ** 2
""")
    for method in ("spawn", "forkserver"):
        text = notebook.run(f"""\
%%ranks 0
class {method.title()}(Squares):
    pass

loader = DataLoader({method.title()}(), num_workers=1, multiprocessing_context="{method}")
[batch.item() for batch in loader]
""")
        assert text.endswith("rank 0: [0, 1, 4, 9]\n")
    text = notebook.run("""\
%%ranks 0
class Later(Squares):
    pass

loader = DataLoader(Later(), num_workers=1, multiprocessing_context="forkserver")
[batch.item() for batch in loader]
""")
    assert text.endswith("rank 0: [0, 1, 4, 9]\n")


def test_an_interrupt_ends_the_look_at_a_value_alone(notebook, session_lab):
    notebook.run("""\
%%ranks
class Slow:
    def __reduce__(self):
        (Path.home() / f"pickled-{os.environ['RANK']}").touch()
        time.sleep(3600)

slow = Slow()
""")
    files = [session_lab.hosts[rank // 2].home / f"pickled-{rank}" for rank in range(4)]

    def interrupt() -> None:
        wait_until(lambda: all(file.exists() for file in files), "all at it")
        notebook.interrupt()

    with notebook.meanwhile(interrupt):
        assert "KeyboardInterrupt" in notebook.fail('ranks["slow"]')
    for file in files:
        file.unlink()
    still_there(notebook)


def test_a_value_of_an_earlier_cell_stays_as_it_was(notebook):
    notebook.run("import torch\nones, twos = torch.ones(3000), torch.full((30,), 2.0)")
    notebook.run("%%ranks\nheld = ones")
    notebook.run("%%ranks\nother = twos")
    text = notebook.run("%%ranks\nheld.sum().item(), other.sum().item()")
    assert text.endswith("ranks 0-3: (3000.0, 60.0)\n")


def test_flags_of_a_later_cell_must_be_those_of_the_first(notebook):
    assert "another hosts" in notebook.fail("%%ranks --hosts dm3:1\n1")
    assert notebook.run("%%distributed --stay ranks\n1").endswith("ranks 0-3: 1\n")
