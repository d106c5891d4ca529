"""The task of one srun: passes its stdin, stdout and stderr to the keeper of this node, which
starts a process on them.

Its last argument is a line of JSON: {"job": "17", "patience_s": 60, "argv": ["python3", ...]}, or
"lease": true instead of argv; see keeper.py. The usher ends with the process, and with its exit
code, 128 + N for a signal N; `NO_KEEPER` if no keeper took the pipes.
"""

import array
import json
import os
import socket
import sys
import time

NO_KEEPER = 118  # used by no shell, srun or Python
_TURN_S = 0.05


def main(text: str) -> int:
    """Pass the pipes to the keeper, and wait; return the exit code."""
    request = json.loads(text)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    path = f"/tmp/distmagic-{os.getuid()}-slurm.{request['job']}.{node}/keeper"
    connection, error = _dial(path, request["patience_s"])
    if connection is None:
        sys.stderr.write(f"distmagic: no keeper answers on {node}: {error}\n")
        return NO_KEEPER
    request["client"] = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    pipes = array.array("i", [0, 1, 2])
    line = json.dumps(request).encode() + b"\n"
    sent = connection.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, pipes)])
    if sent < len(line):
        connection.sendall(line[sent:])
    # From now on only the process has the pipes: their end of file must come when it closes them,
    # not when this program ends.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    # The exit code that the keeper sends.
    said = b""
    while not said.endswith(b"\n"):
        data = connection.recv(4096)
        if not data:
            return NO_KEEPER  # it ended, and its allocation with it
        said += data
    code = int(json.loads(said.decode())["code"])
    return code if code >= 0 else 128 - code


def _dial(path: str, patience_s: float) -> "tuple[socket.socket | None, str]":
    """Connect to the keeper, which may still be starting; return (socket, "") or (None, why
    not).
    """
    end_s = time.monotonic() + patience_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            # No other user can put a socket into a private directory of this user.
            about = os.lstat(os.path.dirname(path))
            if about.st_uid != os.getuid() or about.st_mode & 0o077:
                return None, f"{os.path.dirname(path)} is not this user's alone"
            connection.connect(path)
        except OSError as error:
            connection.close()
            if time.monotonic() > end_s:
                return None, error.strerror or str(error)
        else:
            return connection, ""
        time.sleep(_TURN_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2]))
