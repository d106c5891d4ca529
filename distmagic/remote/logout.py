"""Whether a job would survive the end of the SSH session that starts it: some hosts kill at log-out.

systemd does with `KillUserProcesses=yes`, but for what runs under the user's own manager, which lives on where the
user lingers (logind.conf(5), loginctl(1)). Slurm's pam_slurm_adopt puts every session into a job's "extern" step, and
ends it with that job.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SCOPE = ("systemd-run", "--user", "--scope", "--quiet", "--collect", "--")
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What decides. `cgroup` is the text of /proc/self/cgroup; `has_scopes`: systemd-run --user --scope works."""

    cgroup: str
    kills: bool = False
    lingers: bool = False
    has_scopes: bool = False


def decide(session: Session) -> tuple[str, ...]:
    """Return what to put in front of a command that must survive log-out, () for nothing.

    Raises `PermissionError`, with the cure, where nothing helps.
    """
    if found := re.search(r"/job_(\d+)/step_extern", session.cgroup):
        raise PermissionError(
            f"what is started here ends with Slurm job {found[1]} (pam_slurm_adopt), so no job can be left alone. "
            "Run it without --detach, or submit it to Slurm"
        )
    if not session.kills or not re.search(r"/session-[^/\n]+\.scope", session.cgroup):
        return ()
    if session.has_scopes and session.lingers:
        return _SCOPE
    raise PermissionError(
        "systemd ends here what a user leaves running at log-out (KillUserProcesses=yes), so no job can be left alone. "
        "Run it without --detach, or have it allowed with: loginctl enable-linger"
    )


def survivor_prefix() -> tuple[str, ...]:
    """Return `decide` of this very session. Raises `PermissionError`."""
    return decide(_look())


def _look() -> Session:
    try:
        cgroup = Path("/proc/self/cgroup").read_text()
    except OSError:
        return Session(cgroup="")
    if "session-" not in cgroup:
        return Session(cgroup=cgroup)
    return Session(
        cgroup=cgroup,
        kills=_says("busctl", "--system", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1",
                    "org.freedesktop.login1.Manager", "KillUserProcesses").endswith("true"),
        lingers=_says("loginctl", "show-user", "--value", "--property=Linger", "self") == "yes",
        has_scopes=_works(*_SCOPE, "true"),
    )  # fmt: skip


def _says(*command: str) -> str:
    found = _run(command)
    return found.stdout.decode(errors="replace").strip() if found is not None else ""


def _works(*command: str) -> bool:
    found = _run(command)
    return found is not None and found.returncode == 0


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[bytes] | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
