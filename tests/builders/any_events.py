"""Lists of events as no host would send them, for properties that hold whatever comes (strategies of hypothesis)."""

from __future__ import annotations

from hypothesis import strategies as st

from distmagic.remote.wire import protocol as p
from distmagic.state.events import Event, Gone, Lost, StopRequested, Swept

ECHO = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3344"
SMALL = st.integers(-1, 5)
FLOATS = st.floats(width=32)
WORD = st.sampled_from(
    [
        "",
        "returned",
        "raised",
        "exited",
        "signalled",
        "open",
        "reached",
        "unreached",
        "stdout",
        "stderr",
        ECHO,
    ]
)
ROW = st.builds(
    p.MetricRow,
    at_s=FLOATS,
    step=st.none() | FLOATS,
    metrics=st.dictionaries(WORD, FLOATS, max_size=3),
)
BAR = st.builds(
    p.Bar,
    id=SMALL,
    n=FLOATS,
    total=st.none() | FLOATS,
    rate=st.none() | FLOATS,
    closed=st.booleans(),
)
FAILURE = st.builds(p.Failure, type=WORD, message=WORD, traceback=WORD)
EXIT = st.builds(p.Exit, rank=SMALL, local_rank=SMALL, pid=SMALL, code=SMALL)


def some(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(values, max_size=3).map(tuple)


ANYTHING = st.one_of(
    st.builds(
        p.Hello, protocol=SMALL, job=WORD, node_rank=SMALL, hostname=WORD, pid=SMALL
    ),
    st.builds(
        p.Worker,
        rank=SMALL,
        local_rank=SMALL,
        world_size=SMALL,
        restart=SMALL,
        pid=SMALL,
    ),
    st.builds(p.Paused, rank=SMALL, restart=SMALL, prompt=SMALL, file=WORD, line=SMALL),
    st.builds(p.Resumed, rank=SMALL, restart=SMALL, prompt=SMALL),
    st.builds(
        p.Progress,
        rank=SMALL,
        restart=SMALL,
        at_s=FLOATS,
        step=st.none() | FLOATS,
        points=some(ROW).map(p.points_of),
        bars=some(BAR),
    ),
    st.builds(
        p.Output,
        rank=SMALL,
        stream=WORD,
        offset=SMALL,
        text=st.text("a\r\n"),
        skipped_bytes=SMALL,
    ),
    st.builds(
        p.Ended,
        rank=SMALL,
        restart=SMALL,
        outcome=WORD,
        code=st.integers(-20, 3),
        failure=st.none() | FAILURE,
    ),
    st.builds(p.EngineEnded, code=st.integers(-20, 3), exits=some(EXIT)),
    st.builds(p.Endpoint, state=WORD, detail=WORD),
    st.builds(p.Notice, text=WORD),
    st.builds(p.Final, reason=WORD, survivors=some(WORD)),
    st.builds(Lost, why=WORD),
    st.builds(
        StopRequested,
        reason=st.sampled_from(
            ["failed", "interrupted", "timeout", "rendezvous", "lost"]
        ),
    ),
    st.builds(Swept, survivors=some(WORD)),
    st.just(Gone()),
    st.builds(p.Skipped, through=st.integers(0, 99)),
    st.builds(p.Picture, rank=SMALL, restart=SMALL, data=WORD, step=st.none() | FLOATS),
    st.builds(
        p.Hardware,
        cpu_utilization=st.none() | FLOATS,
        used_bytes=SMALL,
        gpus=some(st.builds(p.Gpu, used_bytes=st.none() | SMALL, total_bytes=SMALL)),
    ),
    st.none(),
)
EVENTS = st.lists(
    st.builds(Event, node_rank=SMALL, at_s=st.floats(0, 100), what=ANYTHING),
    max_size=30,
)
