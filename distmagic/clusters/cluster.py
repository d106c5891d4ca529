"""A cluster of SkyPilot as the SSH hosts that it is: looked for, reached with the keys that were seen first.

    asked     `sky status` runs, and writes how the hosts are reached
    found     the hosts are known; each connection is SSH with SkyPilot's own file
    doubtful  a host did not answer: the next cell asks again whether the cluster is up

Where the program is not installed, its file alone is read: a cluster that others have launched may be used so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from distmagic.clusters import sky, sky_words
from distmagic.clusters.sky_words import ClusterState
from distmagic.connection.connections import connect
from distmagic.connection.prompts import NotebookAsker
from distmagic.errors import DistmagicError, SpecError, Unreachable
from distmagic.request.allocation import AllocationRequest, ClusterRequest
from distmagic.request.hosts import SKY, Host
from distmagic.request.spec import Access
from distmagic.transports import Transport
from distmagic.transports.asking import Asker

_PINS = "~/.distmagic/known_hosts"  # the host keys of clusters, a file a launch

Tell = Callable[[str], object]


class Cluster:
    """One cluster whose hosts a cell uses. `hosts` is () until it is known that it is up.

    `cluster` is SkyPilot's name of it, and `name` tells this launch of it from others. `error` is set when it is over.
    """

    def __init__(self, request: ClusterRequest) -> None:
        """Raises `SpecError` where neither SkyPilot's program nor a file of the cluster is there."""
        self.request = request
        self.cluster = request.name
        self.name = f"{SKY}{self.cluster}"
        self.hosts: tuple[Host, ...] = ()
        self.error: DistmagicError | None = None
        self._pins = ""
        self._is_doubtful = False
        self._asked = self._ask()

    @property
    def is_alive(self) -> bool:
        """Whether it can be used, as far as is known."""
        return self.error is None

    @property
    def awaited(self) -> int:
        """How many hosts it will have, as far as that is known."""
        return self.request.nodes or 1

    def fits(self, request: AllocationRequest | ClusterRequest) -> bool:
        """Whether it is what a cell asks for."""
        if not isinstance(request, ClusterRequest):
            return False
        return request == self.request or request.name == self.cluster

    def check(self, asker: Asker) -> bool:  # noqa: ARG002 - as an allocation's
        """Return whether it can be used; one that is in doubt is not: the next one asks SkyPilot."""
        if self._is_doubtful:
            self.end()
        return self.is_alive

    def _ask(self) -> sky.Command | None:
        """Begin to ask SkyPilot; None where its program is not there, but the cluster's file is."""
        try:
            return sky.Command(sky_words.status())
        except SpecError:
            if not self._file.exists():
                raise
            return None

    @property
    def _file(self) -> Path:
        """Where SkyPilot writes how the hosts are reached."""
        return Path(sky_words.SSH_FOLDER).expanduser() / self.cluster

    # ---- found

    def wait(self, asker: NotebookAsker, tell: Tell) -> tuple[Host, ...]:
        """Return the hosts as soon as they are known; `tell` is called with what it waits for.

        Call it on the main thread. Raises `SpecError` for a cluster that is not up, `Unreachable` where SkyPilot does
        not answer, and KeyboardInterrupt.
        """
        if not self.hosts:
            tell(f"Asking SkyPilot how the cluster {self.cluster} stands.")
            try:
                self._find(self._state(asker))
            except DistmagicError as error:
                self.error = error
                raise
        return self.hosts

    def _state(self, asker: NotebookAsker) -> ClusterState:
        """Return how it stands, which is up. Raises `SpecError` and `Unreachable`."""
        if self._asked is None:
            text = _read(self._file)
            launch = hashlib.sha256(text.encode()).hexdigest()
            return ClusterState(name=self.cluster, status="UP", launch=launch)
        known = sky.read_states(self._asked, asker)
        for one in known:
            if one.name == self.cluster and one.status == "UP":
                return one
        raise sky_words.not_up(self.cluster, known)

    def _find(self, state: ClusterState) -> None:
        """Read how its hosts are reached."""
        names = sky_words.hosts_in(_read(self._file), self.cluster)
        if not names:
            raise SpecError(
                f"{self._file} has no host of the cluster {self.cluster} in it.",
                f"Have SkyPilot write it again: sky status {self.cluster}",
            )
        number = hashlib.sha256(state.launch.encode()).hexdigest()[:16]
        self.name = f"{SKY}{self.cluster}:{number}"
        self._pins = _pins_of(self.cluster, number)
        self.hosts = tuple(Host(name=name, allocation=self.name) for name in names)

    def transport(self, host: Host, access: Access, asker: Asker) -> Transport:
        """Return the way to one of the hosts. Raises what connecting raises."""
        own = Access(
            ssh_config=str(self._file),
            ssh_command=access.ssh_command,
            connect_timeout_s=access.connect_timeout_s,
        )
        try:
            return connect(host, own, asker, self._pins)
        except Unreachable as error:
            self._is_doubtful = True
            error.hint += f"\nsky status {self.cluster} --refresh says whether the cluster is still up."
            raise

    # ---- the end

    def end(self) -> None:
        """Give it up; a cluster that was not launched for us goes on."""
        if self._asked is not None:
            self._asked.end()
        if self.error is None:
            self.error = SpecError(f"The cluster {self.cluster} was given up.")

    def leave(self) -> None:
        """The kernel ends: its cluster goes on until SkyPilot stops it."""
        self.end()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SpecError(
            f"{file}: {error.strerror}.",
            "SkyPilot writes it when it is asked: sky status",
        ) from None


def _pins_of(cluster: str, number: str) -> str:
    """Return the file for the host keys of this launch, and remove those of earlier launches of the same name."""
    folder = Path(_PINS).expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = folder / f"sky-{cluster}.{number}"
    for file in folder.glob(f"sky-{cluster}.*"):
        if file.name.rpartition(".")[0] == f"sky-{cluster}" and file != own:
            file.unlink(missing_ok=True)
    return os.fspath(own)
