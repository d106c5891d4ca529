"""Dials the rendezvous endpoint from this node, so that a closed port is reported within seconds. It sends nothing."""

from __future__ import annotations

import errno
import os
import socket

from distmagic.remote.wire import protocol

_PAUSE_S = 0.25  # between two attempts
_ATTEMPT_S = 2.0  # for one attempt to be answered
_PATIENCE_S = 4.0  # after which the failure is reported; the attempts go on


class Dialer:
    """Tries to connect until it succeeds, without blocking. The agent calls `poll` in every turn of its loop."""

    def __init__(self, address: str, port: int, *, lead: bool, now: float) -> None:
        self._peer = (address, port)
        # The lead dials its own port: that shows that it listens.
        self._state = "open" if lead else "reached"
        self._began = self._tried = now
        self._socket: socket.socket | None = None
        self._error = "no answer"
        self._has_reported = False
        self.is_done = False

    def poll(self, now: float) -> protocol.Endpoint | None:
        """Continue to dial. Return an event when the endpoint is reached, and one if it isn't for `_PATIENCE_S`."""
        if self.is_done:
            return None
        if self._socket is None and now - self._tried >= _PAUSE_S:
            self._dial(now)
        if self._socket is not None and self._is_connected(now):
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

    def _dial(self, now: float) -> None:
        self._tried = now
        # A name that this host can't resolve, or no descriptor is left.
        try:
            address, _ = self._peer
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._socket = socket.socket(family)
            self._socket.setblocking(False)
            self._note(self._socket.connect_ex(self._peer))
        except OSError as error:
            self._error = str(error)
            self.close()

    def _is_connected(self, now: float) -> bool:
        assert self._socket is not None
        try:
            self._socket.getpeername()
        except OSError:  # not yet, or the attempt has failed
            self._note(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            if now - self._tried > _ATTEMPT_S:
                self._note(errno.ETIMEDOUT)
            return False
        self.close()
        return True

    def _note(self, code: int) -> None:
        """Keep an error number as the reason of the failure, and end the attempt."""
        if code not in (0, errno.EINPROGRESS):
            self._error = os.strerror(code)
            self.close()

    def close(self) -> None:
        """End the present attempt."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
