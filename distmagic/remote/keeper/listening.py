"""The socket of a node's keeper: a directory of the user's alone, which has its name as long as somebody listens there."""

import os
import shutil
import socket
import stat
import sys


def listen(folder: str, node: str) -> socket.socket:
    """Listen in a directory that gets its name when its socket answers: one that does not is a dead keeper's.

    `node` is the end of the names of all such directories on this node. Where another keeper of this job serves the
    node, the process exits. Raises OSError.
    """
    for name in os.listdir("/tmp"):
        is_ours = name.startswith(f"distmagic-{os.getuid()}-slurm.")
        if is_ours and name.endswith(node):
            _remove_dead("/tmp/" + name)
    if os.path.lexists(folder) and not _is_own(folder):
        raise OSError(f"{folder} is not this user's alone")
    new = f"{folder}.{os.getpid()}"
    os.mkdir(new, 0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(new + "/keeper")
    listener.listen(64)
    try:
        os.rename(new, folder)
    except OSError:
        shutil.rmtree(new)
        sys.exit(0)  # another keeper of this job serves the node
    return listener


def _is_own(folder: str) -> bool:
    """Whether a directory is this user's alone, and no link."""
    about = os.lstat(folder)
    return (
        about.st_uid == os.getuid()
        and stat.S_ISDIR(about.st_mode)
        and not about.st_mode & 0o077
    )


def _remove_dead(folder: str) -> None:
    """Remove the directory of a keeper of this user that was killed: nothing answers at its socket."""
    try:
        if not _is_own(folder):
            return
    except FileNotFoundError:
        return  # its keeper has ended since
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(folder + "/keeper")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
    client.close()
