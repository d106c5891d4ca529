"""Parses hosts in the user's notation: a list on the command line, a hostfile, an environment
variable. Pure.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen

Slots = int | str  # a number of ranks, or one of SLOT_WORDS, decided on the host
SLOT_WORDS = ("gpu", "cpu", "auto")
# A leading dash would make it an option of ssh.
_NAME = re.compile(r"[A-Za-z0-9._%][A-Za-z0-9._%-]*\Z")
# Names, users and zones may come from another user's hostfile, and OpenSSH's %h, %n and %r put them
# into the shell lines of ProxyCommand and `Match exec`. OpenSSH itself rejects shell characters in
# them since 9.6 (CVE-2023-51385).
_SHELL = r"'`\"$;&<>|(){}"
_USER = re.compile(rf"[^\s@:/{_SHELL}-][^\s@:/{_SHELL}]*(?<!\\)\Z")
_ZONE = re.compile(r"[A-Za-z0-9._-]+\Z")
_SSH = re.compile(r"(?:^|[\s/])ssh(?=\s)")
_NUMBER = re.compile(r"[0-9]{1,6}\Z")
_HOSTS_HINT = "Write hosts as name, name:ranks, user@name:port or user@name:port:ranks, separated by commas."


@frozen
class Source:
    """The source of hosts that a system provides: an allocation, a cluster, or the job that runs
    this process.
    """

    name: str  # identifies the source
    # the start of a command that runs a program on one of its nodes, with {node} for its name; ""
    # for SSH
    by_hand: str = ""
    ended: str = ""  # the message when it has ended
    cure: str = ""  # the advice when it has ended
    # Whether what is sent to a node waits on its way until the node has answered what came before,
    # and the same on the way back: srun does not set TCP_NODELAY, and reads 1,024 bytes at once.
    # Without an answer that takes 40 ms. So an end that waits for more answers by an empty line.
    needs_answers: bool = False


@frozen
class Host:
    """One machine as the user named it. `slots` is its number of ranks, None if not given.

    `allocation` is its source, None for a host that the user named: the same name in another
    allocation is a different machine.
    """

    name: str
    user: str | None = None
    port: int | None = None
    slots: Slots | None = None
    allocation: Source | None = None

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine, reached without SSH."""
        return replace(self, slots=None) == LOCALHOST

    def by_hand(self, client: str = "ssh") -> str:
        """Return the start of a command that runs a program on the host by hand.

        `client` is the ssh program with its options.
        """
        if self.has_log_in_shell:
            return f"{client} {self.login}"
        if self.allocation is None:
            return "env"
        return self.allocation.by_hand.replace("{node}", self.name)

    @property
    def has_log_in_shell(self) -> bool:
        """Whether the user's log-in shell on the host reads each command, as over SSH."""
        is_behind = self.allocation is not None and bool(self.allocation.by_hand)
        return not (is_behind or self.is_local)

    @property
    def login(self) -> str:
        """The host as the user typed it, in ssh's notation: `-p 2222 me@gpu-a`."""
        port = "" if self.port is None else f"-p {self.port} "
        return port + shlex.quote(
            f"{self.user}@{self.name}" if self.user else self.name
        )

    def __str__(self) -> str:
        return self.name


Hosts = tuple[Host, ...]


def pasted(by_hand: str, word: str) -> str:
    """Return a word of a command that starts with `by_hand`, with quotes for each shell that reads
    it.

    The user's shell is one of them, and each ssh has another one on its host. The last of them
    replaces a leading `~/`.
    """
    home = "~/" if word.startswith("~/") else ""
    word = home + shlex.quote(word[len(home) :])
    for _ in _SSH.findall(by_hand):
        word = shlex.quote(word)
    return word


LOCALHOST = Host(name="localhost")


def parse_slots(text: str, where: str) -> Slots:
    """Return a positive number of ranks, or one of `SLOT_WORDS`.

    Raises `UsageError` naming `where`.
    """
    if text in SLOT_WORDS:
        return text
    if re.fullmatch(r"[+-]?[0-9]{1,6}", text) is None:
        raise UsageError(
            f"{where}: {text!r} is not a number of ranks.",
            "Use a number, or gpu, cpu or auto.",
        )
    if int(text) < 1:
        raise UsageError(
            f"{where}: {text} ranks were asked for; a host runs at least 1.",
            "Use 1 or more.",
        )
    return int(text)


def parse_host(text: str) -> Host:
    """Parse `[user@]name[:port][:ranks]`; an IPv6 address that is followed by a number is in
    `[...]`.

    A single number is a port if it is 22 or at least 1024, else a number of ranks: `gpu-a:4`,
    `me@gpu-a:2222`. Raises `UsageError`.
    """
    text = text.strip().removeprefix("ssh://")
    user, at, rest = text.rpartition("@")
    name, numbers = split_name(rest)
    if (at and not _USER.match(user)) or not name or len(numbers) > 2:
        hint = "Write [fe80::1]:22." if rest.startswith("[") else _HOSTS_HINT
        raise UsageError(f"{text!r} is not a host.", hint)
    port, slots = _port_and_slots(numbers, text)
    return Host(name=name, user=user or None, port=port, slots=slots)


def split_name(text: str) -> tuple[str, list[str]]:
    """Return the name in `name:number:...`, and the numbers; an IPv6 address with numbers is in
    `[...]`.

    The name is "" if no host can have it.
    """
    bracketed = re.fullmatch(r"\[([^\]]*)\](:.*)?", text)
    if bracketed:
        address, numbers = bracketed[1], bracketed[2] or ""
        return (address if _is_ipv6(address) else ""), numbers.split(":")[1:]
    if text.count(":") > 1 and _is_ipv6(text.partition("%")[0]):
        return (text if _is_ipv6(text) else ""), []  # otherwise its zone is missing
    name, *others = text.split(":")
    return (name if _NAME.match(name) else ""), others


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    if percent and not _ZONE.match(zone):
        return False
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


def _port_and_slots(numbers: list[str], whole: str) -> tuple[int | None, Slots | None]:
    if not numbers:
        return None, None
    port, *ranks = numbers
    looks_like_port = _NUMBER.match(port) and (int(port) == 22 or int(port) >= 1024)
    if not (ranks or looks_like_port):
        return None, parse_slots(port, f"host {whole!r}")
    if not is_port(port):
        raise UsageError(
            f"host {whole!r}: {port!r} is not a port (1 to 65535).", _HOSTS_HINT
        )
    slots = parse_slots(ranks[0], f"host {whole!r}") if ranks else None
    return int(port), slots


def is_port(text: str) -> bool:
    """Whether `text` is a number from 1 to 65535."""
    return bool(_NUMBER.match(text)) and 1 <= int(text) <= 65535


def parse_hosts(text: str) -> Hosts:
    """Parse a list of hosts separated by commas or spaces. Raises `UsageError`."""
    return hosts_of([part for part in re.split(r"[,\s]+", text) if part])


def hosts_of(named: Sequence[Host | str]) -> Hosts:
    """Return a list of hosts, given as texts for `parse_host` or as `Host` objects.

    Rejects a set, which has no first host, and a dict, whose values would be lost. Raises
    `UsageError`.
    """
    if not isinstance(named, Sequence):
        raise UsageError(f"{named!r} is not a list of hosts.", _HOSTS_HINT)
    hosts: list[Host] = []
    for one in named:
        if not isinstance(one, (Host, str)):
            raise UsageError(f"{one!r} is not a host.", _HOSTS_HINT)
        host = parse_host(one) if isinstance(one, str) else one
        hosts.append(_no_twin(host, hosts))
    if not hosts:
        raise UsageError("The list of hosts is empty.", _HOSTS_HINT)
    return tuple(hosts)


def _no_twin(host: Host, others: Iterable[Host]) -> Host:
    """Return `host`; raise `UsageError` if another one is the same machine."""
    if any(replace(host, slots=other.slots) == other for other in others):
        raise UsageError(
            f"{host.name} is listed twice.", "Write it once, with all its ranks."
        )
    return host


def parse_hostfile(text: str, path: str) -> Hosts:
    """Parse a hostfile in the format of OpenMPI, Horovod and DeepSpeed: one `name slots=N` per
    line, `#` comments.

    Raises `UsageError` naming `path` and the line.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        words = line.partition("#")[0].split()
        try:
            if words:
                hosts.append(_no_twin(_hostfile_host(words), hosts))
        except UsageError as error:
            raise UsageError(
                f"{path}, line {number}: {error.message}", error.hint
            ) from None
    if not hosts:
        raise UsageError(
            f"{path}: no host in this hostfile.",
            "Write one host per line: gpu-a slots=4",
        )
    return tuple(hosts)


def _hostfile_host(words: list[str]) -> Host:
    host = parse_host(words[0])
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in ("slots", "max_slots", "max-slots"):
            raise UsageError(f"{word!r} is not understood.", "Write: gpu-a slots=4")
        if key == "slots":
            host = replace(host, slots=parse_slots(value, f"slots of {host.name}"))
    return host
