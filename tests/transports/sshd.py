"""A real OpenSSH server on 127.0.0.1 for one test: own port, own host keys, own authorized_keys; ended by its pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.waiting import HANG_S

_PROGRAM = (
    shutil.which("sshd", path="/usr/sbin:/sbin:/usr/local/sbin:/usr/bin")
    or "/usr/sbin/sshd"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sshd:
    """A running server. `host_keys` are public keys as lines `type base64`; `log` grows while it runs."""

    port: int
    host_keys: tuple[str, ...]
    pid: int
    log: list[str] = field(default_factory=list)

    def known_hosts_line(self, name: str = "") -> str:
        """Return a known_hosts line for its first key."""
        return f"{name or f'[127.0.0.1]:{self.port}'} {self.host_keys[0]}\n"

    def connections(self) -> int:
        """Return how many log-ins it has let in so far."""
        return sum("Accepted publickey" in line for line in self.log)


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """Make a key pair; return the private key's path."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", path], check=True
    )
    return path


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def sshd(
    folder: Path,
    *public_keys: Path,
    kinds: tuple[str, ...] = ("ed25519",),
    options: tuple[str, ...] = (),
) -> Iterator[Sshd]:
    """Run a server that lets in the owners of `public_keys`, until the block is left."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        # Its privilege separation directory.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    authorized = folder / "authorized_keys"
    authorized.write_text("".join(key.read_text() for key in public_keys))
    host_keys = [folder / f"host_{kind}" for kind in kinds]
    for key, kind in zip(host_keys, kinds, strict=True):
        if not key.exists():
            make_key(key, kind)
    port = free_port()
    config = folder / "sshd_config"
    config.write_text(
        "\n".join((*options, *_settings(port, authorized, host_keys, folder), ""))
    )
    child = subprocess.Popen(
        [_PROGRAM, "-D", "-e", "-f", config], stderr=subprocess.PIPE, text=True
    )
    log: list[str] = []
    listening = threading.Event()
    reader = threading.Thread(target=_read_log, args=(child, log, listening))
    reader.start()
    try:
        assert listening.wait(HANG_S), f"sshd did not start: {log}"
        public = tuple(
            " ".join(Path(f"{key}.pub").read_text().split()[:2]) for key in host_keys
        )
        yield Sshd(port=port, host_keys=public, pid=child.pid, log=log)
    finally:
        _end(child)
        reader.join(10)


def _settings(
    port: int, authorized: Path, host_keys: list[Path], folder: Path
) -> tuple[str, ...]:
    return (
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        *(f"HostKey {key}" for key in host_keys),
        f"AuthorizedKeysFile {authorized}",
        f"PidFile {folder}/pid",
        "UsePAM no",
        "StrictModes no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin yes",
        "AllowTcpForwarding yes",
        "UseDNS no",
        "MaxStartups 200",
        "LogLevel VERBOSE",
    )


def _read_log(
    child: subprocess.Popen[str], log: list[str], listening: threading.Event
) -> None:
    assert child.stderr is not None
    with child.stderr:
        for line in child.stderr:
            log.append(line.rstrip())
            if "Server listening" in line:
                listening.set()
    listening.set()


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [
            int(word)
            for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _end(child: subprocess.Popen[str]) -> None:
    """End the server and the connections it serves: they hold its stderr."""
    serving = [
        pid for first in _children(child.pid) for pid in (first, *_children(first))
    ]
    child.terminate()
    child.wait(60)
    for pid in serving:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)
