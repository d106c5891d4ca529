"""Clusters that are launched with a scripted `sky`: their names, what SkyPilot is told, and what is taken down when."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError, UsageError
from distmagic.request.access import Access
from distmagic.request.allocation import SkyRequest
from distmagic.systems.skypilot import cluster, hosts, sky, sky_words
from distmagic.systems.skypilot.cluster import Cluster
from tests.builders.sky import Sky, entries
from tests.lab.waiting import HANG_S, wait_until

ASKER = NotebookAsker(can_ask=False)
OWNER = "Ann.B@laptop:/home/ann/My train.ipynb"
WANTED = SkyRequest(nodes=2, gpus="L4:4", idle_s=900.0)
NAME = sky_words.name_for(OWNER, WANTED)
LAUNCH = (
    f"launch --yes --detach-run --cluster {NAME} --num-nodes 2 --gpus L4:4 "
    "--idle-minutes-to-autostop 5 --down"
)
STATUS = "status --output json"
DOWN = f"down --yes --async {NAME}"


@pytest.fixture
def skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sky:
    """SkyPilot with a cloud that launches at once."""
    made = Sky(tmp_path, monkeypatch)
    made.has("of-others", entries("of-others", ("10.0.0.9",)))
    made.has(NAME, entries(NAME, ("10.0.0.1", "10.0.0.2")))
    later = (tmp_path / "status.json").rename(tmp_path / "later.json")
    del made.clusters[NAME]
    made.has("of-others")
    made.does(
        "launch",
        f"echo Launching on Lab.; cp {later} {tmp_path}/status.json; echo Cluster launched. >&2",
    )
    return made


def launched(request: SkyRequest = WANTED) -> tuple[Cluster, list[str]]:
    made, told = Cluster(request, OWNER), []
    made.wait(ASKER, told.append)
    return made, told


def failed() -> DistmagicError:
    with pytest.raises(DistmagicError) as caught:
        launched()
    return caught.value


def test_names():
    assert NAME.startswith("dm-annb-mytrain-")
    assert sky_words.name_for(OWNER, WANTED) == NAME
    other = sky_words.name_for(OWNER, dataclasses.replace(WANTED, nodes=4))
    assert other != NAME
    script = sky_words.name_for("a@b:train.py (process 812-3fa9c1)", WANTED)
    assert script.startswith("dm-a-train-")
    assert sky_words.name_for("host", WANTED).startswith("dm-host-host-")
    for name in (NAME, script):
        SkyRequest(name=name)  # it may be named after --on sky:


@pytest.mark.parametrize(
    ("idle_s", "minutes", "hold_s"),
    [(900.0, "5", 600.0), (60.0, "1", 300.0), (3600.0, "5", 3300.0), (1.0, "1", 300.0)],
)
def test_the_idle_time_is_that_of_the_job_that_holds_it_and_skypilots_own(
    idle_s, minutes, hold_s
):
    request = SkyRequest(idle_s=idle_s, file="/x y.yaml")
    words = sky.launch_words(request, "mine")
    assert words[4:] == ("mine", "--idle-minutes-to-autostop", minutes, "--down", "/x y.yaml")  # fmt: skip
    assert sky.hold_s(request) == hold_s


def test_a_cluster_is_launched_once_and_held(skypilot, golden):
    made, told = launched()
    assert [host.name for host in made.hosts] == [NAME, f"{NAME}-worker1"]
    hold = skypilot.asked[2]
    assert skypilot.asked == [STATUS, LAUNCH, hold, STATUS]
    assert hold.startswith(
        f"exec --detach-run --name distmagic-hold {NAME} -- python3 "
    )
    first = f"SkyPilot launches the cluster {NAME}: "
    assert told[1] == f"{first}it was asked to."
    assert all(line.startswith(first) for line in told[1:-2])
    golden(told[-2])
    made.wait(ASKER, told.append)
    assert len(skypilot.asked) == 4
    assert made.fits(SkyRequest(name=NAME))
    made.leave()
    assert len(skypilot.asked) == 4


def test_the_job_that_holds_it_is_a_program(skypilot):
    request = dataclasses.replace(WANTED, idle_s=0.1)
    *_, line = sky.hold_words(request, NAME)
    program, *rest = shlex.split(line)
    assert program == "python3"
    rest[-1] = '{"idle_s": 0.0}'
    subprocess.run([sys.executable, *rest], check=True, timeout=HANG_S)


def test_a_cluster_of_this_notebook_that_is_up_is_used_and_held_again(
    skypilot, monkeypatch
):
    skypilot.has(NAME)
    made, _ = launched()

    def is_held() -> bool:
        return any(one.startswith("exec ") for one in skypilot.asked)

    wait_until(is_held, "the job that holds it")
    assert LAUNCH not in skypilot.asked
    monkeypatch.setattr(made, "_held_at", made._held_at - 400.0)
    before = len(skypilot.asked)
    assert made.check(ASKER)
    wait_until(lambda: len(skypilot.asked) > before, "the next one")
    assert skypilot.asked[-1].startswith("exec ")


def test_a_cluster_is_held_again_after_a_sleep_of_this_machine(skypilot, monkeypatch):
    """Where the usual clock stands still, and the job that holds the cluster has ended."""
    now = 1000.0
    monkeypatch.setattr(cluster, "up_s", lambda: now)
    made, _ = launched()
    held: list[str] = []
    monkeypatch.setattr(sky, "hold_in_background", lambda _, name: held.append(name))
    made._hold_on()
    assert held == []
    now += 720.0
    made._hold_on()
    made._hold_on()
    assert held == [NAME]


def test_a_users_own_cluster_that_stops_itself_is_held_too(skypilot):
    skypilot.has("of-others", autostop=10)
    made, _ = launched(SkyRequest(name="of-others"))
    wait_until(lambda: len(skypilot.asked) > 1, "the job that holds it")
    hold = "exec --detach-run --name distmagic-hold of-others "
    assert skypilot.asked[1].startswith(hold)
    assert sky.hold_s(made.request) == 300.0
    made.end()
    assert len(skypilot.asked) == 2


def test_a_launch_that_fails_says_the_last_lines_and_is_taken_down(skypilot, golden):
    skypilot.does("launch", "echo Trying zone a >&2; echo No capacity. >&2; exit 1")
    error = failed()
    golden(error)
    assert skypilot.asked == [STATUS, LAUNCH, DOWN]


def test_what_was_there_before_is_not_taken_down(skypilot, golden):
    skypilot.has(NAME, status="STOPPED")
    skypilot.does("launch", "exit 1")
    golden(failed())
    assert skypilot.asked == [STATUS, LAUNCH]


def test_a_cluster_that_cant_be_taken_down_is_named(skypilot, golden):
    skypilot.does("launch", "exit 1")
    skypilot.does("down", "echo no server; exit 2")
    golden(failed())


def test_an_interrupt_while_it_is_launched_takes_it_down(skypilot, capsys, golden):
    skypilot.does("launch", "echo $$ >$0.pid; echo Provisioning; exec sleep 60")
    made = Cluster(WANTED, OWNER)

    def interrupt(text: str) -> None:
        if text.endswith("Provisioning"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.wait(ASKER, interrupt)
    made.end()
    assert skypilot.asked == [STATUS, LAUNCH, DOWN]
    pid = Path(f"{skypilot.program}.pid").read_text().strip()
    assert not Path("/proc", pid).exists()
    golden(capsys.readouterr().err)


def test_an_interrupt_of_one_of_two_runs_leaves_the_launch_to_the_other(skypilot):
    made, other = Cluster(WANTED, OWNER), NotebookAsker(can_ask=False)
    made.awaited_by |= {ASKER, other}

    def interrupt(text: str) -> None:
        if text.endswith("it was asked to."):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.wait(ASKER, interrupt)
    assert made.is_alive
    assert DOWN not in skypilot.asked
    hosts = made.wait(other, lambda _: None)
    assert [host.name for host in hosts] == [NAME, f"{NAME}-worker1"]


def test_a_launch_that_another_thread_gives_up_is_ended_and_taken_down(
    skypilot, golden
):
    skypilot.does("launch", "echo Provisioning; exec sleep 60")
    made, raised = Cluster(WANTED, OWNER), []
    is_launching = threading.Event()

    def tell(text: str) -> None:
        if text.endswith("Provisioning"):
            is_launching.set()

    def wait() -> None:
        with pytest.raises(DistmagicError) as caught:
            made.wait(ASKER, tell)
        raised.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_launching.wait(HANG_S)
    made.end()
    thread.join(HANG_S)
    assert raised == [made.error]
    golden(raised[0])
    assert skypilot.asked == [STATUS, LAUNCH, DOWN]
    assert made.hosts == ()


@pytest.mark.parametrize(
    "moment",
    [
        f"SkyPilot launches the cluster {NAME}: it was asked to.",
        f"The cluster {NAME} is up; a job in its queue keeps it from stopping.",
        f"Asking SkyPilot how the hosts of {NAME} are reached.",
    ],
)
def test_given_up_between_two_commands_it_is_taken_down_and_not_used(
    skypilot, moment, golden
):
    made = Cluster(WANTED, OWNER)
    with golden.raises(UsageError):
        made.wait(ASKER, lambda text: made.end() if text == moment else None)
    assert skypilot.asked[-1] == DOWN
    assert skypilot.asked.count(DOWN) == 1
    assert made.hosts == ()


def test_given_up_when_its_hosts_are_known_it_is_not_used(
    skypilot, monkeypatch, golden
):
    made = Cluster(WANTED, OWNER)
    read = sky_words.hosts_in

    def hosts_in(text: str, cluster: str) -> tuple[str, ...]:
        made.end()
        return read(text, cluster)

    monkeypatch.setattr(sky_words, "hosts_in", hosts_in)
    with golden.raises(UsageError):
        made.wait(ASKER, lambda _: None)
    assert skypilot.asked[-1] == DOWN
    assert made.hosts == ()


def test_given_up_before_it_is_launched_nothing_is_launched(skypilot, golden):
    made = Cluster(WANTED, OWNER)
    made.end()
    with golden.raises(UsageError):
        made.wait(ASKER, lambda _: None)
    assert set(skypilot.asked) <= {STATUS}


def test_giving_it_back_takes_down_what_was_launched_and_nothing_else(skypilot, capsys):
    made, _ = launched()
    made.end()
    assert skypilot.asked[-1] == f"down --yes {NAME}"
    assert capsys.readouterr().err == f"taking down the cluster {NAME}\n"
    assert not made.is_alive
    count = len(skypilot.asked)
    named, _ = launched(SkyRequest(name="of-others"))
    named.end()
    assert skypilot.asked[count:] == [STATUS]


def test_a_dry_run_says_what_would_be_launched(skypilot, golden):
    def shown(request: SkyRequest) -> str:
        return hosts.preview(request, Access(), OWNER, is_elastic=False)

    assert shown(WANTED) == f"sky {LAUNCH}"
    golden(shown(SkyRequest(name="mine")))
    assert skypilot.asked == []
