"""N hosts on one bridge, with keys and an ssh_config to reach them."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from tests.lab import files, network
from tests.lab.files import HostSetup, Wiring
from tests.lab.host import LabHost
from tests.lab.isolation import is_isolated
from tests.lab.waiting import HANG_S, wait_until

_REPOSITORY = Path(__file__).resolve().parents[2]
_NETWORKS = itertools.count(1)
_CLIENT = """\
Host dm*
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
"""


class Lab:
    """SSH hosts dm1, dm2 ... that are up inside a `with`. Several labs in one process don't meet.

    `ssh_config`, `identity` (a private key) and `known_hosts` are files to reach them with; `address` is this
    process's own address in their network. With `shared_home` they all have the same home, as on many clusters; with
    `shared_tmp` the same /tmp, as containers on one machine may.
    `setups` are for the first hosts, in order; the others are as `HostSetup()` says. `network` is the third number of
    its addresses, one that no other lab has if it isn't said. `keep` are more folders of this machine that hosts see.
    """

    def __init__(
        self, count: int, *, shared_home: bool = False, shared_tmp: bool = False, setups: tuple[HostSetup, ...] = (),
        network: int | None = None, keep: tuple[Path, ...] = (),
    ) -> None:  # fmt: skip
        if not is_isolated():
            raise RuntimeError(
                "A lab is only for a process that called tests.lab.isolate() (conftest.py does)."
            )
        self.folder = Path(tempfile.mkdtemp(prefix="lab-")).resolve()
        self.ssh_config = self.folder / "ssh_config"
        self.identity = self.folder / "id"
        self.known_hosts = self.folder / "known_hosts"
        number = next(_NETWORKS) if network is None else network
        self._bridge = f"dmbr{number}"
        self._keep = _kept(self.folder, *keep)
        self._shared_home, self._shared_tmp = shared_home, shared_tmp
        self._net, self._net6 = f"10.99.{number}", f"fd99:{number + 1:x}::"
        self.address = f"{self._net}.1"
        files.make_key(self.identity)
        all_setups = (*setups, *(HostSetup() for _ in range(count - len(setups))))
        wirings = [
            self._wiring(index, number, all_setups) for index in range(1, count + 1)
        ]
        self.hosts = tuple(
            LabHost(wiring, setup)
            for wiring, setup in zip(wirings, all_setups, strict=True)
        )
        self._write_client_files()

    def _wiring(self, index: int, number: int, setups: tuple[HostSetup, ...]) -> Wiring:
        name, folder = f"dm{index}", self.folder / f"dm{index}"
        return Wiring(
            name=name,
            folder=folder,
            shared=self.folder,
            home=self.folder / "home" if self._shared_home else folder / "home",
            tmp=self.folder / "tmp" if self._shared_tmp else None,
            address=f"{self._net}.{10 + index}",
            address6=f"{self._net6}{10 + index:x}",
            mac=f"02:99:00:00:01:{index:02x}",
            gateway=self.address,
            card=f"dm{number}v{index}",
            bridge=self._bridge,
            keep=self._keep,
            names=tuple(
                (f"{self._net}.{10 + i}", setup.hostname or f"dm{i}")
                for i, setup in enumerate(setups, start=1)
            ),
        )

    def _write_client_files(self) -> None:
        self.known_hosts.write_text(
            "".join(host.known_hosts_line() for host in self.hosts)
        )
        aliases = "".join(
            f"Host {host.name}\n  HostName {host.address}\n" for host in self.hosts
        )
        limits = f"Include {self.folder}/dm*/ssh_limit\n"
        self.ssh_config.write_text(
            limits + aliases + _CLIENT.format(folder=self.folder)
        )

    def __enter__(self) -> Lab:  # noqa: PYI034 - typing.Self is of Python 3.11
        return self.up()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.down()

    def up(self) -> Lab:
        """Start the network and all hosts, and return this lab once they answer."""
        network.ip(
            f"link add {self._bridge} address 02:99:00:00:00:01 type bridge",  # else it changes with the cards
            f"addr add {self.address}/24 dev {self._bridge}",
            f"addr add {self._net6}1/64 dev {self._bridge} nodad",
            f"link set {self._bridge} up",
        )
        try:
            for host in self.hosts:
                host.begin_start()
            for host in self.hosts:
                host.finish_start()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Switch all hosts off and remove all that there was of them. Safe to call twice."""
        for host in self.hosts:
            host.kill(silent=False)
        network.ip_may_fail(f"link del {self._bridge}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def mend(self) -> None:
        """Make all hosts as they were in the beginning: see `LabHost.mend`."""
        self._write_client_files()
        for host in self.hosts:
            host.mend()

    def sent_bytes(self) -> int:
        """Return how many bytes this machine's card has sent to the hosts so far."""
        return network.sent_bytes(self._bridge)

    def assert_clean(self, within_s: float = HANG_S) -> None:
        """Assert that distmagic left no process and no temporary file on any host that is up.

        Looks again for `within_s` seconds, because what a closed connection ends takes a moment; 0 looks once.
        """
        found: list[str] = []

        def is_clean() -> bool:
            found[:] = [line for host in self.hosts for line in host.leftovers()]
            return not found

        try:
            wait_until(
                is_clean, "hosts without anything of distmagic", within_s, every_s=0.05
            )
        except AssertionError as error:
            raise AssertionError("\n".join((str(error), *found))) from None

    def ssh(
        self, host: LabHost, command: str, *, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line on a host with the system's SSH client."""
        argv = ["ssh", "-F", str(self.ssh_config), host.name, command]
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def _kept(*folders: Path) -> tuple[Path, ...]:
    """Return what hosts see of this machine below /tmp and the like."""
    paths = (_REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *folders)
    unique = {path for given in paths for path in (given, given.resolve())}
    return tuple(
        sorted(
            path
            for path in unique
            if not any(other in path.parents for other in unique)
        )
    )
