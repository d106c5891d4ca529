"""`SyncEnvironment`, answered by a real contact: programs in place of uv, and an index that is a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distmagic.connection.link import Link
from distmagic.connection.opening import open_link
from distmagic.errors import ConnectionLost, PreflightError
from distmagic.payload import bundle
from distmagic.remote.contact import environment_sync
from distmagic.remote.contact.contact import Contact
from distmagic.remote.contact.environment_sync import EnvironmentSync, _sources
from distmagic.remote.records import environments, owners, places
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol as p
from distmagic.request.command_prefix import interpreter_words
from distmagic.request.hosts import LOCALHOST
from distmagic.transports.local import LocalTransport
from tests import REPOSITORY
from tests.builders.shell import completed
from tests.builders.wheels import played_uv, wheel
from tests.lab import wait_until
from tests.lab.waiting import HANG_S

Open = Callable[[], Link]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, uv's among them, which is all that pip looks at; this machine has no uv."""
    folder = tmp_path / "index"
    played_uv(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("UV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def opened(index: Path) -> Iterator[Open]:
    """Opens conversations with this machine."""
    links: list[Link] = []

    def opened_link() -> Link:
        links.append(
            open_link(LOCALHOST, LocalTransport(), sys.executable, bundle.build())
        )
        return links[-1]

    yield opened_link
    for link in links:
        link.close()


def sync(
    link: Link, *lines: str, name: str = "train", owner: str = ""
) -> tuple[list[p.EnvironmentProgress], p.EnvironmentReady]:
    """Have an environment with these packages; return how it went, and what came of it."""
    link.send(p.SyncEnvironment(name=name, requirements=lines, owner=owner))
    return heard(link)


def heard(
    link: Link, progress: list[p.EnvironmentProgress] | None = None
) -> tuple[list[p.EnvironmentProgress], p.EnvironmentReady]:
    progress = [] if progress is None else progress
    while True:
        said: object = link.answer(p.EnvironmentProgress, p.EnvironmentReady)
        if isinstance(said, p.EnvironmentReady):
            return progress, said
        assert isinstance(said, p.EnvironmentProgress)
        progress.append(said)


def asked(python: str, code: str) -> str:
    return completed([python, "-c", code]).stdout.strip()


@pytest.mark.slow
def test_an_environment_is_made_once_and_has_the_packages_and_a_name(index, opened):
    wheel(index, "alpha", requires=("beta",))
    wheel(index, "beta", "2.0")
    link = opened()
    progress, made = sync(link, "alpha==1.0")
    assert not made.was_there
    assert asked(made.python, "import alpha, beta; print(beta.VERSION)") == "2.0"
    lines = [one.line for one in progress]
    assert {"making the environment", "installing the packages"} < set(lines)
    assert lines[-1].startswith("Successfully installed alpha-1.0 beta-2.0")
    # By its name; a program of its own names the Python that it belongs to.
    words = interpreter_words("env:train")
    found = asked_by(words, "import sys; print(sys.prefix)")
    assert Path(found).resolve() == Path(made.python).parents[1].resolve()
    # Nothing is made a second time, also by another conversation that runs in the environment itself.
    inner = open_link(LOCALHOST, LocalTransport(), made.python, bundle.build())
    progress, again = sync(inner, "alpha==1.0", name="other")
    inner.close()
    assert (progress, again.was_there, again.python) == ([], True, made.python)


def asked_by(words: tuple[str, ...], code: str) -> str:
    done = completed([*words, "-c", code])
    return done.stdout.strip()


@pytest.mark.slow
def test_a_package_that_cant_be_had_is_named_and_the_environment_is_not_there(
    index, opened, golden
):
    wheel(index, "alpha")
    link = opened()
    with golden.raises(PreflightError):
        sync(link, "alpha", "nowhere==7")
    assert not (environments.root() / "train").exists()
    with golden.raises(PreflightError):
        sync(link, name="..")  # the conversation goes on


@pytest.mark.parametrize("name", ["", ".x", "a/b"])
def test_a_name_that_leads_elsewhere_is_refused(opened, name, golden):
    with golden.raises(PreflightError):
        sync(opened(), name=name)


def fake_uv(tmp_path: Path, script: str) -> None:
    program = tmp_path / ".local" / "bin" / "uv"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)


# What uv does: `uv venv --python BASE DIR`, `uv pip install --python PYTHON -r FILE`.
UV = """
case "$1" in
venv) exec "$3" -m venv --without-pip "$4" ;;
*) echo "$@" >> "$HOME/uv-calls"; echo "Resolved 2 packages in 1ms"; while [ -e "$HOME/hold" ]; do sleep 0.05; done
esac
"""


def test_an_environment_remembers_all_who_asked_for_it(tmp_path, opened):
    fake_uv(tmp_path, UV)
    link = opened()
    for owner in ("me", "you", "me"):
        _, made = sync(link, "alpha==1.0", owner=owner)
    assert owners.of(Path(made.python).parents[1]) == ("me", "you")


def test_a_file_of_requirements_may_be_empty(tmp_path, opened):
    fake_uv(tmp_path, f'{UV}[ "$1" = venv ] || test -f "$6"')
    _, made = sync(opened(), name="bare")
    assert Path(made.python).exists()


def test_of_two_notebooks_one_makes_the_environment_by_uv_and_the_other_waits(
    tmp_path, opened, golden
):
    fake_uv(tmp_path, UV)
    (tmp_path / "hold").touch()
    first, second = opened(), opened()
    request = p.SyncEnvironment(name="a", requirements=("alpha",))
    first.send(request)
    wait_until((tmp_path / "uv-calls").exists, "uv")
    waited: list[p.EnvironmentProgress] = []
    with ThreadPoolExecutor(1) as pool:
        second.send(request)
        other = pool.submit(heard, second, waited)
        wait_until(lambda: len(waited) > 0, "a second one that waits")
        (tmp_path / "hold").unlink()
        progress, made = heard(first)
        _, found = other.result(HANG_S)
    assert (made.was_there, found.was_there) == (False, True)
    assert found.python == made.python
    golden(*{one.line for one in waited})
    assert progress[-1].line == "Resolved 2 packages in 1ms"
    calls = (tmp_path / "uv-calls").read_text().splitlines()
    assert len(calls) == 1
    assert calls[0].startswith(f"pip install --python {made.python} -r ")
    # Half of one is never used.
    half = Path(made.python).parents[1] / "half"
    half.touch()
    half.with_name("ready").unlink()
    os.utime(half.parent, (1, 1))
    _, repaired = sync(first, "alpha", name="a")
    assert (repaired.was_there, repaired.python) == (False, made.python)
    assert not half.exists()


def test_an_interrupt_ends_all_that_was_started_for_it(tmp_path, opened):
    """A child that leaves the session of its parent ends as well."""
    mark = f"7{os.getpid()}.5"
    fake_uv(
        tmp_path,
        f'[ "$1" = venv ] && exec "$3" -m venv --without-pip "$4"\n'
        f'(setsid sleep {mark} & touch "$TMPDIR/pip-unpack"; echo "$TMPDIR" > "$HOME/began")\nsleep {mark}',
    )
    link = opened()
    link.send(p.SyncEnvironment(name="a", requirements=("alpha",), owner="me"))
    wait_until((tmp_path / "began").exists, "uv")
    wait_until(lambda: len(sleeping(mark)) == 2, "two processes")
    tmp = Path((tmp_path / "began").read_text().strip())
    assert (tmp / "pip-unpack").exists()
    assert tmp.parent.parent == environments.root()
    assert owners.of(tmp.parent) == ("me",), "should the contact be killed"
    link.close()
    wait_until(lambda: not sleeping(mark), "their end")
    wait_until(lambda: not tmp.parent.exists(), "half of it to go, with what pip had")
    with pytest.raises(ConnectionLost):
        heard(link)


@pytest.mark.parametrize("by", ["the next one", "clean"])
def test_what_a_killed_contact_left_goes(tmp_path, opened, by):
    """Nobody could remove it when that contact was killed, and uv with it."""
    fake_uv(
        tmp_path,
        f'[ "$1" = venv ] && exec "$3" -m venv --without-pip "$4"\n'
        f'[ -e "$HOME/began" ] && exit 0; echo $PPID > "$HOME/pid"; mv "$HOME/pid" "$HOME/began"\n'
        f"exec sleep 7{os.getpid()}.7",
    )
    link = opened()
    link.send(p.SyncEnvironment(name="a", requirements=("alpha",), owner="me"))
    wait_until((tmp_path / "began").exists, "uv")
    os.kill(int((tmp_path / "began").read_text()), signal.SIGKILL)
    with pytest.raises(ConnectionLost):
        heard(link)
    wait_until(lambda: not sleeping(f"7{os.getpid()}.7"), "uv's end")
    (half,) = environments.root().glob(".*[!k]")
    os.utime(half, (1, 1))
    if by == "clean":
        environments.remove(half)
    else:
        sync(opened(), "alpha", name="a")
    assert not list(environments.root().glob("*/tmp"))


class PlayedContact:
    """A conversation of which nobody hears; does `meanwhile` when a program has written, and waits only so often."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self._meanwhile = meanwhile
        self._left = 40

    def say(self, _: object) -> None:
        """Tell nobody."""

    def wait(self, file: Any, timeout_s: float) -> None:
        self._left -= 1
        assert self._left, "it waits for ever"
        if not select.select([file], [], [], timeout_s)[0]:
            raise TimeoutError
        self._meanwhile()

    def ran(self, folder: Path, code: str) -> list[str]:
        """Have a sync run a shell; return what it has written if it has failed, else []."""
        environment = environments.Environment(path=folder)
        sync = EnvironmentSync(cast(Contact, self))
        try:
            sync._must(environment, ["sh", "-c", code], what="it failed")
        except OSError as error:
            return str(error).splitlines()[1:]
        return []


def test_an_installers_processes_end_with_it_and_no_others(tmp_path, marks):
    """The agents of a template that ends meanwhile go on; what the installer put into another session does not."""
    agent, left = f"7{os.getpid()}.1", f"7{os.getpid()}.2"
    template = subprocess.Popen(
        ["sh", "-c", f"sleep {agent} & echo; wait"],
        env={**os.environ, **marks},
        stdout=subprocess.PIPE,
    )
    assert template.stdout is not None
    with template.stdout:
        template.stdout.readline()
    wait_until(lambda: len(sleeping(agent)) == 1, "an agent")

    def meanwhile() -> None:
        template.kill()
        template.wait()
        wait_until(lambda: len(sleeping(left)) == 1, "a process of the installer")
        (tmp_path / "go").touch()

    code = f"""setsid sleep {left} >/dev/null 2>&1 & echo began
        while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 3"""
    assert PlayedContact(meanwhile).ran(tmp_path, code) == ["began"]
    assert sleeping(left) == []
    (pid,) = sleeping(agent)
    os.kill(pid, signal.SIGKILL)


def test_an_installer_is_over_when_it_has_ended_whoever_holds_its_output(tmp_path):
    holder = f"7{os.getpid()}.3"
    code = f"echo began; sleep {holder} & printf ended; exit 4"
    assert PlayedContact().ran(tmp_path, code) == ["began", "ended"]
    assert sleeping(holder) == []


def test_modules_of_the_user_are_not_those_of_an_installer(tmp_path, monkeypatch):
    """`python -m pip` looks into the working directory first, and a contact's is the user's home."""
    (tmp_path / "token.py").write_text("raise SystemExit('the user's own')")
    monkeypatch.chdir(tmp_path)
    code = f"{sys.executable} -m tokenize /dev/null; exit $?"
    assert PlayedContact().ran(tmp_path, code) == []


def sleeping(mark: str) -> list[int]:
    found = []
    for process in processes.everything():
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if words == f"sleep\0{mark}\0".encode():
            found.append(process.pid)
    return found


@pytest.mark.slow
def test_a_host_that_cant_get_uv_says_why_and_leaves_nothing(index, opened, golden):
    (index / "uv-1.0-py3-none-any.whl").unlink()
    with pytest.raises(PreflightError, match="pip install uv ") as caught:
        sync(opened(), "alpha")
    golden(caught.value.message.splitlines()[-1])  # all above is pip's
    assert [path.name for path in environments.root().glob(".*[!k]")] == []


@pytest.mark.parametrize(
    ("listed", "lines"),
    [
        ("global.index-url='https://u:p@mirror/simple'", ["--index-url https://u:p@mirror/simple"]),
        (":env:.index-url='a'\nglobal.index-url='b'", ["--index-url a"]),
        ("install.find-links='/a /b'\nglobal.no-index='true'", ["--find-links /a", "--find-links /b", "--no-index"]),
        (r"global.extra-index-url='\nhttps://a\nhttps://b'", ["--extra-index-url https://a", "--extra-index-url https://b"]),
        ("global.no-index='false'\nglobal.timeout='60'", []),
        ("", []),
    ],
)  # fmt: skip
def test_uv_takes_packages_from_where_pip_does(listed, lines):
    assert _sources(["printf", "%s\n", listed, "#"]) == lines


def test_an_environment_that_nobody_uses_is_removed_with_its_name(index):
    environment = environments.Environment(
        path=environments.root() / ".0badcafe0badcafe"
    )
    (environment.path / "bin").mkdir(parents=True)
    environment.python.write_bytes(bytes(5000))
    assert not environment.is_ready()
    environment.finish()
    environment.name_it("train")
    assert (environments.root() / "train" / "bin" / "python").exists()
    assert environment.is_ready()
    now = time.time()
    assert environments.unused(0.0, now) == []  # touched a moment ago
    assert environments.unused(500.0, now + 499) == []
    assert environments.unused(0.0, now + 121) == [(environment.path, 5000)]
    with environment.locked() as is_free:
        assert is_free
        environments.remove(environment.path)
    assert environment.is_ready()  # somebody was making it
    environments.remove(environment.path)
    assert environment.is_ready()  # somebody began to use it meanwhile
    os.utime(environment.path, (now - 121, now - 121))
    environments.remove(environment.path)
    assert list(environments.root().iterdir()) == []


def made(digit: str) -> environments.Environment:
    """Make an environment with a module that knows this digit."""
    environment = environments.Environment(path=environments.root() / f".{digit * 16}")
    venv = [sys.executable, "-m", "venv", "--without-pip", str(environment.path)]
    subprocess.run(venv, check=True)
    (site,) = environment.path.glob("lib/python*/site-packages")
    (site / "late.py").write_text(f"DIGIT = {digit}\n")
    environment.finish()
    return environment


IN_USE = """
import sys
from distmagic.remote.records import environments
print(sys.prefix, flush=True)
input()
import late
environments.touch_own()
print(late.DIGIT)
"""


@pytest.mark.parametrize("by_name", [True, False])
def test_a_job_keeps_its_environment_when_the_name_leads_to_another_one(index, by_name):
    """One that is started by a path through the link is at least not removed."""
    first, second = made("1"), made("2")
    first.name_it("kernel")
    link = environments.root() / "kernel"
    words = interpreter_words("env:kernel") if by_name else (f"{link}/bin/python",)
    with subprocess.Popen(
        [*words, "-c", IN_USE],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        prefix = job.stdout.readline().strip()
        assert prefix == str(first.path.resolve() if by_name else link)
        second.name_it("kernel")
        for environment in (first, second):
            os.utime(environment.path, (0, 0))
        job.stdin.write("\n")
        job.stdin.close()
        assert job.stdout.read() == ("1\n" if by_name else "2\n")
    assert [path for path, _ in environments.unused(0.0, time.time())] == [second.path]


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling"])
def test_what_a_user_has_made_keeps_its_name_and_nothing_is_made(
    kind, tmp_path, opened, golden
):
    there = environments.root() / "train"
    there.parent.mkdir(parents=True)
    if kind == "file":
        there.write_text("mine")
    elif kind == "folder":
        there.mkdir()
    else:
        there.symlink_to(tmp_path if kind == "link" else "nowhere")
    before = os.lstat(there).st_ino
    with golden.raises(PreflightError):  # fmt: skip
        sync(opened(), "alpha")
    assert os.lstat(there).st_ino == before
    assert list(environments.root().iterdir()) == [there]


def test_a_name_that_cant_be_given_leaves_nothing(index, monkeypatch):
    environment = environments.Environment(path=environments.root() / f".{'1' * 16}")
    environment.path.mkdir(parents=True)

    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match="no"):
        environment.name_it("train")
    assert list(environments.root().iterdir()) == [environment.path]


def test_only_environments_and_the_names_of_them_are_ever_removed(tmp_path, index):
    root = environments.root()
    (root / ".git").mkdir(parents=True)
    (root / f".{'a' * 17}").mkdir()
    (root / f".{'b' * 16}").symlink_to(tmp_path)
    (root / "mine").symlink_to("/not/mounted")
    before = sorted(root.iterdir())
    environment = environments.Environment(path=root / f".{'c' * 16}")
    environment.path.mkdir()
    environment.name_it("train")
    os.utime(environment.path, (1, 1))
    found = [path for path, _ in environments.unused(0.0, time.time())]
    assert found == [environment.path]
    environments.remove(environment.path)
    assert sorted(root.iterdir()) == before


def test_an_environment_that_cant_be_read_just_now_is_not_made_anew(opened):
    """Its disk may be slow or its files too many: jobs may be using it."""
    digest = environments.digest((("alpha",), {}))
    environment = environments.Environment(path=environments.root() / f".{digest}")
    (environment.path / "ready").mkdir(parents=True)
    with pytest.raises(PreflightError, match="Is a directory"):
        sync(opened(), "alpha")
    assert (environment.path / "ready").exists()


def test_two_hosts_that_do_not_see_each_others_locks_do_not_share_half_of_one(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    places.make_private(environments.root())
    digest = "0123456789abcdef"
    first = environments.begin(digest)
    (first.path / "half").touch()
    second = environments.begin(digest)
    assert second.path != first.path
    assert (first.path / "half").exists()
    assert environments.find(digest) is None
    second.finish()
    assert environments.find(digest) == second
    first.finish()
    found = environments.find(digest)
    assert found in (first, second)
    second.name_it("train")
    for one in (first, second):
        os.utime(one.path, (1, 1))
    assert {path for path, _ in environments.unused(0.0, time.time())} == {
        first.path,
        second.path,
    }
    for one in (first, second):
        environments.remove(one.path)
    assert list(environments.root().iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_home_without_locks_has_environments_all_the_same(
    tmp_path, monkeypatch, number
):
    def no_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    places.make_private(environments.root())
    made = environments.begin("0123456789abcdef")
    with made.locked() as is_free:
        assert is_free
    os.utime(made.path, (1, 1))
    environments.remove(made.path)
    assert not made.path.exists()


def test_what_a_killed_contact_left_of_one_goes_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTMAGIC_HOME", str(tmp_path / "home"))
    places.make_private(environments.root())
    half = environments.begin("0123456789abcdef")
    os.utime(half.path, (time.time() - 130,) * 2)
    assert environments.begin("0123456789abcdef") == half


def test_who_asked_for_it_is_noted_before_an_environment_is_made_without_uv(
    tmp_path, monkeypatch
):
    """A contact that is killed meanwhile leaves what its owner's clean finds, and pip's files in it."""
    monkeypatch.setattr(environment_sync.shutil, "which", lambda *_, **__: None)
    environment = environments.Environment(path=tmp_path)
    noted = []

    class Killed(environment_sync.EnvironmentSync):
        def _must(self, environment, argv, cure=""):
            noted.append((owners.of(environment.path), environment.tmp.is_dir()))
            raise OSError("killed")

    request = p.SyncEnvironment(name="a", requirements=("alpha",), owner="me")
    syncing = Killed(cast(Any, SimpleNamespace(say=lambda _: None)))
    with pytest.raises(OSError, match="killed"):
        syncing._fill(environment, request)
    assert noted == [(("me",), True)]
