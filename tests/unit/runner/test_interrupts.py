"""What counts as an interrupt."""

from __future__ import annotations

import os
import signal

import pytest

from distmagic.runner import interrupts


def test_another_signal_is_an_interrupt_inside_the_block_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.from_signal(signal.SIGTERM):
        with interrupts.noted() as noted:
            os.kill(os.getpid(), signal.SIGTERM)
            assert noted.take()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_is_one_also_where_interrupts_are_ignored() -> None:
    """As of a command that a shell's script has started in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with (
            interrupts.from_signal(signal.SIGTERM),
            pytest.raises(KeyboardInterrupt),
        ):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
