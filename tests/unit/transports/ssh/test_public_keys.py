"""Public halves and certificates in files: what is cut short or garbage has none, and raises nothing."""

from __future__ import annotations

import base64

import pytest

from distmagic.transports.ssh.public_keys import (
    join_strings,
    read_certificate,
    read_public_half,
)

_ED25519 = join_strings(b"ssh-ed25519", b"k" * 32)


def line(blob: bytes, kind: bytes) -> bytes:
    return kind + b" " + base64.b64encode(blob) + b" a comment\n"


def private(blob: bytes) -> bytes:
    inside = b"openssh-key-v1\0" + join_strings(b"aes256-ctr", b"bcrypt", b"salt")
    body = base64.encodebytes(inside + b"\0\0\0\1" + join_strings(blob, b"secret" * 40))
    armour = b"OPENSSH PRIVATE KEY-----\n"
    return b"-----BEGIN " + armour + body + b"-----END " + armour


@pytest.mark.parametrize("name", ["key", "key.pub"])
def test_a_public_half_is_found_in_all_its_places(name, tmp_path):
    text = b"# mine\r\n\r\n" + line(_ED25519, b"ssh-ed25519")
    (tmp_path / name).write_bytes(text)
    assert read_public_half(str(tmp_path / "key")) == _ED25519


def test_the_readable_part_of_an_encrypted_key(tmp_path):
    (tmp_path / "key").write_bytes(private(_ED25519))
    assert read_public_half(str(tmp_path / "key")) == _ED25519


def test_the_line_beside_a_key_goes_before_what_is_in_it(tmp_path):
    """As ssh has it."""
    other = join_strings(b"ssh-ed25519", b"o" * 32)
    (tmp_path / "key").write_bytes(private(_ED25519))
    (tmp_path / "key.pub").write_bytes(line(other, b"ssh-ed25519"))
    assert read_public_half(str(tmp_path / "key")) == other


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (b"ssh-ed25519", (b"k" * 32,)),
        (b"ssh-rsa", (b"\1\0\1", b"n" * 256)),
        (b"ecdsa-sha2-nistp256", (b"nistp256", b"q" * 65)),
        (b"sk-ssh-ed25519@openssh.com", (b"k" * 32, b"ssh:")),
        (b"sk-ecdsa-sha2-nistp256@openssh.com", (b"nistp256", b"q" * 65, b"ssh:")),
    ],
)
def test_the_key_of_a_certificate(kind, fields, tmp_path):
    certified = kind.removesuffix(b"@openssh.com") + b"-cert-v01@openssh.com"
    blob = join_strings(certified, b"nonce", *fields) + b"\0" * 12 + b"and the rest"
    (tmp_path / "today.pub").write_bytes(line(blob, certified))
    found = read_certificate(str(tmp_path / "today"))
    assert found is not None
    assert (found.blob, found.plain) == (blob, join_strings(kind, *fields))
    (tmp_path / "today.pub").write_bytes(line(join_strings(certified), certified))
    assert read_certificate(str(tmp_path / "today")) is None
    (tmp_path / "today.pub").write_bytes(line(_ED25519, b"ssh-ed25519"))
    assert read_certificate(str(tmp_path / "today")) is None


def test_whatever_is_cut_short_or_no_key_has_no_half(tmp_path):
    file = tmp_path / "key"
    whole = private(_ED25519)
    cuts = [whole[:length] for length in range(0, len(whole), 7)]
    lines = [
        b"ssh-ed25519",
        b"ssh-ed25519 AAAA",
        b"ssh-rsa " + base64.b64encode(_ED25519),
        b"\xff\xfe\0" * 50,
    ]
    for text in (*cuts, *lines):
        file.write_bytes(text)
        assert read_public_half(str(file)) in (None, _ED25519)
    assert read_public_half(str(tmp_path)) is None
    assert read_public_half(str(tmp_path / "missing")) is None
