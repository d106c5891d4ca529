"""Answers of a host to the notebook's requests. They are not in the journal."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from distmagic.remote.wire.bounds import (
    Amount,
    Date,
    HostPath,
    Paragraph,
    Size,
    Word,
    Words,
)
from distmagic.remote.wire.codec import message
from distmagic.remote.wire.parts import (
    DeviceClaim,
    FoundFile,
    GpuHealth,
    JobListing,
    KeptWorkDir,
    Template,
)
from distmagic.remote.wire.requests import StartNode


@message
class Facts:
    """Facts about a host, gathered quickly and without importing torch."""

    executable: HostPath
    torch: Word | None  # its version, None without torch
    gpus: int
    cpus: int
    address: Word  # by which the notebook reached the host
    interface: Word  # the interface with this address
    free_port: int  # a TCP port that was free
    free_bytes: int  # free space on the disk of `state_dir`
    state_dir: HostPath  # distmagic's directory on the host
    # Equal for two names of one machine, and unique to the machine.
    host_id: Word = ""
    # Why a run ends with the SSH connection, with the cure; "" if it does not.
    logout: Paragraph = ""
    # Why `state_dir` is not writable, "" if it is. Existing jobs can still be followed and stopped.
    write_error: Paragraph = ""
    running: tuple[JobListing, ...] = ()  # the jobs that run on it


@message
class Route:
    """The address and interface of the host on its route to the peer of the request.

    `time_s` is its clock, in seconds since 1970; 0 if not sent.
    """

    address: Word
    interface: Word
    time_s: Date = 0.0


@message
class FreePort:
    """A port that is free for TCP and UDP. Use it at once, because that may change at any time."""

    port: int


@message
class Examined:
    """Data about a host for the doctor, in addition to its `Facts`, read in its log-in
    environment.
    """

    hostname: Word
    # The route to the peer of the request.
    route: Route = Route(address="", interface="")
    # The ports on which it listens, in the order of the request; 0 for one in use by another
    # program.
    ports: tuple[int, ...] = ()
    # The addresses to which the host resolves its own `hostname`, None if unknown.
    name_addresses: Words | None = None
    mtus: dict[Word, int] = field(default_factory=dict)  # by interface
    shm_bytes: int = -1  # size of /dev/shm, -1 without one
    open_files: int = -1  # soft limit, -1 for none
    # Soft limit, -1 for none, or for a process that may ignore it.
    locked_bytes: int = -1
    is_root: bool = False  # whether the user needs no sudo
    # The state of each port that this user can use, in Linux's words.
    infiniband: dict[Word, Word] = field(default_factory=dict)
    # Those that affect collectives and threads.
    variables: dict[Word, Word] = field(default_factory=dict)
    # Versions by name, "" for a missing package.
    packages: dict[Word, Word] = field(default_factory=dict)
    torch_cuda: Word = ""  # torch's CUDA version, "" without CUDA
    driver: Word = ""
    driver_cuda: Word = ""  # the driver's highest CUDA version
    xid: Word = ""  # the last GPU fault in the kernel's log
    nccl: Paragraph = ""  # errors that NCCL reports of a running job of this user
    gpus: tuple[GpuHealth, ...] = ()


@message
class Knocked:
    """The result of connecting to each port, in the order of the request: see
    `distmagic.remote.checkup.doors`.
    """

    answers: Words = ()


@message
class DevicesClaimed:
    """The claims of other jobs on the devices, oldest first; if empty, this job has the devices
    now.
    """

    others: tuple[DeviceClaim, ...] = ()


@message
class MissingBlobs:
    """The blobs of an offer that the host lacks."""

    sha256: Words = ()


@message
class DifferingFiles:
    """The indexes of the files of `CompareFiles` that differ or do not exist."""

    indexes: tuple[int, ...] = ()


@message
class Serving:
    """The port at which the host serves blobs; 0 if it can't, for the reason `why`."""

    port: int
    why: Paragraph = ""


@message
class ReceivedBytes:
    """The number of bytes of all blobs of `ReceiveBlobs` that have arrived."""

    size_bytes: int


@message
class NeedBlob:
    """Requests the rest of a blob from the notebook, from `offset` on; its bytes follow.

    `why` is the reason why the other host does not send them, "" if there is no other host.
    """

    sha256: Word
    offset: Size = 0
    why: Paragraph = ""


@message
class Data:
    """`size_bytes` raw bytes follow this line; the `skipped_bytes` before them in the same file are
    not sent.
    """

    size_bytes: Size
    skipped_bytes: Size = 0


@message
class Jobs:
    """Some of the jobs on this host, oldest first. An empty message marks the end."""

    jobs: tuple[JobListing, ...] = ()


@message
class Removed:
    """The number of removed bytes, of a job or of blobs.

    For `PruneBlobs` without `removes`, the number that could be removed.
    """

    size_bytes: int


@message
class Profiled:
    """The files of a job with traces of a profile so far, and the number of ranks of the node
    without one.
    """

    files: Words = ()
    waiting: int = 0


@message
class WorkDirReady:
    """The working directory of the node that is being started; `notice` is a message for the
    user.
    """

    path: HostPath
    notice: Annotated[str, "line", 2000] = ""


@message
class FoundFiles:
    """Some of the files of `ListFiles`. An empty message marks the end."""

    files: tuple[FoundFile, ...] = ()


@message
class FileBegins:
    """A file has `size_bytes`, and is sent from `offset` on."""

    size_bytes: Size
    offset: Size = 0


@message
class FileEnds:
    """All of a file was sent. `has_changed`: the file changed during the transfer."""

    has_changed: bool = False


@message
class WorkDirs:
    """The working directories on this host, at most a thousand."""

    dirs: tuple[KeptWorkDir, ...] = ()


@message
class EnvironmentProgress:
    """The last line of output of the installer of an environment."""

    line: Word
    elapsed_s: Amount = 0.0


@message
class EnvironmentReady:
    """The Python of an environment that is ready; `was_there`: it existed already."""

    python: HostPath
    was_there: bool
    elapsed_s: Amount


@message
class LeadStart:
    """The message with which the lead of a job was started.

    It contains the secret of the heartbeats, so it is in no journal.
    """

    start: StartNode


@message
class AgentGone:
    """The agent of the started or followed job has ended; this conversation answers other requests
    again.

    `error` is the last line of the agent's own log, "" if empty: an agent that ends without an
    error writes nothing.
    """

    error: Paragraph = ""


@message
class Refused:
    """The request can't be fulfilled; `error` is the reason for the user, `what` the name of the
    request's type.
    """

    what: Word
    error: Paragraph


@message
class Templates:
    """The templates (warm processes with torch loaded) of a notebook on this host.

    A template greets each connection with this message, about itself alone.
    """

    templates: tuple[Template, ...] = ()


@message
class AgentForked:
    """A template has forked an agent with this pid."""

    pid: int
