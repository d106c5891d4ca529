"""known_hosts files, read strictly: which keys are known for a host, from which file and line.

Several files, hashed names, wildcards, negation, `[host]:port` and the markers @revoked and @cert-authority.
Checking is pure; only `read` touches files.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from distmagic.transports import troubles
from distmagic.transports.ssh.config_lines import fits, matches_any

_MARKERS = ("@revoked", "@cert-authority")


@dataclass(frozen=True, kw_only=True)
class KnownKey:
    """One line of a known_hosts file. `patterns` are the hosts it is for, `blob` is the key itself."""

    file: str
    line: int
    marker: str
    patterns: str
    type: str
    blob: bytes

    def is_for(self, name: str) -> bool:
        """Whether this line is about the host known as `name`."""
        return matches_any(self.patterns.split(","), name, _matches)


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("|1|"):
        return fits(pattern.lower(), name)  # which may be `[host]:port`
    # A hashed name: |1|SALT|HMAC-SHA1 of the name, both in base64.
    try:
        _, _, salt, digest = pattern.split("|")
        made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(made, base64.b64decode(digest))
    except (ValueError, binascii.Error):
        return False


def read(files: Iterable[str]) -> tuple[KnownKey, ...]:
    """Return the lines of all files that can be read; a missing file is an empty one."""
    found: list[KnownKey] = []
    for file in files:
        try:
            status = Path(file).stat()
            found += _keys_as_of(
                file, status.st_ino, status.st_mtime_ns, status.st_size
            )
        except OSError:
            continue
    return tuple(found)


@functools.lru_cache(maxsize=16)
def _keys_as_of(file: str, *_version: int) -> tuple[KnownKey, ...]:
    """Read a file once in each of its versions, however many hosts are connected to."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        return tuple(parse(lines, file))


def parse(lines: Iterable[str], file: str) -> list[KnownKey]:
    """Return the keys in `lines`; lines that are no known_hosts line are left out, as OpenSSH does."""
    keys = []
    for number, line in enumerate(lines, 1):
        key = _parse_line(line, file, number)
        if key is not None:
            keys.append(key)
    return keys


def _parse_line(line: str, file: str, number: int) -> KnownKey | None:
    words = line.split()
    marker = ""
    if line.lstrip().startswith("@"):
        marker = words.pop(0)
    if len(words) < 3 or words[0].startswith("#"):
        return None
    if marker and marker not in _MARKERS:
        return None
    patterns, kind, encoded, *_ = words
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error):
        return None
    return KnownKey(
        file=file, line=number, marker=marker, patterns=patterns, type=kind, blob=blob
    )


def names_of(hostname: str, port: int, alias: str | None) -> tuple[str, ...]:
    """Return the names a host may be known as, the right one first.

    As OpenSSH: HostKeyAlias as it is; another port than 22 in the name, but also without it.
    """
    if alias is not None:
        return (alias.lower(),)
    plain = hostname.lower()
    if port == 22:
        return (plain,)
    return (f"[{plain}]:{port}", plain)


def types_known(keys: tuple[KnownKey, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types of the keys known for a host, so that the server is asked for one of these."""
    for name in names:
        types = [key.type for key in keys if not key.marker and key.is_for(name)]
        if types:
            return tuple(dict.fromkeys(types))
    return ()


@dataclass(frozen=True, kw_only=True)
class Dialled:
    """The server whose key is checked. `where` are words, `names` are from `names_of`.

    `file` is for new keys, "" where none is kept. `is_pinned`: the first key that is seen is trusted: see pins.py.
    `is_direct`: it is dialled from here.
    """

    where: str
    hostname: str
    port: int
    names: tuple[str, ...]
    file: str
    is_pinned: bool = False
    is_direct: bool = True


def check(
    keys: tuple[KnownKey, ...], server: Dialled, key_type: str, blob: bytes
) -> None:
    """Return if the key that `server` showed is known; else raise a `Trouble` with its cure."""
    seen = shown(key_type, blob)
    about = [k for k in keys if any(k.is_for(name) for name in server.names)]
    for known in about:
        if known.marker == "@revoked" and known.blob == blob:
            by = f"{seen}, by {known.file}, line {known.line}"
            raise troubles.REVOKED_HOST_KEY(server.where, by)
    if any(known.blob == blob and not known.marker for known in about):
        return
    for known in about:
        if (
            not known.marker
            and known.type == key_type
            and known.is_for(server.names[0])
        ):
            raise troubles.CHANGED_HOST_KEY(
                server.where,
                file=known.file,
                line=known.line,
                key=seen,
                name=shlex.quote(server.names[0]),
            )
    for known in about:
        if known.marker == "@cert-authority":
            raise troubles.CERTIFIED_HOST_KEY(
                server.where, file=known.file, line=known.line, key=seen
            )
    raise troubles.unknown_host_key(
        server.where,
        server.names[0],
        server.hostname,
        server.port,
        seen,
        server.file,
        is_direct=server.is_direct,
    )


def shown(key_type: str, blob: bytes) -> str:
    """Return a key as errors name it: its type and fingerprint."""
    return f"{key_type.removeprefix('ssh-')} {fingerprint(blob)}"


def file_for_new_keys(files: tuple[str, ...]) -> str:
    """Return the first of a host's files that keeps what is written to it, "" where none does."""
    return next((file for file in files if file != os.devnull), "")


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as `ssh-keygen -l` shows it."""
    digest = hashlib.sha256(blob).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
