"""Translates error messages of OpenSSH's client into the errors of the paramiko transport. Pure."""

from __future__ import annotations

import re
import shlex

from distmagic.errors import HostError, HostKeyError
from distmagic.request.hosts import Host
from distmagic.transports import troubles
from distmagic.transports.troubles import Trouble, TroubleCause

_KEY = r"(?P<type>\S+) key (?:fingerprint|sent by the remote host) is\s+(?P<fingerprint>SHA256:[^\s.]+)"
_WRONG_CONFIGURATION = TroubleCause(
    HostError, "the ssh configuration is wrong: {why}", "Correct that line."
)
_UNKNOWN_HOST_KEY = TroubleCause(
    HostKeyError,
    "the host key of {where} is not known.",
    "Log in once by hand, which shows the fingerprint, asks and remembers: ssh {login}\n"
    "If UserKnownHostsFile of your ssh configuration is none or /dev/null, first name a file: UserKnownHostsFile ~/.ssh/known_hosts",
)
_TABLE = (
    (
        r"revoked (?:host )?key|key .* revoked|REVOKED HOST KEY",
        troubles.REVOKED_HOST_KEY,
    ),
    (r"Host key verification failed|host key is known for", _UNKNOWN_HOST_KEY),
    (r"Could not resolve hostname", troubles.UNKNOWN_NAME),
    (r"Connection refused", troubles.REFUSED),
    (r"(?P<why>No route to host|Network is unreachable)", troubles.NO_ROUTE),
    (r"kex_exchange_identification: (?P<why>.*)", troubles.NOT_SSH),
    (r"invalid format|Connection (?:closed|reset) by", troubles.NOT_SSH),
    (
        r"(?P<why>.*(?:Bad configuration option|Can't open user config file|missing argument|Bad .* argument).*)",
        _WRONG_CONFIGURATION,
    ),
)


def trouble(stderr: str, host: Host, seconds: float) -> Trouble:
    """Return the trouble for the client's output; an unknown one has its last line."""
    where = f"{host.name} port {host.port}" if host.port is not None else host.name
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in stderr:
        return _changed(stderr, where)
    denied = re.search(
        r"(?:(?P<user>\S+)@\S+: )?Permission denied \((?P<methods>[^)]*)\)", stderr
    )
    if denied is not None:
        accepts = tuple(denied["methods"].split(","))
        refusal = troubles.not_accepted(
            where, denied["user"] or "", ("what ssh offers",), accepts
        )
        if "keyboard-interactive" in accepts or "password" in accepts:
            refusal.hint += "\n--ssh-command never asks for passwords; leave it out where a typed answer is needed."
        return refusal
    # Before the table: for a jump host that does not answer, ssh also reports a closed connection.
    if "timed out" in stderr and "refused" not in stderr:
        return troubles.no_answer(where, seconds)
    for pattern, cause in _TABLE:
        found = re.search(pattern, stderr, re.IGNORECASE)
        if found is not None:
            return cause(where, found.groupdict().get("why", "").strip())
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return troubles.BROKEN(where, lines[-1] if lines else "the client printed nothing")


def _changed(stderr: str, where: str) -> Trouble:
    at = re.search(r"Offending \S+ key in (?P<file>.+):(?P<line>\d+)", stderr)
    name = re.search(r"Host key for (?P<name>\S+) has changed", stderr)
    if at is None or name is None:
        return _UNKNOWN_HOST_KEY(where)
    found = re.search(_KEY, stderr)
    key = "the key it shows"
    if found is not None:
        key = f"{found['type'].lower()} {found['fingerprint']}"
    return troubles.CHANGED_HOST_KEY(
        where,
        file=at["file"],
        line=at["line"],
        key=key,
        name=shlex.quote(name["name"]),
    )
