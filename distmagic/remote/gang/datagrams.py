"""The bytes of one heartbeat datagram, authenticated with the job's secret. Pure.

    magic 4 | version 1 | node 2 | to 2 | counter 8 | echo 8 | formations 4 | phase 1 | reason 1 |
    culprit 2 | detached 1 | returned 1 | ending 1 | paused 1 | at a cell 1 | HMAC-SHA256 32

Sizes are in bytes, numbers big-endian. The secret is sent over SSH and lives as long as the job.
`counter` increases with every datagram of a sender, so that the receiver rejects a replayed one.
`echo` is the highest counter that the sender has received from the addressee. It proves that the
datagram was sent after the echoed one, without any clock.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import astuple, dataclass
from typing import Literal

from distmagic.remote.frozen import frozen
from distmagic.remote.wire.vocabulary import STOP_REASONS, StopReason, known_stop_reason

PHASES = ("up", "stopping", "clear")  # clear: no process of the job is left on the node
# A datagram contains the index.
REASONS: tuple[StopReason | Literal[""], ...] = (
    "",
    *STOP_REASONS,
)
NOBODY = 0xFFFF

_MAGIC = b"dmgc"
_VERSION = 6
_FORM = struct.Struct("!4sBHHQQIBBH?????")
_MAC_BYTES = 32
SIZE_BYTES = _FORM.size + _MAC_BYTES


@dataclass(frozen=True)
class OwnState:
    """A node's state in its datagrams, in the order of the bytes."""

    formations: int = 0  # how often the lead has asked all nodes to restart their ranks
    phase: str = "up"  # one of `PHASES`
    reason: StopReason | Literal[""] = ""  # why the node stops
    culprit: int = NOBODY  # the node that caused the stop, `NOBODY` for none
    is_detached: bool = False  # the job needs no notebook any more, as sent by the lead
    # all ranks of the sender have returned, and its torchrun waits for other nodes; from the lead,
    # whether that holds for any node
    has_returned: bool = False
    # a rank of the sender is about to end by itself, as it was asked to; from the lead, a rank of
    # any node
    is_ending: bool = False
    is_paused: bool = False  # a rank of the sender waits for the user's input
    # a rank of the sender, which stays between cells, runs one
    is_at_cell: bool = False


@frozen
class Datagram:
    """A message from node `node_rank` to node `to`."""

    node_rank: int
    to: int
    counter: int
    echo: int
    said: OwnState = OwnState()


def seal(secret: bytes, one: Datagram) -> bytes:
    """Return the bytes to send. A reason without a number is sent as "stopped"."""
    formations, phase, reason, *others = astuple(one.said)
    body = _FORM.pack(
        _MAGIC,
        _VERSION,
        one.node_rank,
        one.to,
        one.counter,
        one.echo,
        formations,
        PHASES.index(phase),
        REASONS.index(known_stop_reason(reason) if reason else ""),
        *others,
    )
    return body + _mac(secret, body)


def unseal(secret: bytes, data: bytes) -> Datagram | None:
    """Return the datagram that was authenticated with this secret.

    Return None for all other bytes: forged, cut short, or of another job or version.
    """
    body, mac = data[: _FORM.size], data[_FORM.size :]
    if len(data) != SIZE_BYTES or not hmac.compare_digest(mac, _mac(secret, body)):
        return None
    magic, version, node_rank, to, counter, echo, *said = _FORM.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        return None
    formations, phase, reason, *others = said
    if phase >= len(PHASES) or reason >= len(REASONS):
        return None
    return Datagram(
        node_rank=node_rank,
        to=to,
        counter=counter,
        echo=echo,
        said=OwnState(formations, PHASES[phase], REASONS[reason], *others),
    )


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.new(secret, body, hashlib.sha256).digest()
