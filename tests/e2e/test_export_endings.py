"""Exported cells end well; a node ends when the other one has failed."""

import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.e2e.export_endings import export
from tests.lab.waiting import HANG_S, wait_until


# The forms that start a cell's text run on hosts, in test_export_platforms.py and test_exports.py.
def test_a_pickled_call_that_trains_on_gloo_ends_well(tmp_path):
    ended = export("slurm-ranks", tmp_path / "out", is_bundle=True).run()
    assert [code for code, _ in ended] == [0, 0], ended
    for place, (_, printed) in enumerate(ended):
        assert f"rank {place} has trained" in printed


def test_with_c10d_both_nodes_end_too(tmp_path):
    """The nodes number themselves: where the one that failed has the store, the other one's ranks may fail first."""
    ended = export("torchrun-c10d", tmp_path / "out", ending="is killed").run()
    codes = sorted(code for code, _ in ended)
    assert codes[1] == 1, ended
    assert codes[0] in (0, 1), ended  # 0: all was done there


@pytest.mark.needs("lab")
def test_a_node_ends_when_the_other_ones_host_is_switched_off(lab):
    hosts = lab.hosts[:2]
    with tempfile.TemporaryDirectory(dir=lab.folder) as place:
        folder = Path(place) / "out"
        export("torchrun-static", folder, ending="goes on", at=hosts[0].address)
        torchrun = folder / "program" / "run_node.py"
        text = torchrun.read_text()
        assert "_LOST_S = 30" in text
        torchrun.write_text(text.replace("_LOST_S = 30", "_LOST_S = 6"))
        printed = [Path(place) / host.name for host in hosts]
        started = []
        for number, host in enumerate(hosts):
            script = str(folder / f"node-{number}.sh")
            with printed[number].open("w") as file:
                command = host.command(["bash", script])
                started.append(subprocess.Popen(command, stdout=file, stderr=file))
        wait_until(lambda: "trains" in printed[0].read_text(), "both to train")
        hosts[1].kill(silent=True)
        assert started[0].wait(HANG_S) == 1
        words = "Node 1 has been silent for 6 s. This node ends its ranks."
        assert words in printed[0].read_text()
        started[1].wait(HANG_S)
