"""SkyPilot without a cloud: a home with the files that it writes for ssh, and a program `sky` that a test scripts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

# An interpreter that has SkyPilot's own package, "" where nobody names one. `make sky` does.
PYTHON = os.environ.get("SKYPILOT_PYTHON", "")
needs_skypilot = pytest.mark.skipif(
    not PYTHON,
    reason="SKYPILOT_PYTHON names no interpreter with SkyPilot's package: make sky",
)
# What SkyPilot 0.14 writes for each host of a cluster; tests/unit/systems/skypilot/test_sky_words.py compares it with its own.
_ENTRY = """\
# Added by sky (use `sky stop/down {cluster}` to remove)
Host {name}
  HostName {address}
  User {user}
  IdentityFile {key}
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile=/dev/null
  GlobalKnownHostsFile=/dev/null
  Port {port}
  SetEnv SKY_CLUSTER_NAME={cluster}-7c9f
{proxy}
"""
_PROGRAM = """\
#!/bin/sh
printf '%s\\n' "$*" >>{folder}/asked
if test -f {folder}/$1.sh; then . {folder}/$1.sh; fi
"""


def entries(
    cluster: str,
    addresses: tuple[str, ...],
    *,
    user: str = "root",
    key: str = "~/.sky/generated/ssh-keys/mine.key",
    port: int = 22,
    proxy: str = "",
) -> str:
    """Return the file of a cluster. `proxy` is a command, in which %w is the number of the host."""
    text = ""
    for number, address in enumerate(addresses):
        text += _ENTRY.format(
            cluster=cluster,
            name=f"{cluster}-worker{number}" if number else cluster,
            address=address,
            user=user,
            key=key,
            port=port,
            proxy=f"  ProxyCommand {proxy.replace('%w', str(number))}\n"
            if proxy
            else "",
        )
    return text


class Sky:
    """A user of SkyPilot, whose home is in `folder`. What `sky COMMAND` does is in `folder`/COMMAND.sh."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.home = folder, folder / "home"
        (folder / "bin").mkdir(parents=True)
        self.program = folder / "bin" / "sky"
        self.program.write_text(_PROGRAM.format(folder=folder))
        self.program.chmod(0o755)
        self.does("status", f"cat {folder}/status.json")
        monkeypatch.setenv("HOME", str(self.home))
        monkeypatch.setenv("PATH", f"{folder}/bin{os.pathsep}{os.environ['PATH']}")
        self.clusters: dict[str, dict[str, object]] = {}
        self._write()

    def does(self, command: str, script: str) -> None:
        """Have a command of sky run this shell script."""
        (self.folder / f"{command}.sh").write_text(f"{script}\n")

    def has(
        self, name: str, text: str = "", *, status: str = "UP", launch: int = 1,
        autostop: int = -1,
    ) -> None:  # fmt: skip
        """Let there be a cluster; `text` is its file for ssh, "" for none. The time of its launch is `launch`.

        `autostop` are the minutes after which SkyPilot stops it, -1 for never.
        """
        self.clusters[name] = {
            "name": name, "status": status, "cluster_hash": "7c9f", "launched_at": launch, "autostop": autostop,
        }  # fmt: skip
        if text:
            self.file(name).parent.mkdir(parents=True, exist_ok=True)
            self.file(name).write_text(text)
        self._write()

    def file(self, name: str) -> Path:
        """Return where SkyPilot has the file for ssh of a cluster."""
        return self.home / ".sky/generated/ssh" / name

    def _write(self) -> None:
        text = json.dumps(list(self.clusters.values()), indent=2)
        (self.folder / "status.json").write_text(text)

    @property
    def asked(self) -> list[str]:
        """All commands so far, in order."""
        try:
            return (self.folder / "asked").read_text().splitlines()
        except FileNotFoundError:
            return []

    def pins(self) -> list[str]:
        """Return the names of the files with host keys."""
        folder = self.home / ".distmagic/known_hosts"
        return sorted(os.listdir(folder)) if folder.exists() else []
