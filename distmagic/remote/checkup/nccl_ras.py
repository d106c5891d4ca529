"""Asks NCCL's own health service (RAS, since NCCL 2.24) of a job of this user which processes it
misses.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from distmagic.remote.system import processes
from distmagic.remote.system.memory import text_of

PORT = 28028  # NCCL's default, on the loopback address
_FIRST_S = 0.5  # for its first words, which it sends at once
# All processes of a job listen at the port, and the kernel chooses one for each connection. A
# process that is stopped does not answer.
_CONNECTIONS = 20
# It waits 5 s for a process that gives no answer, and 10 s in all. A shorter limit of ours would
# miss healthy ones.
_LIMIT_S = 11.0
_QUESTION = b"verbose status\n"
_MOST_BYTES, _MOST_CHARS = 1 << 18, 1500
_ERRORS = re.compile(r"^Errors\n=+\n(.*?)(?=^Warnings\n=|\Z)", re.MULTILINE | re.DOTALL)
_LISTENS = "0A"


def errors(pids: Iterable[int] | None = None) -> str:
    """Return what NCCL reports as errors: processes that are dead or give no answer; "" for none,
    or without NCCL.

    With `pids`, which are all processes of a run on this host, nothing is asked while another
    process of this user listens: the answer could be about another job.

    Its warnings are left out: in a healthy job, ranks may have made different numbers of calls at
    the moment.
    """
    listening = _listening()
    if pids is not None and listening.difference(*map(processes.open_files, pids)):
        return ""
    if not listening:
        return ""
    data = b""
    for _ in range(_CONNECTIONS):
        data = data or _answer()
    found = _ERRORS.search(data.decode(errors="replace"))
    return found[1].strip()[:_MOST_CHARS] if found else ""


def _answer() -> bytes:
    """Ask one of the processes that listen; return what it sends, b"" for nothing."""
    end_s = time.monotonic() + _FIRST_S
    data = b""
    try:
        with socket.create_connection(("localhost", PORT), _FIRST_S) as sock:
            sock.sendall(_QUESTION)
            while len(data) < _MOST_BYTES:
                sock.settimeout(max(end_s - time.monotonic(), 0.01))
                more = sock.recv(65536)
                if not more:
                    break
                end_s += 0.0 if data else _LIMIT_S
                data += more
    except OSError:
        pass  # what has come may say enough
    return data


def _listening() -> set[str]:
    """Return the sockets of this user that listen at the port: another user's job is none of
    ours.
    """
    found = set()
    for table in ("tcp", "tcp6"):
        for line in text_of(Path(f"/proc/net/{table}")).splitlines()[1:]:
            words = line.split()
            port = int(words[1].rpartition(":")[2], 16)
            if port == PORT and words[3] == _LISTENS and int(words[7]) == os.getuid():
                found.add(f"socket:[{words[9]}]")
    return found
