"""Events of hosts that flood and inject: a small state, and never a script in the page or an order to a terminal."""

from __future__ import annotations

import html.parser

from hypothesis import given
from hypothesis import strategies as st

from distmagic import render, sanitize
from distmagic.errors import WorkerFailed
from distmagic.remote.wire import protocol as p
from distmagic.remote.wire.bounds import MOST_RANKS
from distmagic.state.events import Event, Gone
from distmagic.state.fold import begin, fold
from distmagic.state.model import RunState
from distmagic.state.verdict import verdict
from tests.builders.any_events import EVENTS
from tests.builders.events import HOSTS, at, begun, ended, output, progress, worker

MARKUP = "</pre></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'><a href='javascript:alert(3)'>"
TERMINAL = "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[8mhidden\x9b31m\u202etxt\x00\x7f\x85\x1bP1$r\x1b\\"
NASTY = MARKUP + TERMINAL


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
    assert [*asked.stack_dumps] == ["46", "47", "48", "49"]


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
        progress(0, device=NASTY, step=float("nan"), total=float("-inf"), points=p.points_of([row, row])),
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
