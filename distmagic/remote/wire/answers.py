"""What a host answers to the notebook's requests; not in the journal."""

from __future__ import annotations

from dataclasses import dataclass

from distmagic.remote.wire.codec import message
from distmagic.remote.wire.parts import (
    DeviceClaim,
    FoundFile,
    JobListing,
    KeptWorkDir,
    Template,
)
from distmagic.remote.wire.requests import StartNode


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a host is like, gathered in a moment without importing torch. `running` are the jobs that run on it.

    `torch` is its version, None without one. `address` and `interface` are those by which the notebook reached the host.
    `free_port` is a TCP port that was free, `free_bytes` the room on the disk of `state_dir`, where all is kept. `logout`
    says why a run here ends with the connection, and how that can be changed; "" where it does not.
    `host_id` is the same for two names of one machine, and for no two machines.
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
    host_id: str = ""
    logout: str = ""
    write_error: str = ""
    running: tuple[JobListing, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The address of this host, and its interface, from which it dials the peer of the request.

    `time_s` is what its clock shows, in seconds since 1970; 0 where that is not said.
    """

    address: str
    interface: str
    time_s: float = 0.0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class FreePort:
    """A port that nothing uses, neither by TCP nor by UDP. That may change at any time: it is for use at once."""

    port: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesClaimed:
    """The claims of other jobs on the devices, the oldest first; none: this job has the devices now."""

    others: tuple[DeviceClaim, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingBlobs:
    """The blobs of an offer that this host does not have."""

    sha256: tuple[str, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The port at which the host serves blobs; 0 if it can't, and `why`."""

    port: int
    why: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedBytes:
    """So many bytes of the blobs of `ReceiveBlobs` have arrived, of all together."""

    size_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class NeedBlob:
    """Ask the notebook for the rest of a blob, from `offset` on: its bytes follow.

    `why` says why they do not come from the other host, "" where there is none.
    """

    sha256: str
    offset: int = 0
    why: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """`size_bytes` raw bytes follow this line; `skipped_bytes` of the same file come before them and are not sent."""

    size_bytes: int
    skipped_bytes: int = 0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Some of the jobs of which this host has something, the oldest first. After the last of them comes one without any."""

    jobs: tuple[JobListing, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """So many bytes were removed: of a job, or of blobs. For `PruneBlobs` without `removes`: would be."""

    size_bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDirReady:
    """The working directory of the node that is being started; `notice` is what a user should know of it."""

    path: str
    notice: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """Some of the files of `ListFiles`. After the last of them comes one without any."""

    files: tuple[FoundFile, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class FileBegins:
    """A file is `size_bytes` long, and is sent from `offset` on."""

    size_bytes: int
    offset: int = 0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class FileEnds:
    """All of a file was sent. `has_changed`: what was sent is not what the file begins with any more."""

    has_changed: bool = False


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDirs:
    """The working directories that this host keeps, at most a thousand."""

    dirs: tuple[KeptWorkDir, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentProgress:
    """The last line of what makes an environment."""

    line: str
    elapsed_s: float = 0.0


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReady:
    """The Python of an environment that is ready; `was_there`: nothing had to be made. `notes` are for the user."""

    python: str
    was_there: bool
    elapsed_s: float
    notes: tuple[str, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class LeadStart:
    """The message with which the lead of a job was started. The gang channel's secret is in it: it is in no journal."""

    start: StartNode


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AgentGone:
    """The agent of the job that was started or followed is gone; this conversation answers other requests again.

    `error` is the last line of the agent's own log, "" for none: an agent that ends well writes nothing there.
    """

    error: str = ""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request can't be met; `error` says why in words, `what` is the name of the request on the wire."""

    what: str
    error: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """The templates of a notebook on this host. A template greets whoever connects with this, and itself alone in it."""

    templates: tuple[Template, ...] = ()


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class AgentForked:
    """A template has forked an agent with this process id."""

    pid: int
