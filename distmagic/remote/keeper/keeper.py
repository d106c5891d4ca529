"""The keeper: one node's process in the long-lived step of an allocation.

It starts processes for ushers, on their pipes.

Its last argument is a line of JSON:

    {"leads": true, "first_lease_s": 90, "lease_s": 60, "idle_s": 900,
     "step": [], "needs_others": true}

    usher's socket                     keeper
    one line of JSON and three pipes   starts argv on the pipes, in its own session
                                       {"code": N} when that process has ended
    closed before that                 SIGTERM to that process, SIGKILL soon after, because it would
                                       hold the pipes of a dead step. Its own children in other
                                       sessions run on
    a lease's pipe (no argv)           the lead answers "ready"; each byte renews the lease, an "e"
                                       ends the allocation, a "b" gives up the lease: the allocation
                                       ends as soon as no job runs

When the lead's keeper ends, the allocation ends. It ends when its lease has expired and no job runs
on its node, when no job has run for `idle_s`, and on request. It starts the other keepers with the
command `step`, an srun. They end at the end of their stdin, which is a pipe from the lead, or with
their step. So all have ended before the Slurm job. If the others end first, and it `needs_others`,
the nodes are useless. Then it exits with a code that Slurm counts as a failure of the job. Every
keeper forwards SIGTERM, because scancel, the time limit and preemption only reach its own process
group. It ends when all its children have ended.
"""

import array
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

from distmagic.remote.keeper.allocation_lease import AllocationLease
from distmagic.remote.keeper.listening import listen
from distmagic.remote.keeper.processes import (
    has_job,
    parents,
    send_signal,
    start_process,
    write_quietly,
)

KILL_S = 2.0  # time between SIGTERM and SIGKILL, for the process of a lost connection
# time limit for the end of all started processes; Slurm itself kills them after its KillWait, 30 s
# by default
END_S = 20.0
_TURN_S = 1.0
_LONGEST = 1 << 20  # size limit of a request
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
# Signals that --signal sends before the end.
_WARNINGS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_LOG = ".distmagic-slurm-"  # the batch script's output, only needed if a keeper fails to start


class Connection:
    """One usher: its socket, its pipes, and the process that uses them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.said = b""
        self.pipes: list[int] = []
        self.pid = 0
        self.kill_at = 0.0  # when a process whose usher is gone is killed


class Keeper:
    """The keeper of one node, for its whole life."""

    def __init__(self, settings: "dict[str, Any]") -> None:
        self._leads = settings["leads"]
        self._lease = AllocationLease(time.monotonic(), settings)
        self._node = "." + (os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        job = os.environ["SLURM_JOB_ID"]
        self._folder = f"/tmp/distmagic-{os.getuid()}-slurm.{job}{self._node}"
        self._connections: dict[int, Connection] = {}  # by the descriptor of its socket
        # Connections whose stdin renews the lease, by its descriptor.
        self._leases: dict[int, Connection] = {}
        # Connections whose process is about to end: their other end is gone.
        self._orphans: list[Connection] = []
        self._is_ending = self._is_ended_by_slurm = False
        self._code = 0  # exit code of this process
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end_soon)
        for number in _WARNINGS:
            # A function, not SIG_IGN, which children would inherit.
            signal.signal(number, lambda *_: None)
        # Makes orphans children of this process.
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        self._listener = listen(self._folder, self._node)
        self._needs_others = settings["needs_others"]
        self._others = _start_others(settings)

    def _end_soon(self, *_: object) -> None:
        self._is_ending = self._is_ended_by_slurm = True

    def run(self) -> int:
        """Serve until the end, end all started processes, and return the exit code."""
        try:
            while not self._is_ending:
                self._turn()
                if self._leads and self._is_over():
                    self._is_ending = True
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._listener.close()
        self._end()
        if not self._code:
            _remove_log()
        return self._code

    def _is_over(self) -> bool:
        now = time.monotonic()
        return self._lease.is_due(now) and self._lease.is_over(
            now, has_job=has_job(os.getpid())
        )

    def _turn(self) -> None:
        poll = select.poll()
        sources = [self._wake, self._listener.fileno()]
        if not self._leads:
            sources.append(0)
        for number in sources + list(self._connections) + list(self._leases):
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(1000 * _TURN_S):
            if number == self._wake:
                os.read(self._wake, 4096)
            elif number == 0 and not os.read(0, 4096):
                self._is_ending = True  # the lead has ended
            elif number == self._listener.fileno():
                sock, _ = self._listener.accept()
                peer = sock.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
                )
                if struct.unpack("3i", peer)[1] not in (0, os.getuid()):
                    sock.close()
                else:
                    sock.setblocking(False)
                    self._connections[sock.fileno()] = Connection(sock)
            elif number in self._leases:
                self._renew(number)
            elif number in self._connections:
                self._hear(self._connections[number])
        self._reap()
        self._kill_orphans()

    # ---- ushers

    def _hear(self, connection: Connection) -> None:
        """Read part of a request, or notice that an usher is gone."""
        try:
            data, extra, _, _ = connection.sock.recvmsg(
                65536, socket.CMSG_SPACE(3 * array.array("i").itemsize)
            )
        except BlockingIOError:
            return
        except OSError:
            data, extra = b"", []
        for level, kind, numbers in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(numbers[: len(numbers) - len(numbers) % found.itemsize])
                connection.pipes += list(found)
        connection.said += data
        if not data or len(connection.said) > _LONGEST:
            self._lose(connection)
        elif (
            connection.said.endswith(b"\n")
            and len(connection.pipes) == 3
            and not connection.pid
        ):
            # Not a request of a distmagic usher.
            try:
                self._begin(connection, json.loads(connection.said.decode()))
            except (
                ValueError,
                KeyError,
                TypeError,
                IndexError,
            ):
                self._lose(connection)

    def _begin(self, connection: Connection, request: "dict[str, Any]") -> None:
        self._lease.use(time.monotonic())
        if request.get("lease"):
            self._leases[connection.pipes[0]] = connection
            _remove_log()
            self._lease.renew(time.monotonic())
            write_quietly(connection.pipes[1], b"ready\n")
            return
        connection.pid, code = start_process(
            request["argv"], connection.pipes, request.get("client", "")
        )
        self._close_pipes(connection)
        if not connection.pid:
            self._answer(connection, code)

    def _renew(self, number: int) -> None:
        data = os.read(number, 4096)
        if not data:
            self._answer(self._leases[number], 0)
        elif b"e" in data:
            self._is_ending = True
        elif b"b" in data:
            self._lease.give_up(time.monotonic())
        else:
            self._lease.renew(time.monotonic())

    def _lose(self, connection: Connection) -> None:
        """Handle the loss of an usher: its step is over, and the process with its pipes must not
        hold them.
        """
        self._close(connection)
        if connection.pid:
            send_signal(connection.pid, signal.SIGTERM)
            connection.kill_at = time.monotonic() + KILL_S
            self._orphans.append(connection)

    def _answer(self, connection: Connection, code: int) -> None:
        try:
            connection.sock.sendall(json.dumps({"code": code}).encode() + b"\n")
        except OSError:
            pass  # it is gone as well
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._connections.pop(connection.sock.fileno(), None)
        connection.sock.close()
        self._close_pipes(connection)

    def _close_pipes(self, connection: Connection) -> None:
        for number in connection.pipes:
            self._leases.pop(number, None)
            os.close(number)
        connection.pipes = []

    # ---- processes

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = (
                os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            )
            for connection in [
                one for one in self._connections.values() if one.pid == pid
            ]:
                self._answer(connection, code)
            self._orphans = [one for one in self._orphans if one.pid != pid]
            # The step of the other keepers is over: at the end of all, or because one of them was
            # killed.
            is_others_step = self._others is not None and pid == self._others.pid
            if is_others_step and self._needs_others and not self._is_ending:
                self._is_ending = True
                self._code = 1

    def _kill_orphans(self) -> None:
        # None of them is reaped yet, so their pids are still valid.
        for connection in self._orphans:
            if time.monotonic() > connection.kill_at:
                send_signal(connection.pid, signal.SIGKILL)

    def _end(self) -> None:
        """Send SIGTERM to every child, including orphans that this process adopts; wait for
        them.
        """
        end_s = time.monotonic() + END_S
        told = set()
        if self._others is not None:
            assert self._others.stdin is not None
            self._others.stdin.close()
            told.add(self._others.pid)  # srun would kill the others at once
        while time.monotonic() < end_s:
            self._reap()
            children = [
                pid for pid, parent in parents().items() if parent == os.getpid()
            ]
            if self._is_ended_by_slurm and self._others is not None:
                # Slurm ends the others too; an srun to a dead node would wait for it.
                children = [pid for pid in children if pid != self._others.pid]
            if not children:
                return
            for pid in children:
                if pid not in told:
                    told.add(pid)
                    send_signal(pid, signal.SIGTERM)
            time.sleep(0.02)


def _start_others(settings: "dict[str, Any]") -> "subprocess.Popen[bytes] | None":
    """Start the keepers of the other nodes by the same command as this one; None without other
    nodes.
    """
    if not settings["step"]:
        return None
    with open("/proc/self/cmdline", "rb") as file:
        own = file.read().decode().split("\0")[:-2]  # without the settings
    theirs = json.dumps(dict(settings, leads=False, step=[]))
    # Its own session, so that a signal to this process does not reach srun.
    child = subprocess.Popen(
        settings["step"] + own + [theirs], stdin=subprocess.PIPE, start_new_session=True
    )
    child.returncode = 0  # `_reap` waits for it
    return child


def _remove_log() -> None:
    """Remove the file of the batch script's output: from now on errors are sent over a
    connection.
    """
    path = os.readlink("/proc/self/fd/2")
    if os.path.basename(path).startswith(_LOG) and os.path.exists(path):
        os.unlink(path)


def main(text: str) -> int:
    """Run the keeper of this node until the allocation ends; return the exit code."""
    for name in ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY"):
        # Variables of the log-in node, which sbatch has passed on.
        os.environ.pop(name, None)
    return Keeper(json.loads(text)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[2]))
