"""The table of faults: one row a fault, with what its user is told of it when it comes alone.

tests/e2e/test_faults.py runs each row by itself and compares the words. Pairs of rows come together in test_pairs.py.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

from distmagic.state.model import RunState
from tests.e2e import fault_plays as plays
from tests.e2e import faults
from tests.e2e.faults import (
    LOST_S,
    Fault,
    Way,
    after,
    broken,
    hosts_answer,
    hosts_meet,
    is_lost,
    kill,
    on,
    training,
)
from tests.lab import Lab, LabHost
from tests.lab.clock import give_clock, set_clock

SIGNALS = {
    "SIGKILL": "signal 9 (SIGKILL: killed from outside)",
    "SIGSEGV": "signal 11 (SIGSEGV: segmentation fault: native code touched memory that isn't its own)",
}
RANK_1 = "WorkerFailed: rank 1 (dm2, local_rank 0)"
LOST = "NodeLost: A host was lost, and the others were stopped."
CONNECTION_LOST = (
    "ConnectionLost: dm2: the connection ended before python3 had printed anything."
)
_FULL = "/home/node/.distmagic/jobs/JOB/1-dm2"
DISK_FULL = (
    f"done; dm2: can't write to {_FULL} (No space left on device): the run continues, but its later output is "
    f"not kept; dm2: {_FULL} can be written to again; each log notes what it lacks"
)
UNHEARD = "none of its heartbeats reached the other hosts"
CLOCK = (
    "dm2: its clock is {} s {} dm1's, and so are times in logs and of files. On the host that is wrong: "
    "sudo timedatectl set-ntp true"
)
ELASTIC = {"nnodes": (1, 2), "max_restarts": 1}
SOON_LOST = {"node_lost_after_s": LOST_S}


# ---- what rank 1 does by itself


def exit_with_7() -> None:
    """End at once, without a word."""
    import os

    os._exit(7)


def raise_an_error() -> None:
    """Fail as a program does."""
    raise ValueError("no such data")


def crash() -> None:
    """Read what is at address 0."""
    import ctypes

    ctypes.string_at(0)


def use_up_memory() -> None:
    """Ask for more memory than the limit of the process."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    bytearray(4 << 30)


def crash_at_exit() -> None:
    """End by a signal when all is done."""
    import atexit
    import os

    atexit.register(lambda: os.kill(os.getpid(), 11))


def defy_and_fail() -> None:
    """Fail, and leave children that defy SIGTERM."""
    import subprocess

    subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            "trap '' TERM; (trap '' TERM; setsid sleep 1000) & sleep 1000",
        ]
    )
    raise ValueError("no such data")


def leave_a_child() -> None:
    """Start what goes on when the rank is over, and keeps its streams open."""
    import subprocess

    subprocess.Popen(["sleep", "1000"], start_new_session=True)


def stop_itself() -> None:
    """Stand still until somebody says go on."""
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSTOP)


def close_everything() -> None:
    """Close what this process has no business with."""
    import os

    os.closerange(3, 1024)


# ---- what is done to hosts


def clock(ahead_s: int = 0) -> Callable[[Lab], None]:
    """Give dm2 a clock that is so many seconds ahead of the other hosts, in every process there."""

    def give(lab: Lab) -> None:
        give_clock(lab.hosts[1], ahead_s)
        said = [
            lab.ssh(host, "python3 -c 'import time; print(time.time())'").stdout
            for host in lab.hosts[:2]
        ]
        assert -2 < float(said[1]) - float(said[0]) - ahead_s < 60

    return give


def fill_disk(host: LabHost) -> None:
    """Leave no byte of a host's home, which is a disk of 32 MiB; one that was switched off has its own again."""
    host.exec(["sh", "-c", "head -c 64M /dev/zero > ~/filler"])


def empty_disk(host: LabHost) -> None:
    """Make room again."""
    host.exec(["rm", "filler"])


def has_notices(state: RunState, _: float) -> bool:
    """Hold when there is something that the user should know."""
    return bool(state.notices)


def clean_tmp(host: LabHost) -> None:
    """Remove what distmagic has in /tmp, as a cluster's nightly job does."""
    host.exec(["sh", "-c", "rm -rf /tmp/distmagic-*"]).check_returncode()


def clean_tmp_and_kill_contact(lab: Lab, state: RunState) -> None:
    """Have the next connection come before the agent has made its sockets anew."""
    clean_tmp(lab.hosts[1])
    kill("contact", "dm2")(lab, state)


def flood(lab: Lab, _: RunState) -> None:
    """Send 20,000 datagrams of a stranger to the ports at which dm1 hears the other hosts."""
    listing = lab.hosts[0].exec(["cat", "/proc/net/udp"]).stdout.splitlines()[1:]
    ports = [int(line.split()[1].partition(":")[2], 16) for line in listing]
    assert ports
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for i in range(20_000):
            to = lab.hosts[0].address, ports[i % len(ports)]
            sender.sendto(os.urandom(i % 200), to)


THAW = lambda lab: (lab.hosts[1].thaw(), faults.all_clean(lab))  # noqa: E731


def then(*steps: tuple[faults.When, faults.Act], **more: object) -> Way:
    """Write a row's way shorter."""
    return Way(steps=steps, **more)


TABLE = (
    # ---- a rank
    Fault("rank", "training", "SIGKILL", f"{RANK_1} was ended by {SIGNALS['SIGKILL']}.",
          then((training, kill("rank", "dm2")))),
    Fault("rank", "training", "segmentation fault", f"{RANK_1} was ended by {SIGNALS['SIGSEGV']}.",
          Way(misdeed=crash)),
    Fault("rank", "training", "exit code 7", f"{RANK_1} ended with exit code 7.",
          Way(misdeed=exit_with_7)),
    Fault("rank", "training", "raises", f"{RANK_1} raised ValueError: no such data",
          Way(misdeed=raise_an_error)),
    Fault("rank", "training", "out of memory", f"{RANK_1} raised MemoryError",
          Way(misdeed=use_up_memory)),
    Fault("rank", "training", "raises, with children that ignore SIGTERM", f"{RANK_1} raised ValueError: no such data",
          Way(misdeed=defy_and_fail, hosts="dm1:1,dm2:2")),
    Fault("rank", "training", "SIGSTOP, SIGCONT 1 s later", "done",
          then((training, kill("rank", "dm2", signal.SIGSTOP)), (after(1.0), kill("rank", "dm2", signal.SIGCONT)))),
    Fault("rank", "training", "SIGSTOP for ever", "TimedOut: The run was stopped: its --timeout ran out.",
          Way(misdeed=stop_itself, options={"timeout_s": 3.0})),
    Fault("rank", "training", "closes all descriptors", "done",
          Way(misdeed=close_everything)),
    Fault("rank", "its end", "leaves a child", "done",
          Way(misdeed=leave_a_child)),
    Fault("rank", "its end", "SIGSEGV at exit",
          f"{RANK_1} returned, but its process was ended by {SIGNALS['SIGSEGV']} while it shut down.",
          Way(misdeed=crash_at_exit)),
    Fault("rank", "training", "exit code 7, beside another job, which is unharmed", f"{RANK_1} ended with exit code 7.",
          Way(misdeed=exit_with_7, play=plays.beside_another_job)),

    # ---- torchrun
    Fault("torchrun of the lead", "training", "SIGKILL",
          f"RunError: torchrun on dm1 was ended by {SIGNALS['SIGKILL']} before any rank reported an error.",
          then((training, kill("torchrun", "dm1")))),
    Fault("torchrun of a member", "training", "SIGKILL",
          f"RunError: torchrun on dm2 was ended by {SIGNALS['SIGKILL']} before any rank reported an error.",
          then((training, kill("torchrun", "dm2")))),
    Fault("torchrun of a member", "rendezvous", "SIGKILL",
          f"RunError: torchrun on dm2 was ended by {SIGNALS['SIGKILL']} before any rank reported an error.",
          then((hosts_answer, kill("torchrun", "dm2")))),

    # ---- distmagic's own processes
    Fault("agent of the lead", "training", "SIGKILL", f"{LOST} dm1: its agent exited without an error message (was it killed?)",
          then((training, kill("agent", "dm1")))),
    Fault("agent of a member", "training", "SIGKILL", f"{LOST} dm2: its agent exited without an error message (was it killed?)",
          then((training, kill("agent", "dm2")))),
    Fault("agent of a member", "rendezvous", "SIGKILL", f"{LOST} dm2: its agent exited without an error message (was it killed?)",
          then((hosts_answer, kill("agent", "dm2")))),
    Fault("agent of a member", "training", "SIGTERM", "RunError: dm2 ended its ranks: the agent was asked to end.",
          then((training, kill("agent", "dm2", signal.SIGTERM)))),
    Fault("agent of a member", "training", "SIGSTOP for ever", f"{LOST} dm2: {UNHEARD}",
          then((training, kill("agent", "dm2", signal.SIGSTOP)), (is_lost, lambda *_: None),
               at_last=THAW, options=SOON_LOST)),
    Fault("agent of a member", "training", "SIGSTOP, SIGCONT 1 s later", "done",
          then((training, kill("agent", "dm2", signal.SIGSTOP)), (after(1.0), kill("agent", "dm2", signal.SIGCONT)))),
    Fault("contact", "training", "SIGKILL", "done",
          then((training, kill("contact", "dm2")), (broken("dm2"), lambda *_: None), numbers=40)),
    Fault("contact", "result transfer", "SIGKILL", "came, 40,000,000 numbers",
          Way(play=plays.while_fetching(
              lambda lab: faults.send(lab.hosts[1], faults.pids(lab.hosts[1], "contact", ""), signal.SIGKILL),
              lambda _: None))),
    Fault("sshd's session of the lead", "training", "SIGKILL", "done",
          then((training, kill("session", "dm1")), (broken("dm1"), lambda *_: None), numbers=40)),
    Fault("sshd wholly", "training", "killed and started again", "done",
          then((training, on("dm2", lambda host: host.reject(22))), (broken("dm2"), lambda *_: None),
               (after(1.0), on("dm2", lambda host: host.undrop())), numbers=80)),

    # ---- the notebook's kernel
    Fault("kernel", "training", "SIGKILL", "listed as lease",
          Way(numbers=10_000, options={"lease_s": 4.0}, play=plays.kernel_killed)),
    Fault("kernel", "training", "restarted, and attached again", "done",
          Way(numbers=80, play=plays.kernel_restarted)),
    Fault("kernel", "training", "asleep for a while", "done",
          then((training, plays.doze(2.0)), numbers=60, play=plays.kernel_asleep(plays.has_counted_to(40)))),
    Fault("kernel", "training", "asleep for longer than its lease",
          "RunError: dm1 ended its ranks: this notebook did not renew its lease.",
          then((training, plays.doze(8.0)), numbers=10_000, options={"lease_s": 4.0},
               play=plays.kernel_asleep(plays.is_clean))),

    # ---- the network
    Fault("link", "training", "cut for 5 s", "done",
          then((training, on("dm2", lambda host: host.cut())), (after(5.0), on("dm2", lambda host: host.heal())),
               numbers=140)),
    Fault("link", "training", "cut for ever", f"{LOST} dm2: {UNHEARD}",
          then((training, on("dm2", lambda host: host.cut())), numbers=10_000, options=SOON_LOST)),
    Fault("link of the lead", "training", "cut for ever", f"{LOST} dm1: {UNHEARD}",
          then((training, on("dm1", lambda host: host.cut())), numbers=10_000, options=SOON_LOST)),
    Fault("firewall", "training", "drops what the lead sends",
          "NodeLost: dm2 and dm1 no longer receive each other's heartbeats, though both reach this notebook; the run was stopped.",
          then((training, lambda lab, _: lab.hosts[1].drop_from(lab.hosts[0])), numbers=10_000, options=SOON_LOST)),
    Fault("firewall", "from the beginning", "drops all UDP", "done",
          Way(before=lambda lab: lab.hosts[1].drop_udp())),
    Fault("firewall", "training", "drops every third packet", "done",
          then((training, on("dm2", lambda host: host.drop_some(33))), numbers=60)),
    Fault("firewall", "training", "refuses all SSH, of all hosts, for ever",
          f"{LOST} dm1: no connection for 4 s; dm2: no connection for 4 s",
          then((training, on("dm1", lambda host: host.reject(22))), (after(0.0), on("dm2", lambda host: host.reject(22))),
               numbers=10_000, options={"lease_s": 4.0})),

    # ---- a host
    Fault("host", "connect", "power off", CONNECTION_LOST,
          Way(play=plays.while_connecting(lambda lab: lab.hosts[1].kill()))),
    Fault("host", "rendezvous", "power off", f"{LOST} dm2: {UNHEARD}",
          then((hosts_meet, on("dm2", lambda host: host.kill())), options=SOON_LOST)),
    Fault("host", "training", "power off", f"{LOST} dm2: {UNHEARD}",
          then((training, on("dm2", lambda host: host.kill())), numbers=10_000, options=SOON_LOST)),
    Fault("host", "training", "reset: its kernel closes what is open", f"{LOST} dm2: {UNHEARD}",
          then((training, on("dm2", lambda host: host.kill(silent=False))), numbers=10_000, options=SOON_LOST)),
    Fault("host", "result transfer", "power off", "Unreachable: dm2: no answer from 10.99.0.12 port 22 within 2 s.",
          Way(play=plays.while_fetching(lambda lab: lab.hosts[1].kill(), lambda _: None))),
    Fault("host", "connect", "frozen", CONNECTION_LOST,
          Way(play=plays.while_connecting(lambda lab: lab.hosts[1].freeze()), at_last=THAW)),
    Fault("host", "training", "frozen", f"{LOST} dm2: {UNHEARD}",
          then((training, on("dm2", lambda host: host.freeze())), numbers=10_000, at_last=THAW, options=SOON_LOST)),
    Fault("host", "training", "frozen for 1 s", "done",
          then((training, on("dm2", lambda host: host.freeze())), (after(1.0), on("dm2", lambda host: host.thaw())))),
    Fault("host", "training", "clock 1 h ahead", f"done; {CLOCK.format('3,600', 'ahead of')}",
          Way(before=clock(3600))),
    Fault("host", "training", "clock 1 h ahead, and a rank fails", f"{RANK_1} raised ValueError: no such data",
          Way(before=clock(3600), misdeed=raise_an_error)),
    Fault("host", "training", "clock 1 h ahead, elastic", f"done; {CLOCK.format('3,600', 'ahead of')}",
          Way(before=clock(3600), options=ELASTIC)),
    Fault("host", "training", "clock 1 h behind, elastic", f"done; {CLOCK.format('3,600', 'behind')}",
          Way(before=clock(-3600), options=ELASTIC)),
    Fault("host", "training", "clock set 1 h ahead", "done",
          then((training, on("dm2", lambda host: set_clock(host, 3600))), before=clock())),
    Fault("host", "training", "clock set 1 h ahead, elastic", "done",
          then((training, on("dm2", lambda host: set_clock(host, 3600))), numbers=160, before=clock(), options=ELASTIC)),
    Fault("host", "training", "clock set 1 h back, elastic", "done",
          then((training, on("dm2", lambda host: set_clock(host, -3600))), numbers=160, before=clock(), options=ELASTIC)),
    Fault("disk", "training", "full for a while", DISK_FULL,
          then((training, on("dm2", fill_disk)), (has_notices, on("dm2", empty_disk)), numbers=100,
               before=lambda lab: lab.hosts[1].limit_home(32 << 20), play=plays.disk_full)),
)  # fmt: skip


# These strike alone only: in pairs, rows of the table stand for them.
ALONE = (
    Fault("host", "training", "clock 1 h behind", f"done; {CLOCK.format('3,600', 'behind')}",
          Way(before=clock(-3600))),
    Fault("host", "training", "clock set 1 h back", "done",
          then((training, on("dm2", lambda host: set_clock(host, -3600))), before=clock())),
    Fault("contact", "training", "SIGKILL after a cleaner of /tmp", "done",
          then((training, clean_tmp_and_kill_contact), (broken("dm2"), lambda *_: None), numbers=40)),
    Fault("link", "its end", "cut while ranks end", "done",
          then((training, on("dm2", lambda host: host.cut())), (after(5.0), on("dm2", lambda host: host.heal())),
               numbers=30)),
    Fault("firewall", "training", "drops SSH, and what hosts say to each other passes", "done",
          then((training, on("dm2", lambda host: host.drop(port=22))), (broken("dm2"), lambda *_: None),
               (after(2 * LOST_S), on("dm2", lambda host: host.undrop())), numbers=500, options=SOON_LOST)),
    Fault("gang", "training", "a flood of a stranger's datagrams", "done",
          then((training, flood), options=SOON_LOST)),
)  # fmt: skip


def stopped_for_1_s(process: str) -> Way:
    """Write shorter what stops a process of ours on dm2 for a while."""
    return then(
        (training, kill(process, "dm2", signal.SIGSTOP)),
        (after(1.0), kill(process, "dm2", signal.SIGCONT)),
    )


# These are tests of their own elsewhere, and strike in pairs only. Where the outcome is "done", a run survives one alone.
BESIDE_OTHERS = (
    Fault("notebook", "training", "interrupt", "Cancelled",
          then((training, plays.interrupt))),
    Fault("notebook", "training", "interrupt, and a second one 1 s later", "Cancelled",
          then((training, plays.interrupt), (after(1.0), plays.interrupt))),
    Fault("torchrun of a member", "training", "SIGSTOP, SIGCONT 1 s later", "done", stopped_for_1_s("torchrun")),
    Fault("contact", "training", "SIGSTOP, SIGCONT 1 s later", "done", stopped_for_1_s("contact")),
    Fault("sshd's session", "training", "SIGSTOP, SIGCONT 1 s later", "done", stopped_for_1_s("session")),
    Fault("sshd", "training", "lets nobody in for 3 s", "done",
          then((training, on("dm2", lambda host: host.set_sshd("DenyUsers root"))),
               (after(3.0), on("dm2", lambda host: host.set_sshd(""))), numbers=80)),
    Fault("mount of the home", "starting", "read-only", "",
          then((training, on("dm2", lambda host: host.make_home_read_only())))),
    Fault("home", "training", "all of ours is removed", "",
          then((training, on("dm2", lambda host: host.exec(["rm", "-rf", ".distmagic"]))))),
    Fault("tmp", "training", "a cleaner removes all of ours", "",
          then((training, on("dm2", clean_tmp)))),
    Fault("disk", "training", "full for ever", "",
          then((training, on("dm2", fill_disk)), numbers=100, before=lambda lab: lab.hosts[1].limit_home(48 << 20))),
)  # fmt: skip
