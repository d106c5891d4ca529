"""The notebook machine as a host, without SSH."""

from __future__ import annotations

import os
import threading

from distmagic.errors import Unreachable
from distmagic.request.hosts import LOCALHOST
from distmagic.transports import Argv
from distmagic.transports.piped import OpenProcesses, PipedProcess

# Held while a program of this machine (the system's ssh, a ProxyCommand) connects to a host. All of
# them may use the same jump host, whose sshd rejects clients while many are not logged in yet
# (MaxStartups).
connecting_program = threading.BoundedSemaphore(16)


class LocalTransport(OpenProcesses):
    """Starts processes of this machine, each in its own session, in the notebook's working
    directory.
    """

    def start(self, argv: Argv) -> PipedProcess:
        """Start `argv`. A missing program gives exit code 127 and a message on stderr, as on any
        host.
        """
        words = (os.path.expanduser(argv[0]), *argv[1:])
        try:
            process = PipedProcess(
                ("/bin/sh", "-c", 'exec "$@"', "sh", *words), LOCALHOST.name
            )
        except OSError as error:
            raise Unreachable(
                LOCALHOST.name, f"no process can be started: {error.strerror}."
            ) from error
        self._add(process)
        return process
