"""What a host may say at most: a table with a limit for every field of every message that a host sends. Pure.

All that comes from hosts is read through `DECODER`. Text beyond its limit is cut, and nothing in it is obeyed by a
terminal. Numbers outside their range become the nearest one that is inside; long lists and tables lose their end. A host
of ours stays within all of this by itself: what is changed here was sent by one that is broken, or hostile.

Some fields are refused rather than changed, because a changed value would mean something else: how many bytes follow,
which events were left out, and the texts of the lead's start message, which go back to hosts as they came.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from urllib.parse import unquote_to_bytes

from distmagic import sanitize
from distmagic.errors import ProtocolError
from distmagic.remote.gang.liveness import MOST_NODES
from distmagic.remote.wire import codec, protocol
from distmagic.remote.wire.codec import Limit, Wrong
from distmagic.state.fold_ranks import KEPT_RANKS

MOST_JOBS = 10_000  # of one host
MOST_FILES = 10_000  # of one answer
_LARGEST = 1 << 63
PATH_BYTES = 4096  # no file system opens a longer path
_PERCENT_ENCODED = re.compile(r"[\w.~/%-]*", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tabs and line breaks


# ---- kinds of limits


def whole(low: int, high: int) -> Limit:
    """Return a limit that takes a whole number to the nearest one from `low` to `high`."""

    def limit(value: int) -> int:
        if low <= value <= high:
            return value
        return low if value < low else high

    return limit


def exact_whole(low: int, high: int) -> Limit:
    """Return a limit that refuses a whole number unless it is from `low` to `high`."""

    def limit(value: int) -> int:
        if not low <= value <= high:
            raise Wrong(f"{value:,} is not from {low:,} to {high:,}")
        return value

    return limit


def number(low: float, high: float, otherwise: float | None) -> Limit:
    """Return a limit that takes a number to the nearest one from `low` to `high`, and NaN to `otherwise`.

    An amount that may be unknown is so where it is infinite, too: `otherwise` is None then.
    """

    def limit(value: float) -> float | None:
        if low <= value <= high:
            return value
        if math.isnan(value) or (otherwise is None and math.isinf(value)):
            return otherwise
        return low if value < low else high

    return limit


def _text(most: int, clean: Callable[[str], str]) -> Limit:
    def limit(value: str) -> str:
        if len(value) <= most and value.isprintable():
            return value
        return clean(value[:most])

    return limit


def line(most: int) -> Limit:
    """Return a limit for a text of one line: at most so many characters, and no control character."""
    return _text(most, sanitize.line)


def lines(most: int) -> Limit:
    """Return a limit for a text that may have line breaks and tabs, and no other control character."""
    return _text(most, sanitize.lines)


def log(most: int) -> Limit:
    """Return a limit for what a rank has printed: it may have colours and carriage returns, too."""
    return _text(most, sanitize.log)


def exact(most: int) -> Limit:
    """Return a limit that refuses a text that is longer, or has control characters other than tabs and line breaks."""

    def limit(value: str) -> str:
        if len(value) > most:
            raise Wrong(
                f"a text of {len(value):,} characters (at most {most:,} are allowed)"
            )
        if _CONTROL.search(value):
            raise Wrong("a control character")
        return value

    return limit


def percent_encoded(most: int) -> Limit:
    """Return a limit that refuses what is not percent-encoded, or means more bytes."""

    def limit(value: str) -> str:
        is_long = len(value) > 3 * most or len(unquote_to_bytes(value)) > most
        if is_long or not _PERCENT_ENCODED.fullmatch(value):
            raise Wrong("no percent-encoded text, or a very long one")
        return value

    return limit


def items(most: int, each: Limit | None = None) -> Limit:
    """Return a limit that keeps the first items of a list, `each` within its own limit. Records have limits themselves."""

    def limit(value: tuple[object, ...]) -> tuple[object, ...]:
        kept = value if len(value) <= most else value[:most]
        return kept if each is None else tuple(map(each, kept))

    return limit


def table(most: int, name: Limit, each: Limit | None = None) -> Limit:
    """Return a limit that keeps the first entries of a table, names and values within limits of their own.

    Without `each` the values may be anything: a metric may be infinite, or no number.
    """

    def limit(value: dict[str, object]) -> dict[str, object]:
        kept = value if len(value) <= most else dict(islice(value.items(), most))
        if each is None:
            return {name(key): one for key, one in kept.items()}
        return {name(key): each(one) for key, one in kept.items()}

    return limit


# ---- the limits

NAME = line(1000)  # of a host, a job, a notebook
WORD = line(200)
PATH = line(4096)
TEXT = lines(2000)
RANK = whole(0, KEPT_RANKS)
RANK_OR_NONE = whole(-1, KEPT_RANKS)
NODE = whole(0, MOST_NODES)
COUNT = whole(0, 2**31 - 1)
CODE = whole(-(2**31), 2**31 - 1)  # an exit code, or minus a signal
SIZE = whole(0, _LARGEST)  # bytes
EXACT_SIZE = exact_whole(0, _LARGEST)
PORT = whole(0, 65535)
SECONDS = number(0.0, 1e9, 0.0)
SECONDS_OR_NONE = number(0.0, 1e9, None)
DATE = number(0.0, 1e11, 0.0)  # seconds since 1970
# Nothing near zero, and no eternity: it has to be renewed all the time.
LEASE = number(1.0, 86_400.0, 1.0)
AMOUNT = number(-1e18, 1e18, 0.0)
AMOUNT_OR_NONE = number(-1e18, 1e18, None)
HOSTS = items(MOST_NODES, NAME)
EXACT = exact(1 << 17)  # as long as the kernel allows an argument or a variable to be
EXACT_ITEMS = items(10_000, EXACT)
VARIABLES = table(10_000, EXACT, EXACT)

LIMITS: dict[type, dict[str, Limit]] = {
    # events
    protocol.Hello: {"protocol": COUNT, "job": NAME, "node_rank": NODE, "hostname": NAME, "pid": COUNT},
    protocol.Endpoint: {"state": WORD, "detail": TEXT},
    protocol.Worker: {
        "rank": RANK, "local_rank": RANK, "world_size": COUNT, "restart": COUNT, "pid": COUNT, "round": COUNT,
        "local_world_size": COUNT, "order": items(MOST_NODES, WORD),
    },
    protocol.Progress: {
        "rank": RANK, "restart": COUNT, "at_s": SECONDS, "step": AMOUNT_OR_NONE, "total": AMOUNT_OR_NONE,
        "rows": items(1000), "bars": items(1000), "device": WORD,
    },
    protocol.Picture: {"rank": RANK, "restart": COUNT, "data": line(200_000), "step": AMOUNT_OR_NONE},
    protocol.MetricRow: {"at_s": SECONDS, "step": AMOUNT_OR_NONE, "metrics": table(1000, WORD)},
    protocol.Bar: {
        "id": COUNT, "desc": line(200), "n": AMOUNT, "total": AMOUNT_OR_NONE, "unit": line(200),
        "rate": AMOUNT_OR_NONE, "postfix": line(500),
    },
    protocol.Output: {
        "rank": RANK_OR_NONE, "stream": WORD, "offset": SIZE, "text": log(1 << 18), "skipped_bytes": SIZE,
        "size_bytes": SIZE,
    },
    protocol.Ended: {
        "rank": RANK, "restart": COUNT, "outcome": WORD, "code": CODE, "result_bytes": SIZE, "meaning": lines(40_000),
        "group_use": WORD,
    },
    protocol.Failure: {"type": TEXT, "message": lines(40_000), "traceback": lines(150_000)},
    protocol.EngineEnded: {"code": CODE, "exits": items(4096)},
    protocol.Exit: {"rank": RANK, "local_rank": RANK, "pid": COUNT, "code": CODE},
    protocol.Notice: {"text": TEXT},
    protocol.PeerState: {"node_rank": NODE, "state": WORD},
    protocol.NodeAdded: {"request_id": WORD, "hosts": HOSTS},
    protocol.NodeStopping: {"reason": TEXT, "culprit": whole(-1, MOST_NODES)},
    protocol.Detached: {"why": TEXT},
    protocol.Skipped: {"through": EXACT_SIZE},
    protocol.Stacks: {"request_id": WORD, "rank": RANK, "local_rank": RANK, "threads": items(100), "silence": TEXT},
    protocol.Thread: {"frames": items(100)},
    protocol.Frame: {"file": WORD, "line": COUNT, "function": WORD, "text": WORD},
    protocol.StacksDone: {"request_id": WORD, "ranks": COUNT},
    protocol.Hardware: {
        "cpu_utilization": number(0.0, 1.0, None), "used_bytes": SIZE, "total_bytes": SIZE,
        "received_bytes_s": number(0.0, 1e15, None), "sent_bytes_s": number(0.0, 1e15, None), "gpus": items(256),
    },
    protocol.Gpu: {
        "utilization": number(0.0, 1.0, None), "used_bytes": SIZE, "total_bytes": SIZE,
        "celsius": number(-300.0, 1000.0, None),
    },
    protocol.Final: {"reason": TEXT, "survivors": items(200, line(300))},
    # answers
    protocol.Facts: {
        "executable": PATH, "torch": WORD, "gpus": whole(0, 1024), "cpus": whole(0, KEPT_RANKS), "address": WORD,
        "interface": WORD, "free_port": PORT, "free_bytes": SIZE, "state_dir": PATH, "host_id": WORD,
        "logout": TEXT, "write_error": TEXT,
        "running": items(MOST_JOBS),
    },
    protocol.Route: {"address": WORD, "interface": WORD, "time_s": DATE},
    protocol.FreePort: {"port": PORT},
    protocol.DevicesClaimed: {"others": items(1000)},
    protocol.DeviceClaim: {"device": WORD, "job": NAME, "owner": NAME, "since_s": DATE},
    protocol.MissingBlobs: {"sha256": items(10_000, WORD)},
    protocol.Serving: {"port": PORT, "why": TEXT},
    protocol.ReceivedBytes: {"size_bytes": SIZE},
    protocol.NeedBlob: {"sha256": WORD, "offset": EXACT_SIZE, "why": TEXT},
    protocol.Data: {"size_bytes": EXACT_SIZE, "skipped_bytes": EXACT_SIZE},
    protocol.Jobs: {"jobs": items(MOST_JOBS)},
    protocol.JobListing: {
        "protocol": COUNT, "job": NAME, "node_rank": NODE, "hosts": HOSTS, "began_s": DATE, "reason": TEXT,
        "size_bytes": SIZE, "age_s": SECONDS,
    },
    protocol.JobTerms: {
        "lease_s": LEASE, "owner": NAME, "max_restarts": COUNT, "timeout_s": SECONDS_OR_NONE,
        "hang_timeout_s": SECONDS_OR_NONE, "grace_s": SECONDS, "min_nodes": COUNT, "max_nodes": COUNT, "awaited": HOSTS,
        "call": WORD, "ranks": COUNT, "devices": items(1000, WORD),
    },
    protocol.FoundFiles: {"files": items(1000)},
    protocol.FoundFile: {"path": percent_encoded(PATH_BYTES), "size_bytes": SIZE, "changed_s": DATE},
    protocol.FileBegins: {"size_bytes": EXACT_SIZE, "offset": EXACT_SIZE},
    protocol.FileEnds: {},
    protocol.WorkDirReady: {"path": PATH, "notice": line(2000)},
    protocol.WorkDirs: {"dirs": items(1000)},
    protocol.KeptWorkDir: {
        "name": NAME, "origin": NAME, "size_bytes": SIZE, "age_s": SECONDS, "owners": items(100, NAME),
    },
    protocol.EnvironmentProgress: {"line": WORD, "elapsed_s": SECONDS},
    protocol.EnvironmentReady: {"python": PATH, "elapsed_s": SECONDS, "notes": items(100, line(500))},
    protocol.Removed: {"size_bytes": SIZE},
    protocol.AgentGone: {"error": TEXT},
    protocol.Refused: {"what": WORD, "error": TEXT},
    protocol.Templates: {"templates": items(1000)},
    protocol.Template: {
        "pid": COUNT, "age_s": SECONDS, "idle_s": SECONDS, "size_bytes": SIZE, "packages": items(1000, WORD),
        "refused": items(100, line(400)),
    },
    protocol.AgentForked: {"pid": COUNT},
    # the lead's start message, whose texts go back to hosts as they came
    protocol.LeadStart: {},
    protocol.StartNode: {
        "job": EXACT, "node_rank": NODE, "torchrun": EXACT_ITEMS, "env": VARIABLES, "defaults": VARIABLES, "cwd": EXACT,
        "call": EXACT, "code": EXACT, "endpoint": EXACT, "hosts": EXACT_ITEMS, "side_files": EXACT_ITEMS,
    },
    protocol.Membership: {
        "secret": EXACT, "address": EXACT, "lead_address": EXACT, "port": PORT, "nodes": NODE,
        "lost_after_s": SECONDS,
    },
    protocol.TemplateRequest: {
        "owner": EXACT, "idle_s": SECONDS, "lease_s": LEASE, "env": VARIABLES, "defaults": VARIABLES,
    },
    protocol.WorkDir: {
        "name": EXACT, "origin": EXACT, "manifest": EXACT, "files": COUNT, "size_bytes": SIZE, "inside": EXACT,
        "path": EXACT,
    },
    protocol.JoinTemplate: {
        "sizes": items(10_000, EXACT_SIZE), "nproc_per_node": EXACT, "cwd": EXACT,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstReply:
    """What a host says of itself before our own half runs there; see `distmagic.remote.contact.boot`.

    `python` is the version of its Python. `have`: the bundle is there. `error`: why nothing can be written there.
    """

    python: tuple[int, ...] = ()
    home: str = ""
    have: bool = False
    error: str = ""
    executable: str | None = None
    system: str = ""


LIMITS[FirstReply] = {
    "python": items(3, COUNT), "home": line(500), "error": lines(500), "executable": line(500), "system": WORD,
}  # fmt: skip
DECODER = codec.Decoder(LIMITS)


def first_reply(text: bytes, host: str) -> FirstReply:
    """Return what a host says of itself before our own half runs there. Raises `ProtocolError`."""
    try:
        return DECODER.from_plain(FirstReply, json.loads(text))
    except (ValueError, RecursionError):  # `BadLine` is a ValueError, too
        raise ProtocolError(
            f"{host} sent {text[:80]!r} in place of its first answer."
        ) from None
