"""The wire: one frozen line a type, what is ignored, and that any bytes are a message or a `BadLine`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.remote.wire import codec
from distmagic.remote.wire import protocol as p
from tests import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "wire.jsonl"


def golden() -> list[bytes]:
    return GOLDEN.read_bytes().splitlines(keepends=True)


def sent_fields(message: object, raw: dict[str, object]) -> Iterator[tuple[type, str]]:
    """Yield the fields that a line has, of a message and of the records in it, each with its type."""
    for name in (field.name for field in fields(message) if field.name in raw):
        yield type(message), name
        value, inner = getattr(message, name), raw[name]
        pairs = zip(value, inner, strict=True) if isinstance(value, tuple) else [(value, inner)]  # fmt: skip
        for record, plain in pairs:
            if is_dataclass(record):
                yield from sent_fields(record, plain)


def test_every_field_is_in_the_golden_file():
    """A field at its default is not sent; examples that leave one out would not freeze its name."""
    sent: dict[type, set[str]] = {}
    for line in golden():
        for kind, name in sent_fields(p.decode(line)[1], json.loads(line)):
            sent.setdefault(kind, set()).add(name)
    for kind, names in sent.items():
        assert names == {field.name for field in fields(kind)}, kind


def test_the_golden_file_has_one_line_a_type():
    names = [json.loads(line)["t"] for line in golden()]
    assert sorted(names) == sorted(codec._TYPES)


@pytest.mark.parametrize("line", golden(), ids=lambda line: json.loads(line)["t"])
def test_the_wire_is_frozen(line):
    """A line that differs here is another protocol: hosts and notebooks of different age would not understand it."""
    n, message = p.decode(line)
    raw = json.loads(line)
    assert type(message) is codec._TYPES[raw["t"]]
    assert p.encode(message, n) == line
    assert p.decode(line.rstrip()) == (n, message)


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
    secret = p.Secret(certificate="CERTIFICATE", key="PRIVATE")
    served = p.ServeBlobs(blobs=(), address="10.0.0.2", secret=secret)
    assert "PRIVATE" not in repr(served)


def test_numbers_that_are_no_numbers_travel():
    row = p.MetricRow(at_s=1.0, metrics={"a": math.nan, "b": -math.inf})
    _, event = p.decode(
        p.encode(p.Progress(rank=0, restart=0, at_s=1.0, points=p.points_of([row])))
    )
    assert math.isnan(event.points["a"][-1])
    assert event.points["b"][-1] == -math.inf


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
        (b'{"t":"progress","n":0,"rank":0,"restart":0,"at_s":1,"points":{"a":"AAAAAAAAAAA="}}', "progress.points: a part of a point"),
        (b'{"t":"progress","n":0,"rank":0,"restart":0,"at_s":1,"points":{"a":""}}', "progress.points: a part of a point"),
        (b'{"t":"progress","n":0,"rank":0,"restart":0,"at_s":1,"points":{"a":"?"}}', "progress.points: no base64"),
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


TEXT = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.binary(max_size=200))
def test_any_bytes(line):
    decode_or_wire_error(line)


@given(st.sampled_from(golden()), st.data())
def test_any_damage_of_a_line(line, data):
    at = data.draw(st.integers(0, len(line)))
    decode_or_wire_error(line[:at])
    decode_or_wire_error(line[:at] + data.draw(st.binary(max_size=3)) + line[at + 1 :])


@given(st.sampled_from(golden()), st.data())
def test_any_json_in_any_field(text, data):
    line = json.loads(text)
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
    for name in (b"at_s", b"step", b"rank", b"device", b"points"):
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
