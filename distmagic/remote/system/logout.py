"""Whether what runs here survives the end of the SSH session that starts it: some hosts kill at log-out.

systemd does where logind.conf(5) says so (KillUserProcesses, KillOnlyUsers, KillExcludeUsers), but for what runs under
the user's own manager, which lives on where the user lingers (loginctl(1)). Slurm's pam_slurm_adopt puts every session
into a job's "extern" step, and ends it with that job.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_RUN = ("systemd-run", "--user", "--scope", "--quiet", "--collect")
# A scope ends as a whole when one process in it is killed for want of memory, where it isn't told otherwise (since 253).
_SCOPES = ((*_RUN, "-p", "OOMPolicy=continue", "--"), (*_RUN, "--"))
_ASK = ("busctl", "--system", "get-property", "org.freedesktop.login1")
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogInSession:
    """What decides. `cgroup` is the text of /proc/self/cgroup; `scope`: how a scope of the user's own is begun, () if not."""

    cgroup: str
    user: str = ""
    kills: bool = False
    lingers: bool = False
    scope: tuple[str, ...] = ()

    @property
    def is_killed(self) -> bool:
        """Whether systemd ends here what the user leaves running."""
        return self.kills and re.search(r"/session-[^/\n]+\.scope", self.cgroup) is not None

    @property
    def cure(self) -> str:
        """What lets it run on."""
        if self.lingers:
            return "systemd-run --user --scope, which does not work here"
        return f"loginctl enable-linger {self.user} (as root, where that is refused)"


def decide(session: LogInSession) -> tuple[str, ...]:
    """Return what to put in front of a command that must survive log-out, () for nothing.

    Raises `PermissionError`, with the cure, where nothing helps.
    """
    if found := re.search(r"/job_(\d+)/step_extern", session.cgroup):
        raise PermissionError(
            f"what is started here ends with Slurm job {found[1]} (pam_slurm_adopt), so no job can be left alone. "
            "Run it without --detach, or submit it to Slurm"
        )
    if not session.is_killed:
        return ()
    if session.scope and session.lingers:
        return session.scope
    raise PermissionError(
        "systemd ends here what a user leaves running at log-out (KillUserProcesses and KillOnlyUsers in logind.conf), "
        f"so no job can be left alone. Run it without --detach; what would allow it: {session.cure}"
    )


def survivor_prefix(*, must: bool = True) -> tuple[str, ...]:
    """Return `decide` of this very session. Where nothing helps, raises `PermissionError` if it `must`, else returns ()."""
    try:
        return decide(_look())
    except PermissionError:
        if must:
            raise
        return ()


def warning() -> str:
    """Return what to know of a host on which a run ends with the connection that began it; "" where it does not."""
    session = _look()
    if not session.is_killed or (session.scope and session.lingers):
        return ""
    return (
        "systemd ends a run here when the connection to it breaks (KillUserProcesses and KillOnlyUsers in logind.conf); "
        f"what would let it go on: {session.cure}."
    )


def _look() -> LogInSession:
    try:
        cgroup = Path("/proc/self/cgroup").read_text()
    except OSError:
        return LogInSession(cgroup="")
    if "session-" not in cgroup or not _kills():
        return LogInSession(cgroup=cgroup)
    lingers = _says(*_ASK, "/org/freedesktop/login1/user/self", "org.freedesktop.login1.User", "Linger") == "b true"
    scope = next((one for one in _SCOPES if _works(*one, "true")), ())
    return LogInSession(cgroup=cgroup, user=_user(), kills=True, lingers=lingers, scope=scope)


@functools.cache
def _kills() -> bool:
    """Whether logind ends what this user leaves running: `manager_shall_kill` in its logind-core.c.

    It tells three properties, a line each: `b true`, and lists as `as 2 "ann" "bob"`. Nobody excluded is root excluded.
    """
    names = ("KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers")
    lines = _says(*_ASK, "/org/freedesktop/login1", "org.freedesktop.login1.Manager", *names).splitlines()
    if len(lines) != len(names):
        return False
    only, excluded = (re.findall(r'"([^"]*)"', line) for line in lines[1:])
    if _user() in (excluded or ["root"]):
        return False
    return _user() in only if only else lines[0] == "b true"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


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
