"""The exported job, independent of a system. Pure."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import field

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.remote.values.by_name import is_secret
from distmagic.request.export import ExportRequest
from distmagic.request.flag_values import Pairs, refuse_zero_bytes
from distmagic.request.hosts import Slots
from distmagic.request.spec import JobSpec

PROGRAM = "program"  # the folder with the program of the ranks


@frozen
class File:
    """A file of the exported folder, with its permissions."""

    path: str
    data: bytes = field(repr=False)
    mode: int = 0o644
    # only its owner may read it, because it may contain secrets
    is_private: bool = False
    # it is copied into an image and readable for any user; it never contains a secret
    is_for_all: bool = False


@frozen
class ExportedProgram:
    """The program for every rank."""

    files: tuple[File, ...]  # below the folder `PROGRAM`
    # words after torchrun's flags: a script below `inside`, and its arguments; () if `launcher` has
    # them
    words: tuple[str, ...]
    # the subfolder of `PROGRAM` in which ranks start; "" for `PROGRAM` itself
    inside: str = ""
    # files or folders, also below `PROGRAM`, from which modules are imported
    imports: tuple[str, ...] = ()
    # the script runs a pickled call, which needs `python_version`
    is_bundle: bool = False
    why: str = ""  # why the cell could not be a plain program
    python_version: str = ""
    # arguments of the interpreter that start the ranks of a node; torchrun's flags follow
    launcher: tuple[str, ...] = ()


@frozen
class ExportedJob:
    """One job. `hosts` are its hosts' names if the user gave any, each with its number of ranks or
    None.
    """

    name: str
    program: ExportedProgram
    spec: JobSpec
    request: ExportRequest
    hosts: tuple[tuple[str, Slots | None], ...] = ()
    python: str = ""

    def __post_init__(self) -> None:
        refuse_zero_bytes(self)
        refuse_zero_bytes(self.program, "the program's ")
        if self.spec.is_elastic:
            raise UsageError(
                "--nnodes MIN:MAX: an exported job has as many nodes as it is submitted with.",
                "Write --nnodes N.",
            )
        if self.spec.cwd is not None:
            raise UsageError(
                "--cwd: an exported program runs in its own folder, next to its files.",
                "Leave it out, or let the program change its directory.",
            )
        for name, value in self.spec.variables:
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"--env {name}: the value has bytes that are not UTF-8, and a job's file holds UTF-8 only.",
                    "Leave the flag out, and set the variable in the program.",
                ) from None
        if self.spec.rdzv_endpoint and self.request.chooses_hosts:
            raise UsageError(
                f"--rdzv-endpoint: {self.request.system} decides where the nodes meet.",
                "Leave it out.",
            )

    @property
    def nodes(self) -> int:
        """The number of its nodes."""
        if self.request.nodes is not None:
            return self.request.nodes
        if self.spec.nnodes is not None:
            return self.spec.nnodes[1]
        return max(1, len(self.hosts))

    @property
    def title(self) -> str:
        """Its name in a form for every system: letters, digits and hyphens, a letter first, at most
        40 characters.
        """
        plain = unicodedata.normalize("NFKD", self.name)
        plain = re.sub(r"[^A-Za-z0-9]+", "-", plain).strip("-").lower()
        if not plain[:1].isalpha():
            plain = f"job-{plain}".strip("-")
        return plain[:40].strip("-")

    @property
    def nproc_per_node(self) -> Slots | None:
        """The ranks of a node: as given, else one for each GPU; None if neither is given."""
        if self.spec.nproc_per_node is not None:
            return self.spec.nproc_per_node
        gpus = self.request.gpus
        return gpus.count if gpus is not None and gpus.count else None

    @property
    def backend(self) -> str:
        """The rendezvous backend: as given; c10d if ranks may restart, which static can't do on
        several nodes.
        """
        if self.spec.rdzv_backend is not None:
            return self.spec.rdzv_backend
        return "c10d" if self.spec.max_restarts and self.nodes > 1 else "static"

    @property
    def variables(self) -> Pairs:
        """The variables of every rank that are not secret."""
        return tuple(pair for pair in self.spec.variables if not is_secret(pair[0]))

    @property
    def secrets(self) -> Pairs:
        """The secret variables of every rank."""
        return tuple(pair for pair in self.spec.variables if is_secret(pair[0]))


def text_file(path: str, text: str, **more: bool) -> File:
    """Return a file with a text; bytes that are not UTF-8 (for example in a path) are preserved."""
    return File(path=path, data=text.encode(errors="surrogateescape"), **more)
