"""The packages for an environment on hosts: those of this kernel, of a requirements file, or of a
lock file.

Lines have pip's syntax. Packages that exist only on this machine are left out and named, because no
host could find them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.remote.records.environments import UV_EXPORT

LOCK_FILES = ("uv.lock", "pylock.toml")
_INSTALLED = ("site-packages", "dist-packages")
_NOT_NEEDED = ("distmagic", "pip")
_LINE_BYTES = 900_000  # a request is one line of at most a megabyte
_FILES_BELOW = 20  # limit for requirements files that include each other
_EXPORT_S = 120.0


@frozen
class Packages:
    """The packages of an environment, and its name."""

    name: str
    requirements: tuple[str, ...] = ()  # lines for pip
    # instead of these: the text of a lock file that only uv can read, by file name
    lock: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()  # messages for the user

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}", self.name):
            raise UsageError(
                f"{self.name!r} can't be the name of an environment.",
                "Use letters, digits, dots and dashes: --name NAME.",
            )
        texts = [*self.requirements, *(text for _, text in self.lock)]
        if sum(len(text.encode()) for text in texts) > _LINE_BYTES:
            raise UsageError(
                "The list of packages is longer than a host takes.",
                "Install uv on this machine, which makes a shorter list, or name a requirements file.",
            )


def of_kernel(name: str) -> Packages:
    """Return the packages installed for this kernel, each with its version."""
    lines: dict[str, str] = {}
    left_out = []
    for found in importlib.metadata.distributions():
        own = str(found.metadata["Name"] or "")
        key = re.sub(r"[-_.]+", "-", own).lower()
        if not key or key in lines or key in _NOT_NEEDED:
            continue
        line = _line_of(found, own)
        if line:
            lines[key] = line
        else:
            left_out.append(own)
    # An earlier one on sys.path hides the other.
    left_out = [own for own in left_out if own.lower().replace("_", "-") not in lines]
    notes = _notes(sorted(set(left_out)))
    return _with_torch_note(name, [lines[key] for key in sorted(lines)], notes)


def _line_of(found: importlib.metadata.Distribution, name: str) -> str:
    """Return the line for a package of this kernel, "" for one that exists only on this machine."""
    if Path(str(found.locate_file(""))).name not in _INSTALLED:
        return ""
    text = found.read_text("direct_url.json")
    if text is None:
        # Each host gets the build from its own index: this machine's torch may be a CPU build.
        return f"{name}=={found.version.partition('+')[0]}"
    origin = json.loads(text)
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        return ""
    source = origin.get("vcs_info")
    if source:
        url = f"{source['vcs']}+{url}@{source['commit_id']}"
    return f"{name} @ {url}"


def of_requirements(path: Path, name: str | None = None) -> Packages:
    """Return the packages of a pip requirements file and of the files that it includes.

    Raises `UsageError`.
    """
    lines, left_out = [], []
    for line in _read(path, _FILES_BELOW):
        # Whether a line of a requirements file refers to something on this machine.
        if line.startswith(("-e", "--editable", ".", "/", "~", "file:")):
            is_local = True
        elif "://" in line:
            is_local = re.search(r"@\s*file:", line) is not None
        else:
            is_local = re.search(r"\.(whl|zip|tar\.gz)$", line) is not None
        if is_local:
            left_out.append(line)
        else:
            lines.append(line)
    return _with_torch_note(name or _name_of(path), lines, _notes(left_out))


def of_lock(path: Path, name: str | None = None) -> Packages:
    """Return the packages of a uv.lock, a pylock.toml or a locked requirements file.

    uv exports a uv.lock: on this machine if uv is installed on it, else on the hosts. Raises
    `UsageError`.
    """
    named = name or _name_of(path)
    if path.name == "uv.lock":
        files = {"uv.lock": path, "pyproject.toml": path.with_name("pyproject.toml")}
        uv = shutil.which("uv")
        if uv:
            with tempfile.TemporaryDirectory() as folder:
                exported = Path(folder) / "requirements.txt"
                project = path.parent
                argv = [uv, *UV_EXPORT, str(exported), "--directory", str(project)]
                try:
                    subprocess.run(
                        argv,
                        check=True,
                        capture_output=True,
                        text=True,
                        timeout=_EXPORT_S,
                    )
                except subprocess.CalledProcessError as error:
                    raise UsageError(
                        f"uv can't read {project}/uv.lock: {error.stderr.strip()[-500:]}",
                        "Try it by hand: uv export --frozen",
                    ) from None
                except subprocess.TimeoutExpired:
                    raise UsageError(
                        f"uv did not read {project}/uv.lock within {_EXPORT_S:.0f} s."
                    ) from None
                return of_requirements(exported, named)
    elif re.fullmatch(r"pylock(\.[\w-]+)?\.toml", path.name):
        files = {"pylock.toml": path}
    elif path.suffix in (".toml", ".lock"):
        raise UsageError(
            f"{path} is not a lock file that distmagic can read.",
            f"Known are {', '.join(LOCK_FILES)}, and files that pip reads.",
        )
    else:
        return of_requirements(path, named)
    texts = [(file_name, _text_of(file)) for file_name, file in files.items()]
    return Packages(name=named, lock=tuple(texts))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file"
        raise UsageError(
            f"{path} can't be read: {why.lower()}.", "Check the path."
        ) from None


def _read(path: Path, files_left: int) -> Iterator[str]:
    """Yield the complete lines of a requirements file, without comments, and those of the files
    that it includes.
    """
    if not files_left:
        raise UsageError(f"{path}: requirements files name each other without end.")
    text = re.sub(r"\\\n\s*", " ", _text_of(path))
    for whole in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", whole).strip()
        named = re.match(r"(?:-r|--requirement|-c|--constraint)[\s=]*(\S+)", line)
        if named is None:
            if line:
                yield line
        elif line.startswith(("-c", "--constraint")):
            raise UsageError(
                f"{path}: hosts take no constraints: {line}",
                "Name the versions in the requirements file itself.",
            )
        else:
            yield from _read(path.parent / named[1], files_left - 1)


def _name_of(path: Path) -> str:
    """Return the name of the environment for a file: a lock file's project, or the file's name."""
    stem = path.stem
    if path.name in LOCK_FILES:
        stem = path.resolve().parent.name
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.") or "env"


def _notes(left_out: list[str]) -> tuple[str, ...]:
    if not left_out:
        return ()
    names = ", ".join(left_out)
    return (f"left out, because it lies on this machine alone: {names}",)


def _with_torch_note(name: str, lines: list[str], notes: tuple[str, ...]) -> Packages:
    if not any(re.match(r"torch\b(?!-)", line) for line in lines):
        notes = (*notes, "torch is not among the packages, and a run needs it")
    return Packages(name=name, requirements=tuple(lines), notes=notes)
