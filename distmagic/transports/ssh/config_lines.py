"""Reads ssh_config files like OpenSSH: lines, Include, Host and Match blocks; the first value is
used.

`evaluate` determines the options of one host. A Match line with an unsupported criterion gives a
warning, and its block is ignored; an invalid line never raises an error. Match exec is run, as by
ssh.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import hashlib
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from distmagic.remote.frozen import frozen
from distmagic.transports import Argv

SSH_PORT = 22
MAX_INCLUDES = 16  # as in OpenSSH
EXEC_TIMEOUT_S = 10.0
_REST_OF_LINE = (
    "proxycommand",
    "proxyjump",
    "localcommand",
    "remotecommand",
    "knownhostscommand",
)
_REPEATED = ("identityfile", "certificatefile")
# A keyword, and each word of a Match line: it ends at a space, at one `=`, or after a double-quoted
# part.
_UP_TO_BLANK = re.compile(r'([^\s"=]*)(?:"([^"]*)"\s*|=\s*|\s+(?:=\s*)?|\Z)')
_WORD = re.compile(
    r"""\s*((?:\\[\\"' ]|"(?:\\[\\"']|[^"])*"|'(?:\\[\\"']|[^'])*'|\S)+)"""
)
# A part of a word: quoted, a character after a backslash, or plain.
_PART = re.compile(r""""((?:\\[\\"']|[^"])*)"|'((?:\\[\\"']|[^'])*)'|\\([\\"' ])|(.)""")


@frozen
class ConfigLine:
    """One non-empty line. `words` are without quotes and comment; `rest` is the original text."""

    file: str
    number: int
    keyword: str
    words: tuple[str, ...]
    rest: str

    @property
    def where(self) -> str:
        """The file and the line's number, for messages."""
        return f"{self.file}, line {self.number}"


@dataclass(kw_only=True)
class Scope:
    """The values known while the files are read: the local user, the host's name, and the options
    found so far.

    `final`: in the second pass over the files, and after all of them.
    """

    name: str
    local_user: str
    options: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    final: bool = False
    wants_final: bool = False

    def first(self, keyword: str, default: str) -> str:
        """Return the first word of an option."""
        return (self.options.get(keyword) or [default])[0]

    @property
    def hostname(self) -> str:
        """The name to connect to, as far as it is known."""
        name = _replaced(self.first("hostname", self.name), {"%": "%", "h": self.name})
        # The zone of an IPv6 address is an interface, whose name is case-sensitive.
        return name.lower() if self.final and "%" not in name else name

    def expand(self, text: str, *, variables: bool = False) -> str:
        """Replace OpenSSH's % tokens, and ${VARIABLES} if they are allowed."""
        local = socket.gethostname()
        port, user = (
            self.first("port", str(SSH_PORT)),
            self.first("user", self.local_user),
        )
        place = f"{local}{self.hostname}{port}{user}"
        tokens = {
            "%": "%",
            "C": hashlib.sha1(place.encode(), usedforsecurity=False).hexdigest(),
            "h": self.hostname,
            "n": self.name,
            "k": self.first("hostkeyalias", self.hostname),
            "p": port,
            "r": user,
            "u": self.local_user,
            "d": os.path.expanduser("~"),
            "i": str(os.getuid()),
            "l": local,
            "L": local.partition(".")[0],
        }
        return _replaced(text, tokens, os.environ if variables else {})

    def warn(self, text: str) -> None:
        """Record a warning for the user, once."""
        if text not in self.warnings:
            self.warnings.append(text)


def _replaced(
    text: str, tokens: Mapping[str, str], variables: Mapping[str, str] | None = None
) -> str:
    """Replace all tokens in one pass: replaced text is not replaced again, and unknown tokens
    stay.
    """

    def value(found: re.Match[str]) -> str:
        token, variable = found.groups()
        if token is not None:
            return tokens.get(token, found[0])
        return (variables or {}).get(variable, found[0])

    return re.sub(r"%(.)|\$\{(\w+)\}", value, text)


def evaluate(files: tuple[tuple[str, str], ...], scope: Scope) -> None:
    """Fill `scope` from files, each with the directory of its relative Includes; an unreadable one
    is a warning.
    """
    for is_second in (False, True):
        if not is_second or scope.wants_final:
            for file, base in files:
                _evaluate(file, base, scope, 0, active=True)
        scope.final = True
        # From now on this is the name, whatever HostName the second pass finds.
        scope.options["hostname"] = [scope.hostname.replace("%", "%%")]


def _evaluate(file: str, base: str, scope: Scope, depth: int, *, active: bool) -> None:
    outer = active
    try:
        for line in read_lines(file):
            if line.keyword == "host":
                name = scope.hostname if scope.final else scope.name
                active = outer and matches_any(line.words, name)
            elif line.keyword == "match":
                active = _match(line, scope) and outer  # it may request a second pass
            elif line.keyword == "include":
                for included in included_files(line, base, depth):
                    _evaluate(included, base, scope, depth + 1, active=active)
            elif active:
                _set(line, scope)
    except FileNotFoundError:
        return
    except OSError as error:
        scope.warn(f"{file}: {error.strerror}; it is left out.")


def _set(line: ConfigLine, scope: Scope) -> None:
    keyword, values = line.keyword, list(line.words)
    if not values:
        scope.warn(f"{line.where}: {keyword} has no value; it is left out.")
        return
    if keyword in _REST_OF_LINE:
        values = [line.rest.lstrip("= \t")]
    if keyword == "proxyjump":
        values = [values[0].partition("#")[0].rstrip()]
    if keyword == "port" and not values[0].isdigit():
        with suppress(OSError):  # no service has this name
            values = [str(socket.getservbyname(values[0], "tcp"))]
    if keyword in _REPEATED:
        known = scope.options.setdefault(keyword, [])
        known += [value for value in values if value not in known]
    elif keyword == "connecttimeout" and values == ["none"]:
        return  # ssh treats this as no value: a later one is used
    elif keyword == "proxyjump" and "proxycommand" in scope.options:
        return  # the first one takes precedence
    elif (
        keyword == "proxycommand" and scope.first("proxyjump", "none").lower() != "none"
    ):
        return
    else:
        scope.options.setdefault(keyword, values)


def read_lines(file: str) -> tuple[ConfigLine, ...]:
    """Return the non-empty lines of a file. Raises OSError."""
    status = Path(file).stat()
    return _lines_as_of(file, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _lines_as_of(file: str, *_version: int) -> tuple[ConfigLine, ...]:
    """Read each version of a file once: for 500 hosts its lines are needed a thousand times."""
    found = []
    with open(file, encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, text in enumerate(lines, 1):
            line = text.strip()
            match = _UP_TO_BLANK.match(line)
            if match is None or line.startswith("#"):
                continue
            keyword = f"{match[1]}{match[2] or ''}".lower()
            rest = line[match.end() :]
            # Match lines have their own rules, without backslashes and single quotes.
            words = _match_words(rest) if keyword == "match" else _words(rest)
            if keyword:
                found.append(
                    ConfigLine(
                        file=file,
                        number=number,
                        keyword=keyword,
                        words=words,
                        rest=rest,
                    )
                )
    return tuple(found)


def _words(text: str) -> tuple[str, ...]:
    words = []
    for found in _WORD.finditer(text):
        if found[1].startswith("#"):
            break
        words.append("".join(_unquoted(part) for part in _PART.finditer(found[1])))
    return tuple(words)


def _unquoted(part: re.Match[str]) -> str:
    double, single, escaped, plain = part.groups()
    if escaped or plain:
        return escaped or plain
    return re.sub(r"""\\([\\"'])""", r"\1", single if double is None else double)


def _match_words(text: str) -> tuple[str, ...]:
    words = []
    while text and not text.startswith("#"):
        found = _UP_TO_BLANK.match(text)
        if found is None:
            return (text,)  # unterminated quotes
        words.append(f"{found[1]}{found[2] or ''}")
        text = text[found.end() :]
    return tuple(words)


def included_files(line: ConfigLine, base: str, depth: int) -> list[str]:
    """Return the files of an Include line, in order; none if files include files, `MAX_INCLUDES`
    levels deep.
    """
    if depth >= MAX_INCLUDES:
        return []
    files = []
    for word in line.words:
        # For an unknown user this leaves the word unchanged, and it then matches no file.
        pattern = Path(base) / os.path.expanduser(word)
        files += sorted(glob.glob(str(pattern)))  # noqa: PTH207 - may be absolute
    return files


def fits(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern of ssh_config and known_hosts: only `*` and `?` are
    special.
    """
    if "*" not in pattern and "?" not in pattern:
        # The common case: a file may have hundreds of hosts, and is read for each of them.
        return pattern == name
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def matches_any(
    patterns: Sequence[str], text: str, fits: Callable[[str, str], bool] = fits
) -> bool:
    """Whether `text` matches one of the patterns (`*`, `?`) and none of those that start with
    `!`.
    """
    found = False
    for pattern in patterns:
        negated = pattern.startswith("!")
        if fits(pattern[negated:], text):
            if negated:
                return False
            found = True
    return found


def _match(line: ConfigLine, scope: Scope) -> bool:
    words = list(line.words)
    if not words:
        scope.warn(f"{line.where}: Match without a condition; its block is left out.")
        return False
    result = True
    while words:
        word = words.pop(0).lower()
        criterion = word.removeprefix("!")
        test = _TESTS.get(criterion)
        needs_value = criterion not in ("all", "canonical", "final")
        if test is None or (needs_value and not words):
            scope.warn(
                f"{line.where}: {line.rest!r} is not understood; this Match block is left out."
            )
            return False
        value = words.pop(0) if needs_value else ""
        scope.wants_final |= criterion == "final"
        if result and test(value, scope) == word.startswith("!"):
            result = False
    return result


def _exec_succeeds(value: str, scope: Scope) -> bool:
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            in_users_shell(scope.expand(value)),
            check=False,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            timeout=EXEC_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        scope.warn(
            f"Match exec {value!r} took longer than {EXEC_TIMEOUT_S:g} s; it counts as failed."
        )
        return False
    return done.returncode == 0


def in_users_shell(command: str) -> Argv:
    """Return the words that run a command of the user's configuration by $SHELL, as ssh does."""
    shell = os.environ.get("SHELL") or "/bin/sh"
    # A container may have inherited the variable without having that shell.
    return (shell if os.access(shell, os.X_OK) else "/bin/sh", "-c", command)


def _is_listed(value: str, text: str) -> bool:
    """Whether `text` matches a list of patterns, separated by commas."""
    return matches_any(value.split(","), text)


_TESTS: dict[str, Callable[[str, Scope], bool]] = {
    "all": lambda _value, _scope: True,
    # Names are not canonicalized, but a second pass counts as canonical, too.
    "canonical": lambda _value, scope: scope.final,
    "final": lambda _value, scope: scope.final,
    "exec": _exec_succeeds,
    "host": lambda value, scope: _is_listed(value.lower(), scope.hostname.lower()),
    "originalhost": lambda value, scope: _is_listed(value.lower(), scope.name.lower()),
    "user": lambda value, scope: _is_listed(
        value, scope.first("user", scope.local_user)
    ),
    "localuser": lambda value, scope: _is_listed(value, scope.local_user),
    "tagged": lambda value, scope: _is_listed(value, scope.first("tag", "")),
}
