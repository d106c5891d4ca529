"""What counts as an interrupt."""

import os
import signal
import time

import pytest

from distmagic.runner import interrupts


def test_another_signal_is_an_interrupt_inside_the_block_alone():
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.from_signal(signal.SIGTERM), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_are_to_get_the_signal_that_came():
    with interrupts.from_signal(signal.SIGTERM), interrupts.noted() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted.was_sigterm
        os.kill(os.getpid(), signal.SIGINT)
        assert (noted.was_sigterm, noted.count) == (False, 2)


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch):
    """As that of timeout(1), which sends it to a process and to its group; two interrupts would end ranks without grace."""
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with interrupts.from_signal(signal.SIGTERM), interrupts.noted() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        now_s = 100.9
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted.count == 1
        now_s = 102.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted.count == 2


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupts.from_signal(signal.SIGTERM), interrupts.noted() as noted:
            os.kill(os.getpid(), signal.SIGTERM)
            assert noted.count == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_is_one_also_where_interrupts_are_ignored():
    """As of a command that a shell's script has started in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.from_signal(signal.SIGTERM), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
