"""The lab's Slurm as SkyPilot wants it, and a user of SkyPilot whose only cloud it is.

SkyPilot reaches the log-in node by SSH, has Slurm give it a long job, and sets its runtime up on that job's nodes: uv,
Python 3.10 and its packages, which a real cluster loads from the Internet. Here nodes have no way out. A folder laid
over their /usr/local/sbin has what they need in place of it: a `curl` that answers with an installer of the uv at hand,
which also tells uv to take its packages from the folder of wheels.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distmagic import sanitize
from tests.lab import pythons
from tests.lab.host import LabHost
from tests.lab.slurm import SlurmLab
from tests.lab.waiting import wait_until
from tests.sky.packages import FOLDER, VENV, WHEELS

HOME = FOLDER / "home"
CLOUD = "lab"  # what SkyPilot calls the lab's Slurm
_LOG = HOME / ".sky/api_server/server.log"
_PROGRAMS = {
    # Two nodes with one home install it at the same time: so each puts a whole file into its place.
    "curl": """\
#!/bin/sh
case "$*" in
*/install.sh*) cat <<'END' ;;
set -e
config=$HOME/.config/uv
mkdir -p "$UV_INSTALL_DIR" "$config"
cp {uv} "$UV_INSTALL_DIR/uv.$(hostname)"
mv -f "$UV_INSTALL_DIR/uv.$(hostname)" "$UV_INSTALL_DIR/uv"
cp {config} "$config/uv.toml.$(hostname)"
mv -f "$config/uv.toml.$(hostname)" "$config/uv.toml"
END
*) echo "no network here: $*" >&2; exit 6 ;;
esac
""",
    "python3.10": '#!/bin/sh\nexec {python} "$@"\n',
    "python3": '#!/bin/sh\nexec {torch} "$@"\n',
    "torchrun": '#!/bin/sh\nexec {torch} -m torch.distributed.run "$@"\n',
    "rsync": '#!/bin/sh\nexec {rsync} "$@"\n',
}
_UV_CONFIG = """\
offline = true
no-index = true
find-links = ["{wheels}"]
python-downloads = "never"
"""


class SkyLab:
    """Slurm on two nodes, and the program `sky`. Make it with `sky_lab`."""

    def __init__(self, slurm: SlurmLab) -> None:
        self.slurm = slurm
        self.env = {
            **os.environ,
            "HOME": str(HOME),
            "PATH": f"{VENV}/bin{os.pathsep}{os.environ['PATH']}",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            # Its server builds a wheel of itself for the nodes.
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(WHEELS),
        }

    def sky(
        self, *words: str, cwd: Path = HOME, timeout_s: float = 400, code: int = 0
    ) -> str:
        """Run a command of sky, which must end with `code`; return all that it printed, without colours."""
        done = subprocess.run(
            [str(VENV / "bin/sky"), *words],
            env=self.env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        said = sanitize.ESCAPE.sub("", done.stdout)
        assert done.returncode == code, (
            f"sky {' '.join(words)} ended with {done.returncode}:\n{said}"
        )
        return said

    def clusters(self) -> dict[str, dict[str, Any]]:
        """Return what SkyPilot says of each of its clusters, by their names."""
        text = self.sky("status", "--output", "json")
        start = re.search(r"^\[[{\]\n]", text, re.MULTILINE)
        assert start is not None, text
        records, _ = json.JSONDecoder().raw_decode(text, start.start())
        return {record["name"]: record for record in records}

    def leftovers(self) -> tuple[int, ...]:
        """Return the processes of this machine that have the user's home: SkyPilot's server and what it started."""
        mark = f"HOME={HOME}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return tuple(found)

    def stop(self) -> None:
        """End SkyPilot's server, and the SSH connections that it keeps for some minutes."""
        try:
            self.sky("api", "stop", timeout_s=120)
        finally:
            for pid in self.leftovers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not self.leftovers(), "SkyPilot's processes to end")


@contextlib.contextmanager
def sky_lab() -> Iterator[SkyLab]:
    """Start the lab and yield it; end it, and SkyPilot's server, afterwards. Its server's log stays in build/sky."""
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    prefix = _base_prefix(VENV / "bin/python")
    rsync = Path(shutil.which("rsync") or "")
    keep = (prefix, rsync.resolve().parents[1])
    with SlurmLab(2, shared_home=True, keep=_outside_of_usr(keep)) as slurm:
        programs = _write_programs(slurm, prefix / "bin/python3.10", rsync)
        for host in slurm.lab.hosts:
            _prepare(host, programs, _names(slurm))
        config = HOME / ".slurm/config"
        config.parent.mkdir()
        config.write_text(
            f"Host {CLOUD}\n  HostName {slurm.login.address}\n  User root\n"
            f"  IdentityFile {slurm.lab.identity}\n  IdentitiesOnly yes\n"
        )
        lab = SkyLab(slurm)
        try:
            yield lab
        finally:
            try:
                lab.stop()
            finally:
                if _LOG.exists():
                    shutil.copy(_LOG, FOLDER / "server.log")


def _base_prefix(python: Path) -> Path:
    """Return the folder of the Python that a virtual environment was made from."""
    tell = "import sys; print(sys.base_prefix)"
    done = subprocess.run(
        [str(python), "-c", tell], capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip())


def _outside_of_usr(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return those that a host of the lab does not see anyway."""
    return tuple(folder for folder in folders if not folder.is_relative_to("/usr"))


def _write_programs(slurm: SlurmLab, python: Path, rsync: Path) -> Path:
    """Write what is laid over the hosts' /usr/local/sbin; return the folder."""
    shared = slurm.lab.folder
    folder = shared / "programs"
    folder.mkdir()
    config = shared / "uv.toml"
    config.write_text(_UV_CONFIG.format(wheels=WHEELS))
    torch = pythons.path_of("torch", shared).partition(os.pathsep)[0]
    for name, text in _PROGRAMS.items():
        path = folder / name
        path.write_text(
            text.format(
                uv=VENV / "bin/uv",
                config=config,
                python=python,
                torch=f"{torch}/python3",
                rsync=rsync,
            )
        )
        path.chmod(0o755)
    return folder


def _names(slurm: SlurmLab) -> str:
    """Return lines of /etc/hosts: SkyPilot takes what Slurm calls its nodes for names of hosts."""
    pairs = zip(slurm.nodes, slurm.names, strict=True)
    return "".join(f"{host.address}\t{name}\n" for host, name in pairs)


def _prepare(host: LabHost, programs: Path, names: str) -> None:
    script = f"cat >>/etc/hosts; mount -n --bind {programs} /usr/local/sbin"
    done = host.exec(["sh", "-ec", script], stdin=names)
    assert done.returncode == 0, f"{host.name}: {done.stderr}"


class Clock:
    """Prints a line for each step, with the seconds that it took."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()

    def tell(self, text: str) -> float:
        """Print that something is done; return its seconds."""
        now_s = time.monotonic()
        took_s, self._begun_s = now_s - self._begun_s, now_s
        print(f"{took_s:6.1f} s  {text}", flush=True)
        return took_s
