"""Explains from connection errors of gloo, NCCL and torch's store which host could not reach which.

Pure.

The patterns match messages of these libraries. None of them has the user's name of a host; most
only have an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distmagic.remote.frozen import frozen

_REFUSED, _SILENT, _NO_WAY = "connection refused", "no answer", "no route to it"
_LATE = "no connection in time"  # torch's store keeps trying, whatever the answer
_ABORTED = "the connection was aborted"  # NCCL's message after repeated refusals
_NAMELESS, _LOST = "its name can't be resolved", "lost"
_NO_INTERFACE = "no interface"
_CAUSES = (  # the first match counts; a text may match several, so specific ones come first
    (
        _NO_INTERFACE,
        r"no socket interface found|unable to find interface|no interface found",
    ),
    (
        _NAMELESS,
        r"gai error|name or service not known|name resolution|nodename nor servname",
    ),
    (_REFUSED, r"connection refused"),
    (_NO_WAY, r"no route to host|(?:network|host) is unreachable"),
    (_ABORTED, r"software caused connection abort"),
    (
        _LOST,
        r"closed by (?:remote )?peer|remote peer closed|connection was likely closed|reset by peer|broken pipe|remote process exited",
    ),
    (_LATE, r"timed out after \d+ ?ms while trying to connect"),
    (
        _SILENT,
        r"connect time(?:d )?out|timed out.{0,80}connect|connect.{0,200}timed out|timeout.{0,80}connect|connectfullmesh failed",
    ),
)
_LIBRARIES = re.compile(
    r"gloo|nccl|tcpstore|client socket|c10d|dist(?:network|store|backend)error",
    re.IGNORECASE,
)
_PLACES = (
    r"\[(?:::ffff:)?(?P<name>[^\]\[\s/]+)\]:(?P<port>\d{1,5})\b",  # gloo, torch: [10.0.0.2]:40000
    r"\((?P<name>[^()\s,]+), (?P<port>\d{1,5})\)",  # torch: (gpu-a, 29500)
    r"(?P<name>[^\s<>\[\]()]+)<(?P<port>\d{1,5})>",  # NCCL: 10.0.0.2<43421>
    r"\bto (?P<name>\d+(?:\.\d+){3}):(?P<port>\d{1,5})\b",  # NCCL at times
)
_OWN = re.compile(r"(?:\b(?:local|addr)=|\bfrom )$")  # before this end's own address
_OPEN = "gloo and NCCL connect the ranks over ports that the system chooses, mostly 32768 to 60999: open these between the hosts (%distributed help firewall)."
_HINTS = {
    _REFUSED: _OPEN,
    _SILENT: _OPEN,
    _LATE: "Does a program listen on that port, and is that port open between the hosts?",
    _ABORTED: _OPEN,
    _NO_WAY: "Is there a firewall, or another network? Name the interface of the common one: --env NCCL_SOCKET_IFNAME=eth0 "
             "--env GLOO_SOCKET_IFNAME=eth0",
    _NAMELESS: "Add that name to /etc/hosts on all hosts, or name the hosts by their addresses.",
    _NO_INTERFACE: "Name one that the hosts have: --env NCCL_SOCKET_IFNAME=eth0 --env GLOO_SOCKET_IFNAME=eth0",
}  # fmt: skip
_LOOPBACK = (
    "That is an address of each host itself: name the interface of the common network, "
    "--env NCCL_SOCKET_IFNAME=eth0 --env GLOO_SOCKET_IFNAME=eth0"
)


_ENDED = "the process at the other end ended, or the network failed"


@frozen
class NetworkTrouble:
    """A failed connection: the reason, and the peer's address and port ("" and None if the error
    has none).
    """

    why: str
    address: str = ""
    port: int | None = None


def trouble(text: str) -> NetworkTrouble | None:
    """Return the connection error in a library's message, None if it is about something else."""
    text = text[:20_000]
    if not _LIBRARIES.search(text):
        return None  # the user's own sockets
    for why, pattern in _CAUSES:
        if found := re.search(pattern, text, re.IGNORECASE):
            address, port = _place(text, found.start())
            return NetworkTrouble(why=why, address=address, port=port)
    return None


def _place(text: str, near: int) -> tuple[str, int | None]:
    """Return the address and port nearest to a position in the text, preferably on the same line.

    A line may also have this end's own address, which is only used if there is no other.
    """
    start = text.rfind("\n", 0, near) + 1
    line = text[start:].partition("\n")[0]
    for part, offset in ((line, near - start), (text, near)):
        found = [
            match
            for pattern in _PLACES
            for match in re.finditer(pattern, part)
            if 0 < int(match["port"]) < 65536
        ]
        others = [one for one in found if not _OWN.search(part[: one.start()])]
        if found:
            nearest = min(
                others or found,
                key=lambda one: min(abs(one.start() - offset), abs(one.end() - offset)),
            )
            return nearest["name"], int(nearest["port"])
    return "", None


def in_words(
    text: str, stderr: Sequence[str], host: str, names: Mapping[str, str]
) -> str:
    """Return an explanation of a connection error of a rank on `host`, with advice; "" for none.

    `text` is the exception's message, `stderr` has lines of stderr, which contain details that
    exceptions lack. `names` maps each host's address or own name to the user's name for it.
    """
    # Another exception, such as a ValueError. Without one, a signal has ended the rank.
    if text and not _LIBRARIES.search(text):
        return ""
    found = _sharpened(trouble(text), stderr)
    if found is None:
        return ""
    if found.why == _NO_INTERFACE:
        return f"{host} has no network interface that NCCL or gloo can use. {_HINTS[_NO_INTERFACE]}"
    peer = _peer(found, host, names)
    if found.why == _LOST:
        return f"{host} lost the connection to {peer}: {_ENDED}."
    is_own = found.address.startswith("127.") or found.address in ("::1", "localhost")
    hint = _LOOPBACK if is_own else _HINTS[found.why]
    return f"{host} could not reach {peer}: {found.why}. {hint}"


def has_lost_peer(text: str) -> bool:
    """Whether a library's message is about a lost connection, as when a peer ends."""
    found = trouble(text)
    return found is not None and found.why == _LOST


def is_of_a_peer(words: str) -> bool:
    """Whether a text from `in_words` is about a lost connection, as when a peer ends."""
    return _ENDED in words


def _sharpened(
    found: NetworkTrouble | None, stderr: Sequence[str]
) -> NetworkTrouble | None:
    """Return `found` with details from stderr: only there NCCL names the peer, and torch's store
    the reason.

    `stderr` are the lines of stderr.
    """
    if found is None or not found.address:
        return next(_troubles_in("NCCL WARN", stderr), found)
    if found.why == _LATE:
        for other in _troubles_in("[c10d]", stderr):
            if other.port == found.port and other.why != _LATE:
                return replace(found, why=other.why)
    return found


def _troubles_in(mark: str, stderr: Sequence[str]) -> Iterator[NetworkTrouble]:
    """Yield the errors in lines that contain `mark` and name the peer, or need none."""
    for line in stderr:
        found = trouble(line) if mark in line else None
        if found is not None and (found.address or found.why == _NO_INTERFACE):
            yield found


def _peer(found: NetworkTrouble, host: str, names: Mapping[str, str]) -> str:
    others = set(names.values()) - {host}
    if not found.address:
        return others.pop() if len(others) == 1 else "another rank"
    address, _, _interface = found.address.partition("%")  # of a link-local one
    name = names.get(address, "")
    where = f"{found.address} port {found.port}"
    if name == host:
        return f"itself ({where})"
    if name in ("", found.address):
        return where
    return f"{name} ({where})"
