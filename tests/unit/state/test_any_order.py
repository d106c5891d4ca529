"""Streams of events as they really come: several nodes mixed in any order, cut at any byte, damaged, begun again."""

from __future__ import annotations

import itertools
import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic import render
from distmagic.connection.limits import DECODER
from distmagic.connection.link import Link
from distmagic.errors import ConnectionLost, DistmagicError, ProtocolError
from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event, Gone
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict
from tests.builders.events import HOSTS
from tests.builders.links import HOST, FakeProcess
from tests.builders.states import hold, mixed, what_matters

WORLD = 4


def stream(node: int, dice: random.Random, *, fails: bool) -> list[p.Message]:
    """Return what the agent of a node with two ranks tells from its first event to its last."""
    ranks = (2 * node, 2 * node + 1)
    told: list[p.Message] = [
        p.Hello(
            protocol=p.PROTOCOL, job="j", node_rank=node, hostname=f"h{node}", pid=1
        ),
        p.Endpoint(state="open" if node == 0 else "reached"),
        *(
            p.Worker(
                rank=rank,
                local_rank=rank % 2,
                world_size=WORLD,
                restart=0,
                pid=10 + rank,
            )
            for rank in ranks
        ),
    ]
    for step in range(dice.randrange(1, 6)):
        for rank in ranks:
            row = p.MetricRow(
                at_s=float(step),
                step=float(step),
                metrics={"loss": dice.random(), f"m{rank}": 1.0},
            )
            bar = p.Bar(id=1, n=float(step), total=5.0, desc="épo")
            told.append(
                p.Progress(
                    rank=rank,
                    restart=0,
                    at_s=float(step),
                    step=float(step),
                    total=5.0,
                    points=p.points_of([row]),
                    bars=(bar,),
                )
            )
            text = dice.choice(["whole\n", "torn ", "a\rb", "\u2028é\n", "木" * 5])
            told.append(
                p.Output(
                    rank=rank,
                    stream=dice.choice(["stdout", "stderr"]),
                    offset=step,
                    text=text,
                )
            )
    told.append(p.Output(rank=-1, stream="stderr", offset=0, text="torchrun's\n"))
    told.append(p.Notice(text=f"of node {node}"))
    for rank in ranks:
        failure = (
            p.Failure(type="ValueError", message="no", traceback="T")
            if fails and rank == ranks[1]
            else None
        )
        told.append(p.Ended(rank=rank, restart=0, outcome="raised" if failure else "returned", code=int(bool(failure)),
                            failure=failure, result_bytes=None if failure else 3))  # fmt: skip
    return [*told, p.EngineEnded(code=int(fails)), p.Final(reason="done")]


def events(node: int, told: list[p.Message]) -> deque[Event]:
    return deque(Event(node_rank=node, at_s=1.0, what=what) for what in (*told, Gone()))


@settings(max_examples=60)
@given(
    st.randoms(use_true_random=False),
    st.integers(0, 1000),
    st.sampled_from([(), (0,), (1,)]),
    st.integers(1, 20),
)
def test_nodes_in_any_mixture_give_one_state(order, seed, failing, batch):
    """The clock and the batches differ as well; the first failure is of the only node that fails."""
    content = random.Random(seed)
    queues = [
        events(node, stream(node, content, fails=node in failing)) for node in (0, 1)
    ]
    plain = fold(begin("j", HOSTS), itertools.chain(*queues))
    state, all_events = begin("j", HOSTS), list(mixed(order, *queues))
    for i in range(0, len(all_events), batch):
        state = fold(state, all_events[i : i + batch])
        hold(state)
    assert what_matters(state) == what_matters(plain)
    assert state.first_failure == (2 * failing[0] + 1 if failing else None)
    error, other = verdict(state), verdict(plain)
    assert (str(error), type(error)) == (str(other), type(other))


@given(st.randoms(use_true_random=False))
def test_of_two_failures_the_one_that_came_first_speaks(order):
    queues = [
        events(node, stream(node, random.Random(1), fails=True)) for node in (0, 1)
    ]
    came = list(mixed(order, *queues))
    failures = [
        event.what.rank
        for event in came
        if isinstance(event.what, p.Ended) and event.what.failure
    ]
    assert fold(begin("j", HOSTS), came).first_failure == failures[0]


# ---- through the conversation


SAID = stream(0, random.Random(98), fails=True)  # short, with every kind of text
TEXT = b"".join(p.encode(what, n) for n, what in enumerate(SAID, 1))
# As it comes in: the strange line break is gone.
TOLD = [DECODER.decode(p.encode(what))[1] for what in SAID]


def heard(
    text: bytes, after: int = 0, sizes: tuple[int, ...] = ()
) -> tuple[list[tuple[int, p.Message]], DistmagicError | None]:
    """Return what a link hears of bytes that come in pieces, and how it ends."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    link = Link(HOST, FakeProcess(*pieces, text[at:]))
    link.attach(p.FollowJob(job="j", node_rank=0, after=after))
    found: list[tuple[int, p.Message]] = []
    try:
        found.extend(link.events())
    except DistmagicError as error:
        return found, error
    return found, None


def all_folded(found: list[tuple[int, p.Message]]) -> RunState:
    return fold(
        begin("j", HOSTS),
        [Event(node_rank=0, at_s=1.0, what=what) for _, what in found],
    )


def test_cut_at_any_byte_and_gone_on_from_there():
    """Nothing is lost and nothing comes twice, wherever the connection breaks."""
    ends = [
        0,
        *itertools.accumulate(len(p.encode(what, n)) for n, what in enumerate(SAID, 1)),
    ]
    for cut in range(len(TEXT)):
        first, error = heard(TEXT[:cut])
        assert isinstance(error, ConnectionLost)
        last = first[-1][0] if first else 0
        rest, error = heard(TEXT[ends[last] :] + p.encode(p.AgentGone()), after=last)
        assert error is None
        assert [*first, *rest] == list(enumerate(TOLD, 1))


@given(st.integers(1, len(TOLD) - 1), st.integers(0, len(TOLD)))
def test_a_host_that_goes_on_elsewhere_is_refused(last, first):
    """As one does that has lost its journal, or sends again what was heard already."""
    text = b"".join(
        p.encode(what, n) for n, what in enumerate(SAID, 1) if n >= first
    ) + p.encode(p.AgentGone())
    found, error = heard(text, after=last)
    if max(first, 1) == last + 1:
        assert (len(found), error) == (len(TOLD) - last, None)
    elif first <= len(TOLD):
        assert isinstance(error, ProtocolError)
        assert error.message == f"gpu-a: event {max(first, 1)} came after event {last}."
        assert not found


@given(st.lists(st.integers(1, 200), max_size=50))
def test_any_cutting_into_pieces(sizes):
    found, error = heard(TEXT + p.encode(p.AgentGone()), sizes=tuple(sizes))
    assert (found, error) == (list(enumerate(TOLD, 1)), None)


@settings(max_examples=3 * settings.default.max_examples)
@given(
    st.integers(0, len(TEXT) - 1), st.binary(min_size=0, max_size=4), st.integers(0, 4)
)
def test_damaged_bytes_are_an_error_or_another_message(at, put, taken):
    """What came before the damage is as it was; what is heard is numbered without a gap; and any of it can be shown."""
    text = TEXT[:at] + put + TEXT[at + taken :]
    found, error = heard(text)
    whole = TEXT[:at].count(b"\n")
    assert found[:whole] == list(enumerate(TOLD, 1))[:whole]
    numbers = [n for n, _ in found]
    assert numbers == sorted(set(numbers))
    assert isinstance(error, ConnectionLost | ProtocolError)
    assert error.message.startswith("gpu-a")
    render.html(all_folded(found))
