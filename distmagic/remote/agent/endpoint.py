"""Connects to the rendezvous endpoint from this node, so that a closed port is reported within
seconds.

Sends nothing.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from distmagic.remote.system.facts import family_of
from distmagic.remote.wire import protocol

_PAUSE_S = 0.25  # between two attempts
_ATTEMPT_S = 2.0  # for one attempt to be answered
_PATIENCE_S = 4.0  # after this time the failure is reported; the attempts continue


class Dialer:
    """Tries to connect until it succeeds, without blocking.

    The agent's loop calls `poll` in every turn.
    """

    def __init__(self, address: str, port: int, *, lead: bool, now: float) -> None:
        self._peer = (address, port)
        self._where: Any = None  # the peer with its address, once its name is known
        # The lead connects to its own port: that shows whether it listens.
        self._state = "open" if lead else "reached"
        self._began = self._tried = now
        self._socket: socket.socket | None = None
        self._error = "no answer"
        self._has_reported = False
        self.is_done = False

    def poll(self, now: float) -> protocol.Endpoint | None:
        """Continue to connect.

        Return an event when the endpoint is reached, and one if it isn't within `_PATIENCE_S`.
        """
        if self.is_done:
            return None
        is_under_way = self._socket is not None
        if (is_under_way or now - self._tried >= _PAUSE_S) and self._is_connected(now):
            self.is_done = True
            return protocol.Endpoint(state=self._state)
        if (
            not self._has_reported
            and self._state == "reached"
            and now - self._began > _PATIENCE_S
        ):
            self._has_reported = True
            address, port = self._peer
            return protocol.Endpoint(
                state="unreached", detail=f"{address} port {port} ({self._error})"
            )
        return None

    def _is_connected(self, now: float) -> bool:
        """Start an attempt, or continue the current one."""
        try:
            if self._socket is None:
                self._tried = now
                address, port = self._peer
                family = family_of(address)
                # Once: a slow name service would hold up the agent's loop at each turn.
                if self._where is None:
                    self._where = socket.getaddrinfo(address, port, family)[0][4]
                self._socket = socket.socket(family)
                self._socket.setblocking(False)
            code = self._socket.connect_ex(self._where)
        except OSError as error:  # a name can't be resolved, or no descriptor is free
            self._error = str(error)
            self.close()
            return False
        is_connected = code in (0, errno.EISCONN)
        if code in (errno.EINPROGRESS, errno.EALREADY):
            if now - self._tried <= _ATTEMPT_S:
                return False
            code = errno.ETIMEDOUT
        if not is_connected:
            self._error = os.strerror(code)
        self.close()
        return is_connected

    def close(self) -> None:
        """End the current attempt."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
