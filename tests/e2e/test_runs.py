"""Runs that go well: hosts, ranks, both rendezvous backends, homes apart and shared, all ways of reaching a host."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import NoResult
from distmagic.payload.pack import pack_whole
from distmagic.render.curves import curve_of
from distmagic.render.overview import overview
from distmagic.render.rows import Row
from distmagic.request.access import Access
from distmagic.request.spec import JobSpec
from distmagic.session.dry_run import start_commands
from distmagic.session.session import Session
from distmagic.state.model import RunState, WorkerState
from tests.e2e import runner
from tests.lab import HostSetup, Lab
from tests.lab.pythons import required

pytestmark = [pytest.mark.needs("lab"), pytest.mark.together]


@pytest.mark.parametrize(("backend", "hosts", "places"), [
    ("static", "dm1:2,dm2:1", ["dm1", "dm1", "dm2"]),
    ("c10d", "dm1:1,dm2:1,dm3:1", ["dm1", "dm2", "dm3"]),
])  # fmt: skip
def test_ranks_of_several_hosts_meet(warm_lab, backend, hosts, places):
    run = runner.run_warm(warm_lab, hosts, runner.all_reduce, rdzv_backend=backend)
    found = [run.results[rank] for rank in sorted(run.results)]
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert [float(one["total"]) for one in found] == [3.0, 3.0, 3.0]
    assert sorted(one["host"] for one in found) == places
    if backend == "static":
        # Ranks in the order of the hosts.
        assert [one["host"] for one in found] == places
    assert {worker.phase for worker in run.state.workers.values()} == {"done"}
    # The view follows what the ranks say of themselves.
    for rank, one in enumerate(found):
        assert run.state.workers[rank].host == one["host"]
        assert run.state.workers[rank].local_rank == one["local_rank"]


def test_ranks_begin_with_what_is_set_in_this_process_unless_it_says_not(warm_lab):
    import torch

    def third() -> tuple[str, float]:
        import torch

        return str(torch.get_default_dtype()), float(torch.tensor(1 / 3) * 3 - 1)

    torch.set_default_dtype(torch.float64)
    try:
        run = runner.run_warm(warm_lab, "dm1:1", third)
        usual = runner.run_warm(warm_lab, "dm1:1", third, no_settings=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert run.results[0] == ("torch.float64", 0.0)
    assert any("default dtype float64" in text for text in run.state.notices)
    assert usual.results[0][0] == "torch.float32"
    assert usual.state.notices == ()


def test_detailed_logs_stay_in_the_log_and_out_of_the_view(warm_lab):
    def summed() -> tuple[str, float]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(4) * dist.get_rank()
        dist.all_reduce(total)
        print("the total is", total.tolist())
        dist.destroy_process_group()
        return dist.get_debug_level().name, float(total.sum())

    run = runner.run_warm(warm_lab, "dm1:1,dm2:1", summed, debug=True)
    usual = runner.run_warm(warm_lab, "dm1:1,dm2:1", summed)
    assert run.results == {0: ("DETAIL", 4.0), 1: ("DETAIL", 4.0)}
    assert usual.results == {0: ("OFF", 4.0), 1: ("OFF", 4.0)}
    for rank in (0, 1):
        text = run.logs(rank, "stderr")
        assert "The client socket has connected" in text
        assert "OpType=ALLREDUCE" in text
    for state in (run.state, usual.state):
        shown = [line.text for line in state.lines if line.rank >= 0 and line.text]
        assert [text for text in shown if not text.startswith("[Gloo]")] == [
            "the total is [1.0, 1.0, 1.0, 1.0]"
        ] * 2


@pytest.mark.promise("hosts need only Python and torch")
def test_nothing_of_ours_is_installed_on_hosts(warm_lab):
    def installed() -> set[str]:
        from importlib.metadata import distributions

        return {one.name for one in distributions()}

    of_torch = {canonicalize_name(name) for name in required(("torch", "numpy"))}
    for names in runner.run_warm(warm_lab, "dm1:1,dm2:1", installed).results.values():
        assert "torch" in names
        assert {canonicalize_name(name) for name in names} <= of_torch
    for host in warm_lab.hosts[:2]:
        looked = host.exec(["python3", "-c", "import distmagic"])
        assert "No module named 'distmagic'" in looked.stderr, "nor afterwards"


@pytest.mark.promise("hosts need no shared file system")
def test_each_host_has_its_own_files(warm_lab):
    """What a rank writes is on its own host, and the run goes well."""

    def write(folder: str) -> list[str]:
        import os
        from pathlib import Path

        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        places = [Path.cwd(), Path(folder).expanduser(), Path("/var/tmp")]
        for place in places:
            (place / f"mark-{os.environ['RANK']}").touch()
        dist.all_reduce(torch.ones(1))  # all have written
        dist.destroy_process_group()
        return [mark.name for place in places for mark in place.glob("mark-*")]

    run = runner.run_warm(warm_lab, "dm1:1,dm2:1", write, "~")
    assert [set(run.results[rank]) for rank in (0, 1)] == [{"mark-0"}, {"mark-1"}]
    assert [len(run.results[rank]) for rank in (0, 1)] == [3, 3]


@pytest.mark.promise("no port opens on the notebook machine")
def test_the_notebook_opens_no_port(warm_lab):
    sockets: list[set[str]] = [listening()]
    # Not the phase, which a notebook that is busy for a moment may not show.
    screen = runner.Watch(
        lambda state: bool(state.workers), lambda: sockets.append(listening())
    )
    runner.run_warm(warm_lab, "dm1:1,dm2:1", runner.all_reduce, screen=screen)
    assert sockets[1:] == sockets[:1]


def listening() -> set[str]:
    """Return the sockets of this process that take connections, or datagrams from anybody."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        # Other threads close some; and the listing itself needs one.
        with contextlib.suppress(FileNotFoundError):
            own.add(descriptor.readlink().name)
    found = set()
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state and f"socket:[{words[9]}]" in own:
                found.add(f"{table} {words[1]}")
    return found


@pytest.mark.quick
def test_variables_working_directory_and_stdin_of_ranks(warm_lab):
    warm_lab.hosts[0].exec(["mkdir", "-p", "/home/node/project"])

    def look() -> dict[str, object]:
        import os
        import sys

        names = [
            name for name in os.environ if name.startswith(("PET_", "TORCHELASTIC_RUN"))
        ]
        return {
            "cwd": os.getcwd(),  # noqa: PTH109
            "token": os.environ["TOKEN"], "stdin": sys.stdin.read(), "pet": names,
            "ifname": (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]), "argv": sys.argv,
        }  # fmt: skip

    run = runner.run_warm(
        warm_lab, "dm1:1", look, env={"TOKEN": "s3cret $HOME 'x'"}, cwd="~/project"
    )
    found = run.results[0]
    assert found["cwd"] == "/home/node/project"
    assert found["token"] == "s3cret $HOME 'x'"
    assert found["stdin"] == ""
    assert found["ifname"] == ("eth0", "=eth0")
    assert found["argv"] == ["distmagic"]


@pytest.mark.quick
def test_output_of_all_kinds_is_labelled_and_kept(warm_lab):
    def talk() -> None:
        import os
        import sys

        print("from Python")
        os.write(1, b"from C\n")
        print("to stderr", file=sys.stderr)
        print("old\rnew")
        os.system("echo from a child")
        print("ä" * 3, end="")

    run = runner.run_warm(warm_lab, "dm1:2", talk)
    shown = [
        (line.label, line.stream, line.text)
        for line in run.state.lines
        if line.rank == 1
    ]
    assert ("rank 1 dm1", "stdout", "from Python") in shown
    assert ("rank 1 dm1", "stdout", "from C") in shown
    assert ("rank 1 dm1", "stderr", "to stderr") in shown
    assert ("rank 1 dm1", "stdout", "new") in shown
    assert ("rank 1 dm1", "stdout", "from a child") in shown
    assert ("rank 1 dm1", "stdout", "äää") in shown
    assert run.logs(1, "stdout") == "from Python\nfrom C\nold\rnew\nfrom a child\näää"
    assert run.logs(1, "stderr") == "to stderr\n"


def look_when(
    lab: Lab, holds: Callable[[WorkerState], bool], seen: list[RunState]
) -> runner.Watch:
    """Return a screen that keeps the state in which this holds for two ranks, and then lets the ranks go on."""

    def keep() -> None:
        assert screen.last is not None
        seen.append(screen.last)
        for host in lab.hosts[:2]:
            (host.home / "seen").touch()

    screen = runner.Watch(
        lambda state: sum(map(holds, state.workers.values())) == 2, keep
    )
    return screen


def rows_of(state: RunState) -> list[Row]:
    return [row for group in overview(state).groups for row in group.rows]


@pytest.mark.promise("every rank shows its steps, metrics, curves and bars")
def test_rows_of_all_ranks(warm_lab):
    def work() -> int:
        import time
        from pathlib import Path

        from tqdm.auto import tqdm

        import distmagic

        for step in range(50):
            distmagic.report(step=step + 1, total=60, loss=1 / (step + 1))
        with tqdm(total=30, desc="evaluating") as bar:
            bar.update(12)
            while not Path("~/seen").expanduser().exists():
                time.sleep(0.02)
                bar.refresh()
        return sum(distmagic.track(range(10)))

    def is_there(worker: WorkerState) -> bool:
        return worker.step == 50 and [bar.n for bar in worker.bars] == [12]

    seen: list[RunState] = []
    run = runner.run_warm(
        warm_lab, "dm1:1,dm2:1", work, screen=look_when(warm_lab, is_there, seen)
    )
    (state,) = seen
    for rank, row in enumerate(rows_of(state)):
        assert (row.rank, row.host, row.count) == (rank, f"dm{rank + 1}", "50/60")
        assert row.metrics == {"loss": pytest.approx(0.02)}
        assert row.note == "evaluating 12/30"
        assert row.fraction == pytest.approx(50 / 60)
    curve = curve_of(state, "loss")
    assert (set(curve.lines), curve.by_step) == ({0, 1}, True)
    for line in curve.lines.values():
        assert line.last == pytest.approx(0.02)
        assert line.bins[0].x < 10
        assert line.bins[-1].x == 50

    assert dict(run.results) == {0: 45, 1: 45}
    assert [row["step"] for row in run.metrics if row["rank"] == 1][-1] == 50
    assert {"rank", "at_s", "step", "loss"} == set(run.metrics[0])


@pytest.mark.quick
def test_a_large_result_waits_on_its_host(warm_lab, capfd):
    def make() -> dict[str, object]:
        import torch

        return {
            "weights": torch.arange(3_000_000, dtype=torch.float32),
            "name": "model",
        }

    run = runner.run_warm(warm_lab, "dm1:1", make)
    assert run.results[0]["weights"][-1] == 2_999_999
    assert run.results[0] is run.results[0]
    assert "result of rank 0: 12 of 12 MB" in capfd.readouterr().err


@pytest.mark.quick
def test_a_value_that_can_not_be_pickled_stops_no_rank(warm_lab, golden):
    def make(saved: str) -> object:
        import os
        import threading
        import time
        from pathlib import Path

        rank = int(os.environ["RANK"])
        if rank == 0:
            return threading.Lock()
        while not Path(saved).exists():  # the test writes it when rank 0 has ended
            time.sleep(0.01)
        return {"loss": 0.5, "lock": threading.Lock()}

    saved = warm_lab.hosts[0].home / "saved"  # /home/node/saved on the host
    watch = runner.Watch(
        lambda state: any(w.phase == "done" for w in state.workers.values()),
        saved.touch,
    )
    run = runner.run_warm(warm_lab, "dm1:2", make, "/home/node/saved", screen=watch)
    assert run.state.phase == "done"
    with pytest.raises(NoResult) as caught:
        run.results[0]
    golden(caught.value.message)
    assert run.results[1]["loss"] == 0.5
    golden(repr(run.results[1]["lock"]))
    told = [alert.text for alert in overview(run.state).alerts]
    golden(*(text for text in told if text.startswith("rank 1 ")))


def test_keyword_arguments_are_the_functions_own_whatever_their_names(warm_lab):
    def told(first: int, *, cwd: str, hosts: int) -> tuple[int, str, int]:
        return first, cwd, hosts

    assert runner.run_warm(
        warm_lab, "dm1:1", told, 1, kwargs={"cwd": "/x", "hosts": 3}
    ).results[0] == (1, "/x", 3)


# ---- hosts that are not the same before and after: these come last, as they end what is kept loaded


LEFT = """\
import sys

class Thing:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("Python is", "ending" if sys.is_finalizing() else "whole")

def work():
    Thing()
    return 1

thing = Thing()
work()
"""


def test_what_a_rank_leaves_is_deleted_while_python_is_whole():
    """A process group that dies later, with its model, aborts processes that had done all their work."""
    payload = pack_whole(LEFT, filename="<cell>", labels={}, limit_bytes=1 << 20)
    with closing(Session()) as session, closing(NotebookAsker(can_ask=False)) as asker:
        reaching = session.reach((), Access(), asker)
        run = session.launch(
            reaching, JobSpec(nproc_per_node=1), payload, runner.Watch()
        )
        assert run.logs(0, "stdout") == 2 * "Python is whole\n"
        assert run.results[0] == 1


def where() -> str:
    """Return the name of the host."""
    import os

    return os.uname().nodename


@pytest.mark.needs("fish", "csh")
def test_log_in_shells_that_talk(make_lab):
    shells = ("/usr/bin/fish", "/bin/csh", "/bin/sh", "/bin/bash")
    lab = make_lab(4, setups=tuple(HostSetup(shell=shell) for shell in shells))
    for host in lab.hosts:
        (host.home / ".bashrc").write_text(
            "echo welcome to this host\necho 'and a warning' >&2\n"
        )
        (host.home / ".cshrc").write_text("echo welcome to csh\n")
        (host.home / ".config/fish").mkdir(parents=True)
        (host.home / ".config/fish/config.fish").write_text("echo welcome to fish\n")

    run = runner.run(lab, "dm1,dm2,dm3,dm4", where)
    assert dict(run.results) == {0: "dm1", 1: "dm2", 2: "dm3", 3: "dm4"}


@pytest.mark.quick
def test_the_system_s_ssh_client(lab):
    way = runner.access(lab, ssh_command="ssh")
    run = runner.run(lab, "dm1:1,dm2:1", where, access=way)
    assert dict(run.results) == {0: "dm1", 1: "dm2"}


@pytest.mark.promise("hosts behind jump hosts work")
def test_hosts_behind_two_bastions(lab, tmp_path):
    config = tmp_path / "config"
    far = lab.hosts[1].address
    config.write_text(
        f"Include {lab.ssh_config}\nHost dmfar\n  HostName {far}\n  ProxyJump dm3,dm1\n"
    )

    def where() -> tuple[str, str]:
        import os

        return os.uname().nodename, os.environ["SSH_CONNECTION"].split()[0]

    run = runner.run(
        lab, "dmfar:1,dm3:1", where, access=runner.access(lab, ssh_config=str(config))
    )
    assert dict(run.results) == {
        0: ("dm2", lab.hosts[0].address),
        1: ("dm3", lab.address),
    }


def test_variables_of_a_host_do_not_mislead_torchrun(lab):
    wrong = "PET_NNODES=1:3 PET_MASTER_PORT=1 RANK=7 WORLD_SIZE=9 MASTER_ADDR=10.0.0.1 TORCHELASTIC_RUN_ID=x"
    (lab.hosts[0].home / ".bashrc").write_text(f"export {wrong}\n")
    run = runner.run(lab, "dm1:1,dm2:1", runner.all_reduce)
    assert [run.results[rank]["world_size"] for rank in run.results] == [2, 2]


@pytest.mark.promise("tqdm bars appear unchanged with rate and time left")
def test_bars_of_tqdm(lab):
    """The package is on dm1. On dm2 it is not, and a cell that imports it works nevertheless."""
    lab.hosts[0].set_python("full")

    def work() -> bool:
        import importlib.metadata
        import time
        from pathlib import Path

        from tqdm.auto import tqdm

        with tqdm(total=1000, desc="epoch", unit="batch") as bar:
            while not Path("~/seen").expanduser().exists():
                time.sleep(0.05)
                bar.update()
                bar.set_postfix(acc=0.5)
        return any(d.name == "tqdm" for d in importlib.metadata.distributions())

    seen: list[RunState] = []
    screen = look_when(lab, lambda worker: worker.eta_s is not None, seen)
    run = runner.run(lab, "dm1:1,dm2:1", work, screen=screen)
    for row in rows_of(seen[0]):
        assert re.fullmatch(r"epoch \d+/1,?000", row.count)
        assert row.metrics == {"acc": 0.5}
        assert row.note == "", "what has a column is not said twice"
        assert re.fullmatch(r"[\d.]+ batch/s", row.rate)
        assert row.left
    assert dict(run.results) == {0: True, 1: False}


@pytest.mark.quick
def test_dry_run_starts_nothing(lab):
    from distmagic.api import session
    from distmagic.connection.prompts import NotebookAsker
    from distmagic.request.hosts import parse_hosts
    from distmagic.request.spec import JobSpec

    asker = NotebookAsker(can_ask=False)
    reaching = session().reach(parse_hosts("dm1:2,dm2:1"), runner.access(lab), asker)
    text = start_commands(
        reaching, JobSpec(env=(("TOKEN", "s3cret"),), master_port=29511)
    )
    assert "--nnodes=2 --nproc-per-node=2" in text
    assert (
        f"--node-rank=1 --master-addr={lab.hosts[0].address} --master-port=29511"
        in text
    )
    assert "TOKEN=..." in text
    assert "s3cret" not in text
    lab.assert_clean()
