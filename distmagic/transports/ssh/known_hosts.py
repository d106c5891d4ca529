"""known_hosts files, read strictly: which keys are known for a host, from which file and line.

Several files, hashed names, wildcards, negation, `[host]:port` and the markers @revoked and
@cert-authority. Checking is pure; only `read` touches files.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import os
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.transports import troubles
from distmagic.transports.ssh.config import Resolved
from distmagic.transports.ssh.config_lines import fits, matches_any


@frozen
class KnownKey:
    """One line of a known_hosts file.

    `patterns` are the hosts it is for, `blob` is the key itself.
    """

    file: str
    line: int
    marker: str
    patterns: str
    type: str
    blob: bytes

    def is_for(self, name: str) -> bool:
        """Whether this line applies to the host known as `name`."""
        return matches_any(self.patterns.split(","), name, _matches)


def _matches(pattern: str, name: str) -> bool:
    if not pattern.startswith("|1|"):
        return fits(pattern.lower(), name)  # which may be `[host]:port`
    # A hashed name: |1|SALT|HMAC-SHA1 of the name, both in base64.
    try:
        _, _, salt, digest = pattern.split("|")
        made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(made, base64.b64decode(digest))
    except ValueError:
        return False


def read(files: Iterable[str]) -> tuple[KnownKey, ...]:
    """Return the lines of all readable files; a missing file counts as empty."""
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
    """Return the keys in `lines`; invalid lines are ignored, as by OpenSSH."""
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        marker = words.pop(0) if line.lstrip().startswith("@") else ""
        is_known = marker in ("", "@revoked", "@cert-authority")
        if not is_known or len(words) < 3 or words[0].startswith("#"):
            continue
        patterns, kind, encoded, *_ = words
        with suppress(ValueError):
            blob = base64.b64decode(encoded, validate=True)
            keys.append(
                KnownKey(
                    file=file,
                    line=number,
                    marker=marker,
                    patterns=patterns,
                    type=kind,
                    blob=blob,
                )
            )
    return keys


def names_of(server: Resolved) -> tuple[str, ...]:
    """Return the names under which a host may be known, the preferred one first.

    As in OpenSSH: HostKeyAlias unchanged; a port other than 22 in the name, but also without it.
    """
    if server.host_key_alias is not None:
        return (server.host_key_alias.lower(),)
    plain = server.hostname.lower()
    if server.port == 22:
        return (plain,)
    return (f"[{plain}]:{server.port}", plain)


def types_known(keys: tuple[KnownKey, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types of the keys known for a host, so that the server is asked for one of
    these.
    """
    for name in names:
        types = [key.type for key in keys if not key.marker and key.is_for(name)]
        if types:
            return tuple(dict.fromkeys(types))
    return ()


def check(
    keys: tuple[KnownKey, ...],
    server: Resolved,
    where: str,
    key_type: str,
    blob: bytes,
) -> None:
    """Return if the server's key is known; else raise a `Trouble` with its cure.

    `where` is the machine in messages.
    """
    seen = shown(key_type, blob)
    names = names_of(server)
    about = [k for k in keys if any(k.is_for(name) for name in names)]
    for known in about:
        if known.marker == "@revoked" and known.blob == blob:
            by = f"{seen}, by {known.file}, line {known.line}"
            raise troubles.REVOKED_HOST_KEY(where, by)
    if any(known.blob == blob and not known.marker for known in about):
        return
    for known in about:
        if not known.marker and known.type == key_type and known.is_for(names[0]):
            raise troubles.CHANGED_HOST_KEY(
                where,
                file=known.file,
                line=known.line,
                key=seen,
                name=shlex.quote(names[0]),
            )
    for known in about:
        if known.marker == "@cert-authority":
            raise troubles.CERTIFIED_HOST_KEY(
                where, file=known.file, line=known.line, key=seen
            )
    kept = [file for file in server.user_known_hosts if file != os.devnull]
    raise troubles.unknown_host_key(
        where,
        names[0],
        server.hostname,
        server.port,
        seen,
        kept[0] if kept else "",
        is_direct=not server.jumps and server.proxy_command is None,
    )


def shown(key_type: str, blob: bytes) -> str:
    """Return a key's type and fingerprint, for errors."""
    return f"{key_type.removeprefix('ssh-')} {fingerprint(blob)}"


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as `ssh-keygen -l` shows it."""
    digest = hashlib.sha256(blob).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
