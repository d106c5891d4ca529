"""Processes of a node: starts them on given pipes, signals them, and finds them in /proc."""

import os
import subprocess

# In the variables of an agent and its ranks; a template has dashes after it.
_JOB = b"\0DISTMAGIC_JOB="


def start_process(
    argv: "list[str]", pipes: "list[int]", client: str
) -> "tuple[int, int]":
    """Start a process on three pipes, and return (pid, 0).

    If it can't be started, return 0 and the exit code that a shell would give.
    """
    home = os.path.expanduser("~")
    if not os.path.isdir(home):
        home = "/"
    environment = dict(os.environ)
    environment["DISTMAGIC_CLIENT"] = client
    words = [os.path.expanduser(argv[0]), *argv[1:]]
    try:
        child = subprocess.Popen(
            words,
            stdin=pipes[0],
            stdout=pipes[1],
            stderr=pipes[2],
            cwd=home,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        write_quietly(pipes[2], f"{words[0]}: {error}\n".encode())
        return 0, 127 if isinstance(error, FileNotFoundError) else 126
    child.returncode = 0  # `Keeper._reap` waits for it
    return child.pid, 0


def write_quietly(number: int, data: bytes) -> None:
    """Write bytes to a pipe, if it still has a reader."""
    try:
        os.write(number, data)
    except OSError:
        pass


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def parents() -> "dict[int, int]":
    """Return {process: its parent} of all running processes, without zombies."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if words[0] not in (b"Z", b"X"):
                found[int(name)] = int(words[1])
    return found


def has_job(top: int) -> bool:
    """Whether a process below `top` belongs to a distmagic job."""
    found = parents()
    below = {top}
    more = True
    while more:
        new = {pid for pid, parent in found.items() if parent in below} - below
        below |= new
        more = bool(new)
    return any(is_of_job(pid) for pid in below - {top})


def is_of_job(pid: int) -> bool:
    """Whether a process belongs to a distmagic job; False for another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = b"\0" + file.read()
    except OSError:
        return False
    _, found, value = variables.partition(_JOB)
    return bool(found) and not value.startswith((b"-", b"\0"))
