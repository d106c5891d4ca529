"""Hosts that break, flood and inject: an error or a small state, never memory, never a script in the page.

Each host is a real process behind the real conversation; what it says ends in what a user is shown.
"""

from __future__ import annotations

import html.parser
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic import render, sanitize
from distmagic.connection.link import Link
from distmagic.connection.opening import open_link
from distmagic.connection.requests import host_requests, job_requests
from distmagic.errors import DistmagicError, WorkerFailed
from distmagic.notebook import job_commands as job_lists
from distmagic.payload.blobs import LocalBlob
from distmagic.planning.jobs import found_jobs
from distmagic.remote.contact import boot
from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.bounds import MOST_RANKS
from distmagic.request.hosts import Host
from distmagic.state.events import Event, Gone
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict
from distmagic.transports.local import spawn
from distmagic.transports.piped import PipedProcess
from tests.builders.any_events import EVENTS
from tests.builders.events import HOSTS, at, begun, ended, output, progress, worker
from tests.builders.plans import FACTS
from tests.lab.waiting import HANG_S

MB = 1 << 20
BANNER = boot.MARK + json.dumps(
    {"python": list(sys.version_info[:3]), "home": "/h", "have": True, "error": "", "executable": "/p", "system": "linux"}
).encode()  # fmt: skip
FETCH = p.GetFile(job="j", node_rank=0, name="rank0.result")
MARKUP = "</pre></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'><a href='javascript:alert(3)'>"
TERMINAL = "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[8mhidden\x9b31m\u202etxt\x00\x7f\x85\x1bP1$r\x1b\\"
NASTY = MARKUP + TERMINAL


class Hosts:
    """A transport whose host is a Python script of bytes: `head`, then `again` so many `times`."""

    warnings = ()

    def __init__(self, script: Path, head: bytes, again: bytes, times: int) -> None:
        self._script = script
        script.write_text(
            "import sys; out = sys.stdout.buffer\n"
            "try:\n"
            f"    out.write({head!r}); out.flush()\n"
            f"    for _ in range({times}): out.write({again!r})\n"
            "    out.flush(); sys.stdin.buffer.read()\n"
            "except BrokenPipeError: sys.stderr.close()\n"
        )
        self.processes: list[PipedProcess] = []

    def start(self, argv: tuple[str, ...]) -> PipedProcess:
        self.processes.append(
            PipedProcess(spawn((sys.executable, str(self._script))), "gpu-a")
        )
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.close()
            assert process.wait(HANG_S) is not None


@contextmanager
def memory_below(size_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Link]]:
    """Return a function that opens a conversation with a host that says this after its facts."""
    made: list[Hosts] = []

    def opened(
        said: bytes = b"", again: bytes = b"", times: int = 0, first: bytes = b""
    ) -> Link:
        head = first or BANNER + b"\n" + p.encode(FACTS)
        made.append(Hosts(tmp_path / f"host{len(made)}.py", head + said, again, times))
        bundle = LocalBlob(
            blob=p.Blob(sha256="ab" * 32, size_bytes=0), path=Path("/dev/null")
        )
        return open_link(Host(name="gpu-a"), made[-1], "python3", bundle)

    yield opened
    for one in made:
        one.close()


def refused(act: Callable[[], object], most: int = 16 * MB) -> str:
    with memory_below(most), pytest.raises(DistmagicError) as caught:
        act()
    return str(caught.value)


# ---- before there is a run


@pytest.mark.parametrize(
    "again",
    [
        b"Welcome! " * 7000 + b"\n",
        b"Welcome! " * 7000,
    ],
    ids=["endless banner", "endless line"],
)
def test_a_banner_without_end(hosts, again, golden):
    golden(refused(lambda: hosts(first=b" ", again=again, times=10**9)))


def test_a_first_answer_full_of_escapes(hosts):
    told = {"python": [3, 1], "system": "linux", "executable": NASTY * 2000}
    said = refused(lambda: hosts(first=boot.MARK + json.dumps(told).encode() + b"\n"))
    assert said.startswith("gpu-a: Python 3.1 (</pre></style><script>")
    assert all(char.isprintable() or char == "\n" for char in said)
    assert len(said) < 1500


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"x" * (3 * MB), id="giant"),
        pytest.param(b"[" * 900_000 + b"\n", id="depth"),
        pytest.param(b'{"t":"data","n":0,"size_bytes":' + b"9" * 900_000 + b"}\n", id="digits"),
        pytest.param(b'{"t":"data","n":-1,"size_bytes":1}\n', id="negative number"),
        pytest.param(p.encode(p.Data(size_bytes=10**18)), id="a file of an exabyte"),
        pytest.param(b'{"t":"teleport","n":0}\n' * 2000, id="only strange messages"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none(hosts, line):
    link, got = hosts(line), bytearray()
    said = refused(
        lambda: job_requests.fetch(link, FETCH, got.extend, limit_bytes=MB),
        most=64 * MB,
    )
    assert said.startswith("gpu-a")
    assert not got


def test_a_refusal_full_of_escapes(hosts):
    said = refused(
        lambda: host_requests.route_to(
            hosts(p.encode(p.Refused(what="start", error=TERMINAL * 3000))), ""
        )
    )
    assert len(said) < 3000
    assert all(char.isprintable() or char == "\n" for char in said)


def test_jobs_with_names_that_write_on_the_terminal(hosts):
    one = p.JobListing(job=TERMINAL, node_rank=0, hosts=(TERMINAL,) * 3, began_s=float("nan"), protocol=p.PROTOCOL,
                   terms=p.JobTerms(lease_s=1.0, owner=TERMINAL, awaited=(TERMINAL,)),
                   is_running=False, reason=TERMINAL, size_bytes=2**63)  # fmt: skip
    link = hosts(p.encode(p.Jobs(jobs=(one,) * 300)) + p.encode(p.Jobs()))
    listed = host_requests.list_jobs(link)
    assert len(listed) == 300
    shown = job_lists.table(found_jobs(["gpu-a"], [listed]), 0.0)
    assert all(char.isprintable() or char == "\n" for char in shown)


# ---- events


def test_a_world_beyond_all_bounds_is_not_believed():
    assert begun(worker(5, world=MOST_RANKS + 1)) == begun()


def test_later_failures_keep_the_end_of_their_tracebacks():
    def raised(rank: int, node: int) -> Event:
        failure = p.Failure(type="E", message="m", traceback="t" * 100_000)
        return ended(rank, node, outcome="raised", code=1, failure=failure)

    state = begun(raised(2, 1), raised(0, 0), raised(1, 0))
    lengths = {
        rank: len(w.ended.failure.traceback)
        for rank, w in state.workers.items()
        if w.ended
    }
    assert lengths == {2: 100_000, 0: 4000, 1: 4000}


def test_the_answers_to_few_requests_for_stacks_are_kept():
    asked = begun(
        *(at(p.Stacks(request_id=str(i), rank=0, local_rank=0)) for i in range(50))
    )
    assert [dump.request_id for dump in asked.stack_dumps] == ["46", "47", "48", "49"]


# ---- what is shown


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


TAGS = {"div", "style", "span", "progress", "details", "summary", "pre", "table", "tbody", "tr", "th", "td", "b",
        "svg", "g", "path", "polyline", "polygon", "line", "text", "rect", "circle", "title", "figure", "figcaption"}  # fmt: skip


def assert_harmless(state: RunState) -> None:
    page = render.html(state)
    page.encode()  # no half of a character
    found = _Tags()
    found.feed(page)
    assert found.tags <= TAGS
    assert not any(
        name.startswith("on") or name in ("href", "src") for name in found.attributes
    )
    for shown in (render.text(state), *render.status(state, width=100, height=20)):
        shown.encode()
        assert all(char.isprintable() or char == "\n" for char in shown), repr(shown)


def nasty_state() -> RunState:
    failure = p.Failure(type=NASTY, message=NASTY, traceback=NASTY)
    bar = p.Bar(
        id=1,
        desc=NASTY,
        unit=NASTY,
        postfix=NASTY,
        n=float("nan"),
        total=float("inf"),
        rate=float("inf"),
    )
    row = p.MetricRow(
        at_s=float("nan"),
        step=float("inf"),
        metrics={NASTY: float("nan"), "x": float("-inf")},
    )
    return begun(
        at(p.Hello(protocol=p.PROTOCOL, job=NASTY, node_rank=0, hostname=NASTY, pid=1)),
        progress(0, device=NASTY, step=float("nan"), total=float("-inf"), rows=(row, row)),
        progress(1, bars=(bar,), at_s=float("inf")), output(NASTY), output(f"{NASTY}\n", stream="stderr"),
        at(p.Notice(text=NASTY)), at(p.Endpoint(state="unreached", detail=NASTY), 1),
        ended(2, 1, outcome="raised", code=1, failure=failure), ended(3, 1, outcome=NASTY, code=2**62, meaning=NASTY),
        at(p.EngineEnded(code=-(2**62))), at(p.Final(reason=NASTY, survivors=(NASTY,) * 5), 1),
    )  # fmt: skip


def test_nothing_that_a_host_says_is_obeyed():
    state = nasty_state()
    assert_harmless(state)
    assert_harmless(fold(state, [at(Gone(), node) for node in (0, 1)]))


def test_an_error_shows_what_a_host_said_and_does_not_obey_it():
    error = verdict(nasty_state())
    assert isinstance(error, WorkerFailed)
    for text in (
        str(error),
        *error._render_traceback_(),
        error.remote_traceback,
        *error.args,
    ):
        assert all(char.isprintable() or char == "\n" for char in text), repr(text)


@given(EVENTS)
def test_any_events_can_be_shown(events):
    assert_harmless(fold(begin("j", HOSTS), events))


def test_a_log_keeps_its_colours_and_its_bars():
    text = "\x1b[32mok\x1b[0m\r 50%\r100%\n\ttab\x1b[2J\x1b]52;c;ZQ==\x07\x1b[8;5m\x00end\x9b1m"
    assert sanitize.log(text) == "\x1b[32mok\x1b[0m\r 50%\r100%\n\ttab\x1b[5mend1m"
    assert sanitize.lines(text) == "ok 50%100%\n\ttabend1m"


@given(
    st.text(
        alphabet=st.sampled_from("ab\n\r\t\x1b[]0;m\x07\x9b\x00\u202e\ud800"),
        max_size=60,
    )
)
def test_any_log_is_harmless(text):
    shown = sanitize.log(text)
    shown.encode()
    rest = "".join(
        part
        for i, part in enumerate(shown.split("\x1b"))
        if i == 0 or part.partition("m")[1]
    )
    assert all(char.isprintable() or char in "\n\r\t" for char in rest)
