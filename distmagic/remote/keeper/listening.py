"""The socket of a node's keeper, in a private directory that has its name while a keeper
listens.
"""

import os
import shutil
import socket
import stat
import sys


def listen(folder: str, node: str) -> socket.socket:
    """Listen in a directory that gets its name once its socket answers: one that does not answer
    belongs to a dead keeper.

    `node` is the suffix of the names of all such directories on this node. If another keeper of
    this job serves the node, the process exits. Raises OSError.
    """
    for name in os.listdir("/tmp"):
        is_ours = name.startswith(f"distmagic-{os.getuid()}-slurm.")
        if is_ours and name.endswith(node) and _whose("/tmp/" + name) == "ours":
            _remove_dead("/tmp/" + name)
    if _whose(folder) == "another's":
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


def _whose(folder: str) -> str:
    """Return "ours" for a private directory of this user that is no link, "nobody's" for none, else
    "another's".
    """
    try:
        about = os.lstat(folder)
    except FileNotFoundError:
        return "nobody's"  # its keeper may have ended meanwhile
    is_ours = about.st_uid == os.getuid() and not about.st_mode & 0o077
    return "ours" if is_ours and stat.S_ISDIR(about.st_mode) else "another's"


def _remove_dead(folder: str) -> None:
    """Remove the directory of a killed keeper of this user: nothing answers at its socket."""
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(folder + "/keeper")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
    client.close()
