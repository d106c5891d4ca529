"""What OpenSSH's client says on stderr, translated to the same errors that the paramiko transport raises. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from distmagic.errors import HostError, HostKeyError
from distmagic.hosts import Host
from distmagic.transports import troubles
from distmagic.transports.troubles import Trouble

_KEY = r"(?P<type>\S+) key (?:fingerprint|sent by the remote host) is\s+(?P<fingerprint>SHA256:[^\s.]+)"


def trouble(said: str, host: Host, seconds: float) -> Trouble:
    """Return the trouble behind what the client said; the last line of it where it is not known."""
    where = f"{host.name} port {host.port}" if host.port is not None else host.name
    for pattern, make in _TABLE:
        found = re.search(pattern, said, re.IGNORECASE)
        if found is not None:
            return make(found, where, said, seconds)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return troubles.broken(where, lines[-1] if lines else "the client said nothing")


def _changed(found: re.Match[str], where: str, said: str, seconds: float) -> Trouble:
    at = re.search(r"Offending \S+ key in (?P<file>.+):(?P<line>\d+)", said)
    name = re.search(r"Host key for (?P<name>\S+) has changed", said)
    if at is None or name is None:
        return _unknown(found, where, said, seconds)
    return troubles.changed_host_key(where, name["name"], _key(said), at["file"], int(at["line"]))


def _unknown(found: re.Match[str], where: str, said: str, seconds: float) -> Trouble:
    name = re.search(r"host key is known for (?P<name>\S+)", said)
    if name is None:
        hint = "Log in there once with ssh, which shows the fingerprint, asks and remembers."
        return Trouble(HostKeyError, f"the host key of {where} is not known.", hint)
    place = re.fullmatch(r"\[(?P<host>.+)\]:(?P<port>\d+)", name["name"])
    hostname, port = (place["host"], int(place["port"])) if place else (name["name"], 22)
    return troubles.unknown_host_key(where, name["name"], hostname, port, "it", "~/.ssh/known_hosts")


def _revoked(found: re.Match[str], where: str, said: str, seconds: float) -> Trouble:
    hint = "Don't connect. Ask the machine's administrator for its new key."
    return Trouble(HostKeyError, f"the host key of {where} is REVOKED.", hint)


def _key(said: str) -> str:
    found = re.search(_KEY, said)
    return "the key it shows" if found is None else f"{found['type'].lower()} {found['fingerprint']}"


def _denied(found: re.Match[str], where: str, said: str, seconds: float) -> Trouble:
    accepts = tuple(found["methods"].split(","))
    refusal = troubles.not_accepted(where, found["user"] or "", where.partition(" ")[0], ("what ssh offers",), accepts)
    hint = refusal.hint
    if "keyboard-interactive" in accepts or "password" in accepts:
        hint += "\n--ssh-command never asks for passwords; leave it out where a typed answer is needed."
    return Trouble(refusal.kind, refusal.message, hint)


def _configuration(found: re.Match[str], where: str, said: str, seconds: float) -> Trouble:
    return Trouble(HostError, f"the ssh configuration is wrong: {found[0].strip()}", "Correct that line.")


_Make = Callable[[re.Match[str], str, str, float], Trouble]
_TABLE: tuple[tuple[str, _Make], ...] = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", _changed),
    (r"revoked (?:host )?key|key .* revoked|REVOKED HOST KEY", _revoked),
    (r"Host key verification failed|host key is known for", _unknown),
    (r"(?:(?P<user>\S+)@\S+: )?Permission denied \((?P<methods>[^)]*)\)", _denied),
    (r"Could not resolve hostname", lambda found, where, said, s: troubles.unknown_name(where)),
    (r"Connection refused", lambda found, where, said, s: troubles.refused(where)),
    (r"timed out", lambda found, where, said, s: troubles.no_answer(where, s)),
    (r"No route to host|Network is unreachable", lambda found, where, said, s: troubles.no_route(where, found[0])),
    (
        r"kex_exchange_identification: (.*)|invalid format|Connection (?:closed|reset) by",
        lambda found, where, said, s: troubles.not_ssh(where, (found[1] or "").strip()),
    ),
    (r".*(?:Bad configuration option|Can't open user config file|missing argument|Bad .* argument).*", _configuration),
)
