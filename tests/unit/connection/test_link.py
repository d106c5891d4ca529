"""One host's conversation, played by a process that is a script of bytes: what is asked, and how it can go wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distmagic.connection import link as link_module
from distmagic.connection import opening
from distmagic.connection.link import Link
from distmagic.connection.opening import open_link
from distmagic.connection.requests import blob_requests, host_requests, job_requests
from distmagic.errors import (
    ConnectionLost,
    DistmagicError,
    PreflightError,
    ProtocolError,
    Unreachable,
)
from distmagic.payload.blobs import LocalBlob
from distmagic.remote.contact import boot
from distmagic.remote.wire import protocol as p
from distmagic.request.access import Access
from distmagic.request.command_prefix import NO_ENVIRONMENT
from distmagic.request.hosts import Host, Source
from distmagic.transports.time_limits import TimeLimit
from tests.builders.links import HOST, FakeProcess, FakeTransport, lines, reply
from tests.builders.messages import START
from tests.builders.plans import FACTS

EVENTS = (
    p.Hello(protocol=p.PROTOCOL, job="j", node_rank=0, hostname="a", pid=7),
    p.Worker(rank=0, local_rank=0, world_size=1, restart=0, pid=8),
    p.Final(reason="done"),
)


@pytest.mark.parametrize(("needs_answers", "answers"), [(True, 3), (False, 0)])
def test_events_that_come_by_srun_are_answered_until_the_last(needs_answers, answers):
    """Each is held back until an answer to the one before; the last one is followed by none."""
    source = Source(name="slurm", needs_answers=needs_answers)
    pieces = [p.encode(event, n) for n, event in enumerate(EVENTS, 1)]
    process = FakeProcess(*pieces, lines(p.AgentGone()), hang=True)
    link = Link(replace(HOST, allocation=source), process)
    link.attach(p.FollowJob(job="j", node_rank=0))
    process.written = b""
    assert [event for _, event in link.events()] == list(EVENTS)
    assert process.written == b"\n" * answers
    process.pieces.append(lines(FACTS))
    process.written = b""
    link.query(p.GetFacts(), p.Facts)
    assert process.written == lines(p.GetFacts()), "the bytes of a file may follow"


def by_srun(*pieces: bytes) -> tuple[Link, FakeProcess]:
    process = FakeProcess(*pieces, hang=True)
    source = Source(name="slurm", needs_answers=True)
    return Link(replace(HOST, allocation=source), process), process


def test_a_host_that_sends_a_file_is_answered_no_more_often_than_its_pipe_takes():
    """It reads nothing meanwhile, so a full pipe would block both ends for good."""
    pieces = [b"x"] * 3000
    link, process = by_srun(lines(FACTS), *pieces)
    link.query(p.GetFacts(), p.Facts)
    process.written = b""
    taken = bytearray()
    link.take(3000, taken.extend)
    assert len(taken) == 3000
    assert process.written == b"\n" * link_module._MOST_ANSWERS


def test_a_host_that_refused_to_start_is_sent_no_empty_line_before_a_file():
    refused = lines(p.Refused(what="start_node", error="no room"))
    wanted = lines(p.MissingBlobs(sha256=("b" * 64,)))
    link, process = by_srun(refused, wanted[:9], wanted[9:])
    with pytest.raises(PreflightError):
        link.start(START)
    process.written = b""
    link.query(p.OfferBlobs(blobs=()), p.MissingBlobs)
    assert process.written == lines(p.OfferBlobs(blobs=()))


@pytest.fixture
def bundle(tmp_path) -> LocalBlob:
    path = tmp_path / "bundle"
    path.write_bytes(b"the bundle")
    return LocalBlob(blob=p.Blob(sha256="ab" * 32, size_bytes=10), path=path)


def opened(process: FakeProcess, bundle: LocalBlob) -> Link:
    return open_link(HOST, FakeTransport(process), "python3", bundle)


def talking(*pieces: bytes, **more: object) -> tuple[Link, FakeProcess]:
    """Return a link that is open, and its process."""
    process = FakeProcess(*pieces, **more)
    return Link(HOST, process), process


def refusal(process: FakeProcess, bundle: LocalBlob) -> DistmagicError:
    with pytest.raises(DistmagicError) as caught:
        opened(process, bundle)
    assert process.is_closed.is_set()
    return caught.value


# ---- opening


def test_a_host_that_has_the_bundle(bundle):
    process = FakeProcess(reply(), lines(FACTS))
    transport = FakeTransport(process)
    link = open_link(HOST, transport, "/opt/python", bundle)
    assert link.facts == FACTS
    assert transport.argv == ("/opt/python", "-u", "-c", boot.BOOTSTRAP)
    assert process.written == boot.FIRST + boot.program("ab" * 32) + b"0\n"
    assert not process.is_closed.is_set()


def test_a_host_that_lacks_the_bundle_is_sent_it(bundle):
    process = FakeProcess(reply(have=False), lines(FACTS))
    opened(process, bundle)
    assert process.written.endswith(b"\n10\nthe bundle")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.integers(1, 40), max_size=20))
def test_banners_in_any_cutting(bundle, cuts):
    text = b"Welcome!\r\n\r\nLast login: \xff\xfe\nno newline" + reply() + lines(FACTS)
    pieces = []
    for size in cuts:
        pieces.append(text[:size])
        text = text[size:]
    assert opened(FakeProcess(*pieces, text), bundle).facts == FACTS


def test_a_shell_that_prints_without_end(bundle, golden):
    error = refusal(FakeProcess(*[b"spam and eggs\n" * 4000] * 40), bundle)
    golden(error)
    error = refusal(FakeProcess(*[b"spam" * 20_000] * 40), bundle)
    golden(error)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (127, "bash: python3: command not found"),
        (127, ""),
        (126, ""),
        (1, "fish: Unknown command: python3\nnot found"),
    ],
)
def test_no_python(bundle, code, said, golden):
    error = refusal(FakeProcess(b"banner\n", code=code, stderr=said), bundle)
    assert isinstance(error, PreflightError)
    golden(error)


def test_an_environment_that_is_not_there(bundle, golden):
    said = f"Welcome!\n{NO_ENVIRONMENT} train /home/me/train /opt/conda/envs/train\n"
    process = FakeProcess(code=127, stderr=said)
    with golden.raises(PreflightError):
        open_link(HOST, FakeTransport(process), "env:train", bundle)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (127, "bash: line 1: exec: apptainer: not found"),
        (1, "apptainer: Command not found."),
        (255, "FATAL: could not open image /home/me/a.sif: no such file or directory"),
    ],
)
def test_a_program_or_an_image_around_python_that_is_not_there(
    bundle, code, said, golden
):
    process = FakeProcess(code=code, stderr=said)
    prefix = "apptainer exec a.sif"
    with golden.raises(PreflightError):
        open_link(
            HOST, FakeTransport(process), "python3", bundle, Access(exec_prefix=prefix)
        )


def test_a_command_to_try_has_all_that_was_typed(bundle):
    host = Host(name="gpu-a", user="me", port=2222)
    way = Access(ssh_config="/home/my files/ssh", ssh_command="ssh -J ops@bastion")
    process = FakeProcess(code=1, stderr="no module")
    with pytest.raises(PreflightError) as caught:
        open_link(host, FakeTransport(process), "python3", bundle, way)
    assert caught.value.hint == (
        "Try by hand: ssh -o ProxyJump=ops@bastion -F '/home/my files/ssh' -p 2222 me@gpu-a python3 -m site"
    )


def test_a_setup_that_fails_on_a_host(bundle, golden):
    said = "bash: module: command not found\n"
    error = refusal(FakeProcess(code=97, stderr=said), bundle)
    assert isinstance(error, PreflightError)
    golden(error)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_python_that_ends_at_once(bundle, deaf, golden):
    error = refusal(
        FakeProcess(code=-6, stderr="Fatal Python error: init\n", deaf=deaf), bundle
    )
    assert isinstance(error, PreflightError)
    golden(error)


@pytest.mark.parametrize(
    ("said", "code", "stderr"),
    [
        (b"banner\n" + boot.SHELL, 0, ""),  # exec dash
        (b"banner\n", 0, "Agent pid 7"),  # exit
        (b"", 1, ""),  # set -e
        (boot.PYTHON, 0, ""),  # exec </dev/null
    ],
)
def test_start_up_files_that_are_in_the_way(bundle, said, code, stderr, golden):
    error = refusal(FakeProcess(said + b"\n", code=code, stderr=stderr), bundle)
    assert isinstance(error, PreflightError)
    golden(error)


class Shells(FakeTransport):
    """A host whose first process hangs, and whose next one, of the look at its shell, is `look`."""

    def __init__(self, first: FakeProcess, look: FakeProcess) -> None:
        super().__init__(first)
        self.processes = [first, look]

    def start(self, argv: tuple[str, ...]) -> FakeProcess:
        self.argv = argv
        return self.processes.pop(0)


def test_a_log_in_shell_that_hangs_is_looked_at(bundle, golden, monkeypatch):
    monkeypatch.setattr(opening, "SHELL_S", 0.01)
    look = FakeProcess(b"banner\n", code=0)
    shells = Shells(FakeProcess(hang=True), look)
    with pytest.raises(PreflightError) as caught:
        open_link(HOST, shells, "python3", bundle)
    assert shells.argv == ("cat",)
    assert look.written.splitlines()[-1] == b"distmagic-word"
    assert not look.has_stdin
    golden(caught.value)


@pytest.mark.parametrize(
    ("said", "code"),
    [(b"distmagic-word\n", 0), (b"", None)],
    ids=["Python is slow", "the connection is lost"],
)
def test_who_is_slow_behind_a_log_in_shell_is_waited_for(
    bundle, said, code, monkeypatch
):
    monkeypatch.setattr(opening, "SHELL_S", 0.01)
    look = FakeProcess(said, code=code)

    class Slow(FakeProcess):
        def read(self, max_bytes: int = 65536) -> bytes:
            assert look.is_closed.wait(60)
            return super().read(max_bytes)

    slow = Slow(boot.PYTHON + b"\n" + reply(), lines(FACTS))
    assert open_link(HOST, Shells(slow, look), "python3", bundle).facts == FACTS
    assert not slow.is_closed.is_set()


def test_a_connection_that_ends_before_python_speaks(bundle, golden):
    error = refusal(
        FakeProcess(code=None, stderr="client_loop: send disconnect\n"), bundle
    )
    assert isinstance(error, ConnectionLost)
    golden(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"python": [2, 7, 18]},
        {"python": [], "executable": None},
        {"python": [3, 6, 0]},
        {"system": "darwin"},
        {"error": "[Errno 30] Read-only file system: '/home/me/.distmagic'"},
    ],
    ids=str,
)
def test_a_host_that_will_not_do(bundle, changes, golden):
    error = refusal(FakeProcess(reply(**changes), hang=True), bundle)
    assert isinstance(error, PreflightError)
    golden(error)


@pytest.mark.parametrize(
    "text",
    [b"[1]", b"{", b"null", b"[" * 100_000, b'{"python": ["x", null]}'],
    ids=["a list", "cut", "null", "deep", "wrong types"],
)
def test_a_first_answer_that_is_none(bundle, text, golden):
    error = refusal(FakeProcess(boot.MARK + text + b"\n"), bundle)
    assert isinstance(error, ProtocolError)
    golden(error)


def test_a_host_that_is_silent(bundle, monkeypatch, golden):
    monkeypatch.setattr(opening, "BOOT_TIMEOUT_S", 0.02)
    error = refusal(FakeProcess(b"banner\n", hang=True), bundle)
    assert isinstance(error, Unreachable)
    golden(error)


def test_a_connection_that_ends_in_the_middle(bundle, golden):
    error = refusal(FakeProcess(reply(), stderr="Traceback: boom\n"), bundle)
    assert type(error) is ConnectionLost
    golden(error)


# ---- before the start


def test_asking_for_the_way():
    route = p.Route(address="10.0.0.1", interface="eth0")
    link, process = talking(lines(route))
    assert host_requests.route_to(link, "10.0.0.2") == route
    assert process.requests == [p.GetRoute(peer="10.0.0.2")]


def blob(folder: Path, data: bytes, letter: str) -> LocalBlob:
    path = folder / letter
    path.write_bytes(data)
    return LocalBlob(blob=p.Blob(sha256=letter * 64, size_bytes=len(data)), path=path)


def test_only_what_is_lacking_is_sent(tmp_path):
    blobs = tuple(
        blob(tmp_path, data, letter)
        for data, letter in ((b"call", "a"), (b"c" * 600_000, "b"))
    )
    offer = p.OfferBlobs(blobs=tuple(one.blob for one in blobs))
    link, process = talking(lines(p.MissingBlobs(sha256=("b" * 64,)), p.MissingBlobs()))
    assert blob_requests.deliver(link, blobs) == 600_000
    assert process.written == p.encode(offer) + b"c" * 600_000
    link, process = talking(lines(p.MissingBlobs()))
    assert blob_requests.deliver(link, blobs) == 0
    assert process.written == p.encode(offer)


@pytest.mark.parametrize(
    "what", ["offer_blobs", "receive_blobs", "start_node", "get_file", "dance"]
)
def test_a_refusal(what, golden):
    link, _ = talking(lines(p.Refused(what=what, error="no space left")))
    with golden.raises(PreflightError):
        host_requests.route_to(link, "")


def test_another_answer_than_the_one_expected(golden):
    link, _ = talking(lines(p.MissingBlobs()))
    with golden.raises(ProtocolError):
        host_requests.route_to(link, "")


@pytest.mark.parametrize(
    "data",
    [b"hello\n", b'{"t":"route","n":0,"address":1}\n', b"x" * (p.MAX_LINE_BYTES + 2)],
    ids=["no JSON", "a wrong type", "a long line"],
)
def test_what_is_not_of_the_protocol(data, golden):
    link, _ = talking(data)
    with golden.raises(ProtocolError):
        host_requests.route_to(link, "")


# ---- a job


def started(*pieces: bytes) -> tuple[Link, FakeProcess]:
    link, process = talking(*pieces)
    link.start(p.StartNode(job="j", node_rank=0, torchrun=(), env={}, defaults={}, cwd="~", call="", code="", endpoint="", hosts=("a",),
                       lead=True, terms=p.JobTerms(lease_s=60.0)))  # fmt: skip
    return link, process


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_from_hello_to_the_end(size):
    text = lines(*EVENTS, first=1) + lines(p.AgentGone())
    link, _ = started(*(text[i : i + size] for i in range(0, len(text), size)))
    assert list(link.events()) == list(enumerate(EVENTS, 1))


def test_events_of_an_unknown_type_are_left_out():
    link, _ = started(
        lines(EVENTS[0], first=1),
        b'{"t":"teleport","n":2}\n',
        lines(EVENTS[2], first=3),
        lines(p.AgentGone()),
    )
    assert [n for n, _ in link.events()] == [1, 3]


def test_a_job_of_another_version_is_not_followed(golden):
    link, _ = talking(
        lines(p.Hello(protocol=7, job="j", node_rank=0, hostname="a", pid=1), first=1)
    )
    link.attach(p.FollowJob(job="j", node_rank=0))
    with golden.raises(ProtocolError):
        list(link.events())


def test_an_agent_that_does_not_end_its_job(monkeypatch, golden):
    monkeypatch.setattr(job_requests, "STOP_TIMEOUT_S", 0.02)
    link, process = talking(lines(EVENTS[0], EVENTS[1], first=1), hang=True)
    with golden.raises(Unreachable):
        job_requests.stop(link, "j", 0, 0.0)
    assert process.requests == [
        p.FollowJob(job="j", node_rank=0),
        p.StopNode(grace_s=0.0),
    ]


def test_events_that_are_refused():
    link, _ = started(
        lines(EVENTS[0], first=1),
        lines(p.Refused(what="follow_job", error="no such room")),
    )
    events = link.events()
    next(events)
    with pytest.raises(PreflightError) as caught:
        next(events)
    assert str(caught.value) == "gpu-a: no such room."


def test_an_agent_that_breaks_down_at_once(golden):
    with golden.raises(PreflightError):
        started(lines(p.AgentGone(error="MemoryError")))


def test_a_gap_between_events():
    link, _ = started(lines(EVENTS[0], first=1), lines(EVENTS[1], first=3))
    events = link.events()
    next(events)
    with pytest.raises(ProtocolError) as caught:
        next(events)
    assert str(caught.value) == "gpu-a: event 3 came after event 1."


def test_a_gap_that_is_told():
    link, _ = started(
        lines(EVENTS[0], first=1), lines(p.Skipped(through=40), first=2), lines(EVENTS[1], first=41),
        lines(p.Skipped(through=42), EVENTS[2], first=42), lines(p.AgentGone()),
    )  # fmt: skip
    found = list(link.events())
    assert [n for n, _ in found] == [1, 40, 41, 42, 43]
    assert [message for _, message in found] == [
        EVENTS[0],
        p.Skipped(through=40),
        EVENTS[1],
        p.Skipped(through=42),
        EVENTS[2],
    ]


def test_news_without_a_number_come_between_the_events():
    news = p.Hardware(used_bytes=7)
    link, _ = started(
        lines(EVENTS[0], first=1), p.encode(news), p.encode(p.Route(address="", interface="")),
        lines(EVENTS[1], first=2), lines(p.AgentGone()),
    )  # fmt: skip
    assert list(link.events()) == [(1, EVENTS[0]), (1, news), (2, EVENTS[1])]


@pytest.mark.parametrize("through", [1, 0])
def test_a_gap_that_leads_backwards(through, golden):
    link, _ = started(
        lines(EVENTS[0], first=1), lines(p.Skipped(through=through), first=2)
    )
    with golden.raises(ProtocolError):
        list(link.events())


def test_a_file_comes_in_pieces():
    data = bytes(range(256)) * 4000
    link, process = talking(
        lines(p.Data(size_bytes=len(data))) + data[:10], data[10:], lines(p.AgentGone())
    )
    got: list[bytes] = []
    fetch = p.GetFile(job="j", node_rank=0, name="rank0.result")
    sent = job_requests.fetch(link, fetch, got.append, limit_bytes=len(data))
    assert sent.size_bytes == len(data)
    assert b"".join(got) == data
    assert max(map(len, got)) <= 1 << 18
    taken = p.ResultTaken(job="j", node_rank=0, name="rank0.result")
    assert process.requests == [fetch, taken]
    assert link._next() == (0, p.AgentGone())


def test_an_empty_file():
    link, _ = talking(lines(p.Data(size_bytes=0)))
    request = p.GetFile(job="j", node_rank=0, name="x")
    sent = job_requests.fetch(link, request, pytest.fail, limit_bytes=0)
    assert sent.size_bytes == 0


def test_a_file_that_is_cut():
    link, _ = talking(lines(p.Data(size_bytes=100)) + b"only this")
    with pytest.raises(ConnectionLost):
        job_requests.fetch(
            link,
            p.GetFile(job="j", node_rank=0, name="x"),
            lambda data: None,
            limit_bytes=100,
        )


def test_a_sweep():
    final = p.Final(reason="swept", survivors=("python (pid 7, state D)",))
    link, process = talking(lines(final))
    assert job_requests.sweep(link, "j") == final
    assert process.requests == [p.SweepJob(job="j")]


def test_of_a_list_of_jobs_without_end_the_first_are_kept(monkeypatch):
    one = p.JobListing(
        protocol=2, job="j", node_rank=0, hosts=("gpu-a",), began_s=1.0, terms=p.JobTerms(lease_s=60.0),
    )  # fmt: skip
    monkeypatch.setattr(host_requests, "MOST_JOBS", 4)
    link, _ = talking(lines(p.Jobs(jobs=(one,) * 3)) * 50, lines(p.Jobs()))
    assert host_requests.list_jobs(link) == (one,) * 4


def test_a_host_has_its_time_for_each_line_of_its_list_of_jobs(monkeypatch):
    """A slow file server takes longer for a thousand jobs than a host may take for an answer."""
    began: list[float] = []

    def noted(seconds, act):
        began.append(seconds)
        return TimeLimit(seconds, act)

    monkeypatch.setattr(link_module, "TimeLimit", noted)
    one = p.JobListing(
        protocol=2, job="j", node_rank=0, hosts=("gpu-a",), began_s=1.0, terms=p.JobTerms(lease_s=60.0),
    )  # fmt: skip
    link, _ = talking(lines(p.Jobs(jobs=(one,))) * 3, lines(p.Jobs()))
    began.clear()
    assert len(host_requests.list_jobs(link)) == 3
    assert began == [600.0, 30.0, 30.0, 30.0, 30.0]


def test_empty_lines_of_a_host_that_keeps_devices_are_passed_over():
    link, _ = talking(b"\n\n", lines(p.Jobs()), b"\n", lines(p.Jobs()))
    assert host_requests.list_jobs(link) == host_requests.list_jobs(link) == ()


def test_of_stacks_without_end_the_first_are_kept(monkeypatch):
    one = p.Stacks(request_id="a", rank=0, local_rank=0, silence="x" * 1000)
    monkeypatch.setattr(job_requests, "_MAX_RANKS", 3)
    link, _ = talking(lines(one) * 50, lines(p.StacksDone(request_id="a", ranks=50)))
    assert job_requests.stacks(link, "j", 0, "a") == [one] * 3


def test_a_roll_call_takes_only_its_own_answers():
    mine = p.Stacks(request_id="a", rank=0, local_rank=0, silence="x")
    others = p.Stacks(request_id="b", rank=1, local_rank=1)
    told = (
        others,
        p.StacksDone(request_id="b", ranks=1),
        mine,
        p.Notice(text="x"),
        p.StacksDone(request_id="a", ranks=1),
    )
    link, process = talking(lines(*told, p.Notice(text="y"), first=7))
    assert job_requests.stacks(link, "j", 0, "a") == [mine]
    assert process.requests == [
        p.FollowJob(job="j", node_rank=0, live=True),
        p.DumpStacks(request_id="a"),
    ]


@pytest.mark.parametrize(
    "answer", [p.AgentGone(), p.Refused(what="follow_job", error="no such file")]
)
def test_a_roll_call_of_an_agent_that_is_gone(answer):
    assert job_requests.stacks(talking(lines(answer))[0], "j", 0, "a") == []


def test_hanging_up():
    link, process = talking()
    link.finish()
    assert not process.has_stdin
    assert process.is_closed.is_set()
    link.close()


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_that_names_the_host(data):
    for text in (data, lines(EVENTS[0], first=1) + data):
        link, _ = talking(text)
        with pytest.raises((ProtocolError, ConnectionLost)) as caught:
            host_requests.route_to(link, "")
        assert caught.value.message.startswith("gpu-a")
