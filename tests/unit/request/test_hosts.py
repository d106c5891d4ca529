"""Hosts as users write them, and what is said of those that are written wrong."""

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmagic.errors import UsageError
from distmagic.request.hosts import (
    LOCALHOST,
    Host,
    is_port,
    parse_host,
    parse_hostfile,
    parse_hosts,
    parse_slots,
    pasted,
)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu-a", Host(name="gpu-a")),
        ("gpu-a:4", Host(name="gpu-a", slots=4)),
        ("gpu-a:gpu", Host(name="gpu-a", slots="gpu")),
        ("gpu-a:22", Host(name="gpu-a", port=22)),
        ("gpu-a:21", Host(name="gpu-a", slots=21)),
        ("gpu-a:1023", Host(name="gpu-a", slots=1023)),
        ("gpu-a:1024", Host(name="gpu-a", port=1024)),
        ("gpu-a:65535", Host(name="gpu-a", port=65535)),
        ("gpu-a:80:2", Host(name="gpu-a", port=80, slots=2)),
        ("me@gpu-a", Host(name="gpu-a", user="me")),
        ("corp\\me.x+y@gpu-a", Host(name="gpu-a", user="corp\\me.x+y")),
        ("[fe80::1%eth0.7]:22", Host(name="fe80::1%eth0.7", port=22)),
        ("me@gpu-a:2222", Host(name="gpu-a", user="me", port=2222)),
        ("me@gpu-a:2222:auto", Host(name="gpu-a", user="me", port=2222, slots="auto")),
        ("ssh://me@gpu-a:2222", Host(name="gpu-a", user="me", port=2222)),
        ("10.0.0.1:8", Host(name="10.0.0.1", slots=8)),
        ("fd00::1", Host(name="fd00::1")),
        ("fe80::1%eth0", Host(name="fe80::1%eth0")),
        ("[fd00::1]", Host(name="fd00::1")),
        ("[fd00::1]:22", Host(name="fd00::1", port=22)),
        ("me@[fd00::1]:2222:4", Host(name="fd00::1", user="me", port=2222, slots=4)),
        ("a.b_c-d.example:cpu", Host(name="a.b_c-d.example", slots="cpu")),
        ("  gpu-a  ", Host(name="gpu-a")),
    ],
)
def test_a_host(text, host):
    assert parse_host(text) == host


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("gpu-a:4", "ssh gpu-a"),
        ("me@gpu-a:2222:2", "ssh -p 2222 me@gpu-a"),
        ("gpu-a:22", "ssh -p 22 gpu-a"),
        ("corp\\me@gpu-a", "ssh 'corp\\me@gpu-a'"),
        ("[fe80::1%eth0]:22", "ssh -p 22 fe80::1%eth0"),
        ("localhost", "env"),
        ("me@localhost", "ssh me@localhost"),
    ],
)
def test_the_command_by_hand_has_all_that_was_typed(text, command):
    assert parse_host(text).by_hand() == command


@pytest.mark.parametrize(
    ("by_hand", "home"),
    [("env", "/here"), ("ssh a", "/on/a"), ("ssh a ssh b", "/on/b")],
)
def test_a_home_in_a_pasted_word_is_that_of_the_last_host(by_hand, home):
    ssh = 'ssh() { HOME=/on/$1; export HOME; shift; eval "$*"; }'
    line = f"{ssh}; {by_hand} echo {pasted(by_hand, '~/my env/python')}"
    done = subprocess.run(
        ["sh", "-c", line],
        env={"HOME": "/here", "PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout == f"{home}/my env/python\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@gpu-a",
        "gpu a",
        "gpu-a;rm",
        "-oProxyCommand",
        "-l@gpu-a",
        "gpu-a:1:2:3",
        "gpu-a:0",
        "gpu-a:-2",
        "gpu-a:2.5",
        "gpu-a:",
        "gpu-a:²",
        "gpu-a:70000",
        "gpu-a:0:4",
        "gpu-a:ssh:4",
        "[fd00::1",
        "$(id)@gpu-a",
        "me;id@gpu-a",
        "`id`@gpu-a",
        "me|id@gpu-a",
        "me\\@gpu-a",
        "fe80::1%;id",
        "fe80::1%",
        "[fe80::1%$(id)]:22",
        "[gpu-a]:22",
        "[fd00::1]22",
    ],
)
def test_what_is_no_host(text, golden):
    with golden.raises(UsageError):
        parse_host(text)


def test_a_list_is_separated_by_commas_or_blanks():
    expected = (Host(name="a", slots=4), Host(name="b", slots=2), Host(name="c"))
    assert parse_hosts("a:4,b:2,c") == parse_hosts(" a:4  b:2,\n c ,") == expected


@pytest.mark.parametrize("text", ["", " ", ",", " , \n"])
def test_an_empty_list(text, golden):
    with golden.raises(UsageError):
        parse_hosts(text)


@pytest.mark.parametrize("text", ["a,b,a", "a:2,a:4", "me@a:2222,me@a:2222:4"])
def test_a_host_that_is_listed_twice(text, golden):
    with golden.raises(UsageError):
        parse_hosts(text)


def test_one_name_with_two_ports_is_two_hosts():
    assert len(parse_hosts("127.0.0.1:2201,127.0.0.1:2202,me@127.0.0.1:2201")) == 3


def test_a_hostfile_of_openmpi_horovod_and_deepspeed():
    text = "\ufeff# the cluster\r\ngpu-a slots=4   # new\r\n\r\nme@gpu-b:2222 slots=2 max-slots=8\ngpu-c max_slots=4\nfd00::1 slots=gpu"
    assert parse_hostfile(text, "hosts.txt") == (
        Host(name="gpu-a", slots=4),
        Host(name="gpu-b", user="me", port=2222, slots=2),
        Host(name="gpu-c"),
        Host(name="fd00::1", slots="gpu"),
    )


@pytest.mark.parametrize(
    "text",
    [
        "a slots=2\nb slots=x",
        "a slots=0",
        "a slots=",
        "# one\n\na 4",
        "a slot=4",
        "a\nb!",
        "a\nb\na slots=3",
        "# nothing\n",
    ],
)
def test_a_hostfile_names_the_line(text, golden):
    with golden.raises(UsageError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert caught.value.hint


def test_slots_and_ports():
    assert [
        parse_slots(word, "here") for word in ("1", "+2", "gpu", "cpu", "auto")
    ] == [1, 2, "gpu", "cpu", "auto"]
    assert [
        is_port(word)
        for word in ("1", "65535", "0", "65536", "-1", "x", "", "²", "9" * 5000)
    ] == [True] * 2 + [False] * 7


def test_only_plain_localhost_is_this_machine():
    assert parse_host("localhost:4").is_local
    assert LOCALHOST.is_local
    assert not parse_host("localhost:2222").is_local
    assert not parse_host("me@localhost").is_local


@given(st.text(max_size=40) | st.text(alphabet="ab@:[]0123456789.-%,# =", max_size=30))
def test_any_text_is_hosts_or_a_usage_error(text):
    for parse in (parse_host, parse_hosts, lambda t: parse_hostfile(t, "file")):
        try:
            found = parse(text)
        except UsageError:
            continue
        for host in found if isinstance(found, tuple) else (found,):
            assert host.name
            assert not host.name.startswith("-")
            assert host.port is None or 1 <= host.port <= 65535
            assert (
                host.slots is None
                or host.slots in ("gpu", "cpu", "auto")
                or host.slots >= 1
            )
