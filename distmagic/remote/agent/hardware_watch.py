"""Measures the load of the hardware on a separate thread, because a GPU's driver may block its
caller. A process that such a driver blocks also ends later.
"""

from __future__ import annotations

import time

from distmagic.remote.system import threads
from distmagic.remote.wire import protocol

_QUIET_S = 0.5  # pause at the start of a job, which has more urgent work


class HardwareWatch:
    """Measures the host's load until the process ends.

    `mask` is CUDA_VISIBLE_DEVICES, None for all GPUs.
    """

    def __init__(self, mask: str | None) -> None:
        self._mask = mask
        self._latest: protocol.Hardware | None = None
        threads.begin("hardware", self._look)

    def news(self) -> protocol.Hardware | None:
        """Return the latest measurement, None if it was returned before."""
        latest, self._latest = self._latest, None
        return latest

    def _look(self) -> None:
        time.sleep(_QUIET_S)
        from distmagic.remote.system import hardware

        for seen in hardware.looks(self._mask):
            self._latest = seen
