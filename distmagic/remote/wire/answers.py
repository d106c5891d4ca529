"""What a host answers to the notebook's requests; not in the journal."""

from __future__ import annotations

from dataclasses import dataclass

from distmagic.remote.wire.codec import message
from distmagic.remote.wire.parts import JobListing, Template
from distmagic.remote.wire.requests import StartNode


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a host is like, gathered in a moment without importing torch; `running` are the jobs on it.

    `logout` says why, and how that can be changed, a run here ends with the connection; "" where it does not.
    `write_error`: why nothing can be written to `state_dir`, "" where it can. Jobs that are there can be followed and
    stopped all the same.
    """

    executable: str
    torch: str | None
    gpus: int
    cpus: int
    address: str
    interface: str
    free_port: int
    free_bytes: int
    state_dir: str
    logout: str = ""
    write_error: str = ""
    running: tuple[JobListing, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The address of this host, and its interface, from which the asked-for peer is dialled."""

    address: str
    interface: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingBlobs:
    """The blobs of an offer that this host does not have."""

    sha256: tuple[str, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The port where the host serves; 0 if it can't, and why."""

    port: int
    why: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedBytes:
    """So many bytes of what is to be taken are here."""

    size_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class NeedBlob:
    """Ask the notebook for the rest of a blob, from `offset` on: its bytes follow. `why` not from the other host."""

    sha256: str
    offset: int = 0
    why: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """`size_bytes` raw bytes follow this line."""

    size_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Some of the jobs of which this host has something, the oldest first. After the last of them comes one without any."""

    jobs: tuple[JobListing, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What a job had left, or what was kept of what was sent, is gone: so many bytes of it."""

    size_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class LeadStart:
    """What a lead was told when it was started, the gang channel's secret in it: never in a journal."""

    start: StartNode


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AgentGone:
    """The agent of the job that was started or attached to is gone; requests are answered again.

    `error` is the last line it wrote to its own log, "" for none: an agent that ends well writes nothing there.
    """

    error: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request can't be met, in words that name the cause."""

    what: str
    error: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """What a notebook keeps warm on this host; a template itself greets with the one that it is."""

    templates: tuple[Template, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AgentForked:
    """A template has forked an agent with this process id."""

    pid: int
