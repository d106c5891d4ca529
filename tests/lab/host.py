"""One host of the lab: an OpenSSH server that is the first process of its own network, PID, IPC, UTS and mount namespace."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

from tests.lab import cgroups, files, network, processes, pythons
from tests.lab.files import HOME, HostSetup, Wiring
from tests.lab.processes import HostProcess
from tests.lab.pythons import PythonKind
from tests.lab.waiting import wait_until
from tests.system.components import COMPONENTS

_BOOT, _BOOT_SYSTEMD = (
    Path(__file__).with_name(name) for name in ("boot.sh", "boot_systemd.sh")
)
_BOOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
_LISTENS = "Server listening on"


class LabHost:
    """A host that is up from `start` to `kill`. Start it from a thread that lives as long as the host shall.

    `home` is its home as seen from here; on the host it is `/home/node`, and the user is root. `/tmp`, `/var/tmp`,
    `/run`, `/home` and `/dev/shm` are its own, but for this repository, the Python in use and the lab's own folder.
    """

    def __init__(self, wiring: Wiring, setup: HostSetup) -> None:
        self.name = wiring.name
        self.address = wiring.address
        self.address6 = wiring.address6
        self.home = wiring.home
        self.hostname = setup.hostname or wiring.name
        self._wiring = wiring
        self._first_setup = self._setup = setup
        self._process: subprocess.Popen[str] | None = None
        self._first_pid = 0
        self._is_broken = False
        self._cgroup = f"distmagic-lab-{os.getpid()}-{wiring.card}"
        files.write_all(wiring, setup)

    def __repr__(self) -> str:
        return (
            f"LabHost({self.name}, {self.address}, {'up' if self._process else 'down'})"
        )

    # ---- power

    @property
    def is_up(self) -> bool:
        """Whether it is switched on."""
        return self._process is not None

    def start(self) -> None:
        """Switch it on, and return as soon as its SSH server answers. Nothing happens if it is on."""
        if self._process is None:
            self.begin_start()
            self.finish_start()

    def begin_start(self) -> None:
        """Switch it on and don't wait, so that many start at the same time; `finish_start` waits."""
        wiring = self._wiring
        environment = {
            "PATH": _BOOT_PATH,
            "LANG": "C.UTF-8",
            "HOST_DIR": str(wiring.folder),
            "HOST_NAME": self.hostname,
            "HOST_HOME": str(wiring.home),
            "HOST_TMP": str(wiring.tmp or ""),
            "KEEP": "\n".join(map(str, wiring.keep)),
            "SSHD": COMPONENTS["sshd"].path() or "sshd",
            "SYSTEMD": COMPONENTS["systemd"].path() or "systemd",
            "CGROUP": self._cgroup,
        }
        boot = _BOOT if self._setup.logind is None else _BOOT_SYSTEMD
        unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        with (wiring.folder / "boot.log").open("a") as log:
            self._process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    *unshare,
                    "sh",
                    str(boot),
                ],  # it ends with this process
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,
            )

    def finish_start(self) -> None:
        """Plug in its network card and wait until its SSH server answers."""
        process, wiring, before = (
            self._process,
            self._wiring,
            self.log().count(_LISTENS),
        )
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            if process.stdout.readline() != "ready\n":
                raise AssertionError(
                    f"{self.name} doesn't boot: {(wiring.folder / 'boot.log').read_text()}"
                )
            self._first_pid = processes.only_child(process.pid)
            network.ip(
                f"link add {wiring.card} type veth peer name eth0 address {wiring.mac} netns {self._first_pid}",
                f"link set {wiring.card} master {wiring.bridge} up",
            )
            process.stdin.write("go\n")
        self._wait_until_it_listens(before)
        # Who asks it sooner waits for ARP.
        wait_until(self._answers, f"{self.name}'s SSH server to answer")
        files.write_limit(wiring, is_away=False)

    def _wait_until_it_listens(self, before: int) -> None:
        """Wait until its log says once more than `before` that it listens."""
        wait_until(
            lambda: self.log().count(_LISTENS) > before, f"{self.name}'s SSH server"
        )

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), timeout=1) as connection:
                return connection.recv(3) == b"SSH"
        except OSError:
            return False

    def kill(self, *, silent: bool = True) -> None:
        """Cut its power: nothing more comes from it. Not `silent`: its kernel still closes the connections."""
        if self._process is None:
            return
        files.write_limit(self._wiring, is_away=True)
        if silent:
            network.ip_may_fail(f"link set {self._wiring.card} down")
        try:
            # All of its PID namespace end with it.
            os.kill(self._first_pid or self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()
        self._process, self._first_pid = None, 0
        self.home = self._wiring.home
        if self._setup.logind is not None:
            wait_until(
                lambda: cgroups.remove(self._cgroup),
                f"{self.name}'s cgroups to be empty",
            )
        # The kernel removes it too, but some time later.
        network.ip_may_fail(f"link del {self._wiring.card}")

    # ---- faults, and their cures

    def cut(self) -> None:
        """Pull its cable."""
        self._is_broken = True
        files.write_limit(self._wiring, is_away=True)
        network.ip(f"link set {self._wiring.card} down")

    def heal(self) -> None:
        """Put its cable back."""
        network.ip(f"link set {self._wiring.card} up")
        files.write_limit(self._wiring, is_away=False)

    def drop(self, *, port: int | None = None, source: LabHost | None = None) -> None:
        """Have its firewall swallow packets in silence: all, or TCP to `port`, or what the host `source` has part in."""
        self._is_broken = True
        if source is None and port in (None, 22):
            files.write_limit(self._wiring, is_away=True)
        if port is not None:
            sender = f"ip saddr {source.address} " if source else ""
            network.add_rules(
                self._pid(), f'in iifname != "lo" {sender}tcp dport {port} drop'
            )
        elif source is not None:
            rules = (
                f"in ip saddr {source.address} drop",
                f"out ip daddr {source.address} drop",
            )
            network.add_rules(self._pid(), *rules)
        else:
            network.add_rules(
                self._pid(), 'in iifname != "lo" drop', 'out oifname != "lo" drop'
            )

    def drop_udp(self) -> None:
        """Have its firewall swallow every datagram."""
        self._is_broken = True
        network.add_rules(self._pid(), 'in iifname != "lo" meta l4proto udp drop')

    def drop_from(self, source: LabHost) -> None:
        """Have its firewall swallow what the host `source` sends it; the other way everything passes."""
        self._is_broken = True
        network.add_rules(self._pid(), f"in ip saddr {source.address} drop")

    def drop_some(self, percent: int) -> None:
        """Have its firewall swallow so many of all packets that come in, at random."""
        self._is_broken = True
        network.add_rules(
            self._pid(), f'in iifname != "lo" numgen random mod 100 < {percent} drop'
        )

    def reject(self, port: int | None = None, *, source: LabHost | None = None) -> None:
        """Have its firewall refuse TCP with a reset: to `port` or to all, from the host `source` or from everywhere."""
        self._is_broken = True
        sender = f"ip saddr {source.address} " if source else ""
        what = f"tcp dport {port}" if port is not None else "meta l4proto tcp"
        network.add_rules(
            self._pid(), f'in iifname != "lo" {sender}{what} reject with tcp reset'
        )

    def drop_by(self, rule: str) -> None:
        """Have its firewall go by a rule of nft, without the table and the chain: `in tcp dport 22 drop`."""
        self._is_broken = True
        network.add_rules(self._pid(), rule)

    def is_to_be_mended(self) -> None:
        """Have `mend` switch it off and on: a test has changed it from the side."""
        self._is_broken = True

    def close_ports(self, how: str, *, but: tuple[int, ...]) -> None:
        """Have its firewall do `how` (drop, or reject in nft's words) with every new TCP connection, but to some ports."""
        self._is_broken = True
        ports = ", ".join(map(str, but))
        rule = f'in iifname != "lo" tcp dport != {{ {ports} }} tcp flags & (syn | ack) == syn {how}'
        network.add_rules(self._pid(), rule)

    def undrop(self) -> None:
        """Take away all that `drop` and `reject` have set."""
        network.clear_rules(self._pid())
        files.write_limit(self._wiring, is_away=False)

    def mend_network(self) -> None:
        """Put its cable back and take its firewall's rules away, if a test has changed them since."""
        if self._is_broken:
            self.undrop()
            self.heal()
            self._is_broken = False

    def freeze(self) -> None:
        """Stop every process on it where it is, as a machine that hangs does; its kernel goes on answering."""
        self._is_broken = True
        files.write_limit(self._wiring, is_away=True)
        wait_until(
            lambda: processes.stop_all(self._pid()), f"{self.name} to stand still"
        )

    def thaw(self) -> None:
        """Let every process go on."""
        processes.signal_all(self._pid(), signal.SIGCONT)
        files.write_limit(self._wiring, is_away=False)

    def limit_home(self, size_bytes: int) -> None:
        """Put a small, empty disk in place of its home, until it is switched off; `home` shows that one."""
        self._is_broken = True
        self.exec(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", HOME]
        ).check_returncode()
        self.home = self._root() / HOME.lstrip("/")

    def make_home_read_only(self) -> None:
        """Have its home refuse every write, until it is made writable or switched off."""
        self._is_broken = True
        self.exec(["mount", "-o", "remount,bind,ro", HOME]).check_returncode()

    def make_home_writable(self) -> None:
        """Have its home take what is written again."""
        self.exec(["mount", "-o", "remount,bind,rw", HOME]).check_returncode()

    def mend(self) -> None:
        """Make it as it was when it started for the first time: no fault, no process of a test, an empty home."""
        self._setup = self._first_setup
        if self._process is not None and (
            self._is_broken or self.processes() or self.leftovers()
        ):
            self.kill()
        self._is_broken = False
        self.empty_home()
        was_other = files.write_sshd_config(self._wiring, self._setup)
        files.write_all(self._wiring, self._setup)
        if self._process is None:
            self.start()
        elif was_other:
            self._reload()

    def empty_home(self, keeps: str = "") -> None:
        """Remove what is in its home, but for the entry `keeps`."""
        for path in self.home.iterdir():
            if path.name == keeps:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    # ---- what can change while it is up

    def resolve_own_name(self, to: str | None) -> None:
        """Have its own name resolve to this address on it, or to nothing."""
        files.write_names(self._wiring, self.hostname, to)

    def set_shell(self, shell: str) -> None:
        """Have root log in with this shell, from the next connection on; one that is kept open has it to its end."""
        self._is_broken = True
        files.write_passwd(self._wiring, shell)

    def set_python(self, kind: PythonKind) -> None:
        """Change what `python3` is on it, from the next connection on."""
        self._is_broken = True
        self._setup = replace(self._setup, python=kind)
        if files.write_sshd_config(self._wiring, self._setup):
            self._reload()

    def set_sshd(self, lines: str) -> None:
        """Put these lines first in its sshd_config (the first to say something wins), from the next connection on."""
        self._is_broken = True
        self._setup = replace(self._setup, sshd=lines)
        if files.write_sshd_config(self._wiring, self._setup):
            self._reload()

    def change_key(self) -> None:
        """Give it a new host key, which is not in the lab's known_hosts; the old one is back after `mend`."""
        key = self._wiring.folder / "other_key"
        if not key.exists():
            files.make_key(key)
        # Host keys add up, and the first of a kind is offered.
        self.set_sshd(f"HostKey {key}")

    def _reload(self) -> None:
        before = self.log().count(_LISTENS)
        os.kill(self._pid(), signal.SIGHUP)
        self._wait_until_it_listens(before)  # its cable may be cut

    # ---- looking at it

    def processes(self) -> tuple[HostProcess, ...]:
        """Return every process on it but those of the SSH server (the first process is one of these), no zombies."""
        return processes.of_host(self._first_pid) if self._first_pid else ()

    def outer_pids(self) -> tuple[int, ...]:
        """Return the numbers, as this machine counts, of all that runs on it, its SSH server's own processes too."""
        return tuple(processes.outer_pids(self._pid()))

    def ranks_that_printed(self) -> int:
        """Return how many ranks have written to stdout since the homes were emptied."""
        logs = self.home.glob(".distmagic/jobs/*/*/rank?.stdout.log")
        return sum(log.stat().st_size > 0 for log in logs)

    def leftovers(self) -> tuple[str, ...]:
        """Return, in words, what distmagic has on it that should be gone after a run: processes, temporary files."""
        if self._first_pid == 0:
            return ()
        strays = [p for p in self.processes() if p.is_of_distmagic]
        found = [
            f"{self.name}: process {p.pid} (child of {p.ppid}): {' '.join(p.cmdline)[:300]}"
            for p in strays
        ]
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run"):
            names = [
                name
                for name in self.listdir(folder)
                if "distmagic" in name and not self._is_kept(folder, name)
            ]
            found += [f"{self.name}: {folder}/{name}" for name in names]
        return tuple(found)

    def _is_kept(self, folder: str, name: str) -> bool:
        return any(
            path.is_relative_to(Path(folder, name)) for path in self._wiring.keep
        )

    def exec(
        self, argv: list[str], *, stdin: str = "", timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on it, not over SSH but from the side, and return how it ended, with its output."""
        return subprocess.run(
            self.command(argv),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def command(self, argv: list[str]) -> list[str]:
        """Return the command that runs a program on it from the side."""
        path = pythons.path_of(self._setup.python, self._wiring.shared)
        enter = ["nsenter", "--target", str(self._pid()), *_NAMESPACES, "--"]
        clean = [
            "env",
            "-i",
            "-C",
            HOME,
            f"HOME={HOME}",
            "USER=root",
            "LANG=C.UTF-8",
            f"PATH={path}",
        ]
        return [*enter, *clean, *argv]

    def files(self, path: str) -> tuple[str, ...]:
        """Return all below a directory of it that is no directory, sockets too. Other file systems are left out."""
        root = self._root()
        top = root / path.lstrip("/")
        device = top.stat().st_dev if top.exists() else -1
        found: list[str] = []
        for folder, inner, names in os.walk(top):
            inner[:] = [
                name for name in inner if Path(folder, name).lstat().st_dev == device
            ]
            found += [
                str(Path("/", Path(folder, name).relative_to(root))) for name in names
            ]
        return tuple(sorted(found))

    def listdir(self, path: str) -> tuple[str, ...]:
        """Return the names in a directory of it."""
        return tuple(sorted(os.listdir(self._root() / path.lstrip("/"))))

    def log(self) -> str:
        """Return what its SSH server has logged."""
        path = self._wiring.folder / "sshd.log"
        return path.read_text() if path.exists() else ""

    def known_hosts_line(self) -> str:
        """Return its line of a known_hosts file."""
        kind, key, *_ = (self._wiring.folder / "host_key.pub").read_text().split()
        return f"{self.name},{self.address},{self.address6} {kind} {key}\n"

    def _pid(self) -> int:
        assert self._first_pid, f"{self.name} is switched off"
        return self._first_pid

    def _root(self) -> Path:
        return Path(f"/proc/{self._pid()}/root")
