"""What OpenSSH's client says on stderr, translated to the same errors that the paramiko transport raises. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from distmagic.errors import HostError, HostKeyError
from distmagic.request.hosts import Host
from distmagic.transports import troubles
from distmagic.transports.troubles import Trouble

_KEY = r"(?P<type>\S+) key (?:fingerprint|sent by the remote host) is\s+(?P<fingerprint>SHA256:[^\s.]+)"
USUAL_FILE = "~/.ssh/known_hosts"


@dataclass(frozen=True, kw_only=True)
class _Stderr:
    """All that the client wrote, what a pattern found in it, and what was dialled for how long.

    `file` is for new host keys, "" where the configuration keeps none.
    """

    text: str
    found: re.Match[str]
    where: str
    seconds: float
    file: str


def trouble(stderr: str, host: Host, seconds: float, file: str = USUAL_FILE) -> Trouble:
    """Return the trouble behind what the client wrote; its last line where that is not known."""
    where = f"{host.name} port {host.port}" if host.port is not None else host.name
    for pattern, make in _TABLE:
        found = re.search(pattern, stderr, re.IGNORECASE)
        if found is not None:
            return make(
                _Stderr(
                    text=stderr, found=found, where=where, seconds=seconds, file=file
                )
            )
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return troubles.broken(where, lines[-1] if lines else "the client printed nothing")


def _changed(stderr: _Stderr) -> Trouble:
    at = re.search(r"Offending \S+ key in (?P<file>.+):(?P<line>\d+)", stderr.text)
    name = re.search(r"Host key for (?P<name>\S+) has changed", stderr.text)
    if at is None or name is None:
        return _unknown(stderr)
    found = re.search(_KEY, stderr.text)
    key = "the key it shows"
    if found is not None:
        key = f"{found['type'].lower()} {found['fingerprint']}"
    return troubles.changed_host_key(
        stderr.where, name["name"], key, at["file"], int(at["line"])
    )


def _unknown(stderr: _Stderr) -> Trouble:
    name = re.search(r"host key is known for (?P<name>\S+)", stderr.text)
    if name is None:
        hint = "Log in there once with ssh, which shows the fingerprint, asks and remembers."
        if not stderr.file:
            hint = troubles.KEPT_NOWHERE
        return Trouble(
            HostKeyError, f"the host key of {stderr.where} is not known.", hint
        )
    hostname, port = name["name"], 22
    place = re.fullmatch(r"\[(?P<host>.+)\]:(?P<port>\d+)", hostname)
    if place:
        hostname, port = place["host"], int(place["port"])
    return troubles.unknown_host_key(
        stderr.where, name["name"], hostname, port, "it", stderr.file
    )


def _revoked(stderr: _Stderr) -> Trouble:
    hint = "Don't connect. Ask the machine's administrator for its new key."
    return Trouble(HostKeyError, f"the host key of {stderr.where} is REVOKED.", hint)


def _denied(stderr: _Stderr) -> Trouble:
    accepts = tuple(stderr.found["methods"].split(","))
    refusal = troubles.not_accepted(
        stderr.where, stderr.found["user"] or "", ("what ssh offers",), accepts
    )
    hint = refusal.hint
    if "keyboard-interactive" in accepts or "password" in accepts:
        hint += "\n--ssh-command never asks for passwords; leave it out where a typed answer is needed."
    return Trouble(refusal.kind, refusal.message, hint)


def _configuration(stderr: _Stderr) -> Trouble:
    line = stderr.found[0].strip()
    return Trouble(
        HostError, f"the ssh configuration is wrong: {line}", "Correct that line."
    )


_TABLE: tuple[tuple[str, Callable[[_Stderr], Trouble]], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", _changed),
    (r"revoked (?:host )?key|key .* revoked|REVOKED HOST KEY", _revoked),
    (r"Host key verification failed|host key is known for", _unknown),
    (r"(?:(?P<user>\S+)@\S+: )?Permission denied \((?P<methods>[^)]*)\)", _denied),
    (r"Could not resolve hostname", lambda stderr: troubles.unknown_name(stderr.where)),
    (r"Connection refused", lambda stderr: troubles.refused(stderr.where)),
    (r"timed out", lambda stderr: troubles.no_answer(stderr.where, stderr.seconds)),
    (
        r"No route to host|Network is unreachable",
        lambda stderr: troubles.no_route(stderr.where, stderr.found[0]),
    ),
    (
        r"kex_exchange_identification: (?P<why>.*)",
        lambda stderr: troubles.not_ssh(stderr.where, stderr.found["why"].strip()),
    ),
    (
        r"invalid format|Connection (?:closed|reset) by",
        lambda stderr: troubles.not_ssh(stderr.where),
    ),
    (
        r".*(?:Bad configuration option|Can't open user config file|missing argument|Bad .* argument).*",
        _configuration,
    ),
)
