"""The notebooks that teach, executed from the first cell to the last; their exercises know right answers from wrong."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError
from nbformat import NotebookNode

from tests import REPOSITORY
from tests.builders.course import COURSE, as_found, solved
from tests.lab import pythons
from tests.notebooks.kernel import environment, text_of

pytestmark = pytest.mark.timeout(1200)

QUICKSTART = REPOSITORY / "notebooks" / "00_quickstart.ipynb"
RANKS = REPOSITORY / "notebooks" / "01_ranks_and_rendezvous.ipynb"
SLURM = REPOSITORY / "notebooks" / "05_slurm.ipynb"
MNIST = REPOSITORY / "notebooks" / "02_mnist_ddp.ipynb"
GPT = REPOSITORY / "notebooks" / "03_mingpt_ddp.ipynb"
EXPLORE = REPOSITORY / "notebooks" / "07_explore.ipynb"
FAILURES = REPOSITORY / "notebooks" / "04_survive_failures.ipynb"
OSMO = REPOSITORY / "notebooks" / "06_osmo.ipynb"


def executed(path: Path, folder: Path) -> list[NotebookNode]:
    """Return the cells of code after all of them ran, with the exercises solved; a cell that fails without being meant to raises.

    For the site the notebook with its outputs is kept in build/notebooks, with the exercises as the reader finds them.
    """
    notebook = solved(path.stem)
    shutil.copy(COURSE / "course.py", folder)
    client = NotebookClient(
        notebook, timeout=400, resources={"metadata": {"path": str(folder)}}
    )
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    try:
        client.execute(env=environment())
    except CellTimeoutError:
        # It says which cell that was, and nothing of what the cell has shown by then.
        for cell in cells:
            for output in cell.outputs:
                print(output.get("text") or output.get("data", {}).get("text/plain"))
        raise
    kept = REPOSITORY / "build" / "notebooks" / path.name
    kept.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(as_found(notebook, path), kept)
    return cells


def cell_with(cells: list[NotebookNode], words: str) -> NotebookNode:
    (found,) = [cell for cell in cells if words in cell.source]
    return found


def solved_all(cells: list[NotebookNode]) -> bool:
    """Return whether the last cell finds all answers right."""
    verdicts = text_of(cells[-1]).strip().splitlines()
    return len(verdicts) > 1 and all(one.endswith(": right") for one in verdicts)


def test_quickstart(tmp_path):
    cells = executed(QUICKSTART, tmp_path)
    hello = text_of(cell_with(cells, "for rank, words in"))
    assert sorted(hello.split("\n")[:-1]) == [f"rank {rank} of 4" for rank in range(4)]
    assert "4 ranks on node1, node2" in text_of(cell_with(cells, "epochs=10"))
    assert "test accuracy 0.9" in text_of(cell_with(cells, "What the model reads"))
    failed = text_of(cell_with(cells, 'lr="3e-3"'))
    assert re.search(r"node\d +failed +TypeError: '<='", failed)
    assert "Adam(model.parameters(), lr=lr)" in failed, "the line of one's own"
    mended = text_of(cell_with(cells, "-o run\ntrain(epochs=2, lr=3e-3)"))
    assert "4 ranks on node1, node2" in mended
    assert solved_all(cells)


def test_ranks_and_rendezvous(tmp_path):
    cells = executed(RANKS, tmp_path)

    table = text_of(cell_with(cells, "for name in ranks[0]"))
    assert re.search(r"^RANK +0 +1 +2$", table, re.MULTILINE)
    assert re.search(r"^LOCAL_RANK +0 +1 +0$", table, re.MULTILINE)

    static = text_of(cell_with(cells, "%%distributed --dry-run\n"))
    assert "--node-rank=0" in static
    assert "--node-rank=1" in static
    met = re.findall(r"--(master-addr|master-port)=(\S+)", static)
    assert len(met) == 4
    assert len(set(met)) == 2, "exactly the same on both hosts, as the text says"
    c10d = text_of(cell_with(cells, "--dry-run --rdzv-backend c10d"))
    assert c10d.count("--rdzv-backend=c10d") == 2
    assert sorted(re.findall(r"is_host=(\d)", c10d)) == ["0", "1"]
    assert sorted(re.findall(r"--nproc-per-node=(\d)", c10d)) == ["1", "2"]
    assert "--node-rank" not in c10d

    seats = re.findall(
        r"attempt (\d): RANK (\d) is .* process (\d+)",
        text_of(cell_with(cells, 'startswith("attempt")')),
    )
    assert sorted(seat[:2] for seat in seats) == [
        (attempt, rank) for attempt in "01" for rank in "012"
    ]
    assert len({process for _, _, process in seats}) == 6

    broken = cell_with(cells, "GLOO_SOCKET_IFNAME=nosuch0")
    assert "Unable to find address for: nosuch0" in text_of(broken)
    assert "talks over lo" in text_of(cell_with(cells, "%%distributed -o run\nmeet()"))

    plots = [
        cell
        for cell in cells
        if any("image/png" in output.get("data", {}) for output in cell.outputs)
    ]
    assert len(plots) == 3
    assert solved_all(cells)


def test_slurm_in_ten_minutes(tmp_path):
    cells = executed(SLURM, tmp_path)
    where = text_of(cell_with(cells, "HAS_SLURM ="))
    assert "cells run with: --hosts node1:1,node2:1" in where
    assert "4713 PENDING PartitionTimeLimit" in text_of(cell_with(cells, "RECORDED ="))
    check_slurm(cells)
    assert solved_all(cells)


@pytest.mark.needs("lab", "slurm")
def test_slurm_in_ten_minutes_on_real_slurm(slurm):
    """On the log-in node, as it is: its cells run in an allocation, and sbatch takes what it exports."""
    folder = slurm.lab.folder / "notebook"
    folder.mkdir()
    shutil.copy(SLURM, folder)
    shutil.copy(COURSE / "course.py", folder)
    # The job is started with torchrun, and sbatch hands PATH on to it.
    path = pythons.path_of("full", slurm.lab.folder)
    env = ["env", "-C", str(folder), f"PATH={path}", f"PYTHONPATH={REPOSITORY}"]
    convert = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
    done = slurm.login.exec([*env, *convert, "--inplace", SLURM.name], timeout_s=1000)
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(folder / SLURM.name, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    where = text_of(cell_with(cells, "HAS_SLURM ="))
    assert "cells run with: --on slurm --nodes 2 " in where
    assert "PARTITION" in text_of(cell_with(cells, "RECORDED ="))
    check_slurm(cells)
    assert text_of(cells[-1]).count("not answered yet") == 5
    first, second = slurm.names
    for words in ("def train(epochs", "def fit(steps"):
        shown = text_of(cell_with(cells, words))
        assert re.search(rf"\b{first}\b(?s:.*)\b{second}\b", shown), shown
    (_,) = (folder / "cifar-job").glob("*.out")  # of the job that it has submitted
    shutil.rmtree(folder)
    slurm.assert_clean()


def check_slurm(cells: list[NotebookNode]) -> None:
    """Check what the notebook of Slurm shows, on real Slurm or on hosts that stand in for it."""
    trained = text_of(cell_with(cells, "def train(epochs"))
    accuracy = re.search(r"test accuracy: (\d+)%", trained)
    assert accuracy is not None
    assert int(accuracy[1]) > 50, "ten kinds of stripes, guessed: 10 %"
    lines = re.findall(
        r"rank \d: y = (\S+) x \+ (\S+)", text_of(cell_with(cells, "for rank, (slope"))
    )
    assert len(lines) == 2
    assert lines[0] == lines[1]

    done = re.search(r"(\d+) epochs done", text_of(cell_with(cells, "limited.stop()")))
    again = re.search(r"epoch (\d+)", text_of(cell_with(cells, "it continued")))
    assert done is not None
    assert again is not None
    assert int(done[1]) <= int(again[1]) <= int(done[1]) + 1, "a snapshot a epoch"

    exported = text_of(cell_with(cells, "--export slurm cifar-job --nodes 2"))
    assert "program/ has a plain program" in exported
    explained = text_of(cell_with(cells, "MEANING = {"))
    assert len(re.findall(r"^#SBATCH --.* {2,}\S", explained, re.MULTILINE)) == 7
    submitted = text_of(cell_with(cells, "def play_slurm"))
    assert re.search(r"^epoch 7: loss", submitted, re.MULTILINE)
    assert accuracy[0] in submitted, "the exported program is the same program"

    assert "--gpus counts" in text_of(cell_with(cells, "broken-job"))
    refused = text_of(cell_with(cells, "--nodes 4 --time 0:30:00"))
    assert "cifar-job/job.sbatch was changed" in refused
    assert "#SBATCH --nodes=4" in text_of(
        cell_with(cells, "for line in batch.read_text()")
    )
    assert (
        len(
            [
                cell
                for cell in cells
                if any("image/png" in output.get("data", {}) for output in cell.outputs)
            ]
        )
        == 2
    )


def test_osmo(tmp_path):
    cells = executed(OSMO, tmp_path)
    assert "{{host:master}}" in text_of(cell_with(cells, "contents: "))
    played = text_of(cell_with(cells, "def lay_files"))
    assert played.count("exit code 0") == 3
    lines = re.findall(r"^rank (\d) of 6: 1,200,000 darts", played, re.MULTILINE)
    assert sorted(lines) == list("012345")
    changed = text_of(cell_with(cells, "difflib"))
    assert re.findall(r"^\+ \S+ (.*)$", changed, re.MULTILINE) == [
        f"--size=2 --offset={offset} --world_size=8" for offset in (0, 2, 4, 6)
    ]
    broken = text_of(cell_with(cells, "late=tasks_of"))
    assert len(re.findall("exit code 0; 2 ranks finished", broken)) == 3
    assert "worker-3: still waiting, so it was ended; 0 ranks finished" in broken
    mended = text_of(cell_with(cells, 'play(tasks_of("larger-job"))'))
    assert mended.count("exit code 0; rank") == 4
    assert solved_all(cells)


def test_explore(tmp_path):
    cells = executed(EXPLORE, tmp_path)
    assert text_of(cells[2]).endswith("ranks 0-3: 60\n")
    spike = text_of(cell_with(cells, "breakpoint()"))
    assert "somebody typed q, or nobody can type in this run" in spike
    assert "keep their old class" not in spike
    found = text_of(cell_with(cells, 'ranks["step"], ['))
    assert found.startswith("([59, 59, 40, 59], [")
    assert "Exported to" in text_of(cell_with(cells, "--export torchrun explore"))
    assert "ranks 0-3: (4, 60, 5)" in text_of(cell_with(cells, "total = torch.ones"))
    assert solved_all(cells)
    script = (tmp_path / "explore" / "program" / "cell.py").read_text()
    assert "losses = fit(0.02)" in script
    assert "#         breakpoint()\n" in script
    assert script.index("def fit(lr)") < script.index("losses = fit(0.02)")


def test_mnist_from_one_process_to_many(tmp_path):
    cells = executed(MNIST, tmp_path)
    shares = text_of(cell_with(cells, "num_replicas=2"))
    first, second = re.findall(r"epoch 0, rank \d: \[(.*)\]", shares)
    assert sorted(f"{first}, {second}".split(", ")) == list("0123456789")

    drawn = cell_with(cells, "distmagic.show(figure)")
    pages = [output.get("data", {}).get("text/html", "") for output in drawn.outputs]
    assert "".join(pages).count('alt="picture of rank ') == 2

    averaged = text_of(cell_with(cells, "by hand"))
    after = re.findall(r"after DDP: \[(.*)\]", averaged)
    by_hand = re.findall(r"average: \[(.*)\]", averaged)
    assert after[0] == after[1]
    for one, other in zip(after[0].split(", "), by_hand[0].split(", "), strict=True):
        assert abs(float(one) - float(other)) < 3e-6

    trained = text_of(cell_with(cells, "-o twice_the_rate\n"))
    found = re.search(r"2 ranks, 66 steps each, test accuracy: (\d+\.\d)%", trained)
    assert found is not None
    assert float(found[1]) > 80
    broken = text_of(cell_with(cells, "without ="))
    assert len(set(re.findall(r"\[(.*)\]", broken))) == 1, "the same losses everywhere"
    assert "132 in one process, 132 on each of two ranks" in broken
    one, two = re.findall(r"(\d+\.\d)% (?:in one|on two)", broken)
    assert one == two, "the second rank was of no use"
    played = text_of(cell_with(cells, "printed = run.results[node]"))
    assert f"node 0: {found[0]}" in played, "the image has the same program"
    assert "node 1: no line of its own" in played
    variables = text_of(cell_with(cells, "def variables_of"))
    assert len(re.findall("node 1: (?!the same)", variables)) == 2
    compared = text_of(cell_with(cells, "compare(same_rate, twice_the_rate)"))
    assert len(re.findall(r"train\(epochs=6, lr=0\.\d+\)", compared)) == 2
    mended = text_of(cell_with(cells, "has_sampler=True)"))
    assert found[0] in mended
    assert "2 ranks" in text_of(cell_with(cells, "%distributed run multinode.py 50"))
    environments = text_of(cell_with(cells, "{run.results[rank]}"))
    assert environments.count(f"{sys.prefix} has torch ") == 2
    assert solved_all(cells)


def test_a_small_gpt_from_two_nodes_to_four(tmp_path):
    cells = executed(GPT, tmp_path)
    summaries = [
        found
        for cell in cells
        for found in re.findall(
            r"(?:steps (\d+) to|\(the snapshot is at step) (\d+)\)? on (\d) ranks; (\d+)% of",
            text_of(cell),
        )
    ]
    assert [summary[:3] for summary in summaries] == [
        ("1", "100", "2"),
        ("101", "200", "2"),
        ("201", "250", "4"),
        ("251", "280", "4"),
        ("", "280", "4"),
        ("1", "100", "2"),
    ]
    assert int(summaries[4][3]) > 60, "it has learnt to spell"
    assert summaries[3][3] == summaries[4][3], "the snapshot of FSDP2 is whole"
    assert summaries[5] == summaries[0], "the exported task is the same program"

    shares = text_of(cell_with(cells, "parameters with DDP"))
    for whole, part in re.findall(r"([\d,]+) parameters with DDP, ([\d,]+) w", shares):
        assert int(part.replace(",", "")) < 0.5 * int(whole.replace(",", ""))
    stood = text_of(cell_with(cells, "all_write=False)"))
    assert re.search(r"rank 0 \(node1, local_rank 0\) waits in", stood)
    assert "ranks 1, 2, 3 wait in barrier" in " ".join(stood.split())
    assert "all ranks wrote the same: True" in text_of(
        cell_with(cells, "wrote the same:")
    )
    explained = text_of(cell_with(cells, "def explain"))
    assert re.search(r"--node-rank=.* {2,}this node's number", explained)
    assert re.search(r"RANKS=.* {2,}a rank for each GPU", explained)
    assert "--rdzv-backend=c10d" in text_of(cell_with(cells, "difflib"))
    played = text_of(cell_with(cells, "def play(form"))
    assert re.search(r"^step 100: loss \d", played, re.MULTILINE)
    assert re.search(r"^\| \w", played, re.MULTILINE)
    assert "c10d printed the same lines: True" in played
    asked = text_of(cell_with(cells, "--on sky --nodes 2 --gpus L4:4 --dry-run"))
    assert "sky launch --yes " in asked
    assert "--num-nodes 2 --gpus L4:4 " in asked
    assert solved_all(cells)


def test_survive_failures(tmp_path):
    cells = executed(FAILURES, tmp_path)
    failed = text_of(cell_with(cells, 'misdeed="raise"'))
    assert re.search(r"node2 +failed .* IndexError: ", failed)
    assert "images[len(images)]" in failed
    assert "rank 0 reported steps 1 to " in text_of(cell_with(cells, "failed.logs(0)"))
    twice = re.search(r"twice: \[(.*)\]", text_of(cell_with(cells, "plot(killed, ")))
    assert twice is not None
    assert "21" in twice[1].split(", "), (
        "the snapshot before the end was that of step 20"
    )
    frozen = text_of(cell_with(cells, 'row["step"] > 20)\n%distributed playground f'))
    assert re.search(r"node2 +frozen", frozen)
    alone = text_of(cell_with(cells, "seconds_alone ="))
    assert re.search(r"one host trains alone \d+ s", alone)
    lost = text_of(cell_with(cells, "fixed.wait()"))
    assert "NodeLost" in lost
    assert "node3" in lost
    kept = text_of(cell_with(cells, "connected.wait()"))
    assert "every step once, in order: True" in kept
    hung = " ".join(text_of(cell_with(cells, "everybody=False)")).split())
    assert re.search(r"rank 0 .*waits in all_reduce", hung)
    assert re.search(r"rank 1 .*waits in barrier", hung)
    assert "detached" in text_of(cell_with(cells, "%distributed jobs"))
    assert "(0, 80)" in text_of(cell_with(cells, "job.attach()"))
    later = text_of(cell_with(cells, "tomorrow.fetch"))
    assert "it started after step 80" in later
    assert "left.pt" in later
    assert re.search(r"\b1 ranks", " ".join(map(text_of, cells))) is None
    measured = text_of(cell_with(cells, "a silent host, elastic"))
    assert re.search(r"a broken connection: +steps lost: 0", measured)
    assert solved_all(cells)
