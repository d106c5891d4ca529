"""Makes a virtual environment with the packages that a notebook requests, by uv.

If the host has no uv, the environment's own pip installs one into it.

The notebook gets the last line of the installer at least once a second. When the channel ends, all
started processes end too.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from distmagic.remote.records import environments, owners, places
from distmagic.remote.records.environments import Environment
from distmagic.remote.system import processes
from distmagic.remote.wire import protocol

if TYPE_CHECKING:
    from distmagic.remote.contact import Conversation

_TELL_S = 0.5
_LOOK_S = 0.3
_LINE_CHARS = 200
# time for a killed program to end; one that hangs in the kernel never does
_KILLED_S = 1.0
# The end of a program's output that is kept; an error shows its last lines.
_KEPT_BYTES = 64 << 10
_TOLD_LINES = 8
# Variables that would direct the installers away from the new environment.
_MISLEADING = ("PYTHON", "VIRTUAL_ENV", "CONDA_", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")  # fmt: skip
# Settings of pip with package sources, which uv does not read.
_SOURCES = ("index-url", "extra-index-url", "find-links")


@dataclass
class EnvironmentSync:
    """Answers `SyncEnvironment` for one conversation."""

    _notebook: Conversation
    _began_s: float = 0.0
    _said_s: float = 0.0
    _line: str = ""  # the last line of output

    def sync(self, request: protocol.SyncEnvironment) -> None:
        """Make or find the environment, and answer with its Python.

        Raises OSError and ValueError.
        """
        if "/" in request.name or request.name.startswith(".") or not request.name:
            raise ValueError(f"{request.name[:80]!r} is not the name of an environment")
        self._began_s = time.monotonic()
        places.make_private(environments.root())
        environments.check_name(request.name)
        digest = environments.digest((request.requirements, request.lock))
        was_there = True
        while (environment := environments.find(digest)) is None:
            with Environment(
                path=environments.root() / f".{digest}"
            ).locked() as is_free:
                # Another notebook may have made it meanwhile.
                if is_free and environments.find(digest) is None:
                    begun = environments.begin(digest)
                    try:
                        self._fill(begun, request)
                    except BaseException:
                        with suppress(OSError):
                            shutil.rmtree(begun.path)
                        raise
                    was_there = False
            if not is_free:
                self._say("waiting for another notebook, which creates the environment")
                with suppress(TimeoutError):
                    self._notebook.wait(None, _TELL_S)
        places.touch([environment.path])
        # On a full disk it gets no owner, and `clean all` leaves it.
        with suppress(OSError):
            owners.note(environment.path, request.owner)
        environment.name_it(request.name)
        self._notebook.say(
            protocol.EnvironmentReady(
                python=str(environment.python),
                was_there=was_there,
                elapsed_s=time.monotonic() - self._began_s,
            )
        )

    def _fill(
        self, environment: Environment, request: protocol.SyncEnvironment
    ) -> None:
        self._say("making the environment")
        base = environments.base_python()
        # It may be where its installer puts it, outside of PATH.
        places_of_uv = [os.environ.get("PATH", ""), *map(os.path.expanduser, ("~/.local/bin", "~/.cargo/bin"))]  # fmt: skip
        uv = shutil.which("uv", path=os.pathsep.join(places_of_uv))
        path = str(environment.path)
        sources = []
        if uv:
            self._must(environment, [uv, "venv", "--python", base, path])
            # Only now: uv makes an environment in an empty folder.
            _begin(environment, request.owner)
        else:
            _begin(environment, request.owner)
            cure = "\nInstall uv on this host, or its package python3-venv"
            self._must(environment, [base, "-m", "venv", path], cure)
            pip = [str(environment.python), "-m", "pip"]
            self._must(environment, [*pip, "install", "uv"], cure)
            uv = f"{path}/bin/uv"
            sources = _sources(pip)
        # The contact's umask lets only its user read these files: the URL of an index can contain a
        # password.
        wanted = environment.path / "requirements.txt"
        if "pylock.toml" in request.lock:
            wanted = environment.path / "pylock.toml"
            lines = request.lock["pylock.toml"].split("\n")
            sources = []  # it has the location of each package
        elif request.lock:
            # The requirements equivalent to a uv.lock.
            folder = environment.path / "lock"
            folder.mkdir()
            for name in ("uv.lock", "pyproject.toml"):
                text = request.lock.get(name, "")
                (folder / name).write_text(text, encoding="utf-8")
            exported = folder / "requirements.txt"
            argv = [uv, *environments.UV_EXPORT, str(exported), "--directory", str(folder)]  # fmt: skip
            self._must(environment, argv)
            lines = exported.read_text().splitlines()
        else:
            lines = list(request.requirements)
        if any(line.startswith(("-i", "--index-url")) for line in lines):
            # pip uses the one in the file, and uv refuses a second one.
            sources = [line for line in sources if not line.startswith("--index-url")]
        text = "\n".join([*sources, *lines]) + "\n"
        wanted.write_text(text, encoding="utf-8")
        self._say("installing the packages")
        python = str(environment.python)
        self._must(
            environment,
            [uv, "pip", "install", "--python", python, "-r", str(wanted)],
            what="the packages could not be installed",
        )
        environment.finish()

    # ---- programs

    def _must(
        self,
        environment: Environment,
        argv: Sequence[str],
        cure: str = "",
        what: str = "",
    ) -> None:
        """Run a program to its end, or to that of the channel, and leave no process.

        If it fails, raises OSError with `what` failed, and the last lines of its output.
        """
        said = b""
        # This identifies its processes; children of this contact can be agents, whose template has
        # ended meanwhile.
        mark = f"sync-{secrets.token_hex(6)}"
        # pip leaves downloads there when it is killed.
        tmp = environment.tmp
        own_tmp = {"TMPDIR": str(tmp)} if tmp.is_dir() else {}
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**_variables(), **own_tmp, processes.MARK: mark},
            # `python -m` imports from the working directory, and uv reads its configuration there:
            # the home may have a token.py.
            cwd="/",
            start_new_session=True,
            preexec_fn=partial(processes.die_with_parent, os.getpid()),  # noqa: PLW1509 - there is one thread
        )
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        has_ended = False
        try:
            while not has_ended:
                # Its children may keep the pipe open, so the end of the pipe can be much later than
                # its own.
                has_ended = child.poll() is not None
                with suppress(TimeoutError, BlockingIOError):
                    if not has_ended:
                        self._notebook.wait(child.stdout, _TELL_S)
                    data = os.read(child.stdout.fileno(), 1 << 16)
                    has_ended = has_ended or not data
                    said = (said + data)[-_KEPT_BYTES:]
                if has_ended or time.monotonic() - self._said_s > _LOOK_S:
                    places.touch([environment.path])
                    self._say((_lines(said) or [self._line])[-1])
        finally:
            child.kill()
            processes.sweep(mark)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_KILLED_S)
            child.stdout.close()
        if child.wait():
            last = _lines(said)[-_TOLD_LINES:] or ["it wrote nothing"]
            what = what or f"{' '.join(argv)} failed"
            raise OSError("\n".join([f"{what}:", *last]) + cure)

    def _say(self, line: str) -> None:
        self._line = line
        self._said_s = time.monotonic()
        self._notebook.say(
            protocol.EnvironmentProgress(
                line=line[:_LINE_CHARS], elapsed_s=self._said_s - self._began_s
            )
        )


def _lines(said: bytes) -> list[str]:
    """Return the lines of a program's output, without blank ones."""
    lines = map(str.strip, said.decode(errors="replace").splitlines())
    return list(filter(None, lines))


def _variables() -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_MISLEADING)
    }
    ours = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    return {**env, **ours, "PIP_PROGRESS_BAR": "off", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "UV_NO_PROGRESS": "1"}  # fmt: skip


def _sources(pip: Sequence[str]) -> list[str]:
    """Return the package sources of this host's pip, as lines of a requirements file; they may hold
    secrets.
    """
    done = subprocess.run(
        [*pip, "config", "list"],
        check=False,
        capture_output=True,
        text=True,
        cwd="/",
        env=_variables(),
    )
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^\S+\.([a-z-]+)='(.*)'$", done.stdout, re.MULTILINE):
        # Its variables come first and take precedence.
        found.setdefault(key, value.replace("\\n", " ").split())
    lines = [f"--{key} {one}" for key in _SOURCES for one in found.get(key, ())]
    if found.get("no-index", [""])[0].lower() in ("1", "true", "yes", "on"):
        lines.append("--no-index")
    return lines


def _begin(environment: Environment, owner: str) -> None:
    """Note whose environment this is, and make its directory of temporary files. Raises OSError."""
    with suppress(OSError):
        owners.note(environment.path, owner)
    environment.tmp.mkdir()
