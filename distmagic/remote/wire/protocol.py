"""All names of the wire: JSON Lines, one frozen dataclass a type. Both halves use this file.

A line is `{"t": type, "n": sequence number, ...fields}`. Events of a job are numbered from 1 by the agent's journal;
everything else has n = 0. Unknown types and fields are ignored, so halves of different age understand each other
within one `PROTOCOL`. Binary (bundle, payload, results) follows a line that tells its size, never inside a line.
The messages stand in requests.py, answers.py and events.py, and what they are made of in parts.py; codec.py writes and
reads them; ranks import events.py and parts.py alone, since making all these classes takes tens of milliseconds.
`tests/golden/wire.jsonl` freezes one line per type.
"""

from __future__ import annotations

from distmagic.remote.wire.answers import (
    AgentForked,
    AgentGone,
    Data,
    DevicesClaimed,
    EnvironmentProgress,
    EnvironmentReady,
    Facts,
    FileBegins,
    FileEnds,
    FoundFiles,
    FreePort,
    Jobs,
    LeadStart,
    MissingBlobs,
    NeedBlob,
    ReceivedBytes,
    Refused,
    Removed,
    Route,
    Serving,
    Templates,
    WorkDirReady,
    WorkDirs,
)
from distmagic.remote.wire.codec import (
    MAX_LINE_BYTES,
    BadLine,
    Message,
    decode,
    encode,
    name_of,
)
from distmagic.remote.wire.events import (
    Detached,
    Ended,
    Endpoint,
    EngineEnded,
    Final,
    Hardware,
    Hello,
    NodeAdded,
    NodeStopping,
    Notice,
    Output,
    PeerState,
    Picture,
    Progress,
    Skipped,
    Stacks,
    StacksDone,
    Worker,
)
from distmagic.remote.wire.parts import (
    Bar,
    Blob,
    DeviceClaim,
    Exit,
    Failure,
    Folder,
    FoundFile,
    Frame,
    Gpu,
    JobListing,
    JobTerms,
    JoinTemplate,
    KeptWorkDir,
    Membership,
    MetricRow,
    Secret,
    Template,
    Thread,
    WorkDir,
)
from distmagic.remote.wire.requests import (
    AddNode,
    CheckBlobs,
    ClaimDevices,
    DetachJob,
    DumpStacks,
    EndTemplates,
    FollowJob,
    ForkAgent,
    GetBlob,
    GetFacts,
    GetFile,
    GetFreePort,
    GetRoute,
    GetStart,
    ListFiles,
    ListJobs,
    ListTemplates,
    ListWorkDirs,
    OfferBlobs,
    PruneBlobs,
    ReadFile,
    ReceiveBlobs,
    RemoveJob,
    RemoveWorkDir,
    RenewLease,
    ResultTaken,
    ServeBlobs,
    StartNode,
    StopNode,
    SweepJob,
    SyncEnvironment,
    TemplateRequest,
    WriteFile,
)

PROTOCOL = 2


def another_version(job: str, number: int) -> str:
    """Return why a job can't be followed or ended from here, and what to do: its agent speaks protocol `number`."""
    return (
        f"job {job} was begun by another version of distmagic, which speaks protocol {number} where this one speaks "
        f"protocol {PROTOCOL}. Follow it, or stop it, with the version that began it"
    )
