"""The queue of a rank's reports to the agent: waiting points of metrics and bars, and packets of
them.

Only `flush` and `send_for_sure` wait for the agent. Data that can't be sent stays in lists of
limited size until a later call. Every call adds its data to `inbox`, and sends the inbox unless
another thread is doing so.
"""

from __future__ import annotations

import enum
import itertools
import json
import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from distmagic.remote.wire.codec import Message, encode, packed
from distmagic.remote.wire.events import Picture
from distmagic.remote.wire.parts import Bar

# points of a metric, kept while the agent takes none; above that, every second point is dropped
KEPT_POINTS = 500
_KEPT_NAMES = 2000  # of metrics, kept meanwhile
# bars kept meanwhile; above that, closed bars that were never sent are dropped
KEPT_BARS = 100
# size of several metrics; a unix socket takes 200 KiB at once by default, and the agent reads 256
# KiB
_PACKET_BYTES = 48_000
_MOST_BYTES = 200_000  # maximum size of a packet; the socket would refuse a larger one
_MOST_METRICS = 1000  # limit for each row
# Sending a packet costs as much as 20 calls, and wakes the agent.
_BURST = 50.0  # packets at once
_REFILL = 10.0  # packets a second
_PAUSE_S = 0.002  # between two attempts to send
TOGETHER = 256  # calls whose data waits in the inbox: taking them together is cheaper

_json = json.JSONEncoder(separators=(",", ":")).encode


class NumberSource(enum.IntEnum):
    """The sources of a rank's numbers; only the highest source that has any counts."""

    BAR = 1
    FRAMEWORK = 2
    REPORT = 3


# Numbers that were reported or logged: seconds by the rank's clock, step, numbers by name, total,
# and whether the step is the rank's progress; without a step they are then recorded at the count of
# its innermost bar. A class would take a fifth of the time of a report.
ReportedRow = tuple[float, float | None, dict[str, float], float | None, bool]


class Outbox:
    """Sends reports to the agent, and keeps those that could not be sent yet.

    Any thread may append to `inbox` at any time. Only the thread that holds `_busy` uses the other
    attributes.
    """

    def __init__(
        self,
        send: Callable[[bytes], bool],
        rank: int,
        restart: int,
        clock: Callable[[], float],
        complain: Callable[[str], None],
    ) -> None:
        self.inbox: deque[Bar | ReportedRow] = deque()
        self.source = NumberSource.BAR  # source of the numbers so far
        self._send = send
        self.clock = clock
        self._complain = complain
        self._began = clock()
        self._rank, self._restart = rank, restart
        self._busy = threading.Lock()
        # Of each metric: seconds, step (NaN for none) and value, one after the other.
        self._points: dict[str, list[float]] = {}
        self._bars: dict[int, Bar] = {}
        self._shown: set[int] = set()  # open bars that were sent at least once
        self._counts: dict[int, float] = {}  # the count of each open bar
        self._step: float | None = None
        self._total: float | None = None
        # whether step or total, or a call without either, must still be sent
        self._has_news = False
        self._device = ""
        self._tokens = _BURST
        self._filled_s = self._began
        self.due_s = self._began  # the earliest time for the next packet

    def pump(self) -> None:
        """Send the inbox, unless another thread is doing so, or this thread in a call that was
        interrupted.

        Data that can't be sent yet stays in the inbox: taking many rows together is cheaper.
        """
        while self.inbox and self._busy.acquire(blocking=False):
            try:
                if self._may_send():
                    self._empty_inbox()
                    self._send_all()
                elif len(self.inbox) < TOGETHER:
                    return
                else:
                    self._empty_inbox()
            finally:
                self._busy.release()

    def flush(self, patience_s: float) -> bool:
        """Send everything, retrying for `patience_s`; return whether nothing is left."""
        give_up = time.monotonic() + patience_s
        if not self._busy.acquire(timeout=patience_s):
            return False
        try:
            self._empty_inbox()
            while not self._send_all():
                if time.monotonic() >= give_up:
                    return False
                time.sleep(_PAUSE_S)
            return True
        finally:
            self._busy.release()

    def send_picture(self, data: str, patience_s: float) -> None:
        """Send a picture after all earlier reports. Above a rate limit it is dropped."""
        give_up_s = time.monotonic() + patience_s
        if not (self._may_send() and self.flush(patience_s)):
            return
        picture = Picture(
            rank=self._rank, restart=self._restart, data=data, step=self._step
        )
        packet = encode(picture)
        while not self._send(packet) and time.monotonic() < give_up_s:
            time.sleep(_PAUSE_S)

    def _may_send(self) -> bool:
        """Whether the token bucket allows a packet: a slow loop is shown at once, a fast one ten
        times a second.
        """
        now = self.clock()
        self._tokens = min(_BURST, self._tokens + (now - self._filled_s) * _REFILL)
        self._filled_s = now
        if self._tokens < 1:
            self.due_s = now + (1 - self._tokens) / _REFILL
            return False
        self._tokens -= 1
        return True

    # ---- from the inbox to points and bars

    def _empty_inbox(self) -> None:
        while self.inbox:
            new = self.inbox.popleft()
            if isinstance(new, Bar):
                self._add_bar(new)
            else:
                self._add_row(new)
        for points in self._points.values():
            while len(points) > 3 * KEPT_POINTS:
                # Every second point, the last one among them.
                whole = list(zip(points[0::3], points[1::3], points[2::3], strict=True))
                kept = whole[(len(whole) - 1) % 2 :: 2]
                points[:] = itertools.chain.from_iterable(kept)

    def _add_row(self, row: ReportedRow) -> None:
        clock_s, step, values, total, tells_progress = row
        at_s = clock_s - self._began
        if tells_progress:
            self._has_news = True
            if total is not None:
                self._total = total
            if step is not None:
                self._step = step
            elif self._counts:
                step = self._counts[max(self._counts)]  # count of the innermost bar
        if len(values) > _MOST_METRICS:
            self._complain(
                f"{len(values)} metrics in one call are more than {_MOST_METRICS}"
            )
            return
        if step is None:
            step = math.nan
        for name, value in values.items():
            points = self._points.get(name)
            if points is not None:
                points += (at_s, step, value)
            elif len(self._points) < _KEPT_NAMES:
                self._points[name] = [at_s, step, value]

    def _add_bar(self, bar: Bar) -> None:
        self._bars[bar.id] = bar
        if bar.closed:
            self._counts.pop(bar.id, None)
        elif bar.id in self._counts or len(self._counts) < KEPT_BARS:
            self._counts[bar.id] = bar.n
        if len(self._bars) <= KEPT_BARS:
            return
        # A bar that was opened and closed without being sent leaves no trace: it can be dropped.
        for old in self._bars.values():
            if old.closed and old.id not in self._shown:
                del self._bars[old.id]
                return

    # ---- sending

    def _send_all(self) -> bool:
        """Send packets until nothing is left (True) or the agent takes no more (False)."""
        while self._points or self._bars or self._has_news:
            points = self._packed_points()
            bars = list(itertools.islice(self._bars.values(), 20))
            device = "" if self._device else _device()
            packet = self._packet(points, bars, device)
            if len(packet) > _MOST_BYTES and points:
                self._complain(
                    f"metrics of {len(packet):,} bytes in one call are more than {_MOST_BYTES:,}"
                )
                del self._points[next(iter(points))]
                continue
            if not self._send(packet):
                return False
            self._device = self._device or device
            for name in points:
                del self._points[name]
            self._has_news = False
            for bar in bars:
                del self._bars[bar.id]
                if bar.closed:
                    self._shown.discard(bar.id)
                else:
                    self._shown.add(bar.id)
        return True

    def _packed_points(self) -> dict[str, str]:
        """Return the points of the first metric, and of as many more as a packet has room for."""
        found: dict[str, str] = {}
        size_bytes = 0
        for name, points in self._points.items():
            text = packed(points)
            size_bytes += len(_json(name)) + len(text)
            if found and size_bytes > _PACKET_BYTES:
                break
            found[name] = text
        return found

    def _packet(self, points: dict[str, str], bars: list[Bar], device: str) -> bytes:
        fields = {
            "t": "progress",
            "n": 0,
            "rank": self._rank,
            "restart": self._restart,
            "at_s": round(self.clock() - self._began, 6),
            "step": self._step,
            "total": self._total,
            "points": points,
            "bars": [
                {
                    **vars(bar),
                    "desc": bar.desc[:200],
                    "unit": bar.unit[:40],
                    "postfix": bar.postfix[:500],
                }
                for bar in bars
            ],
            "device": device,
        }
        return f"{_json(fields)}\n".encode()


def _device() -> str:
    """Return the GPU that this process uses, "" for none; does not initialize one."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return ""
    return f"cuda:{cuda.current_device()}"


def send(conn: socket.socket, packet: bytes) -> bool:
    """Send without blocking; return False if the agent has no room for it now."""
    try:
        conn.send(packet, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the agent is gone, and the kernel ends this process in a moment
    return True


def send_for_sure(conn: socket.socket, message: Message) -> None:
    """Send, waiting for the agent as long as it has no room."""
    while not send(conn, encode(message)):
        time.sleep(_PAUSE_S)
