"""Reads the user's ssh configuration of a host: `resolve`, and host names for completion."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable
from pathlib import Path

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request.hosts import Host, Hosts, is_port
from distmagic.transports.ssh.config_lines import (
    SSH_PORT,
    Scope,
    evaluate,
    included_files,
    read_lines,
)

USER_FILE = "~/.ssh/config"
SYSTEM_FILE = "/etc/ssh/ssh_config"
_DEFAULT_KEYS = (
    "~/.ssh/id_ed25519",
    "~/.ssh/id_ecdsa",
    "~/.ssh/id_rsa",
    "~/.ssh/id_ed25519_sk",
    "~/.ssh/id_ecdsa_sk",
)
# Options that paramiko does not support, with cures.
_NOT_FOLLOWED = {
    "CanonicalizeHostname": "write the full name, or ",
    "PKCS11Provider": "run ssh-add -s with it, or ",
    "KnownHostsCommand": "log in once with ssh, or ",
    "ProxyUseFdpass": "",
    "BindAddress": "",
    "BindInterface": "",
}
_METHODS = {
    "publickey": "pubkeyauthentication",
    "keyboard-interactive": "kbdinteractiveauthentication",
    "password": "passwordauthentication",
}
_USER_KNOWN_HOSTS = ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
_GLOBAL_KNOWN_HOSTS = ["/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"]
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
# A configuration file, its modification time in ns and its size in bytes; both are -1 if it does
# not exist.
FileVersion = tuple[str, int, int]
_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>.+)@)?(?P<name>\[[^\]]+\]|[^:\[\]/]+)(?::(?P<port>\d+))?/?\Z"
)


@frozen
class Resolved:
    """How to connect to a host.

    Host keys are always checked strictly, whatever StrictHostKeyChecking is.
    """

    name: str
    hostname: str
    user: str
    port: int
    identity_files: tuple[str, ...] = ()  # tried in order
    default_keys: bool = False  # these files are OpenSSH's defaults, and need not exist
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None  # the agent's socket, or None
    jumps: Hosts = ()  # ProxyJump's hosts, first hop first
    proxy_command: str | None = None
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    host_key_alias: str | None = None
    # the first key is trusted, and stored in the file of `user_known_hosts`: see pins.py
    is_pinned: bool = False
    connect_timeout_s: float | None = None
    batch_mode: bool = False
    # methods of log-in that the user rules out, by their names in RFC 4252
    refused: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()  # ignored options


def resolve(host: Host, path: str | None) -> Resolved:
    """Return the configuration of `host`; values that the user typed (user, port) take precedence.

    `path` None means the user's and the system's files, which may be missing. Raises `UsageError`
    for a named file that can't be read, and for an invalid port, time or jump host.
    """
    scope = Scope(name=host.name, local_user=_local_user())
    if host.user is not None:
        scope.options["user"] = [host.user]
    if host.port is not None:
        scope.options["port"] = [str(host.port)]
    if path is not None:
        try:
            with open(os.path.expanduser(path), "rb"):
                pass  # it exists and is readable
        except OSError as error:
            raise UsageError(
                f"--ssh-config {path}: {error.strerror}.", "Check the path."
            ) from None
    evaluate(_files(path), scope)
    return _resolved(scope)


def _files(path: str | None) -> tuple[tuple[str, str], ...]:
    user_base = os.path.expanduser("~/.ssh")
    if path is not None:
        return ((os.path.expanduser(path), user_base),)
    return ((os.path.expanduser(USER_FILE), user_base), (SYSTEM_FILE, "/etc/ssh"))


def _resolved(scope: Scope) -> Resolved:
    alias = scope.first("hostkeyalias", "").lower()
    # Without HostKeyAlias, %k is the typed name, but in a Match line it is the name to connect to.
    scope.options["hostkeyalias"] = [alias or scope.name]
    for keyword, instead in _NOT_FOLLOWED.items():
        if scope.first(keyword.lower(), "no").lower() not in ("no", "none", "false"):
            scope.warn(f"{keyword} is not followed; {instead}use --ssh-command ssh.")
    command = scope.first("proxycommand", "none")
    return Resolved(
        name=scope.name,
        hostname=scope.hostname,
        user=scope.first("user", scope.local_user),
        port=_port(scope),
        identity_files=_paths(scope, "identityfile", _DEFAULT_KEYS),
        default_keys="identityfile" not in scope.options,
        certificate_files=_paths(scope, "certificatefile"),
        identities_only=_yes(scope, "identitiesonly"),
        identity_agent=_agent(scope),
        jumps=_jumps(scope),
        proxy_command=None if command.lower() == "none" else scope.expand(command),
        user_known_hosts=_paths(scope, "userknownhostsfile", _USER_KNOWN_HOSTS),
        global_known_hosts=tuple(  # tokens and ~ are not expanded in it
            file
            for file in scope.options.get("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS)
            if file.lower() != "none"
        ),
        host_key_alias=alias or None,
        connect_timeout_s=_connect_timeout(scope),
        batch_mode=_yes(scope, "batchmode"),
        refused=_refused(scope),
        warnings=tuple(scope.warnings),
    )


def _refused(scope: Scope) -> frozenset[str]:
    """Return the methods of log-in that are switched off, or are not among the preferred ones."""
    preferred = scope.first("preferredauthentications", ",".join(_METHODS)).split(",")
    return frozenset(
        method
        for method, keyword in _METHODS.items()
        if method not in preferred or scope.first(keyword, "yes").lower() == "no"
    )


def _yes(scope: Scope, keyword: str) -> bool:
    return scope.first(keyword, "no").lower() in ("yes", "true")


def _port(scope: Scope) -> int:
    text = scope.first("port", str(SSH_PORT))
    if not is_port(text):
        raise _not_understood(scope, "Port", text, "port")
    return int(text)


def _connect_timeout(scope: Scope) -> float | None:
    """Return a time such as 90 or 1m30s in seconds; None if it is "none" or 0."""
    text = scope.first("connecttimeout", "0")
    if not re.fullmatch(r"(?:\d+[smhdw]?)+", text, re.IGNORECASE | re.ASCII):
        raise _not_understood(scope, "ConnectTimeout", text, "time")
    parts = re.findall(r"(\d+)([a-z]?)", text.lower())
    return float(sum(int(number) * _UNITS[unit] for number, unit in parts)) or None


def _not_understood(scope: Scope, keyword: str, text: str, what: str) -> UsageError:
    return UsageError(
        f"{keyword} {text!r} of {scope.name} in the ssh configuration is not a {what}.",
        "Correct it.",
    )


def _paths(scope: Scope, keyword: str, default: Iterable[str] = ()) -> tuple[str, ...]:
    words = scope.options.get(keyword, default)
    return tuple(_path(scope, word) for word in words if word.lower() != "none")


def _path(scope: Scope, word: str) -> str:
    return scope.expand(os.path.expanduser(word), variables=True)


def _agent(scope: Scope) -> str | None:
    word = scope.first("identityagent", "SSH_AUTH_SOCK")
    if word == "none":
        return None
    if word == "SSH_AUTH_SOCK" or (word.startswith("$") and not word.startswith("${")):
        return os.environ.get(word.removeprefix("$")) or None
    return _path(scope, word)


def _jumps(scope: Scope) -> Hosts:
    word = scope.first("proxyjump", "none")
    if word.lower() == "none":
        return ()
    jumps = []
    for part in scope.expand(word).split(","):
        found = _JUMP.match(part.strip())
        if found is None:
            raise UsageError(
                f"ProxyJump {part!r} of {scope.name} is not a host.",
                "Write [user@]host[:port],...",
            )
        port = None if found["port"] is None else int(found["port"])
        jumps.append(
            Host(name=found["name"].strip("[]"), user=found["user"], port=port)
        )
    return tuple(jumps)


def _local_user() -> str:
    """Return the user's name in the password file, as ssh does: $USER may differ."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container, the user may have no name
        return os.environ.get("USER") or str(os.getuid())


def host_names(path: str | None = None) -> tuple[str, ...]:
    """Return the names in Host lines without wildcards, for completion.

    Never raises: unreadable files have none.
    """
    names: dict[str, None] = {}
    file, base = _files(path)[0]
    _collect(file, base, [], names, 0)
    return tuple(names)


def file_versions(path: str | None) -> tuple[FileVersion, ...]:
    """Return versions of all files that `resolve` may read, to detect edits. Never raises."""
    files: list[str] = []
    for file, base in _files(path):
        _collect(file, base, files, {}, 0)
    versions = []
    for name in files:
        try:
            status = Path(name).stat()
        except OSError:
            versions.append((name, -1, -1))
        else:
            versions.append((name, status.st_mtime_ns, status.st_size))
    return tuple(versions)


def _collect(
    file: str, base: str, files: list[str], names: dict[str, None], depth: int
) -> None:
    """Add a file and its includes to `files`, and the names in their Host lines to `names`, in
    order.
    """
    files.append(file)
    try:
        for line in read_lines(file):
            if line.keyword == "host":
                for word in line.words:
                    if not re.search(r"[*?!]", word):
                        names[word] = None
            elif line.keyword == "include":
                for included in included_files(line, base, depth):
                    _collect(included, base, files, names, depth + 1)
    except OSError:
        return
