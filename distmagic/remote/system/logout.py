"""Whether a process survives the end of its SSH session: some hosts kill all processes at log-out.

systemd kills them if logind.conf(5) is set that way (KillUserProcesses, KillOnlyUsers,
KillExcludeUsers). It spares processes under the user's own manager, which stays if lingering is
enabled for the user (loginctl(1)). Slurm's pam_slurm_adopt puts every session into the "extern"
step of a job, and ends it with that job.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import subprocess
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.remote.system.memory import text_of

_RUN = ("systemd-run", "--user", "--scope", "--quiet", "--collect")
# Since systemd 253, by default, a scope ends completely when memory runs out and the kernel kills
# one of its processes.
_SCOPES = ((*_RUN, "-p", "OOMPolicy=continue", "--"), (*_RUN, "--"))
_LOGIND = ("busctl", "--system", "get-property", "org.freedesktop.login1")
_TIMEOUT_S = 5.0


@frozen
class LogInSession:
    """The log-in session of this process."""

    cgroup: str  # the text of /proc/self/cgroup
    user: str = ""
    kills: bool = False  # logind ends this user's processes at log-out
    lingers: bool = False  # the user's manager stays after log-out
    # the command that starts a scope under that manager, () if none works
    scope: tuple[str, ...] = ()

    @property
    def is_killed(self) -> bool:
        """Whether systemd ends this process at log-out."""
        return (
            self.kills
            and re.search(r"/session-[^/\n]+\.scope", self.cgroup) is not None
        )

    @property
    def cure(self) -> str:
        """Advice for the user, so that processes survive."""
        if self.lingers:
            return "systemd-run --user --scope, which does not work on this host"
        return f"loginctl enable-linger {self.user} (as root, where that is refused)"


def decide(session: LogInSession) -> tuple[str, ...]:
    """Return the words to put before a command that must survive log-out, () if none are needed.

    Raises `PermissionError`, with the cure in its message, if no words help.
    """
    if found := re.search(r"/job_(\d+)/step_extern", session.cgroup):
        raise PermissionError(
            f"processes started on this host end with Slurm job {found[1]} (pam_slurm_adopt), so --detach is not possible. "
            "Run it without --detach, or submit it to Slurm"
        )
    if not session.is_killed:
        return ()
    if session.scope and session.lingers:
        return session.scope
    raise PermissionError(
        "systemd on this host ends what a user leaves running at log-out (KillUserProcesses and KillOnlyUsers in logind.conf), "
        f"so --detach is not possible. Run it without --detach, or allow it: {session.cure}"
    )


def survivor_prefix(*, must: bool = True) -> tuple[str, ...]:
    """Return `decide` for this session.

    If nothing helps, raise `PermissionError` if it `must` survive, else return ().
    """
    try:
        return decide(_look())
    except PermissionError:
        if must:
            raise
        return ()


def warning() -> str:
    """Return a warning if a run ends with the SSH connection that started it, else ""."""
    session = _look()
    if not session.is_killed or (session.scope and session.lingers):
        return ""
    return (
        "systemd on this host ends a run when the connection to it breaks (KillUserProcesses and KillOnlyUsers in "
        f"logind.conf). To let the run continue: {session.cure}."
    )


def _look() -> LogInSession:
    cgroup = text_of(Path("/proc/self/cgroup"))
    if "session-" not in cgroup or not _kills():
        return LogInSession(cgroup=cgroup)
    answer = _output(
        *_LOGIND,
        "/org/freedesktop/login1/user/self",
        "org.freedesktop.login1.User",
        "Linger",
    )
    works = (one for one in _SCOPES if _output(*one, "true") is not None)
    scope = next(works, ())
    return LogInSession(
        cgroup=cgroup, user=_user(), kills=True, lingers=answer == "b true", scope=scope
    )


@functools.cache
def _kills() -> bool:
    """Whether logind ends this user's processes at log-out, by the rules of `manager_shall_kill` in
    its logind-core.c.

    busctl prints three properties, one per line: `b true`, and lists as `as 2 "ann" "bob"`. An
    empty list of excluded users means that root is excluded.
    """
    names = ("KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers")
    answer = _output(
        *_LOGIND, "/org/freedesktop/login1", "org.freedesktop.login1.Manager", *names
    )
    lines = (answer or "").splitlines()
    if len(lines) != len(names):
        return False
    user = _user()
    only = re.findall(r'"([^"]*)"', lines[1])
    excluded = re.findall(r'"([^"]*)"', lines[2]) or ["root"]
    if user in excluded:
        return False
    if only:
        return user in only
    return lines[0] == "b true"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _output(*command: str) -> str | None:
    """Return the output of a command, None if it does not exist or fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
