"""What the notebook and a host say to each other: JSON Lines, one frozen dataclass a type. Both halves use this file.

A line is `{"t": type, "n": sequence number, ...fields}`. Events of a job are numbered from 1 by the agent's journal;
everything else has n = 0. Unknown types and fields are ignored, so halves of different age understand each other
within one `PROTOCOL`. Binary (bundle, payload, results) follows a line that tells its size, never inside a line.
`tests/golden/wire.jsonl` freezes one line per type.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass

PROTOCOL = 1
MAX_LINE_BYTES = 1 << 20


class WireError(ValueError):
    """A line that is not of this protocol; the text says what is wrong with it."""


_TYPES: dict[str, type] = {}
_NAMES: dict[type, str] = {}

_M = typing.TypeVar("_M")


def _message(cls: type[_M]) -> type[_M]:
    """Enter a class among the types of the wire, under its name in small letters."""
    name = cls.__name__.lower()
    _TYPES[name], _NAMES[cls] = cls, name
    return cls


# ---- parts of messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One progress bar of a rank, of tqdm or of `track`. `id` is unique in the rank; `closed` bars are finished."""

    id: int
    desc: str = ""
    n: float = 0.0
    total: float | None = None
    unit: str = "it"
    rate: float | None = None
    postfix: str = ""
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call of `report` with metrics: seconds since the rank started, the step if told, and the values."""

    at_s: float
    step: float | None = None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception on a rank. `traceback` is ready to show: our own frames are gone, cells carry their number."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How torchrun saw a rank's process end: `code` is negative for a signal."""

    rank: int
    local_rank: int
    pid: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A content-addressed file: SHA-256 in hex, and its size."""

    sha256: str
    size_bytes: int


# ---- host to notebook: events of a job, in the journal


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The agent is up. Always the first event."""

    protocol: int
    job: str
    node_rank: int
    hostname: str
    pid: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """torchrun was started on this node, with this process id."""

    pid: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Whether this node can dial the rendezvous endpoint: "open" (the lead's own), "reached" or "unreached"."""

    state: str
    detail: str = ""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A rank's process is up and about to load the function."""

    rank: int
    local_rank: int
    world_size: int
    restart: int
    pid: int
    device: str = ""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a rank reported since the last line: coalesced, at most about 10 lines a second and rank.

    `step`, `total`: the latest of `report`, None if never told. `rows`: metrics in order, thinned out when a rank
    reports faster than is useful. `bars`: those that changed.
    """

    rank: int
    restart: int
    at_s: float
    step: float | None = None
    total: float | None = None
    rows: tuple[Row, ...] = ()
    bars: tuple[Bar, ...] = ()
    device: str = ""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Text that a rank (or torchrun: rank -1) wrote. `offset` is its place, in bytes, in the log on the host.

    `skipped_bytes` in front of it are in the log but not sent, because they came too fast to be read by anybody.
    The journal keeps `size_bytes` in place of the text, which stands in the log already.
    """

    rank: int
    stream: str
    offset: int
    text: str = ""
    skipped_bytes: int = 0
    size_bytes: int = 0


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank's end: "returned", "raised", "exited" (with `code`) or "signalled" (`code` is minus the signal)."""

    rank: int
    restart: int
    outcome: str
    code: int = 0
    failure: Failure | None = None
    result_bytes: int | None = None
    meaning: str = ""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Engineended:
    """torchrun ended on this node, and what it says of ranks that failed."""

    code: int
    exits: tuple[Exit, ...] = ()


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something a user should know that is no failure: "info" or "warning"."""

    level: str
    text: str


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """The last event: nothing of the job runs on this node any more, but for `survivors` (pid and name, and why).

    `reason`: "done", "stopped", "lease" (nobody renewed it) or an error in words.
    """

    reason: str
    survivors: tuple[str, ...] = ()


# ---- host to notebook: answers, not in the journal


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a host is like, gathered in a moment without importing torch."""

    hostname: str
    system: str
    python: str
    executable: str
    torch: str | None
    gpus: int
    gpu_name: str
    cpus: int
    address: str
    interface: str
    free_port: int
    free_bytes: int
    tqdm: bool
    state_dir: str
    systemd_kills: bool = False


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The address of this host, and its interface, from which the asked-for peer is dialled."""

    address: str
    interface: str


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """The blobs of an offer that this host does not have."""

    sha256: tuple[str, ...] = ()


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """`size_bytes` raw bytes follow this line."""

    size_bytes: int


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The agent of the job that was started or attached to is gone; requests are answered again."""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request can't be met, in words that name the cause."""

    what: str
    error: str


# ---- notebook to host


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask for `Route` to `peer` (an address, "" for none), or for the number of ranks that a word means here."""

    peer: str


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Ask which of these blobs the host wants to be sent."""

    blobs: tuple[Blob, ...] = ()


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the agent of one node. `torchrun` are torchrun's flags, `call` and `code` the payload's blobs.

    `env` replaces variables of the host's own environment, `defaults` only those that it lacks. `endpoint` is
    "address port" of the rendezvous, "" where there is only one node.
    """

    job: str
    node_rank: int
    torchrun: tuple[str, ...]
    env: dict[str, str]
    defaults: dict[str, str]
    cwd: str
    call: str
    code: str
    endpoint: str
    lead: bool
    lease_s: float
    max_restarts: int = 0


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Send the job's events after number `after`, and go on live."""

    job: str
    node_rank: int
    after: int = 0


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Renew the job's lease."""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the job on this node: SIGTERM, and SIGKILL after `grace_s`."""

    grace_s: float
    reason: str = "stopped"


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The reader has all it wants: the agent may go once the job has ended."""


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Ask for a file of a job (a log, a result) from byte `offset` on; `Data` and the bytes, or `Refused`, follow."""

    job: str
    node_rank: int
    name: str
    offset: int = 0


@_message
@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """End what a dead agent of this job left running; `Final` follows."""

    job: str


Message = typing.Any  # one of the classes above


def encode(message: Message, n: int = 0) -> bytes:
    """Return the line of `message`, newline included."""
    line = {"t": _NAMES[type(message)], "n": n, **_plain(message)}
    return json.dumps(line, separators=(",", ":"), allow_nan=True).encode() + b"\n"


def _plain(value: typing.Any) -> typing.Any:
    if is_dataclass(value):
        pairs = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: _plain(v) for f, v in pairs if f.default is MISSING or v != f.default}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def decode(line: bytes) -> tuple[int, Message | None]:
    """Return sequence number and message of a line; None for a type that this half does not know.

    Raises `WireError` for anything that is not of the protocol: no JSON, a missing field, a wrong type.
    """
    if len(line) > MAX_LINE_BYTES:
        raise WireError(f"a line of {len(line)} bytes (at most {MAX_LINE_BYTES} are allowed)")
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:80]!r}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("t"), str) or type(raw.get("n")) is not int:
        raise WireError(f"not a message: {line[:80]!r}")
    kind = _TYPES.get(raw["t"])
    return raw["n"], None if kind is None else _reader(kind)(raw, raw["t"])


_READERS: dict[typing.Any, Callable[[typing.Any, str], typing.Any]] = {}


def _reader(kind: typing.Any) -> Callable[[typing.Any, str], typing.Any]:
    """Return a function (value, where) that checks a plain value and makes a `kind` of it."""
    if kind not in _READERS:
        _READERS[kind] = _make_reader(kind)
    return _READERS[kind]


def _make_reader(kind: typing.Any) -> Callable[[typing.Any, str], typing.Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _dataclass_reader(typing.cast(type, kind))
    if origin is tuple:
        return _list_reader(_reader(args[0]))
    if origin is dict:
        return _dict_reader(_reader(args[1]))
    if origin in (types.UnionType, typing.Union):
        inner = _reader(args[0])
        return lambda value, where: None if value is None else inner(value, where)
    return _scalar_reader(kind)


def _scalar_reader(kind: type) -> Callable[[typing.Any, str], typing.Any]:
    def read(value: typing.Any, where: str) -> typing.Any:
        if kind is str and isinstance(value, str):
            return value if value.isascii() else value.encode("utf-8", "replace").decode()  # no lone surrogates
        if type(value) is kind:
            return value
        try:
            if kind is float and type(value) is int:
                return float(value)
        except OverflowError:
            raise WireError(f"{where}: too large a number") from None
        raise WireError(f"{where}: {type(value).__name__} in place of {kind.__name__}")

    return read


def _list_reader(item: Callable[[typing.Any, str], typing.Any]) -> Callable[[typing.Any, str], typing.Any]:
    def read(value: typing.Any, where: str) -> typing.Any:
        if not isinstance(value, list):
            raise WireError(f"{where}: no list")
        return tuple(item(v, where) for v in value)

    return read


def _dict_reader(item: Callable[[typing.Any, str], typing.Any]) -> Callable[[typing.Any, str], typing.Any]:
    def read(value: typing.Any, where: str) -> typing.Any:
        if not isinstance(value, dict):
            raise WireError(f"{where}: no object")
        return {k: item(v, where) for k, v in value.items()}

    return read


def _dataclass_reader(kind: type) -> Callable[[typing.Any, str], typing.Any]:
    hints = typing.get_type_hints(kind)
    readers = [(f.name, _reader(hints[f.name]), f.default is MISSING) for f in fields(kind)]

    def read(value: typing.Any, where: str) -> typing.Any:
        if not isinstance(value, dict):
            raise WireError(f"{where}: no object")
        found = {}
        for name, reader, required in readers:
            if name in value:
                found[name] = reader(value[name], f"{where}.{name}")
            elif required:
                raise WireError(f"{where}: {name} is missing")
        return kind(**found)

    return read
