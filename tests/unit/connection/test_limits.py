"""What hosts send: every field of every message comes in harmless and within its limits, and honest messages unchanged.

The messages are built out of the wire's own types, so a new one is tested without a word here.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmagic.connection.limits import DECODER, FirstReply, first_reply
from distmagic.errors import ProtocolError
from distmagic.remote.wire import codec
from distmagic.remote.wire import protocol as p
from tests import REPOSITORY
from tests.builders.harmless import is_harmless

OF_HOSTS = [kind for kind in codec._NAMES if kind not in codec._REQUESTS]
OF_NOTEBOOKS = [kind for kind in codec._NAMES if kind in codec._REQUESTS]
GOLDEN = (REPOSITORY / "tests" / "golden" / "wire.jsonl").read_bytes().splitlines()
NASTY = "\x1b]0;owned\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[8mhidden\x9b31m\u202etxt\x00\x7f\x85\x1bP1$r\x1b\\\r\n\t\u2028"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Fields that may have line breaks and tabs; and so may the lead's start message.
MAY_BREAK = {
    "detail",
    "nccl",
    "text",
    "meaning",
    "message",
    "traceback",
    "type",
    "reason",
    "why",
    "silence",
    "logout",
    "write_error",
    "error",
    "shown",
}
OF_A_START = (p.StartNode, p.Membership, p.TemplateRequest, p.JoinTemplate, p.WorkDir)
MOST_CHARS = {
    "text": 1 << 18,
    "message": 40_000,
    "meaning": 40_000,
    "traceback": 150_000,
    "data": 200_000,
    "value": 200_000,
}


def part_types(kind: type) -> Iterator[type]:
    """Yield a type of message, and the types of the records in it."""
    yield kind
    for hint in typing.get_type_hints(kind).values():
        for inner in (hint, *typing.get_args(hint)):
            if is_dataclass(inner):
                yield from part_types(typing.cast(type, inner))


TYPES = sorted(
    {part for kind in (*OF_HOSTS, FirstReply) for part in part_types(kind)},
    key=lambda kind: kind.__name__,
)


def is_unbounded(hint: object) -> bool:
    """Whether a text or an amount in a field has no bound; a metric needs none."""
    if typing.get_origin(hint) is typing.Annotated:
        return False
    if typing.get_origin(hint) is dict:
        return is_unbounded(typing.get_args(hint)[0])
    return hint in (str, float) or any(map(is_unbounded, typing.get_args(hint)))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_text_and_amount_that_a_host_sends_has_a_bound(kind):
    if kind in OF_A_START:
        return  # it is not shown, and goes back to hosts as it came
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        assert not is_unbounded(hint), (
            f"{kind.__name__}.{name} needs a bound of distmagic/remote/wire/bounds.py"
        )


@pytest.mark.parametrize("line", GOLDEN, ids=lambda line: json.loads(line)["t"])
def test_an_honest_message_comes_in_as_it_was_sent(line):
    _, message = p.decode(line)
    if type(message) not in OF_NOTEBOOKS:
        assert DECODER.decode(line) == p.decode(line)


def test_the_worst_that_our_own_half_sends_is_not_cut():
    failure = p.Failure(type="E", message="m" * 30_000, traceback="t\n" * 60_000)
    frames = (p.Frame(file="f" * 200, line=1, function="g" * 200, text="t" * 200),) * 60
    row = p.MetricRow(at_s=1.0, step=1.0, metrics={"loss": math.inf})
    bar = p.Bar(id=1, desc="d" * 200, unit="u" * 40, postfix="p" * 500)
    for message in (
        p.Output(
            rank=-1, stream="stdout", offset=0, text="\x1b[1;32mok\x1b[0m\t50%\r" * 5000
        ),
        p.Ended(
            rank=0, restart=0, outcome="raised", failure=failure, meaning="m" * 30_000
        ),
        p.Stacks(
            request_id="a1",
            rank=0,
            local_rank=0,
            threads=(p.Thread(frames=frames),) * 9,
        ),
        p.Progress(
            rank=0,
            restart=0,
            at_s=1.0,
            points=p.points_of([row] * 500),
            bars=(bar,) * 100,
        ),
    ):
        assert DECODER.decode(p.encode(message)) == (0, message)


@pytest.mark.parametrize("kind", OF_NOTEBOOKS, ids=lambda kind: kind.__name__)
def test_what_only_a_notebook_says_is_refused(kind):
    name = codec._NAMES[kind]
    with pytest.raises(p.BadLine) as caught:
        DECODER.decode(json.dumps({"t": name, "n": 1}).encode())
    assert str(caught.value) == f"{name}: no host sends this"


# ---- any message, with hostile values


CHARS = st.sampled_from([*NASTY, "a", "é", "😀", "\u200b"])
TEXT = st.text(CHARS, max_size=30) | CHARS.map(lambda char: char * 5000)
WHOLE = st.integers(-(2**63), 2**63) | st.sampled_from([-1, 0, 1, 2**63, -(2**63)])
VALUES = {
    str: TEXT,
    int: WHOLE,
    float: st.floats() | WHOLE,
    bool: st.booleans(),
    codec.Numbers: st.lists(st.floats(), min_size=6, max_size=6).map(codec.packed),
}


def plain(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Return a strategy for what JSON may have in place of a value of this type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.fixed_dictionaries(
            {field.name: plain(hints[field.name]) for field in fields(kind)}
        )
    if origin is tuple:
        return st.lists(plain(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXT, plain(args[1]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.none() | plain(args[0])
    return VALUES[kind]


def comes_in(kind: type, raw: dict[str, object]) -> p.Message | None:
    """Return what a line becomes, None if it is refused."""
    line = json.dumps(
        {"t": codec._NAMES[kind], "n": 0, **raw}, ensure_ascii=False
    ).encode("utf-8", "replace")
    try:
        return DECODER.decode(line)[1]
    except p.BadLine:
        return None


def check(value: object, owner: type, name: str) -> None:
    """Assert that a value is harmless and bounded, and all that is in it; it came in as field `name` of an `owner`."""
    if isinstance(value, str):
        check_text(value, owner, name)
    elif is_dataclass(value):
        for field in fields(value):
            check(getattr(value, field.name), type(value), field.name)
    elif isinstance(value, codec.Numbers):
        assert all(-1e18 <= at_s <= 1e18 for at_s in value[0::3])
        assert not any(abs(step) > 1e18 for step in value[1::3])  # NaN for none
    elif isinstance(value, dict | tuple):
        for one in value:
            check(one, owner, name)
            if isinstance(value, dict):
                check(value[one], owner, name)
    elif isinstance(value, int):
        assert -(2**63) <= value <= 2**63
    elif value is not None:
        # A metric may be infinite, and no number.
        number = typing.cast(float, value)
        assert name == "metrics" or owner in OF_A_START or -1e18 <= number <= 1e18


def check_text(value: str, owner: type, name: str) -> None:
    if owner in OF_A_START:
        return
    assert len(value) <= MOST_CHARS.get(name, 3 * 4096)
    if (owner, name) == (p.Output, "text"):
        assert is_harmless(COLOURS.sub("", value).replace("\r", ""), may_break=True)
    else:
        assert is_harmless(value, may_break=name in MAY_BREAK)


@pytest.mark.parametrize("kind", OF_HOSTS, ids=lambda kind: kind.__name__)
@settings(max_examples=settings.default.max_examples // 3)
@given(st.data())
def test_any_message_comes_in_harmless_and_within_its_limits(kind, data):
    raw = data.draw(plain(kind))
    message = comes_in(kind, raw)
    # Whole lines that are too long are refused, and what is no size.
    if message is None:
        is_long = len(json.dumps(raw, ensure_ascii=False)) > p.MAX_LINE_BYTES // 4
        assert is_long or kind in (p.Skipped, p.NeedBlob, p.Data, p.FileBegins)
        return
    check(message, kind, "")
    again = p.encode(message)
    if len(again) <= p.MAX_LINE_BYTES:
        assert p.encode(DECODER.decode(again)[1]) == again, (
            "what is within the limits is not changed"
        )


@given(plain(FirstReply))
def test_any_first_reply_comes_in_harmless(raw):
    check(first_reply(json.dumps(raw).encode(), "gpu-a"), FirstReply, "")


# ---- what becomes of single values


@pytest.mark.parametrize(
    ("value", "amount", "optional"),
    [
        (math.nan, 0.0, None),
        (math.inf, 1e18, None),
        (-math.inf, -1e18, None),
        (1e300, 1e18, 1e18),
        (7, 7.0, 7.0),
    ],
)
def test_amounts_beyond_their_range(value, amount, optional):
    raw = {"rank": 0, "restart": 0, "at_s": 1, "bars": [{"id": 1, "n": value, "rate": value}]}  # fmt: skip
    (bar,) = comes_in(p.Progress, raw).bars
    assert (bar.n, bar.rate) == (amount, optional)


@pytest.mark.parametrize(
    ("lease_s", "kept"), [(0, 1.0), (math.nan, 1.0), (math.inf, 86_400.0), (90, 90.0)]
)
def test_a_lease_that_cannot_be_renewed(lease_s, kept):
    listed = {
        "protocol": 2,
        "job": "j",
        "node_rank": 0,
        "hosts": [],
        "began_s": 1e300,
        "terms": {"lease_s": lease_s},
    }
    (job,) = comes_in(p.Jobs, {"jobs": [listed]}).jobs
    assert job.terms.lease_s == kept
    assert job.began_s == 1e11


def test_a_number_that_no_arithmetic_takes_is_refused():
    raw = {"rank": 10**30, "stream": "stdout", "offset": 0}
    assert comes_in(p.Output, raw) is None


def test_a_metric_may_be_infinite_or_no_number():
    values = {"a": math.inf, "b": math.nan, "\x1b[2J": -math.inf}
    raw = {name: codec.packed([1, 2, value]) for name, value in values.items()}
    points = comes_in(
        p.Progress, {"rank": 0, "restart": 0, "at_s": 1, "points": raw}
    ).points
    assert list(points) == ["a", "b", ""]
    assert math.isnan(points["b"][2])
    assert (points["a"], points[""]) == ((1, 2, math.inf), (1, 2, -math.inf))


def test_seconds_and_steps_of_points_come_into_their_range():
    raw = codec.packed(
        [math.nan, math.inf, 1.0, 1e300, -1e300, 2.0, 1.0, math.nan, 3.0]
    )
    told = {"rank": 0, "restart": 0, "at_s": 1, "points": {"loss": raw}}
    loss = comes_in(p.Progress, told).points["loss"]
    assert [repr(number) for number in loss] == [
        "0.0", "nan", "1.0", "1e+18", "-1e+18", "2.0", "1.0", "nan", "3.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "points", ["AAAA", "no base64", 1, None, [1.0], codec.packed([1.0, 2.0])]
)
def test_points_that_are_none_are_refused(points):
    told = {"rank": 0, "restart": 0, "at_s": 1, "points": {"loss": points}}
    assert comes_in(p.Progress, told) is None


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (p.Data(size_bytes=-1), "data.size_bytes"),
        (p.NeedBlob(sha256="", offset=-1), "need_blob.offset"),
        (p.Skipped(through=1 << 63), "skipped.through"),
    ],
)
def test_a_size_is_refused_rather_than_changed(message, field):
    with pytest.raises(p.BadLine) as caught:
        DECODER.decode(p.encode(message))
    assert str(caught.value) == f"{field}: no size"


def test_texts_are_cut():
    points = {"n" * 300: codec.packed([1, 1, 1])}
    message = comes_in(p.Progress, {"rank": 0, "restart": 0, "at_s": 1, "device": "d" * 999, "points": points})  # fmt: skip
    assert (len(message.device), *map(len, message.points)) == (200, 200)
    failure = {"type": "T" * 9999, "message": "m" * 99_999, "traceback": "t" * 300_000}
    kept = comes_in(
        p.Ended, {"rank": 0, "restart": 0, "outcome": "raised", "failure": failure}
    ).failure
    assert (len(kept.type), len(kept.message), len(kept.traceback)) == (
        2000,
        40_000,
        150_000,
    )


def test_a_first_reply_without_its_fields(golden):
    assert first_reply(b"{}", "gpu-a") == FirstReply()
    with golden.raises(ProtocolError):
        first_reply(b'{"have":"\x1b[2J"}', "gpu-a")
