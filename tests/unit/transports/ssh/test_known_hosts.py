"""known_hosts: which line is for a host, and which keys are not trusted."""

from __future__ import annotations

import pytest

from distmagic.transports.ssh import known_hosts
from distmagic.transports.ssh.config import Resolved
from distmagic.transports.troubles import Trouble

KEY, OTHER = "AAAAC3NzaC1lZDI1NTE5AAAAIJy3", "AAAAC3NzaC1lZDI1NTE5AAAAIJy4"


def known(text: str) -> tuple[known_hosts.KnownKey, ...]:
    return tuple(known_hosts.parse(text.splitlines(), "kh"))


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("gpu-a", "gpu-a", True),
        ("GPU-A", "gpu-a", True),
        ("gpu-?,10.0.0.*", "10.0.0.7", True),
        ("*,!gpu-b", "gpu-b", False),
        ("!gpu-b,*", "gpu-a", True),
        ("[10.0.0.1]:22", "10.0.0.1", False),
        ("[10.0.0.1]:2222", "[10.0.0.1]:2222", True),
        ("|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg=", "192.168.1.61", True),
        ("|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg=", "192.168.1.62", False),
        ("|1|broken", "gpu-a", False),
    ],
)  # fmt: skip
def test_patterns(pattern, name, fits):
    (line,) = known(f"{pattern} ssh-ed25519 {KEY}")
    assert line.is_for(name) is fits


def test_lines_that_say_nothing_are_left_out():
    text = f"\n# x\ngpu-a\ngpu-a ssh-rsa ???\n@odd gpu-a ssh-rsa {KEY}\n@revoked gpu-a ssh-ed25519 {KEY} comment\n"
    assert [(line.line, line.marker) for line in known(text)] == [(6, "@revoked")]


def server(port: int = 22, alias: str | None = None) -> Resolved:
    return Resolved(
        name="gpu-a",
        hostname="gpu-a",
        user="me",
        port=port,
        host_key_alias=alias,
        user_known_hosts=("~/kh",),
    )


def check(text: str, dialled: Resolved, key_type: str = "ssh-ed25519") -> str:
    """Return the trouble's message and hint, "" if there is none."""
    blob = next(iter(known(f"x {key_type} {KEY}"))).blob
    try:
        known_hosts.check(known(text), dialled, "gpu-a port 22", key_type, blob)
    except Trouble as trouble:
        return str(trouble.for_host("gpu-a"))
    return ""


def test_a_known_key():
    assert check(f"gpu-a ssh-ed25519 {KEY}", server()) == ""
    assert check(f"gpu-a ssh-ed25519 {OTHER}\ngpu-a ssh-ed25519 {KEY}", server()) == ""
    # As OpenSSH: also without the port.
    assert check(f"gpu-a ssh-ed25519 {KEY}", server(2222)) == ""
    assert check(f"the-alias ssh-ed25519 {KEY}", server(2222, "the-alias")) == ""


def test_keys_that_are_not_trusted():
    assert "is not known" in check("", server())
    assert "is not known" in check(
        f"gpu-a ssh-ed25519 {KEY}", server(alias="the-alias")
    )
    assert "is not known" in check(f"gpu-a ssh-rsa {OTHER}", server())
    assert "has CHANGED" in check(f"gpu-a ssh-ed25519 {OTHER}", server())
    assert "kh, line 2" in check(f"\ngpu-a ssh-ed25519 {OTHER}", server())
    assert "is REVOKED" in check(
        f"gpu-a ssh-ed25519 {KEY}\n@revoked * ssh-ed25519 {KEY}", server()
    )
    assert "--ssh-command ssh" in check(
        f"@cert-authority * ssh-ed25519 {OTHER}", server()
    )


def test_an_unknown_key_under_another_name_is_not_cured_by_keyscan():
    assert "ssh-keyscan gpu-a >> ~/kh" in check("", server())
    assert "ssh-keyscan" not in check("", server(alias="the-alias"))


def test_the_types_to_ask_for():
    lines = known(
        f"gpu-a ssh-rsa {KEY}\ngpu-a ssh-ed25519 {KEY}\n@revoked gpu-a ssh-dss {KEY}\nb x {KEY}"
    )
    assert known_hosts.types_known(lines, ("gpu-a",)) == ("ssh-rsa", "ssh-ed25519")
    assert known_hosts.types_known(lines, ("nobody",)) == ()


def test_a_known_hosts_file_is_read_once_and_again_after_an_edit(tmp_path):
    file = tmp_path / "known_hosts"
    file.write_text("gpu-a ssh-ed25519 AAAA\n")
    first = known_hosts.read([str(file)])
    assert known_hosts.read([str(file)])[0] is first[0]
    file.write_text("gpu-a,gpu-b ssh-ed25519 AAAA\n")
    assert [key.patterns for key in known_hosts.read([str(file)])] == ["gpu-a,gpu-b"]
    file.unlink()
    assert known_hosts.read([str(file)]) == ()
