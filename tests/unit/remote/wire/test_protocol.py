"""The wire: one frozen line a type, what is ignored, and that any bytes are a message or a `BadLine`."""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.wire import codec
from distmagic.remote.wire import protocol as p
from tests import REPOSITORY
from tests.builders.messages import SHA, START, TERMS

GOLDEN = REPOSITORY / "tests" / "golden" / "wire.jsonl"
BLOB = p.Blob(sha256=SHA, size_bytes=7)
SECRET = p.Secret(
    certificate="-----BEGIN CERTIFICATE-----", key="-----BEGIN PRIVATE KEY-----"
)
LISTED = p.JobListing(
    protocol=2, job="j-1", node_rank=1, hosts=("gpu-a", "gpu-b"), began_s=1.5, terms=TERMS, is_running=True,
    is_detached=True, reason="done", size_bytes=7, age_s=90.0, began_ago_s=95.0, reported=p.MetricRow(at_s=2.5, metrics={"loss": 0.5}),
)  # fmt: skip
WORK = p.WorkDir(
    name="train", origin="here:/nb/train.ipynb", manifest=SHA, files=3, size_bytes=7, inside="nb", is_fresh=True,
    path="/home/me/.distmagic/work/train",
)  # fmt: skip
FOLDER = p.Folder(job="j-1", node_rank=1, path="in")
KEPT = p.KeptWorkDir(
    name="train", origin="here:/nb/train.ipynb", size_bytes=7, age_s=90.0, is_used=True,
    owners=("me@here:/nb/train.ipynb",),
)  # fmt: skip
WARM = p.TemplateRequest(
    owner="ab12",
    idle_s=900.0,
    lease_s=60.0,
    env={"A": "1"},
    defaults={"OMP_NUM_THREADS": "1"},
    preload=("lightning",),
)
MESSAGES = (
    (1, p.Hello(protocol=2, job="j-1", node_rank=1, hostname="gpu-b", pid=71)),
    (2, p.Endpoint(state="unreached", detail="Connection refused")),
    (
        3,
        p.Worker(
            rank=3,
            local_rank=1,
            world_size=4,
            restart=1,
            pid=73,
            round=2,
            local_world_size=2,
        ),
    ),
    (
        4,
        p.Progress(
            rank=3,
            restart=1,
            at_s=1.5,
            step=10.0,
            total=100.0,
            rows=(
                p.MetricRow(
                    at_s=1.25, step=10.0, metrics={"loss": 0.5, "bad": math.inf}
                ),
                p.MetricRow(at_s=1.5, metrics={}),
            ),
            bars=(
                p.Bar(
                    id=1,
                    desc="épo",
                    n=2.0,
                    total=3.0,
                    unit="b",
                    rate=4.0,
                    postfix="x",
                    closed=True,
                ),
                p.Bar(id=2),
            ),
            device="cuda:1",
            is_printed=True,
        ),
    ),
    (5, p.Output(rank=-1, stream="stderr", offset=10, text="é\n", skipped_bytes=5, size_bytes=3)),
    (
        6,
        p.Ended(
            rank=3,
            restart=1,
            outcome="raised",
            code=1,
            failure=p.Failure(type="ValueError", message="no", traceback="Traceback\n"),
            result_bytes=0,
            meaning="m",
            group_use="used",
        ),
    ),
    (13, p.Picture(rank=3, restart=1, data="iVBORw0KGgo=", step=2.5)),
    (7, p.EngineEnded(code=1, exits=(p.Exit(rank=3, local_rank=1, pid=73, code=-9),))),
    (8, p.Notice(text="the disk is full")),
    (9, p.Skipped(through=9)),
    (
        11,
        p.Stacks(
            request_id="a1",
            rank=3,
            local_rank=1,
            silence="its process is stopped",
            threads=(
                p.Thread(
                    frames=(
                        p.Frame(
                            file="Cell In[3]",
                            line=9,
                            function="f",
                            mine=True,
                            text="g()",
                        ),
                    )
                ),
            ),
            calls=(
                p.GroupRecord(
                    name="pairs",
                    ranks="0-1",
                    backend="gloo",
                    waits_s=2.5,
                    calls=(
                        p.CallRecord(number=3, name="all_reduce", sizes="[4]", is_over=True),
                    ),
                ),
            ),
        ),
    ),
    (12, p.StacksDone(request_id="a1", ranks=2)),
    (
        0,
        p.Hardware(
            cpu_utilization=0.25,
            used_bytes=7,
            total_bytes=70,
            received_bytes_s=1.5,
            sent_bytes_s=2.5,
            gpus=(p.Gpu(utilization=0.5, used_bytes=8, total_bytes=80, celsius=71.0),),
        ),
    ),
    (10, p.Final(reason="done", survivors=("python (pid 73, state D)",))),
    (
        0,
        p.Facts(
            executable="/usr/bin/python3",
            torch="2.13.0",
            gpus=2,
            cpus=16,
            address="10.0.0.2",
            interface="eth0",
            free_port=40001,
            host_id="0badcafe",
            free_bytes=1 << 40,
            state_dir="/home/me/.distmagic",
            logout="systemd ends a run here",
            write_error="No space left on device",
            running=(LISTED,),
        ),
    ),
    (0, p.Route(address="10.0.0.2", interface="eth0", time_s=1763985600.5)),
    (0, p.MissingBlobs(sha256=(SHA,))),
    (0, p.Serving(port=40002, why="no")),
    (0, p.NeedBlob(sha256=SHA, offset=5, why="Connection refused")),
    (0, p.ReceivedBytes(size_bytes=7)),
    (0, p.Data(size_bytes=7, skipped_bytes=3)),
    (0, p.AgentGone(error="MemoryError")),
    (0, p.Refused(what="start_node", error="no such directory")),
    (0, p.GetRoute(peer="10.0.0.1")),
    (0, p.OfferBlobs(blobs=(BLOB,))),
    (0, p.CheckBlobs(blobs=(BLOB,))),
    (0, p.ServeBlobs(blobs=(BLOB,), has_them=True, address="10.0.0.2", secret=SECRET)),
    (0, p.ReceiveBlobs(blobs=(BLOB,), address="10.0.0.2", port=40002, secret=SECRET)),
    (
        0,
        p.StartNode(
            job="j-1",
            node_rank=1,
            torchrun=("--nnodes=2",),
            env={"A": "1"},
            defaults={"B": "2"},
            cwd="~",
            call=SHA,
            code=SHA,
            endpoint="10.0.0.1 29500",
            hosts=("gpu-a", "gpu-b"),
            lead=False,
            terms=TERMS,
            membership=p.Membership(
                secret="00ff",
                address="10.0.0.2",
                lead_address="10.0.0.1",
                port=29500,
                nodes=2,
                lost_after_s=10.0,
            ),
            warm=WARM,
            side_files=(SHA,),
            join_template=p.JoinTemplate(
                sizes=(7, 8), nproc_per_node="gpu", cwd="~/run", work=WORK
            ),
            work=WORK,
        ),
    ),
    (0, p.ProfileRanks(job="j-0", node_rank=1, profile="5f0c", steps=3)),
    (0, p.Profiled(files=("rank0.7.5f0c.json.gz",), waiting=1)),
    (0, p.WorkDirReady(path="/home/me/.distmagic/work/train", notice="job j-0 still runs")),
    (0, p.ListFiles(folder=FOLDER, pattern="*.pt")),
    (0, p.FoundFiles(files=(p.FoundFile(path="a.pt", size_bytes=7, changed_s=1.5),))),
    (0, p.ReadFile(folder=FOLDER, path="a.pt", size_bytes=5, sha256=SHA)),
    (0, p.WriteFile(folder=FOLDER, path="a.pt", size_bytes=5, sha256=SHA, is_executable=True)),
    (0, p.FileBegins(size_bytes=7, offset=5)),
    (0, p.FileEnds(has_changed=True)),
    (0, p.PlaceFiles(folder=FOLDER, files=(p.PlacedFile(path="a.pt", blob=p.Blob(sha256=SHA, size_bytes=5), is_executable=True),), origin="nb", owner="nb")),
    (0, p.ListWorkDirs()),
    (0, p.WorkDirs(dirs=(KEPT,))),
    (0, p.RemoveWorkDir(name="train")),
    (0, p.FollowJob(job="j-1", node_rank=1, after=7, live=True)),
    (0, p.RenewLease()),
    (0, p.DumpStacks(request_id="a1", quietly=True)),
    (0, p.StopNode(grace_s=3.0, reason="failed")),
    (0, p.GetFile(job="j-1", node_rank=1, name="rank3.result", offset=5, most_bytes=4)),
    (0, p.ResultTaken(job="j-1", node_rank=1, name="rank3.result")),
    (0, p.SweepJob(job="j-1", node_rank=1)),
    (0, p.ListJobs(job="j-1")),
    (0, p.Jobs(jobs=(LISTED,))),
    (0, p.RemoveJob(job="j-1", owner="me@here:/nb/train.ipynb")),
    (0, p.Removed(size_bytes=7)),
    (0, p.PruneBlobs(removes=True, owner="me@here:/nb/train.ipynb")),
    (11, p.PeerState(node_rank=1, state="joined")),
    (12, p.NodeStopping(reason="lost", culprit=1)),
    (13, p.Detached(why="asked")),
    (0, p.DetachJob()),
    (0, WARM),
    (0, p.GetFacts()),
    (0, p.ListTemplates(owner="ab12")),
    (0, p.EndTemplates(owner="ab12")),
    (
        0,
        p.Templates(
            templates=(
                p.Template(
                    pid=70,
                    age_s=9.5,
                    idle_s=1.5,
                    size_bytes=7,
                    packages=("lightning",),
                    refused=("cupy (uses a GPU)",),
                ),
            )
        ),
    ),
    (0, p.ForkAgent(start=START, env={"A": "1"})),
    (0, p.AgentForked(pid=71)),
    (14, p.NodeAdded(request_id="a1", hosts=("gpu-a", "gpu-b", "gpu-c"))),
    (0, p.AddNode(host="gpu-c", request_id="a1")),
    (0, p.GetStart()),
    (0, p.LeadStart(start=START)),
    (0, p.GetBlob(sha256=SHA)),
    (0, p.GetFreePort(address="10.0.0.2")),
    (0, p.FreePort(port=40001)),
    (0, p.Examine(packages=("numpy",), peer="10.0.0.2", ports=(29500, 0), secret="00ff")),
    (0, p.Knock(doors=(p.HostDoor(address="10.0.0.2", port=40001, secret="00ff"),))),
    (0, p.Knocked(answers=("open",))),
    (
        0,
        p.Examined(
            hostname="gpu-a",
            route=p.Route(address="10.0.0.1", interface="eth0", time_s=1.5),
            ports=(0, 40001),
            name_addresses=("10.0.0.1",),
            mtus={"eth0": 1500},
            shm_bytes=7,
            open_files=1024,
            locked_bytes=8,
            infiniband={"mlx5_0/1": "4: ACTIVE"},
            variables={"NCCL_DEBUG": "INFO"},
            packages={"numpy": "2.1.0"},
            torch_cuda="12.8",
            driver="570.1",
            driver_cuda="12.8",
            xid="79 (PCI:0000:01:00)",
            gpus=(
                p.GpuHealth(
                    model="H100",
                    used_bytes=7,
                    total_bytes=8,
                    holders=("71 python",),
                    ecc_errors=1,
                    slowed_by="heat",
                ),
            ),
        ),
    ),
    (0, p.ClaimDevices(job="j-1", devices=("0", "1"))),
    (0, p.DevicesClaimed(others=(p.DeviceClaim(device="0", job="j-0", owner="nb", since_s=1.5),))),
    (
        0,
        p.SyncEnvironment(
            name="train",
            requirements=("torch==2.9.0",),
            lock={"pylock.toml": "x"},
            owner="me@here:/nb/train.ipynb",
        ),
    ),
    (0, p.EnvironmentProgress(line="Downloading torch", elapsed_s=1.5)),
    (
        0,
        p.EnvironmentReady(
            python="/home/me/.distmagic/envs/.0badcafe/bin/python",
            was_there=True,
            elapsed_s=1.5,
            notes=("torch is another one",),
        ),
    ),
    (9, p.Paused(rank=1, restart=0, prompt=3, file="Cell In[3]", line=4, asks="(Pdb) ")),
    (10, p.Resumed(rank=1, restart=0, prompt=3)),
    (0, p.RankInput(rank=1, prompt=3, text="p x", is_end=True)),
    (0, p.RunCell(cell=2, ranks=(0, 3), data="AA==", blob=SHA, anew=True)),
    (0, p.ParkAtStep(cell=2, ranks=(0, 3))),
    (0, p.StopAtStep(cell=2, ranks=(0, 3), kind="step", step=1204)),
    (0, p.InterruptCell(cell=2, ranks=(0, 3), failed=1)),
    (11, p.CellBegan(cell=2, rank=3)),
    (12, p.StepCount(cell=2, rank=3, steps=1203, iterations=9, idle_s=0.5, step_s=0.25)),
    (
        12,
        p.CellEnded(
            cell=2,
            rank=3,
            ended=p.Ended(rank=3, restart=0, outcome="returned", result_bytes=1),
            shown="7",
            value="AA==",
            names=("model",),
            groups=(p.GroupCalls(name="0", size=4, calls=7, last="broadcast"),),
            holders=("model (DistributedDataParallel)",),
            is_broken=True,
        ),
    ),
)  # fmt: skip


def golden() -> list[bytes]:
    return GOLDEN.read_bytes().splitlines(keepends=True)


def test_the_golden_file_has_one_line_a_type():
    assert [json.loads(line)["t"] for line in golden()] == [
        codec._NAMES[type(m)] for _, m in MESSAGES
    ]
    assert {type(message) for _, message in MESSAGES} == set(codec._NAMES)


@pytest.mark.parametrize(
    "index", range(len(MESSAGES)), ids=[type(m).__name__ for _, m in MESSAGES]
)
def test_the_wire_is_frozen(index):
    """A line that differs here is another protocol: hosts and notebooks of different age would not understand it."""
    n, message = MESSAGES[index]
    assert p.encode(message, n) == golden()[index]
    assert p.decode(golden()[index]) == (n, message)
    assert p.decode(golden()[index].rstrip()) == (n, message)


def test_every_field_is_in_the_golden_file():
    """A field at its default is not sent; an example that leaves one out would not freeze its name."""
    for _, message in MESSAGES:
        line = json.loads(p.encode(message))
        assert set(line) == {"t", "n", *(field.name for field in fields(message))}


@pytest.mark.parametrize("line", golden(), ids=lambda line: json.loads(line)["t"])
def test_unknown_fields_are_ignored(line):
    more = json.dumps({**json.loads(line), "colour": {"deep": [1]}}).encode()
    assert p.decode(more) == p.decode(line)


def test_unknown_types_are_none_with_their_number():
    assert p.decode(b'{"t":"teleport","n":7,"to":"mars"}') == (7, None)


def test_fields_at_their_default_are_left_out():
    assert (
        p.encode(p.Progress(rank=0, restart=0, at_s=1.0))
        == b'{"t":"progress","n":0,"rank":0,"restart":0,"at_s":1.0}\n'
    )


def test_a_line_is_one_line_of_ascii():
    line = p.encode(p.Notice(text="a\nb\r\u2028é\0"))
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert b"\r" not in line


def test_a_private_key_is_not_shown():
    assert "PRIVATE" not in repr(
        p.ServeBlobs(blobs=(BLOB,), address="10.0.0.2", secret=SECRET)
    )


def test_numbers_that_are_no_numbers_travel():
    row = p.MetricRow(at_s=1.0, metrics={"a": math.nan, "b": -math.inf})
    _, event = p.decode(p.encode(p.Progress(rank=0, restart=0, at_s=1.0, rows=(row,))))
    assert math.isnan(event.rows[0].metrics["a"])
    assert event.rows[0].metrics["b"] == -math.inf


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "not JSON: b''"),
        (b"Last login: today", "not JSON: b'Last login: today'"),
        (b'{"t":"data","n":0,"size_bytes":7', 'not JSON: b\'{"t":"data","n":0,"size_bytes":7\''),
        (b"[" * 100_000, f"not JSON: {b'[' * 80!r}"),
        (b"\xff\xfe", r"not JSON: b'\xff\xfe'"),
        (b"[1]", "not a message: b'[1]'"),
        (b'{"t":1,"n":0}', 'not a message: b\'{"t":1,"n":0}\''),
        (b'{"t":"agent_gone"}', 'not a message: b\'{"t":"agent_gone"}\''),
        (b'{"t":"agent_gone","n":true}', 'not a message: b\'{"t":"agent_gone","n":true}\''),
        (b'{"t":"agent_gone","n":1.0}', 'not a message: b\'{"t":"agent_gone","n":1.0}\''),
        (b'{"t":"data","n":0}', "data: size_bytes is missing"),
        (b'{"t":"data","n":0,"size_bytes":true}', "data.size_bytes: bool instead of int"),
        (b'{"t":"missing_blobs","n":0,"sha256":"x"}', "missing_blobs.sha256: no list"),
        (b'{"t":"offer_blobs","n":0,"blobs":[1]}', "offer_blobs.blobs: no object"),
        (b'{"t":"offer_blobs","n":0,"blobs":[{"sha256":"x"}]}', "offer_blobs.blobs: size_bytes is missing"),
        (b'{"t":"ended","n":0,"rank":0,"restart":0,"outcome":"raised","failure":1}', "ended.failure: no object"),
        (
            b" " * (p.MAX_LINE_BYTES + 1),
            f"a line of {p.MAX_LINE_BYTES + 1} bytes (at most {p.MAX_LINE_BYTES} are allowed)",
        ),
    ],
    ids=lambda value: repr(value[:24]),
)  # fmt: skip
def test_what_is_not_of_the_protocol(line, message):
    with pytest.raises(p.BadLine) as caught:
        p.decode(line)
    assert str(caught.value) == message


def a(kind: object) -> st.SearchStrategy[object]:
    """Return a strategy for values of a field's type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        given_ = {f.name: a(hints[f.name]) for f in fields(kind)}
        optional = {f.name for f in fields(kind) if f.default is not MISSING}
        required = {k: v for k, v in given_.items() if k not in optional}
        return st.fixed_dictionaries(
            required, optional={k: given_[k] for k in optional}
        ).map(lambda kw: kind(**kw))
    if origin is tuple:
        return st.lists(a(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(TEXT, a(args[1]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.none() | a(args[0])
    return SCALARS[kind]


TEXT = st.text(max_size=20)
SCALARS = {
    str: TEXT,
    int: st.integers(-(2**63), 2**63),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
}
ANY_MESSAGE = st.one_of([a(kind) for kind in codec._NAMES])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
    ),
    max_leaves=8,
)


@given(ANY_MESSAGE, st.integers(0, 2**63))
def test_round_trip(message, n):
    line = p.encode(message, n)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert p.decode(line) == (n, message)


@given(st.binary(max_size=200))
def test_any_bytes(line):
    decode_or_wire_error(line)


@given(st.sampled_from(range(len(MESSAGES))), st.data())
def test_any_damage_of_a_line(index, data):
    line = golden()[index]
    at = data.draw(st.integers(0, len(line)))
    decode_or_wire_error(line[:at])
    decode_or_wire_error(line[:at] + data.draw(st.binary(max_size=3)) + line[at + 1 :])


@given(st.sampled_from(range(len(MESSAGES))), st.data())
def test_any_json_in_any_field(index, data):
    line = json.loads(golden()[index])
    line[data.draw(st.sampled_from(sorted(line)))] = data.draw(JSON)
    decode_or_wire_error(json.dumps(line).encode())


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"1" * 400),
        pytest.param(b"-" + b"9" * 4000),
        b"[" * 900 + b"]" * 900,
        b'{"a":' * 400 + b"1" + b"}" * 400,
    ],
)  # fmt: skip
def test_numbers_beyond_all_bounds_and_nests(value):
    for name in (b"at_s", b"step", b"rank", b"device", b"rows"):
        decode_or_wire_error(
            b'{"t":"progress","n":1,"rank":0,"restart":0,"at_s":1,"'
            + name
            + b'":'
            + value
            + b"}"
        )


def test_half_characters_of_utf16_become_question_marks():
    """A file name that is not UTF-8 in an exception's message would break every screen it is shown on."""
    _, message = p.decode(b'{"t":"notice","n":1,"level":"info","text":"a\\udcffb"}')
    assert message.text == "a?b"


def decode_or_wire_error(line: bytes) -> None:
    try:
        n, message = p.decode(line)
    except p.BadLine:
        return
    assert type(n) is int
    assert message is None or type(message) in codec._NAMES
