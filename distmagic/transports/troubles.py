"""Messages for errors of connecting to a host: one constant for each cause, used by both SSH
transports. Pure.

A `Trouble` lacks the host that the user typed, because a jump host serves several; `for_host` adds
that host. `where` is the machine of the failed connection: "10.0.0.5 port 22" or "jump host bastion
(10.0.0.1 port 22)".
"""

from __future__ import annotations

import errno
import shlex
import socket
from dataclasses import dataclass

from distmagic.errors import AuthenticationError, HostError, HostKeyError, Unreachable

_MOST_CHARS = 2000  # limit of a message: a server may have chosen part of its text
# The hint for a host whose UserKnownHostsFile is none or /dev/null.
KEPT_NOWHERE = (
    "Your ssh configuration keeps no key of this host: its UserKnownHostsFile is none or /dev/null. Name a file, "
    "such as ~/.ssh/known_hosts, and log in once with ssh -o StrictHostKeyChecking=ask, which asks and remembers.\n"
    "A cluster of SkyPilot is --on sky:NAME, which keeps its keys."
)


LOGIN = "{login}"  # a placeholder in a hint for ssh's arguments, which are known when connecting


_STEPS = {HostKeyError: "key", AuthenticationError: "log-in"}


class Trouble(Exception):
    """A `HostError` without its host.

    `step` is the failed step of the connection, as in `HostError`.
    """

    def __init__(
        self, kind: type[HostError], message: str, hint: str = "", step: str = ""
    ) -> None:
        super().__init__(message)
        self.step = step or _STEPS.get(kind, "")
        self.kind = kind
        self.message = message[:_MOST_CHARS]
        self.hint = hint

    def log_in_by(self, words: str) -> None:
        """Insert ssh's arguments for the host into the hint."""
        self.hint = self.hint.replace(LOGIN, words)

    def for_host(self, name: str) -> HostError:
        """Return the error for the user."""
        error = self.kind(name, self.message, self.hint)
        error.step = self.step
        return error


@dataclass(frozen=True)
class TroubleCause:
    """One cause of failure: `CAUSE(where, ...)` makes its `Trouble`, replacing the names in braces.

    `why` is the reason from another program; `file` and `line` are in a known_hosts file, in which
    `key` was searched.
    """

    kind: type[HostError]
    message: str
    hint: str
    step: str = ""

    def __call__(
        self, where: str, why: str = "", file: str = "", **more: object
    ) -> Trouble:
        """Return the trouble with the machine `where`."""
        words = {
            "where": where,
            "machine": where.partition(" port ")[0],
            "why": why.rstrip("."),
            "in_brackets": f" ({why})" if why else "",
            "file": file,
            "file_word": tilde(file),
            "login": LOGIN,
            **more,
        }
        message, hint = self.message.format(**words), self.hint.format(**words)
        return Trouble(self.kind, message, hint, self.step)


# The name can't be resolved.
UNKNOWN_NAME = TroubleCause(
    Unreachable,
    "can't resolve {machine}.",
    "Check the spelling, and that a Host block in your ssh config gives its HostName.",
    "name",
)
# The port is closed: the machine itself refused.
REFUSED = TroubleCause(
    Unreachable,
    "{where} refused the connection: nothing listens on that port.",
    "Check the port, and that sshd runs on that machine: systemctl status ssh",
    "TCP",
)
# This process has too many open files.
TOO_MANY_FILES = TroubleCause(
    Unreachable,
    "no connection to {where} can be made: this process may open no more files (ulimit -n).",
    "Run `ulimit -n 65536` in the shell that starts this notebook (an administrator may have to allow it), "
    "or name fewer hosts.",
)
# There is no route to it.
NO_ROUTE = TroubleCause(
    Unreachable,
    "the network does not lead to {where} ({why}).",
    "Check that you are on the right network or VPN, or set a ProxyJump for it in your ssh config.",
    "TCP",
)
# The answer is not SSH, or the connection closed before it.
NOT_SSH = TroubleCause(
    Unreachable,
    "{where} answered, but not as an SSH server{in_brackets}.",
    "Check the port; an overloaded sshd (MaxStartups) or a firewall also hangs up like this.",
    "banner",
)
# The connection ended or failed during the handshake.
BROKEN = TroubleCause(
    Unreachable,
    "the connection to {where} failed: {why}.",
    "With a configuration that paramiko can't do, use --ssh-command ssh. Try: ssh -v {login}",
)
# The server ended the connection during the log-in.
HUNG_UP = TroubleCause(
    AuthenticationError,
    "{where} hung up during log-in.",
    "It may limit the number of attempts: name the right key with IdentityFile and IdentitiesOnly yes.",
)
# The jump host `where` was reached, but not the host that it leads to.
NOT_FORWARDED = TroubleCause(
    Unreachable,
    "{where} can't reach {behind}: {why}.",
    "Check the name and port as seen from the jump host, and that it allows forwarding (AllowTcpForwarding).",
)
# A host whose first key was trusted, and is in `file`, has another key now.
OTHER_HOST_KEY = TroubleCause(
    HostKeyError,
    "the host key of {where} has CHANGED: {key} is not the one that was seen first, which is in {file}.",
    "Somebody may be listening in, or the machine was replaced without a launch. If you are sure that it was replaced:\n"
    "  rm {file_word}\n"
    "and the key that it shows next is trusted.",
)
# The file that keeps the first key of a host can't be used.
UNKEPT_HOST_KEY = TroubleCause(
    HostKeyError,
    "the host key of {where} can't be kept: {file}: {why}.",
    "Only a key that is kept is trusted. Make the file writable, or remove it.",
)
# known_hosts has another key of the same type, for `name`.
CHANGED_HOST_KEY = TroubleCause(
    HostKeyError,
    "the host key of {where} has CHANGED: {key} is not that of {file}, line {line}.",
    "Somebody may be listening in, or the machine was reinstalled. Ask its administrator; if the key is right:\n"
    "  ssh-keygen -R {name} -f {file_word}\n"
    "and log in once, which asks and remembers: ssh {login}",
)
# known_hosts marks the key as revoked.
REVOKED_HOST_KEY = TroubleCause(
    HostKeyError,
    "the host key of {where} is REVOKED{in_brackets}.",
    "Don't connect. Ask the machine's administrator for its new key.",
)
# known_hosts trusts an authority's certificates for this host, which paramiko can't check.
CERTIFIED_HOST_KEY = TroubleCause(
    HostKeyError,
    "the host key of {where}, {key}, is not known; {file}, line {line} trusts an authority for it instead.",
    "Use --ssh-command ssh, which can check certificates, or log in once with ssh to add the plain key.",
)


# What to do if no answer comes, by the step of the connection.
_NO_ANSWER = {
    "TCP": "Check that the machine is up, that you are on the right network or VPN, and its firewall.",
    "banner": "The port accepts connections, but no SSH server answers. On that machine: systemctl status sshd",
    "key": "The SSH server answers, but slowly: look at the load of that machine, or allow more: --connect-timeout 60",
}


def no_answer(where: str, seconds: float, step: str = "TCP") -> Trouble:
    """Nothing came back in time; `step` is the first that did not."""
    hint = _NO_ANSWER[step]
    return Trouble(
        Unreachable, f"no answer from {where} within {seconds:g} s.", hint, step
    )


def of_socket(where: str, error: OSError, seconds: float) -> Trouble:
    """Return the trouble for a socket's error."""
    if isinstance(error, socket.gaierror):
        return UNKNOWN_NAME(where)
    if isinstance(error, ConnectionRefusedError):
        return REFUSED(where)
    if error.errno == errno.EMFILE:
        return TOO_MANY_FILES(where)
    if isinstance(error, TimeoutError):
        return no_answer(where, seconds)
    if error.errno in (
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.ENETDOWN,
        errno.EACCES,
    ):
        return NO_ROUTE(where, error.strerror or str(error))
    return BROKEN(where, error.strerror or str(error))


def unknown_host_key(
    where: str, known_as: str, hostname: str, port: int, key: str, file: str, *, is_direct: bool = True
) -> Trouble:  # fmt: skip
    """No known_hosts line confirms that `key` (type and SHA256 fingerprint, or "it") belongs to
    this host.

    `known_as` is the name in known_hosts, `hostname` and `port` are the address. `file` is for new
    keys, "" if the configuration keeps none. `is_direct`: it is reached directly from this machine,
    as by ssh-keyscan.
    """
    message = (
        f"the host key of {where} is not known: {key} is in no line for {known_as}."
    )
    if not file:
        return Trouble(HostKeyError, message, KEPT_NOWHERE)
    at = f"-p {port} " if port != 22 else ""
    hint = (
        f"Compare the fingerprint with the one its administrator gives you; then trust it:\n"
        f"  ssh-keyscan {at}{shlex.quote(hostname)} >> {tilde(file)}\n"
        f"or log in once, which asks and remembers: ssh {LOGIN}"
    )
    alias = hostname if port == 22 else f"[{hostname}]:{port}"
    if known_as != alias or not is_direct:
        hint = f"Log in once by hand, which asks and remembers (in {file}); compare the fingerprint then: ssh {LOGIN}"
    return Trouble(HostKeyError, message, hint)


def silent_agent(agent: str, seconds: float) -> Trouble:
    """The ssh agent at the socket `agent` did not answer within the time limit."""
    return Trouble(
        AuthenticationError,
        f"no answer from the ssh agent {agent} within {seconds:g} s: it was asked for a signature.",
        _see_agent(agent),
    )


def _see_agent(agent: str) -> str:
    return (
        "Restart your ssh agent, or leave it out: IdentityAgent none in your ssh configuration. "
        f"See what it answers: SSH_AUTH_SOCK={tilde(agent)} ssh-add -l"
    )


def not_accepted(
    where: str, user: str, tried: tuple[str, ...], accepts: tuple[str, ...], agent: str = ""
) -> Trouble:  # fmt: skip
    """The server refused all keys and answers. `agent` is a broken ssh agent, "" for none."""
    had = "; ".join(tried) or "nothing, because there was no key to try"
    hint = f"Check the user name, and copy your public key to the host: ssh-copy-id {LOGIN}"
    if agent:
        hint = _see_agent(agent)
    if "gssapi-with-mic" in accepts and "publickey" not in accepts:
        hint = "It needs a Kerberos ticket: use kinit and --ssh-command ssh."
    accepted = f" It accepts: {', '.join(accepts)}." if accepts else ""
    return Trouble(
        AuthenticationError,
        f"{where} did not let in user {user}. Tried: {had}.{accepted}",
        hint,
    )


def tilde(path: str) -> str:
    """Return `path` as it can be pasted into a shell."""
    quoted = shlex.quote(path)
    if path.startswith("~/") and shlex.quote(path[2:]) == path[2:]:
        return path  # quoted, ~ would not be the home
    return quoted
