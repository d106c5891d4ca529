"""Looks at the hardware from a thread of its own, since the driver of a GPU may keep whoever asks it waiting."""

from __future__ import annotations

import time

from distmagic.remote.system import threads
from distmagic.remote.wire import protocol

_QUIET_S = 0.5  # at the beginning of a job, which has more urgent things to do


class HardwareWatch:
    """Looks at the host until the process ends. `mask` is CUDA_VISIBLE_DEVICES, None for all GPUs."""

    def __init__(self, mask: str | None) -> None:
        self._mask = mask
        self._latest: protocol.Hardware | None = None
        threads.begin("hardware", self._look)

    def news(self) -> protocol.Hardware | None:
        """Return the latest reading of the hardware, None if it was returned before."""
        latest, self._latest = self._latest, None
        return latest

    def _look(self) -> None:
        time.sleep(_QUIET_S)
        from distmagic.remote.system import hardware

        for seen in hardware.looks(self._mask):
            self._latest = seen
