"""Public halves of keys in files: a .pub, a certificate, and the readable part of a private key.

Only reads files.
"""

from __future__ import annotations

import base64
import struct
from pathlib import Path

from distmagic.remote.frozen import frozen

_CERTIFIED = b"-cert-v01@openssh.com"
_PRIVATE = b"-----BEGIN OPENSSH PRIVATE KEY-----"
_MAGIC = b"openssh-key-v1\0"
_MOST_BYTES = 1 << 17  # of a file
# The number of fields of a public key after its type; ecdsa keys have two, too.
_FIELDS = {
    b"ssh-ed25519": 1,
    b"sk-ssh-ed25519@openssh.com": 2,
    b"sk-ecdsa-sha2-nistp256@openssh.com": 3,
}


@frozen
class Certificate:
    """A user certificate. `blob` is all of it, `plain` is the public half of its key."""

    file: str
    blob: bytes
    plain: bytes


def read_public_half(file: str) -> bytes | None:
    """Return the public key in `file`, in `file`.pub or in the private key `file`; None if there is
    none.
    """
    return read_public_key(file) or read_public_key(f"{file}.pub") or _private(file)


def read_public_key(file: str) -> bytes | None:
    """Return the first line of a file that is a public key or a certificate; None if there is
    none.
    """
    for line in _content(file).splitlines():
        words = line.split()
        try:
            blob = base64.b64decode(words[1], validate=True)
            if take_strings(blob, 1)[0] == words[0]:
                return blob
        except (IndexError, ValueError):
            continue
    return None


def _private(file: str) -> bytes | None:
    """Return the public half in a private key in OpenSSH's format, which is never encrypted."""
    _, is_there, rest = _content(file).partition(_PRIVATE)
    if not is_there:
        return None
    try:
        data = base64.b64decode(b"".join(rest.partition(b"-----")[0].split()))
        *names, options = take_strings(data.removeprefix(_MAGIC), 3)
        skipped = len(_MAGIC) + sum(4 + len(part) for part in (*names, options))
        return take_strings(data[skipped + 4 :], 1)[0]  # after the number of keys
    except ValueError:
        return None


def _content(file: str) -> bytes:
    try:
        with Path(file).open("rb") as opened:
            return opened.read(_MOST_BYTES)
    except OSError:
        return b""


def read_certificate(file: str) -> Certificate | None:
    """Return the certificate in `file` or `file`.pub; None if there is none."""
    blob = read_public_half(file)
    if blob is None:
        return None
    try:
        kind, is_certified, _ = take_strings(blob, 1)[0].partition(_CERTIFIED)
        if not is_certified:
            return None
        if kind.startswith(b"sk-"):
            kind += b"@openssh.com"
        _, _nonce, *fields = take_strings(blob, 2 + _FIELDS.get(kind, 2))
    except ValueError:
        return None
    return Certificate(file=file, blob=blob, plain=join_strings(kind, *fields))


def is_security_key(half: bytes) -> bool:
    """Whether the private half is in a hardware token (FIDO)."""
    return half[4:7] == b"sk-"


def take_strings(data: bytes, count: int) -> list[bytes]:
    """Return the first `count` strings in SSH's format, each after its length.

    Raises `ValueError` if data ends early.
    """
    strings = []
    at = 0
    for _ in range(count):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data) or at + 4 > len(data):
            raise ValueError("the data end in the middle of a string")
        strings.append(data[at + 4 : end])
        at = end
    return strings


def join_strings(*parts: bytes) -> bytes:
    """Return strings joined in SSH's format."""
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)
