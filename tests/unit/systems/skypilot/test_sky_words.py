"""What SkyPilot's program says, understood; and that the clusters of these tests are written as it writes them."""

import subprocess

import pytest

from distmagic.systems.skypilot import sky_words
from distmagic.systems.skypilot.sky_words import ClusterState
from tests.builders.sky import PYTHON, entries, needs_skypilot

STATUS = """\
Failed to connect to SkyPilot API server at http://127.0.0.1:46580. Starting a local server.
[
  {"name": "mine", "status": "UP", "cluster_hash": "a1", "launched_at": 5, "more": [1]},
  {"name": "old", "status": "STOPPED", "cluster_hash": "b2", "launched_at": 4, "autostop": 0}
]
"""
SPINNER = (
    "\x1b[?25l\x1b[36m⠦\x1b[0m Waiting for 'sky.status' request to be scheduled: 1a05d2ae\n"
    "[1/2] starting\r\x1b[1A\x1b[2K\x1b[?25h\r\x1b[2K"
)
MINE = ClusterState(name="mine", status="UP", launch="a1-5")
OLD = ClusterState(name="old", status="STOPPED", launch="b2-4", stops=True)


def test_the_list_of_clusters():
    assert sky_words.states(STATUS) == (MINE, OLD)
    assert sky_words.states("[]\n") == ()
    with pytest.raises(ValueError, match="no list of clusters"):
        sky_words.states("Usage: sky")


def test_the_list_of_clusters_after_a_spinner_that_is_wiped_away():
    assert sky_words.states(f"{SPINNER}[]\n") == ()
    (line,) = [line for line in STATUS.splitlines() if "mine" in line]
    assert sky_words.states(f"{SPINNER}[\n{line.rstrip(',')}\n]\n") == (MINE,)


def test_the_hosts_of_a_cluster_are_in_order_and_others_are_left_out():
    text = entries("mine", tuple(f"10.0.0.{number}" for number in range(12)))
    text += "Host *\nHost mine-worker\nHost mine-workerx\nHost mine-2\nHost a b\n"
    workers = tuple(f"mine-worker{number}" for number in range(1, 12))
    assert sky_words.hosts_in(text, "mine") == ("mine", *workers)
    assert sky_words.hosts_in(text, "min") == ()


def test_a_line_without_colours_and_spinners():
    text = "\r\x1b[?25l⠋ Launching\r\x1b[2K\x1b[36m⚙︎ \x1b[0mLaunching on Slurm.\n"
    assert sky_words.plain(text) == "⚙︎ Launching on Slurm."
    assert sky_words.plain("Done.\r\x1b[0m\n") == "Done."


@pytest.mark.parametrize(
    "line", ["\x1b]52;c;eA==\x07hi", "\x1b]0;title\x1b\\hi", "\x1bPq\x1b\\\x9bhi\x08"]
)
def test_a_line_without_orders_to_a_terminal(line):
    assert sky_words.plain(line) == "hi"


@pytest.mark.parametrize("name", ["new", "old"])
def test_clusters_that_cant_be_used(name, golden):
    error = sky_words.not_up(name, (MINE, OLD))
    golden(error)
    assert "clusters: none." in sky_words.not_up(name, ()).hint


def test_a_cluster_that_is_not_up_yet(golden):
    state = ClusterState(name="mine", status="INIT", launch="")
    error = sky_words.not_up("mine", (state,))
    golden(error)


_WRITE = """
from sky.utils import cluster_utils
for cluster, proxy in (("mine", ""), ("other", "proxy --node %w")):
    auth = {"ssh_user": "root", "ssh_private_key": "~/.sky/generated/ssh-keys/mine.key"}
    if proxy:
        auth["ssh_proxy_command"] = proxy
    cluster_utils.SSHConfigHelper.add_cluster(
        cluster, cluster + "-7c9f", ["10.0.0.1", "10.0.0.2"], auth, [22, 22]
    )
"""


@needs_skypilot
def test_the_clusters_of_these_tests_are_written_as_skypilot_writes_them(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    subprocess.run([PYTHON, "-c", _WRITE], check=True)
    for cluster, proxy in (("mine", ""), ("other", "proxy --node %w")):
        text = (tmp_path / ".sky/generated/ssh" / cluster).read_text()
        assert text == entries(cluster, ("10.0.0.1", "10.0.0.2"), proxy=proxy)
        workers = sky_words.hosts_in(text, cluster)
        assert workers == (cluster, f"{cluster}-worker1")
