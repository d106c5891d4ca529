"""Dials the rendezvous endpoint from this node, so that a closed port has a name within seconds. Sends nothing."""

from __future__ import annotations

import errno
import os
import socket

from distmagic.remote.wire import protocol

_PAUSE_S = 0.25
_ANSWER_S = 2.0  # one attempt
_PATIENCE_S = 4.0  # then a failure is told, and dialling goes on


class Dialer:
    """Tries again and again without blocking. `poll` returns what is new."""

    def __init__(self, address: str, port: int, *, lead: bool, now: float) -> None:
        self._peer = (address, port)
        self._state = "open" if lead else "reached"
        self._began = self._tried = now
        self._socket: socket.socket | None = None
        self._error = "no answer"
        self._told = False
        self.is_done = False

    def poll(self, now: float) -> protocol.Endpoint | None:
        """Go on dialling; return an event when the endpoint was reached, or once when it wasn't for a while."""
        if self.is_done:
            return None
        if self._socket is None and now - self._tried >= _PAUSE_S:
            self._dial(now)
        if self._socket is not None and self._answered(now):
            self.is_done = True
            return protocol.Endpoint(state=self._state)
        if not self._told and self._state == "reached" and now - self._began > _PATIENCE_S:
            self._told = True
            return protocol.Endpoint(state="unreached", detail=f"{self._peer[0]} port {self._peer[1]} ({self._error})")
        return None

    def _dial(self, now: float) -> None:
        self._tried = now
        self._socket = socket.socket(socket.AF_INET6 if ":" in self._peer[0] else socket.AF_INET)
        self._socket.setblocking(False)
        try:
            self._note(self._socket.connect_ex(self._peer))
        except OSError as error:  # a name that this host can't resolve
            self._error = str(error)
            self.close()

    def _answered(self, now: float) -> bool:
        assert self._socket is not None
        try:
            self._socket.getpeername()
        except OSError:
            self._note(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            if now - self._tried > _ANSWER_S:
                self._note(errno.ETIMEDOUT)
            return False
        self.close()
        return True

    def _note(self, code: int) -> None:
        if code not in (0, errno.EINPROGRESS):
            self._error = os.strerror(code)
            self.close()

    def close(self) -> None:
        """Drop the attempt under way."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
