"""How a host comes to an elastic job later: what it is told, what it is brought, who may start it."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from distmagic.errors import PreflightError, ProtocolError, UsageError
from distmagic.payload.blobs import LocalBlob
from distmagic.payload.pack import Payload
from distmagic.planning.plan import Reached
from distmagic.planning.start_messages import join_message, start_messages
from distmagic.remote.records import places
from distmagic.remote.system import facts
from distmagic.remote.wire import protocol as p
from distmagic.request.hosts import LOCALHOST
from distmagic.request.spec import JobSpec
from distmagic.runner.node_joiner import NodeJoiner
from tests.builders.plans import WORK, A, B, plan_for, reached

C = reached("gpu-c", "10.0.0.3", "eth1", slots="gpu", gpus=4)
SECRET = "00ff"  # of no gang
DATA = {name: name.encode() * 1000 for name in ("call", "code", "volume")}


@pytest.fixture
def payload(tmp_path) -> Payload:
    """Three files of this machine."""
    found = {}
    for name, data in DATA.items():
        (tmp_path / name).write_bytes(data)
        blob = p.Blob(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        found[name] = LocalBlob(blob=blob, path=tmp_path / name)
    return Payload(
        call=found["call"], code=found["code"], side_files=(found["volume"],)
    )


def begun(
    payload: Payload, *hosts: Reached, awaited: tuple[str, ...] = (), **spec
) -> list[p.StartNode]:
    """Return what all nodes of an elastic job are told that begins on these hosts."""
    asked = JobSpec(**{"nnodes": (1, 4), "max_restarts": 3, **spec})
    plan = plan_for(asked, *hosts, awaited=awaited)
    return start_messages(plan, payload, SECRET, [None] * len(plan.nodes))


# ---- what it is told


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"nproc_per_node": 2},
        {"nproc_per_node": "cpu"},
        {"cwd": "~/x", "env": (("A", "1"),)},
    ],
)
@pytest.mark.parametrize(
    "late", [C, reached("gpu-c", "fd00::3"), replace(B, host=LOCALHOST)]
)
def test_a_host_that_comes_later_is_told_what_it_would_have_been_told_at_the_beginning(
    payload, spec, late
):
    lead, _ = begun(payload, A, B, **spec)
    at_once = begun(payload, A, B, late, **spec)[2]
    joined = join_message(lead, (*lead.hosts, late.host.name), late, local_cwd="/nb")
    assert joined.membership.nodes == 2, "with so many it began"
    assert replace(joined, membership=replace(joined.membership, nodes=3)) == at_once


def test_only_the_lead_of_a_job_that_may_grow_has_a_template_for_them(payload):
    lead, other = begun(payload, A, B, cwd="~/x", nproc_per_node=2, awaited=("gpu-c",))
    sizes = tuple(len(data) for data in DATA.values())
    assert lead.join_template == p.JoinTemplate(
        sizes=sizes, nproc_per_node="2", cwd="~/x", work=WORK
    )
    assert (lead.terms, lead.terms.awaited) == (other.terms, ("gpu-c",))
    assert other.join_template is None
    assert (lead.terms.min_nodes, lead.terms.max_nodes) == (1, 4)
    assert begun(payload, A, B, max_restarts=0)[0].terms.max_nodes == 0
    assert begun(payload, A, B, max_restarts=0)[0].join_template is None
    assert begun(payload, A, B, nnodes=(2, 2))[0].join_template is None


# ---- what it is brought


class FakeLink:
    """A conversation with a host that has some blobs and hears what it is sent."""

    def __init__(
        self,
        one: Reached,
        has: dict[str, bytes] | None = None,
        running: tuple[p.JobListing, ...] = (),
    ) -> None:
        self.host, self.facts = (
            one.host,
            replace(one.facts, torch=facts.torch_version(), running=running),
        )
        self.python = sys.version_info[:3]
        self.has = {
            hashlib.sha256(data).hexdigest(): data for data in (has or {}).values()
        }
        self.said: list[object] = []
        self.route, self.is_open = one.route, True
        self.answers: list[p.Message] = []
        self.coming: Iterator[p.Message | None] = iter(())
        self.others: tuple[p.DeviceClaim, ...] = ()

    def close(self):
        self.is_open = False

    def query(self, request, kind):
        self.said.append(request)
        if kind is p.DevicesClaimed:
            return p.DevicesClaimed(others=self.others)
        return self.route if kind is p.Route else p.Final(reason="swept")

    def send(self, message):
        self.said.append(message)

    def answer(self, kind):
        if isinstance(self.said[-1], p.GetBlob):
            return kind(size_bytes=len(self.has[self.said[-1].sha256]))
        asked = [
            message
            for message in self.said
            if isinstance(message, p.CheckBlobs | p.OfferBlobs)
        ]
        names = [blob.sha256 for blob in asked[-1].blobs]
        return kind(sha256=tuple(name for name in names if name not in self.has))

    def pour(self, local):
        data = local.path.read_bytes()
        self.said.append(data)
        yield len(data)

    def take(self, size_bytes, write):
        data = self.has[self.said[-1].sha256]
        assert len(data) == size_bytes
        write(data)

    def start(self, request):
        self.said.append(request)

    def attach(self, request):
        assert request == p.FollowJob(job="j-1", node_rank=0, live=True)
        lost = p.PeerState(node_rank=1, state="lost")
        self.coming = iter((lost, None, *self.answers))

    def bounded(self, timeout_s):
        return contextlib.nullcontext()

    def message(self):
        return next(self.coming)


class Lead:
    """The first host of a job: what it answers, and the conversations with it."""

    def __init__(
        self,
        start: p.StartNode,
        has: dict[str, bytes] | None = None,
        added: p.Message | None = None,
    ) -> None:
        self.start, self.has, self.links = start, has, []
        self.added = added or p.NodeAdded(
            request_id="a1", hosts=(*start.hosts, "gpu-c")
        )

    def open(self) -> FakeLink:
        link = FakeLink(A, self.has)
        link.answers = [
            p.LeadStart(start=self.start),
            p.NodeAdded(request_id="b2", hosts=("gpu-x",)),
            self.added,
        ]
        self.links.append(link)
        return link


def test_the_notebook_that_began_the_job_has_all_that_is_needed_itself(payload):
    lead = Lead(begun(payload, A, B)[0])
    link = FakeLink(C, {"call": DATA["call"]})
    start = NodeJoiner("j-1", lead.open, lead.start, payload.blobs).admit(link, "a1")
    assert start == join_message(
        lead.start,
        ("gpu-a", "gpu-b", "gpu-c"),
        replace(C, facts=link.facts),
        local_cwd="",
    )
    assert link.said[1:] == [
        p.OfferBlobs(blobs=(payload.code.blob, payload.side_files[0].blob)),
        DATA["code"],
        DATA["volume"],
        p.GetRoute(peer="10.0.0.1"),
        p.SweepJob(job="j-1"),
    ]
    assert [said for one in lead.links for said in one.said] == [
        p.AddNode(host="gpu-c", request_id="a1")
    ]
    assert not any(one.is_open for one in lead.links)


def test_a_host_whose_devices_another_job_has_does_not_come(payload):
    four = [replace(one, facts=replace(one.facts, gpus=4)) for one in (A, B)]
    lead = Lead(begun(payload, *four, devices=("0", "1"))[0])
    joiner = NodeJoiner("j-1", lead.open, lead.start, payload.blobs)
    link = FakeLink(C)
    joiner.admit(link, "a1")
    asked = p.ClaimDevices(job="j-1", devices=("0", "1"))
    assert [one for one in link.said if isinstance(one, p.ClaimDevices)] == [asked]
    link.others = (p.DeviceClaim(device="1", job="j-0"),)
    with pytest.raises(PreflightError, match=r"gpu-c: .* device 1"):
        joiner.admit(link, "a2")
    requests = [said.request_id for one in lead.links for said in one.said]
    assert requests == ["a1"], "the lead counts no host that can't come"


def test_another_notebook_asks_the_lead_for_all_of_it(payload, tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    lead = Lead(begun(payload, A, B)[0], has=DATA)
    newcomers = NodeJoiner("j-1", lead.open)
    link = FakeLink(C, {"call": DATA["call"]})
    start = newcomers.admit(link, "a1")
    assert (start.node_rank, start.membership.secret, start.call) == (
        2,
        "00ff",
        payload.call.blob.sha256,
    )
    assert link.said[2:4] == [DATA["code"], DATA["volume"]]
    asked = [said for one in lead.links for said in one.said]
    assert asked == [
        p.GetStart(),
        p.GetBlob(sha256=payload.code.blob.sha256),
        p.GetBlob(sha256=payload.side_files[0].blob.sha256),
        p.AddNode(host="gpu-c", request_id="a1"),
    ]
    assert places.blob(payload.code.blob.sha256).read_bytes() == DATA["code"]
    newcomers.admit(FakeLink(C), "a1")
    assert [said for one in lead.links[-3:] for said in one.said] == [
        p.GetBlob(sha256=payload.call.blob.sha256),
        p.AddNode(host="gpu-c", request_id="a1"),
    ]


def test_what_arrives_damaged_is_not_kept(payload, tmp_path, monkeypatch, golden):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path))
    lead = Lead(begun(payload, A, B)[0], has=DATA)
    monkeypatch.setattr(
        FakeLink, "take", lambda self, size_bytes, write: write(b"x" * size_bytes)
    )
    with golden.raises(ProtocolError):
        NodeJoiner("j-1", lead.open).admit(FakeLink(C), "a1")
    assert list((tmp_path / "blobs").iterdir()) == []


@pytest.mark.parametrize(
    "answer",
    [p.Refused(what="add_node", error="it is about to end"), p.AgentGone()],
    ids=["refused", "gone"],
)
def test_the_lead_lets_nobody_in(payload, answer, golden):
    lead, link = Lead(begun(payload, A, B)[0], added=answer), FakeLink(C)
    with golden.raises(UsageError):
        NodeJoiner("j-1", lead.open, lead.start, payload.blobs).admit(link, "a1")
    assert p.SweepJob(job="j-1") not in link.said, "it may run there"


def test_a_job_that_is_not_elastic_takes_in_nobody(payload, golden):
    lead = Lead(begun(payload, A, B, nnodes=None)[0])
    with golden.raises(UsageError):
        NodeJoiner("j-1", lead.open).admit(FakeLink(C), "a1")


def listed(node_rank: int) -> tuple[p.JobListing, ...]:
    return (
        p.JobListing(
            job="j-1",
            node_rank=node_rank,
            hosts=("gpu-c",),
            began_s=0.0,
            is_running=True,
            protocol=p.PROTOCOL,
            terms=p.JobTerms(lease_s=60.0),
        ),
    )


def test_a_host_on_which_the_job_still_runs_is_left_alone_whatever_its_name(
    payload, golden
):
    lead, link = Lead(begun(payload, A, B)[0]), FakeLink(C, running=listed(1))
    with golden.raises(UsageError):
        NodeJoiner("j-1", lead.open, lead.start, payload.blobs).admit(link, "a1")
    assert (link.said, lead.links) == ([], [])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"call": "../../etc/passwd"}, ProtocolError),
        ({"side_files": ()}, ProtocolError),
        ({"join_template": p.JoinTemplate(sizes=(1, -1, 1))}, ProtocolError),
        ({"job": "j-2"}, UsageError),
    ],
    ids=["a path", "no side files", "a negative size", "another job"],
)  # fmt: skip
def test_a_lead_that_tells_of_what_can_not_be_is_not_believed(
    payload, change, error, golden
):
    link = FakeLink(C)
    with golden.raises(error):
        NodeJoiner("j-1", Lead(replace(begun(payload, A, B)[0], **change)).open).admit(
            link, "a1"
        )
    assert not any(isinstance(said, list) for said in link.said), (
        "nothing was brought there"
    )


def test_a_host_with_another_python_comes_to_a_job_without_byte_code_only(payload):
    lead, link = Lead(begun(payload, A, B)[0]), FakeLink(C)
    link.python = (3, 99, 1)
    with pytest.raises(PreflightError, match=r"--python gpu-c=") as refused:
        NodeJoiner("j-1", lead.open, lead.start, payload.blobs).admit(link, "a1")
    assert refused.value.host == "gpu-c"
    assert (link.said, lead.links) == ([], [])
    joiner = NodeJoiner("j-1", lead.open, lead.start, payload.blobs, is_text=True)
    assert joiner.admit(link, "a1").call == lead.start.call


def test_a_host_that_does_not_fit_is_brought_nothing(payload):
    lead, link = Lead(begun(payload, A, B)[0]), FakeLink(C)
    link.facts = replace(link.facts, torch=None)
    with pytest.raises(PreflightError, match="gpu-c"):
        NodeJoiner("j-1", lead.open).admit(link, "a1")
    assert (link.said, lead.links) == ([], [])
