"""The files that make a host of the lab what it is: its place in the network, its names, users and SSH server."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.lab import pythons
from tests.lab.pythons import PythonKind

HOME = "/home/node"
_SSHD_CONFIG = """\
{more}
Port 22
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {shared}/id.pub
SetEnv PATH={path}
StrictModes no
UsePAM {pam}
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
X11Forwarding no
UseDNS no
MaxStartups 200:30:400
MaxSessions 100
LogLevel VERBOSE
Subsystem sftp internal-sftp
"""


# How long a client tries to log in, in seconds: to a host that is up on a busy machine, and to one that can't answer.
_UP_S, _AWAY_S = 30, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """What a host is like. `sshd`: lines of sshd_config that win over ours; `hostname`: its name if not the lab's.

    `logind`: lines of logind.conf; with them systemd is the host's first process, and an SSH log-in a session of its own.
    """

    python: PythonKind = "torch"
    shell: str = "/bin/bash"
    hostname: str | None = None
    sshd: str = ""
    logind: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """A host's place in its lab. `card` is the lab's end of its cable; `names` are (address, name) of all hosts.

    A machine has the same `mac` after it was switched off and on; else its neighbours would look for the old one. `tmp`
    is what it has as its /tmp, None for one of its own.
    """

    name: str
    folder: Path
    shared: Path
    home: Path
    tmp: Path | None
    address: str
    address6: str
    mac: str
    gateway: str
    card: str
    bridge: str
    keep: tuple[Path, ...]
    names: tuple[tuple[str, str], ...]


def write_all(wiring: Wiring, setup: HostSetup) -> None:
    """Write everything that a host needs to boot."""
    (wiring.folder / "etc").mkdir(parents=True, exist_ok=True)
    wiring.home.mkdir(parents=True, exist_ok=True)
    if wiring.tmp is not None:
        wiring.tmp.mkdir(exist_ok=True)
        wiring.tmp.chmod(0o1777)
    if not (wiring.folder / "host_key").exists():
        make_key(wiring.folder / "host_key")
    (wiring.folder / "network").write_text(
        "link set lo up\n"
        f"addr add {wiring.address}/24 dev eth0\n"
        f"addr add {wiring.address6}/64 dev eth0 nodad\n"
        "link set eth0 up\n"
        f"route add default via {wiring.gateway}\n"
    )
    hostname = setup.hostname or wiring.name
    write_etc(wiring, "hostname", f"{hostname}\n")
    write_etc(wiring, "resolv.conf", "")
    write_etc(
        wiring,
        "nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    )
    # "!" would lock the account for a server without PAM.
    write_etc(wiring, "shadow", "root:*:19000:0:99999:7:::\n")
    write_passwd(wiring, setup.shell)
    write_names(wiring, hostname, wiring.address)
    write_etc(wiring, "logind.conf", f"[Login]\n{setup.logind or ''}\n")
    write_sshd_config(wiring, setup)
    write_limit(wiring, is_away=False)


def write_limit(wiring: Wiring, *, is_away: bool) -> None:
    """Write for how long clients try to log in to the host, into a file that the lab's ssh_config includes."""
    path = wiring.folder / "ssh_limit"
    aside = path.with_suffix(".new")
    seconds = _AWAY_S if is_away else _UP_S
    aside.write_text(f"Host {wiring.name}\n  ConnectTimeout {seconds}\n")
    aside.replace(path)


def write_etc(wiring: Wiring, name: str, text: str) -> None:
    """Write a file of the host's /etc, in place: a host that is up has this very file mounted."""
    (wiring.folder / "etc" / name).write_text(text)


def write_passwd(wiring: Wiring, shell: str) -> None:
    """Write the host's users: this machine's, but for root's home and shell."""
    others = re.sub(r"(?m)^root:.*\n", "", Path("/etc/passwd").read_text())
    write_etc(wiring, "passwd", f"root:x:0:0:root:{HOME}:{shell}\n{others}")


def write_names(wiring: Wiring, hostname: str, own: str | None) -> None:
    """Write /etc/hosts: all hosts of the lab, and the host's own name at the address `own`, or not at all."""
    others = [
        (address, name) for address, name in wiring.names if address != wiring.address
    ]
    lines = [
        ("127.0.0.1", "localhost"),
        ("::1", "localhost"),
        *([(own, hostname)] if own else []),
        *others,
    ]
    write_etc(
        wiring, "hosts", "".join(f"{address}\t{name}\n" for address, name in lines)
    )


def write_sshd_config(wiring: Wiring, setup: HostSetup) -> bool:
    """Write the SSH server's configuration; return whether it is another one than before."""
    path = wiring.folder / "sshd_config"
    before = path.read_text() if path.exists() else ""
    search = pythons.path_of(setup.python, wiring.shared)
    text = _SSHD_CONFIG.format(
        folder=wiring.folder,
        shared=wiring.shared,
        path=search,
        more=setup.sshd,
        pam="no" if setup.logind is None else "yes",
    )
    path.write_text(text)
    return text != before


def make_key(path: Path) -> None:
    """Make an ed25519 key pair without a passphrase: `path` and `path`.pub."""
    subprocess.run(
        [
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-C",
            path.name,
            "-f",
            str(path),
        ],
        check=True,
    )
