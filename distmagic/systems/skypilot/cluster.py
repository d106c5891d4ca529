"""A SkyPilot cluster as SSH hosts: found or launched, and reached with the host keys seen first.

    asked     `sky status` runs, and writes the hosts' ssh configuration
    launching it was requested by its size, and is not up yet: `sky launch` runs
    found     the hosts are known; each connection is SSH with SkyPilot's configuration
    doubtful  a host did not answer: the next cell checks again whether the cluster is up

If the program is not installed, only its configuration file is read, so a cluster that others have
launched can be used. Promised: a cluster that this notebook launched, and that failed or was given
up during the launch, is shut down. No other one is, unless a user requests it by name. When the
kernel ends, SkyPilot shuts the idle cluster down.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

from distmagic.connection.connections import connect
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError, Unreachable, UsageError
from distmagic.remote.system.processes import up_s
from distmagic.request.access import Access
from distmagic.request.allocation import HostsRequest, SkyRequest
from distmagic.request.hosts import Host, Hosts, Source
from distmagic.systems.protocol import Held
from distmagic.systems.skypilot import sky, sky_words
from distmagic.systems.skypilot.sky_words import ClusterState
from distmagic.transports import Argv, Process, Transport
from distmagic.transports.asking import Asker

_PINS = "~/.distmagic/known_hosts"  # the host keys of clusters, a file a launch
# 192.0.2.1 is unused (RFC 5737): its route is the usual one to other hosts. Nothing is sent.
_OUTWARD = (
    'case $1 in "~/"*) p=$HOME/${1#"~/"};; *) p=$1;; esac; shift; '
    'DISTMAGIC_CLIENT=192.0.2.1 exec "$p" "$@"'
)


class Cluster(Held):
    """One cluster whose hosts a cell uses. `hosts` is () until it is known to be up.

    `cluster` is SkyPilot's name of it, and `source` distinguishes this launch from others. `error`
    is set when it is over. It has no findings: SkyPilot could only report that a cluster is down,
    and its hosts' SSH errors name that already.
    """

    def __init__(self, request: SkyRequest, owner: str) -> None:
        """Raises `UsageError` if both SkyPilot's program and the cluster's file are missing."""
        self.request = request
        self.cluster = request.name or sky_words.name_for(owner, request)
        self.source = self._source("")
        self.title = f"cluster {self.cluster} of SkyPilot"
        self.awaited_by: set[NotebookAsker] = set()  # of the runs that wait for it
        self.awaited = request.nodes or 1
        # Whether it was launched for a notebook, and not named by a user.
        self._is_ours = not request.name
        self._pins = ""
        self._is_doubtful = False
        self._is_launched = False  # whether this notebook launched it
        self._is_new = False  # whether there was none of this name before
        self._stops = False  # whether SkyPilot stops it when its queue is empty
        self._held_at = -math.inf
        self._ending = threading.Lock()  # held while it gets its hosts, or its error
        self._begun: list[sky.SkyCommand] = []  # on whatever thread
        self._asked = self._ask()

    def fits(self, request: HostsRequest) -> bool:
        """Whether the cluster satisfies a cell's request."""
        if not isinstance(request, SkyRequest):
            return False
        return request == self.request or request.name == self.cluster

    def check(self, asker: Asker) -> bool:  # noqa: ARG002 - as an allocation's
        """Return whether a coming run can use it; False if in doubt: then the run asks SkyPilot."""
        if self._is_doubtful:
            self.leave()
        if self.hosts and self.is_alive:
            self._hold_on()
        return self.is_alive

    def _ask(self) -> sky.SkyCommand | None:
        """Start to ask SkyPilot; None if its program is missing, but the cluster's file exists."""
        try:
            return self._begin(sky_words.STATUS)
        except UsageError:
            if self._is_ours or not self._file.exists():
                raise
            return None

    def _begin(self, words: Argv) -> sky.SkyCommand:
        """Start a command that ends when any thread gives the cluster up. Raises `error` then."""
        self._raise_if_over()
        command = sky.SkyCommand(words)
        self._begun.append(command)
        if self.error is not None:  # `leave` may not have seen it
            command.end()
        self._raise_if_over()
        return command

    def _raise_if_over(self) -> None:
        if self.error is not None:
            raise self.error

    @property
    def _file(self) -> Path:
        """The file in which SkyPilot writes the hosts' ssh configuration."""
        return Path(sky_words.SSH_FOLDER).expanduser() / self.cluster

    # ---- found

    def wait(self, asker: NotebookAsker, tell: sky.Tell) -> Hosts:
        """Return the hosts once they are known, launching the cluster if needed; `tell` gets the
        reason for the wait.

        Call it on the thread of the run. Raises `UsageError` for a cluster that is not up, or was
        given up by another thread. Raises `Unreachable` if SkyPilot does not answer or can't launch
        it, and KeyboardInterrupt.
        """
        if self.hosts:
            return self.hosts
        tell(f"Asking SkyPilot for the state of the cluster {self.cluster}.")
        try:
            self._find(self._state(asker, tell))
        except BaseException as caught:  # noqa: BLE001 - an interrupt, too
            raise self._ended_by(caught, asker) from None
        self._hold_on()
        return self.hosts

    def _ended_by(self, caught: BaseException, asker: NotebookAsker) -> BaseException:
        """Return the error of a failed or interrupted wait.

        Shut the cluster down if this kernel has launched it for nobody else.
        """
        if isinstance(caught, KeyboardInterrupt) and self.awaited_by - {asker}:
            return caught
        # A command that was ended also fails; the error of giving up was set before.
        error = self.error or caught
        if isinstance(error, DistmagicError):
            self.error = error
        if not self._is_launched or self.hosts:  # which another run may have found
            return error
        left = f"The cluster {self.cluster} existed before this cell, and is left as it is."
        if self._is_new:
            left = sky.take_down_soon(self.cluster)
        if isinstance(error, DistmagicError):
            error.hint = f"{left}\n{error.hint}".rstrip("\n")
        else:
            print(f"{self.cluster}: {left}", file=sys.stderr)  # noqa: T201 - a line for people
        return error

    def _state(self, asker: NotebookAsker, tell: sky.Tell) -> ClusterState:
        """Return the state of a running cluster.

        Raises `UsageError` if it is not up, and `Unreachable`.
        """
        if self._asked is None:
            text = _read(self._file)
            launch = hashlib.sha256(text.encode()).hexdigest()
            return ClusterState(name=self.cluster, status="UP", launch=launch)
        known = sky.read_states(self._asked, asker)
        state = known.get(self.cluster)
        if self._is_ours and (state is None or state.status != "UP"):
            self._raise_if_over()
            if not self._is_launched:  # for another run
                self._is_new = state is None
            self._is_launched = True
            sky.launch(self.request, self.cluster, self._begin, asker, tell)
            self._held_at = up_s()
            tell(f"Asking SkyPilot how the hosts of {self.cluster} are reached.")
            known = sky.read_states(self._begin(sky_words.STATUS), asker)
            state = known.get(self.cluster)
        if state is None or state.status != "UP":
            raise sky_words.not_up(self.cluster, tuple(known.values()))
        return state

    def _hold_on(self) -> None:
        """Keep the cluster up for the coming run, if its holding job may be about to end."""
        sure_s = sky.hold_s(self.request)
        if self._stops and up_s() > self._held_at + sure_s / 2:
            self._held_at = up_s()
            sky.hold_in_background(self.request, self.cluster)

    def _find(self, state: ClusterState) -> None:
        """Read the hosts' ssh configuration."""
        self._stops = self._is_ours or state.stops
        names = sky_words.hosts_in(_read(self._file), self.cluster)
        if not names:
            raise UsageError(
                f"{self._file} has no host of the cluster {self.cluster} in it.",
                f"Let SkyPilot write it again: sky status {self.cluster}",
            )
        number = hashlib.sha256(state.launch.encode()).hexdigest()[:16]
        self.source = self._source(number)
        # The file for the host keys of this launch, and remove those of earlier launches of the
        # same name.
        folder = Path(_PINS).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = folder / f"sky-{self.cluster}.{number}"
        for file in folder.glob(f"sky-{self.cluster}.{'?' * len(number)}"):
            if file != own:
                file.unlink(missing_ok=True)
        self._pins = os.fspath(own)
        hosts = tuple(Host(name=name, allocation=self.source) for name in names)
        with self._ending:
            self._raise_if_over()
            self.hosts = hosts

    def _source(self, number: str) -> Source:
        return Source(
            name=f"sky:{self.cluster}:{number}",
            ended=f"The cluster {self.cluster} was given up.",
            cure="Run the cell again: it asks SkyPilot for it.",
        )

    def transport(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return a transport to one of the hosts. Raises the errors of connecting."""
        own = replace(access, ssh_config=str(self._file))
        try:
            return _ForwardedTransport(connect(host, own, asker, self._pins))
        except Unreachable as error:
            self._is_doubtful = True
            error.hint += f"\nsky status {self.cluster} --refresh shows whether the cluster is still up."
            raise

    # ---- the end

    def end(self) -> None:
        """Shut the cluster down if this notebook launched it.

        A cluster that the user named keeps running. If `wait` is still launching it on another
        thread, that thread shuts it down.
        """
        with self._ending:
            is_up = bool(self.hosts) and self.error is None
            self.leave()
        if not (self._is_ours and is_up):
            return
        said = f"taking down the cluster {self.cluster}"
        print(said, file=sys.stderr)  # noqa: T201 - lines for people
        try:
            sky.take_down(self.cluster, NotebookAsker(can_ask=False))
        except DistmagicError as error:
            print(error, file=sys.stderr)  # noqa: T201

    def leave(self) -> None:
        """Leave the cluster to SkyPilot, which stops it when idle; end this machine's processes for
        it.
        """
        # Before any command ends, so that its waiting thread raises this.
        if self.error is None:
            self.error = UsageError(f"The cluster {self.cluster} was given up.")
        for command in tuple(self._begun):
            command.end()


class _ForwardedTransport:
    """SSH to a host that may be behind a forwarded port, such as a pod or a Slurm node.

    Such a host sees a connection from itself. So it gets an outside address, and determines its own
    address on the route to that.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.warnings = inner.warnings

    def start(self, argv: Argv) -> Process:
        """Start `argv` on the host.

        A variable holds the outside address that the class describes.
        """
        return self._inner.start(("sh", "-c", _OUTWARD, "sh", *argv))

    def close(self) -> None:
        """End the connection."""
        self._inner.close()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"{file}: {error.strerror}.",
            "SkyPilot writes it when it is asked: sky status",
        ) from None
