"""Put this process into a network of its own, from which nothing can leave.

Several test sessions on one machine then have labs with the same addresses and don't meet. Loopback works as usual.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MARK = "DISTMAGIC_TESTS_ISOLATED"  # of whoever isolated itself: children inherit the network, and need not do it again


def isolate() -> None:
    """Move this thread, and all that it starts from now on, into new network and mount namespaces.

    Call it before there are threads. Raises OSError where this process may not (it isn't root).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET), "unshare")
    _check(
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        "make mounts private",
    )
    subprocess.run(
        ["ip", "link", "set", "lo", "up"], check=True, stdin=subprocess.DEVNULL
    )
    os.environ[_MARK] = _network()


def is_isolated() -> bool:
    """Return whether this process is in a network made by `isolate`."""
    return os.environ.get(_MARK) == _network()


def _network() -> str:
    return os.readlink("/proc/thread-self/ns/net")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
