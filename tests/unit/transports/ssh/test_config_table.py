"""Some hundred generated configurations, hostile but valid: what is made of them is what `ssh -G` and `ssh -v` say."""

from __future__ import annotations

import os
import pwd
import random
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distmagic.request.hosts import Host
from distmagic.transports.ssh.config import Resolved, resolve
from tests.builders.shell import completed

CONFIGURATIONS = 120
NAMES = ("gpu-a", "gpu-b", "GPU-A", "login", "10.0.0.7", "x.example.org", "v100.1")
PATTERNS = (
    *NAMES, "gpu-*", "GPU-*", "!gpu-b", "*", "?pu-a", "[g]pu-a", '"gpu-a"', "*.example.org", "10.0.*", "!*",
    "!GPU-A", "g*-?", "'login'", "v100*", "gpu-a,gpu-b", "L\\OGIN",
)  # fmt: skip
LISTS = (
    "gpu-a", "GPU-A", "gpu-*,login", "!gpu-b,*", "*,!GPU-A", "jo,me", "root,*", "?o", "*.cluster", "real", '"gpu-a,x"',
)  # fmt: skip
COMMANDS = (
    "true", "false", "/bin/true", "test %h = gpu-a", "test '%n' = gpu-b", "test %p -gt 100", "test %r = jo",
    "test %% = %%", "test -n %C -a %L != %h -a %u != jo", "test %k = alias", "test %k = real", "test -d %d -a %i -ge 0 -a -n %l",
)  # fmt: skip
PATHS = (
    "~/.ssh/id_%h", '"~/.ssh/a key"', "'~/.ssh/a  key'", "~/k\\ %r", "/abs/%n-%p", "none", "~/%%d${KEYS}", "%d/%u_%L_%l_%i_%k",
    "~/x#y", '"~/q\\"q\'"', "~/back\\slash\\\\", '~/"mid dle"/x', "relative/%h", "${KEYS}/%r", "NONE", "~/$KEYS", "~/%%%%h",
)  # fmt: skip
VALUES = {
    "HostName": ("%h", "%h.cluster", "10.0.0.5", "UPPER.%h", "fe80::1%%eth0", '"real"', "%%h.%h", "REAL"),
    "User": ("jo", '"jo"', "'jo'", "j\\ o", "u%h", "%%u", 'a"b"c'),
    "Port": ("22", "2222", '"7"', "65535", "ssh"),
    "ConnectTimeout": ("5", "1m", "1h5", "none", "2M30s", "0"),
    "IdentityFile": PATHS,
    "CertificateFile": PATHS,
    "UserKnownHostsFile": (*PATHS, "~/one /two", '"~/one %h" two%n', "none"),
    "GlobalKnownHostsFile": ("none", "/etc/known", '"/etc/known hosts" ~/global', "~/%h"),
    "IdentityAgent": ("none", "SSH_AUTH_SOCK", "$AGENT", "${AGENT}/x", "~/agent-%h", '"/run/a %u"', "agent"),
    "IdentitiesOnly": ("yes", "no", "TRUE", "False", '"yes"'),
    "BatchMode": ("yes", "no", "True", "FALSE"),
    "PubkeyAuthentication": ("yes", "no"),
    "PasswordAuthentication": ("no", "yes"),
    "KbdInteractiveAuthentication": ("no", "yes"),
    "PreferredAuthentications": ("publickey", "keyboard-interactive,password", "password,publickey,keyboard-interactive"),
    "HostKeyAlias": ("alias", '"An Alias"', "%h", "none"),
    "ProxyCommand": ("false %h %p", 'false "%r # %n" ${KEYS} %%', "none", "NONE", "= false '%h'", '"false" %h', "false\t%h"),
    "ProxyJump": ("none", "bastion", "ops@bastion:2200,other", "ssh://me@jump:22", "[fd00::1]:22", "a@b@c", "%h-jump",
                  "b1,b2,b3", "b4 # comment", "NONE", "Bastion:1,x@[::1],c", "ssh://j/"),
    "SendEnv": ("LANG LC_*",),
    "StrictHostKeyChecking": ("no",),
}  # fmt: skip
_REST = ("proxycommand", "proxyjump")  # not split into words


@dataclass(slots=True, kw_only=True)
class Writer:
    """Writes one configuration: `file` and those that it includes, in `base` and in the user's ~/.ssh."""

    random: random.Random
    base: Path
    dot_ssh: Path
    includes: int = 0
    lines: list[str] = field(default_factory=list)

    def file(self, depth: int = 0) -> str:
        """Return the text of a file."""
        blocks = [self.options(depth) for _ in range(self.random.randint(0, 1))]
        for _ in range(self.random.randint(1, 5 - 2 * depth)):
            blocks += [self.head(), self.options(depth)]
        end = self.random.choice(("\n", "\n", "\r\n"))
        return "".join(f"{line}{end}" for block in blocks for line in block)

    def options(self, depth: int) -> list[str]:
        """Return some lines of a block."""
        names = self.random.choices(list(VALUES), k=self.random.randint(0, 5))
        lines = [self.line(name, self.random.choice(VALUES[name])) for name in names]
        if depth < 2 and self.random.random() < 0.25:
            lines.insert(self.random.randint(0, len(lines)), self.include(depth))
        if self.random.random() < 0.2:
            lines.append(self.random.choice(("", "   # comment", "\t", "#Port 1")))
        return lines

    def line(self, keyword: str, value: str) -> str:
        """Return a line, spelled in one of the many ways."""
        keyword = self.random.choice(
            (keyword, keyword, keyword.lower(), keyword.upper())
        )
        between = self.random.choice((" ", " ", "=", " = ", "\t", "   ", " ="))
        if self.random.random() < 0.05:
            keyword, between = f'"{keyword}"', " "
        after = self.random.choice(("", "", "", "   ", " # comment", '\t#c "x'))
        if keyword.strip('"').lower() in _REST:
            after = ""  # of a ProxyCommand it is a part, and "none #" is the host none to some versions of ssh
        before = self.random.choice(("", "  ", "\t"))
        return f"{before}{keyword}{between}{value}{after}"

    def head(self) -> list[str]:
        """Return the head of a block."""
        if self.random.random() < 0.5:
            patterns = self.random.choices(PATTERNS, k=self.random.randint(1, 3))
            return [self.line("Host", " ".join(patterns))]
        if self.random.random() < 0.15:
            return [
                self.line(
                    "Match", self.random.choice(("all", "final all", "canonical all"))
                )
            ]
        return [
            self.line(
                "Match", " ".join(self.test() for _ in range(self.random.randint(1, 3)))
            )
        ]

    def test(self) -> str:
        """Return one condition of a Match line."""
        kind = self.random.choice(
            ("host", "originalhost", "user", "localuser", "exec", "final", "canonical")
        )
        negated = "!" if self.random.random() < 0.25 else ""
        if self.random.random() < 0.1:
            kind = kind.upper()
        if kind.lower() in ("final", "canonical"):
            return f"{negated}{kind}"
        value = self.random.choice(LISTS)
        if kind.lower() == "exec":
            value = f'"{self.random.choice(COMMANDS)}"'
        return f"{negated}{kind}{self.random.choice((' ', '  ', '=', ' = '))}{value}"

    def include(self, depth: int) -> str:
        """Write an included file, or several, and return the line."""
        self.includes += 1
        name = f"part {self.includes}"
        folder = self.random.choice((self.base, self.dot_ssh / self.base.name))
        (folder / name).mkdir(parents=True)
        for one in ("b", "a", ".hidden", "c"):
            (folder / name / one).write_text(self.file(depth + 1))
        place = folder / name
        start = str(place)
        if folder != self.base:
            start = self.random.choice(
                (f"~/.ssh/{self.base.name}/{name}", f"{self.base.name}/{name}")
            )
        choices = (
            f'"{start}/a"',
            f'"{start}/*"',
            f"'{start}/[bc]'",
            f'"{start}/nothing" "{start}/b" "{start}/?"',
        )
        return self.line("Include", self.random.choice(choices))


def said_by_ssh(words: list[str]) -> dict[str, list[str]] | None:
    """Return {key: its values, in order} that `ssh -G` says, None where it refuses the configuration."""
    done = completed(["ssh", "-G", *words], check=False)
    values = defaultdict(list)
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        values[key].append(value)
    return None if done.returncode else values


def files_of_ssh(words: list[str], *, has_command: bool) -> dict[str, list[str]]:
    """Return what `ssh -v` says that it would read and run. Nothing is dialled: each ProxyCommand is `false`."""
    instead = () if has_command else ("-o", "ProxyCommand=false")
    done = completed(["ssh", "-v", *instead, *words, "true"], check=False, input="")
    found = defaultdict(list)
    for kind, name in re.findall(
        r"^debug1: (identity|certificate) file (.*) type -?\d+\r?$",
        done.stderr,
        re.MULTILINE,
    ):
        if name.lower() != "none" and not name.endswith("-cert"):
            found[kind].append(name)
    found["command"] = re.findall(
        r"^debug1: Executing proxy command: exec (.*?)\r?$", done.stderr, re.MULTILINE
    )
    return found


def jumps_as_text(found: Resolved) -> str:
    texts = []
    for jump in found.jumps:
        user = "" if jump.user is None else f"{jump.user}@"
        name = f"[{jump.name}]" if ":" in jump.name else jump.name
        texts.append(f"{user}{name}" + ("" if jump.port is None else f":{jump.port}"))
    return ",".join(texts)


def ours_as_theirs(found: Resolved) -> dict[str, str]:
    """Return what was made of a configuration in the words of `ssh -G`."""
    seconds = found.connect_timeout_s
    return {
        "hostname": found.hostname,
        "user": found.user,
        "port": str(found.port),
        "identitiesonly": "yes" if found.identities_only else "no",
        "batchmode": "yes" if found.batch_mode else "no",
        "refused": " ".join(sorted(found.refused)),
        "connecttimeout": "none" if seconds is None else f"{seconds:g}",
        "hostkeyalias": found.host_key_alias or "",
        "userknownhostsfile": " ".join(found.user_known_hosts),
        "globalknownhostsfile": " ".join(found.global_known_hosts),
        "identityagent": found.identity_agent or "none",
        "proxyjump": jumps_as_text(found),
        "has command": str(found.proxy_command is not None),
        "default keys": str(found.default_keys),
    }


def at_home(text: str, home: str) -> str:
    """Return paths of ssh's, which takes the home from the password file, whatever HOME says, in the home that it says."""
    return re.sub(rf"(?<!\S){pwd.getpwuid(os.getuid()).pw_dir}(?=/)", home, text)


def refused(first: dict[str, str]) -> list[str]:
    switches = {"keyboard-interactive": "kbdinteractive", "password": "password", "publickey": "pubkey"}  # fmt: skip
    preferred = first.get("preferredauthentications", ",".join(switches)).split(",")
    return [
        method
        for method, switch in switches.items()
        if method not in preferred
        or first[f"{switch}authentication"] in ("no", "false")
    ]


def theirs(said: dict[str, list[str]], home: str) -> dict[str, str]:
    first = {key: values[0] for key, values in said.items()}
    agent = first.get("identityagent", "SSH_AUTH_SOCK")
    if agent == "SSH_AUTH_SOCK" or agent.startswith("$"):
        agent = os.environ.get(agent.removeprefix("$"), "none")
    known = at_home(first["userknownhostsfile"], home)
    keys = ("hostname", "user", "port", "identitiesonly", "batchmode")
    jump = first.get("proxyjump", "").replace("%h", first["hostname"])
    seconds = first["connecttimeout"]
    system = first["globalknownhostsfile"]
    return {
        **{key: first[key] for key in keys},
        "refused": " ".join(refused(first)),
        "connecttimeout": seconds if seconds != "0" else "none",
        "hostkeyalias": first.get("hostkeyalias", ""),
        "userknownhostsfile": "" if known.lower() == "none" else known,
        "globalknownhostsfile": "" if system == "none" else system,
        "identityagent": at_home(agent, home),
        "proxyjump": jump.replace("ssh://", "").rstrip("/"),
        "has command": str("proxycommand" in said),
        "default keys": str(first["identityfile"] == "~/.ssh/id_rsa"),
    }


@dataclass(slots=True)
class Case:
    """A host asked of a configuration; `differences` are those between both programs."""

    what: str
    differences: list[str] = field(default_factory=list)

    def compare(self, key: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            self.differences.append(f"{key}: ours {ours!r}, theirs {theirs!r}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".ssh").mkdir()
    for name, value in (
        ("HOME", str(tmp_path)),
        ("KEYS", "/keys of %h $HOME"),
        ("AGENT", "/run/agent"),
        ("SSH_AUTH_SOCK", "/run/usual"),
        ("SHELL", "/bin/sh"),
    ):
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.needs("ssh")
def test_openssh_and_we_read_every_configuration_alike(home):
    chance = random.Random(20)
    cases: list[Case] = []
    refused = 0
    for number in range(CONFIGURATIONS):
        base = home / f"case {number}"
        base.mkdir()
        config = base / "config"
        config.write_text(
            Writer(random=chance, base=base, dot_ssh=home / ".ssh").file()
        )
        for name in chance.sample(NAMES, 2):
            typed = Host(name=name)
            words = ["-F", str(config)]
            if chance.random() < 0.2:
                typed = Host(name=name, user="typed", port=4022)
                words += ["-l", "typed", "-p", "4022"]
            words.append(name)
            said = said_by_ssh(words)
            if said is None:
                refused += 1
                continue
            case = Case(f"{config}: {name}")
            cases.append(case)
            found = resolve(typed, str(config))
            ours = ours_as_theirs(found)
            for key, value in theirs(said, str(home)).items():
                case.compare(key, ours[key], value)
            if len(cases) % 3 == 0:
                files = files_of_ssh(words, has_command="proxycommand" in said)
                compare_files(case, found, files, str(home))
    assert refused < len(cases) // 10, "most of what is generated is valid"
    wrong = [
        f"{case.what}\n    {chr(10).join(case.differences)}"
        for case in cases
        if case.differences
    ]
    assert wrong == []


def compare_files(
    case: Case, found: Resolved, files: dict[str, list[str]], home: str
) -> None:
    # ssh's log has a second backslash for each.
    said = {
        kind: [at_home(name.replace("\\\\", "\\"), home) for name in files[kind]]
        for kind in ("identity", "certificate")
    }
    if not found.default_keys:
        case.compare("identities", list(found.identity_files), said["identity"])
    case.compare("certificates", list(found.certificate_files), said["certificate"])
    if found.proxy_command is not None:
        case.compare("command", [found.proxy_command], files["command"])
