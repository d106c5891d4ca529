"""ssh_config files as OpenSSH reads them: lines, Include, Host and Match blocks, the first value wins.

`evaluate` gives the options that apply to one host. What a Match line asks beyond what is known here is named in a
warning and its block is left out; a line that can't be read never stops the user. Match exec is run, as ssh does.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MAX_INCLUDES = 16  # as OpenSSH
EXEC_TIMEOUT_S = 10.0
_REST_OF_LINE = ("proxycommand", "localcommand", "remotecommand", "knownhostscommand")
_REPEATED = ("identityfile", "certificatefile")
_LINE = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+|$)(.*?)\s*\Z")
_WORD = re.compile(r'"([^"]*)"|\'([^\']*)\'|(\S+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigLine:
    """One line with something on it. `words` are without quotes and comment; `rest` is as it was written."""

    file: str
    number: int
    keyword: str
    words: tuple[str, ...]
    rest: str

    @property
    def where(self) -> str:
        """The place, for messages."""
        return f"{self.file}, line {self.number}"


@dataclass(slots=True, kw_only=True)
class Scope:
    """What is known while the files are read: the local user, the host's name, and the options found so far."""

    name: str
    local_user: str
    expand: Callable[[str, Scope], str]
    options: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    final: bool = False
    wants_final: bool = False

    def first(self, keyword: str, default: str) -> str:
        """Return the first word of an option."""
        return (self.options.get(keyword) or [default])[0]

    def warn(self, text: str) -> None:
        """Note something the user should know, once."""
        if text not in self.warnings:
            self.warnings.append(text)


def evaluate(files: tuple[tuple[str, str], ...], scope: Scope) -> None:
    """Fill `scope` from files, each with the directory of its relative Includes; an unreadable one is a warning."""
    for scope.final in (False, True):
        for file, base in files:
            _evaluate_readable(file, base, scope, 0, active=True)
        if not scope.wants_final:
            return


def _evaluate_file(
    file: str, base: str, scope: Scope, depth: int, *, active: bool
) -> None:
    outer = active
    for line in read_lines(file):
        if line.keyword == "host":
            active = outer and matches_any(line.words, scope.name)
        elif line.keyword == "match":
            active = outer and _match(line, scope)
        elif line.keyword == "include":
            for included in included_files(line, base, depth):
                _evaluate_readable(included, base, scope, depth + 1, active=active)
        elif active:
            _set(line, scope)


def _evaluate_readable(
    file: str, base: str, scope: Scope, depth: int, *, active: bool
) -> None:
    try:
        _evaluate_file(file, base, scope, depth, active=active)
    except FileNotFoundError:
        return
    except OSError as error:
        scope.warn(f"{file}: {error.strerror}; it is left out.")


def _set(line: ConfigLine, scope: Scope) -> None:
    if not line.words:
        scope.warn(f"{line.where}: {line.keyword} has no value; it is left out.")
        return
    values = [line.rest] if line.keyword in _REST_OF_LINE else list(line.words)
    if line.keyword in _REPEATED:
        known = scope.options.setdefault(line.keyword, [])
        known += [value for value in values if value not in known]
    elif line.keyword == "proxyjump" and "proxycommand" in scope.options:
        return  # whichever of the two comes first wins
    elif line.keyword == "proxycommand" and "proxyjump" in scope.options:
        return
    else:
        scope.options.setdefault(line.keyword, values)


def read_lines(file: str) -> tuple[ConfigLine, ...]:
    """Return the lines of a file that say something. Raises OSError."""
    status = Path(file).stat()
    return _lines_as_of(file, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _lines_as_of(file: str, *_version: int) -> tuple[ConfigLine, ...]:
    """Read a file once in each of its versions: for five hundred hosts its lines are asked for a thousand times."""
    found = []
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, 1):
            match = _LINE.match(text)
            if match is not None:
                keyword, rest = match[1].lower(), match[2]
                found.append(
                    ConfigLine(
                        file=file,
                        number=number,
                        keyword=keyword,
                        words=_words(rest),
                        rest=rest,
                    )
                )
    return tuple(found)


def _words(text: str) -> tuple[str, ...]:
    words = []
    for found in _WORD.finditer(text):
        if (found[3] or "").startswith("#"):
            break
        words.append(next(part for part in found.groups() if part is not None))
    return tuple(words)


def included_files(line: ConfigLine, base: str, depth: int) -> list[str]:
    """Return the files an Include names, in order; none beyond `MAX_INCLUDES` levels."""
    if depth >= MAX_INCLUDES:
        return []
    files: list[str] = []
    for word in line.words:
        # Of a user who is not there this leaves the word as it is, which names nothing then.
        pattern = Path(base) / os.path.expanduser(word)
        files += sorted(glob.glob(str(pattern)))  # noqa: PTH207 - may be absolute
    return files


def matches_any(patterns: tuple[str, ...], text: str) -> bool:
    """Whether `text` fits one of the patterns (`*`, `?`) and none of those that begin with `!`."""
    found = False
    for pattern in patterns:
        negated = pattern.startswith("!")
        if fits(pattern[negated:], text.lower()):
            if negated:
                return False
            found = True
    return found


def fits(pattern: str, name: str) -> bool:
    """Whether a name, in lower case, fits a pattern as ssh_config and known_hosts write them: `*` and `?` alone count."""
    literal = pattern.lower()
    if "*" not in literal and "?" not in literal:
        # As most of them: a file may name hundreds of hosts, and is looked at for each of them.
        return literal == name
    return fnmatch.fnmatchcase(name, literal.replace("[", "[[]"))


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
        if result and test(value, scope) == word.startswith("!"):
            result = False
    return result


def _is_final(_value: str, scope: Scope) -> bool:
    scope.wants_final = True
    return scope.final


def _exec_succeeds(value: str, scope: Scope) -> bool:
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            in_users_shell(scope.expand(value, scope)),
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


def in_users_shell(command: str) -> tuple[str, ...]:
    """Return the words that run a command of the user's configuration as ssh does, by $SHELL."""
    shell = os.environ.get("SHELL") or "/bin/sh"
    # A container may have the variable of the machine around it, without that shell.
    return (shell if os.access(shell, os.X_OK) else "/bin/sh", "-c", command)


def _is_listed(value: str, text: str) -> bool:
    """Whether `text` fits a list of patterns, separated by commas."""
    return matches_any(tuple(value.split(",")), text)


def _is_host(value: str, scope: Scope) -> bool:
    hostname = scope.first("hostname", scope.name).replace("%h", scope.name)
    return _is_listed(value, hostname)


_TESTS: dict[str, Callable[[str, Scope], bool]] = {
    "all": lambda _value, _scope: True,
    "canonical": lambda _value, _scope: False,  # names are not canonicalized here
    "final": _is_final,
    "exec": _exec_succeeds,
    "host": _is_host,
    "originalhost": lambda value, scope: _is_listed(value, scope.name),
    "user": lambda value, scope: _is_listed(
        value, scope.first("user", scope.local_user)
    ),
    "localuser": lambda value, scope: _is_listed(value, scope.local_user),
    "tagged": lambda value, scope: _is_listed(value, scope.first("tag", "")),
}
