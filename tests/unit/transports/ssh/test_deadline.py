"""The time that is left of a connection's limit."""

import threading

from distmagic.transports.ssh.deadline import Deadline
from distmagic.transports.time_limits import TimeLimit
from tests.lab.waiting import HANG_S


def test_a_deadline_expires_once():
    expired = threading.Event()
    with Deadline(0.05, expired.set) as deadline:
        assert expired.wait(HANG_S)
        assert deadline.is_over
        assert deadline.remaining() == 0


def test_a_deadline_that_is_kept_never_fires():
    expired, later = threading.Event(), threading.Event()
    with Deadline(0.2, expired.set) as deadline:
        pass
    TimeLimit(0.3, later.set)
    assert later.wait(HANG_S)
    assert not expired.is_set()
    assert not deadline.is_over


def test_a_pause_is_not_counted():
    expired = threading.Event()
    with Deadline(HANG_S, expired.set) as deadline:
        with deadline.paused(), deadline.paused():
            left_s = deadline.remaining()
            assert not expired.wait(0.05)
            assert deadline.remaining() == left_s
        assert not deadline.is_over
        assert 0 < deadline.remaining() <= left_s
    with Deadline(0.05, expired.set) as deadline:
        with deadline.paused():
            pass
        assert expired.wait(HANG_S)
