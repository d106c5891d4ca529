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
_KEYSCAN_FILE = "~/.ssh/known_hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """All that the client said, what a pattern found in it, and what was dialled for how long."""

    text: str
    found: re.Match[str]
    where: str
    seconds: float


def trouble(said: str, host: Host, seconds: float) -> Trouble:
    """Return the trouble behind what the client said; its last line where that is not known."""
    where = f"{host.name} port {host.port}" if host.port is not None else host.name
    for pattern, make in _TABLE:
        found = re.search(pattern, said, re.IGNORECASE)
        if found is not None:
            return make(_Said(text=said, found=found, where=where, seconds=seconds))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return troubles.broken(where, lines[-1] if lines else "the client said nothing")


def _changed(said: _Said) -> Trouble:
    at = re.search(r"Offending \S+ key in (?P<file>.+):(?P<line>\d+)", said.text)
    name = re.search(r"Host key for (?P<name>\S+) has changed", said.text)
    if at is None or name is None:
        return _unknown(said)
    found = re.search(_KEY, said.text)
    key = "the key it shows"
    if found is not None:
        key = f"{found['type'].lower()} {found['fingerprint']}"
    return troubles.changed_host_key(said.where, name["name"], key, at["file"], int(at["line"]))


def _unknown(said: _Said) -> Trouble:
    name = re.search(r"host key is known for (?P<name>\S+)", said.text)
    if name is None:
        hint = "Log in there once with ssh, which shows the fingerprint, asks and remembers."
        return Trouble(HostKeyError, f"the host key of {said.where} is not known.", hint)
    hostname, port = name["name"], 22
    place = re.fullmatch(r"\[(?P<host>.+)\]:(?P<port>\d+)", hostname)
    if place:
        hostname, port = place["host"], int(place["port"])
    return troubles.unknown_host_key(said.where, name["name"], hostname, port, "it", _KEYSCAN_FILE)


def _revoked(said: _Said) -> Trouble:
    hint = "Don't connect. Ask the machine's administrator for its new key."
    return Trouble(HostKeyError, f"the host key of {said.where} is REVOKED.", hint)


def _denied(said: _Said) -> Trouble:
    accepts = tuple(said.found["methods"].split(","))
    login = said.where.replace(" port ", " -p ")
    refusal = troubles.not_accepted(said.where, said.found["user"] or "", login, ("what ssh offers",), accepts)
    hint = refusal.hint
    if "keyboard-interactive" in accepts or "password" in accepts:
        hint += "\n--ssh-command never asks for passwords; leave it out where a typed answer is needed."
    return Trouble(refusal.kind, refusal.message, hint)


def _configuration(said: _Said) -> Trouble:
    return Trouble(HostError, f"the ssh configuration is wrong: {said.found[0].strip()}", "Correct that line.")


_TABLE: tuple[tuple[str, Callable[[_Said], Trouble]], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", _changed),
    (r"revoked (?:host )?key|key .* revoked|REVOKED HOST KEY", _revoked),
    (r"Host key verification failed|host key is known for", _unknown),
    (r"(?:(?P<user>\S+)@\S+: )?Permission denied \((?P<methods>[^)]*)\)", _denied),
    (r"Could not resolve hostname", lambda said: troubles.unknown_name(said.where)),
    (r"Connection refused", lambda said: troubles.refused(said.where)),
    (r"timed out", lambda said: troubles.no_answer(said.where, said.seconds)),
    (r"No route to host|Network is unreachable", lambda said: troubles.no_route(said.where, said.found[0])),
    (r"kex_exchange_identification: (?P<why>.*)", lambda said: troubles.not_ssh(said.where, said.found["why"].strip())),
    (r"invalid format|Connection (?:closed|reset) by", lambda said: troubles.not_ssh(said.where)),
    (r".*(?:Bad configuration option|Can't open user config file|missing argument|Bad .* argument).*", _configuration),
)
