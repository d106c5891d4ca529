"""Parses the magic's line: `%%distributed --hosts gpu-a:4 --nproc-per-node 4 -o run` becomes a
`Request`. Pure.

torchrun's flags keep their names, with hyphens or underscores. flag_parser.py parses single flags;
this module combines them.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any

from distmagic.errors import UsageError
from distmagic.remote.frozen import frozen
from distmagic.request import flag_parser, systems
from distmagic.request.access import Access
from distmagic.request.allocation import HostsRequest
from distmagic.request.export import ExportRequest
from distmagic.request.flag_table import FLAGS, NO_SYSTEM, SBATCH_FLAGS
from distmagic.request.flag_values import refuse_zero_bytes
from distmagic.request.hosts import Hosts, Slots
from distmagic.request.spec import PAYLOAD_LIMIT_BYTES, JobSpec
from distmagic.request.systems import System, Wanted


@frozen
class Defaults:
    """Values for flags that the line lacks.

    `environ` is the notebook's own, for `--env NAME` without a value.
    """

    access: Access = field(default_factory=Access)
    nproc_per_node: Slots | None = None
    payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)


@frozen
class Request:
    """One line of `%%distributed`."""

    spec: JobSpec = field(default_factory=JobSpec)
    access: Access = field(default_factory=Access)
    hosts: Hosts | None = None  # None if the line does not name hosts
    hostfile: str | None = None  # None if the line does not name one
    # The request of `--on` to a scheduler, None for other hosts.
    allocation: HostsRequest | None = None
    # `--on none`: ignore the scheduler that started this process.
    ignores_system: bool = False
    export: ExportRequest | None = None  # a folder to write instead of a run
    workflow: ExportRequest | None = None  # a job that a system such as OSMO runs
    python_hosts: tuple[str, ...] = ()  # the names in `--python HOST=PATH`
    names_ssh_config: bool = False  # whether the line itself has `--ssh-config`
    names_nproc: bool = False  # whether the line itself has `--nproc-per-node`
    background: bool = False  # whether the cell returns during the run
    whole: bool = False  # whether every rank runs the whole cell
    # Whether the cell runs as a script, with the words after `--` as `args`.
    script: bool = False
    args: tuple[str, ...] = ()
    dry_run: bool = False
    output: str | None = None  # the name after `-o`
    stay: str | None = None  # the name of ranks that stay
    ranks: tuple[int, ...] = ()  # those of them that run the cell, () for all
    # They end after this time without a cell and without work on their GPUs; `--idle` of their
    # hosts sets it, too.
    stay_idle_s: float | None = None
    payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES


def parse_line(line: str, defaults: Defaults) -> Request:
    """Return the request of `line`.

    Raises `UsageError` that names the flag, with the closest known one.
    """
    return parse_words(split(line), defaults)


def parse_words(words: Sequence[str], defaults: Defaults) -> Request:
    """Return the request of a line already split into words.

    Raises `UsageError` as `parse_line`.
    """
    own = list(words)
    script_args = []
    if "--" in own:
        place = own.index("--")
        own, script_args = own[:place], own[place + 1 :]
    args = flag_parser.parse(own)
    if script_args and not args.script:
        raise UsageError(
            f"`-- {' '.join(script_args)}` gives arguments to a script, but --script is missing.",
            "Write %%distributed --script -- ARGUMENTS.",
        )
    if args.hosts is not None and args.hostfile is not None:
        raise UsageError("--hosts and --hostfile are both given.", "Keep one of them.")
    if args.background and args.detach:
        raise UsageError(
            "--background and --detach are both given.",
            "Keep --background for a run that is this notebook's, --detach for one that needs no notebook.",
        )
    if args.stay is None and args.ranks:
        raise UsageError(
            "--ranks is for ranks that stay.",
            "Add --stay NAME; the number of ranks on each host is --nproc-per-node.",
        )
    if args.stay is None and args.stay_idle is not None:
        raise UsageError("--stay-idle is for ranks that stay.", "Add --stay NAME.")
    _check_stay(args)
    system = None if args.on in (None, NO_SYSTEM) else systems.at(args.on)
    given = _fields_of(JobSpec, args)
    given.setdefault("nproc_per_node", defaults.nproc_per_node)
    given["env"] = tuple(_variable(text, defaults.environ) for text in args.env)
    _check_once("--env", [name for name, _ in given["env"]])
    asked = _fields_of(Request, args)
    if args.stay is not None and args.stay_idle is None:
        asked["stay_idle_s"] = args.idle  # their hosts are in use as long as they are
    asked.update(
        spec=JobSpec(**given),
        access=_access(args, defaults.access, system),
        allocation=_allocation(args, system, defaults.environ),
        ignores_system=args.on == NO_SYSTEM,
        export=_export(args, system),
        workflow=_workflow(args, system),
        python_hosts=tuple(host for host, _ in args.python if host),
        names_ssh_config=args.ssh_config is not None,
        names_nproc=args.nproc_per_node is not None,
        args=tuple(script_args),
        payload_limit_bytes=args.payload_limit or defaults.payload_limit_bytes,
    )
    return Request(**asked)


def _refuse(args: argparse.Namespace, what: str, why: str, hint: str) -> None:
    """Raise `UsageError` for a flag that `what` rejects; `why` follows its name.

    `what` is "export", "stay", or "workflow" (systems that run whole jobs).
    """
    for flag in FLAGS:
        if what in flag.not_with.split() and _value(args, flag.name):
            raise UsageError(f"--{flag.name} {why}.", hint)


def _check_stay(args: argparse.Namespace) -> None:
    if args.stay is None:
        return
    why = (
        f"is for a run that ends; the ranks of --stay {args.stay} stay after their cell"
    )
    _refuse(args, "stay", why, "Leave one of them out.")
    if args.on_disconnect == "keep" and args.stay_idle is None:
        raise UsageError(
            f"With --on-disconnect keep the ranks of --stay {args.stay} outlive this notebook, and nothing would end them.",
            "Add --stay-idle 30m: after this time without a cell they end.",
        )
    if args.nnodes is not None and args.nnodes[0] != args.nnodes[1]:
        raise UsageError(
            f"--nnodes MIN:MAX restarts ranks when a host leaves or joins; the ranks of --stay {args.stay} would lose their values.",
            "Write --nnodes N, or leave --stay out.",
        )


_RANKS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def words_of_ranks(line: str, last: str) -> list[str]:
    """Convert a line of `%%ranks [NAME] [0,4-7]` to words of `%%distributed`; without a name it
    uses `last`.
    """
    words = split(line)
    name, ranks = last, []
    if words and words[0].isidentifier():
        name = words.pop(0)
    if words and _RANKS.fullmatch(words[0]):
        ranks = ["--ranks", words.pop(0)]
    return ["--stay", name, *ranks, *words]


# A line up to a # that starts a word outside quotation marks: --env COLOUR=#fff keeps its value.
_BEFORE_COMMENT = re.compile(r"""("[^"]*"?|'[^']*'?|(?<=\S)#|[^"'#])*""")


def split(line: str) -> list[str]:
    """Split `line` into words as a shell does, without a comment.

    Raises `UsageError` for an unmatched quotation mark.
    """
    found = _BEFORE_COMMENT.match(line)
    assert found is not None
    try:
        return shlex.split(found[0])
    except ValueError as error:
        raise UsageError(
            f"The line can't be split into words: {str(error).lower()}.",
            f"It is: {line}",
        ) from None


def asks_help(line: str) -> bool:
    """Whether `line` asks for the help text instead of a run."""
    return any(word in ("-h", "--help") for word in split(line))


def _fields_of(record: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a record that flags set: those with the flags' names, such as
    `timeout_s` for --timeout.
    """
    given = {}
    for one in fields(record):
        value = vars(args).get(one.name.removesuffix("_s"))
        is_there = value is not None and value is not False
        if is_there:
            given[one.name] = tuple(value) if isinstance(value, list) else value
    return given


def _check_once(flag: str, names: Sequence[str]) -> None:
    """Raise `UsageError` if a repeatable flag sets the same name twice; "" is no name."""
    for name in names:
        if names.count(name) > 1:
            of_name = f" for {name}" if name else ""
            raise UsageError(f"{flag} is given twice{of_name}.", "Keep one of them.")


def _variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in environ:
        raise UsageError(
            f"--env {name}: the notebook has no such variable.",
            f"Write --env {name}=VALUE.",
        )
    return name, environ[name]


def _access(args: argparse.Namespace, base: Access, system: System | None) -> Access:
    given = _fields_of(Access, args)
    if system is not None and system.takes_setup:
        given.pop("setup", None)
    _check_once("--python", [host for host, _ in args.python])
    pythons = dict(base.pythons)
    pythons.update(args.python)
    return replace(base, pythons=tuple(pythons.items()), **given)


def _allocation(
    args: argparse.Namespace, system: System | None, environ: Mapping[str, str]
) -> HostsRequest | None:
    """Return the line's request to a scheduler. Raises `UsageError` for flags that need one."""
    options = _resources(args)
    given = {**dict(options), "nodes": args.nodes, "idle": args.idle}
    for name, value in given.items():
        if value is not None and system is None and args.export is None:
            raise UsageError(
                f"--{name} is for hosts of a scheduler.",
                "Add --on slurm, or leave it out.",
            )
    if system is None or system.on != "sky":
        # Raise `UsageError` for flags that are only used to launch a SkyPilot cluster.
        if args.gpus is not None:
            raise UsageError(
                "--gpus is for --on sky.",
                "GPUs of your own hosts are named with --devices 0,1, and the number of ranks is --nproc-per-node; "
                "Slurm and exported files take --gpus-per-node.",
            )
        if args.sky is not None:
            raise UsageError("--sky is for --on sky.", "Add --on sky, or leave it out.")
    if system is None or "hosts" not in system.can:
        return None
    _refuse_hosts(args, "--on asks a scheduler for hosts", "Keep one of them.")
    wanted = Wanted(
        options=tuple(options),
        file=args.sky,
        environ=environ,
        **_fields_of(Wanted, args),
    )
    try:
        asked: HostsRequest = system.part("hosts").asked(args.on, wanted)
    except UsageError as error:
        if system.page:
            error.hint += f" More: %distributed help {system.page}."
        raise
    return asked


def _resources(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the options that the line passes to sbatch, "" for a switch."""
    options = []
    for name in SBATCH_FLAGS:
        value = _value(args, name)
        if value not in (None, False):
            options.append((name, "" if value is True else value))
    return options + list(args.slurm)


def _value(args: argparse.Namespace, name: str) -> Any:
    """Return the value of the flag of that name."""
    return getattr(args, name.replace("-", "_"))


def _export(args: argparse.Namespace, system: System | None) -> ExportRequest | None:
    """Return the request for an export. Raises `UsageError` for flags that only a run has."""
    if args.export is None:
        is_workflow = system is not None and "run" in system.can
        for name in ("image", "results"):
            if _value(args, name) is not None and not is_workflow:
                raise UsageError(
                    f"--{name} is for OSMO, and for files that are exported.",
                    "Add --on osmo or --export osmo DIR, or leave it out.",
                )
        return None
    why = "is for a run, and --export only writes files"
    _refuse(args, "export", why, "Leave one of them out.")
    name, folder = args.export
    request = _folder(args, name, folder)
    if request.chooses_hosts:
        _refuse_hosts(args, f"{name} chooses the hosts of --export {name}", _NODES_HINT)
    return request


_NODES_HINT = "Leave them out; --nodes N sets the number."


def _refuse_hosts(args: argparse.Namespace, why: str, hint: str) -> None:
    if args.hosts is not None or args.hostfile is not None:
        raise UsageError(f"{why}, and --hosts or --hostfile names some.", hint)


def _folder(args: argparse.Namespace, system: str, folder: str) -> ExportRequest:
    return ExportRequest(
        system=system,
        folder=folder,
        options=tuple(_resources(args)),
        **_fields_of(ExportRequest, args),
    )


def _workflow(args: argparse.Namespace, system: System | None) -> ExportRequest | None:
    """Return the request for a whole job of a system.

    Raises `UsageError` for hosts, and for flags of schedulers.
    """
    if system is None or "run" not in system.can:
        return None
    _refuse_hosts(
        args, f"{system.title} chooses the hosts of --on {args.on}", _NODES_HINT
    )
    why = f"does not work with --on {args.on}: that system starts the ranks, and not this notebook"
    _refuse(args, "workflow", why, "Leave the flag out.")
    return _folder(args, system.name, ".")


# ---- a program after the flags

USAGE = "run [FLAGS] SCRIPT [ARGUMENTS], or run [FLAGS] -m MODULE [ARGUMENTS]"

# Programs that start the program after them.
_STARTERS = re.compile(
    r"(\S*/)?(python[\d.]*( -[BEIOsu]+)*|torchrun|deepspeed|mpirun|accelerate[ -]launch|(fabric|lightning)( run( model)?)?) "
    r"|-m (torch\.distributed\.(run|launch)|accelerate\.commands\.launch) "
)


@frozen
class Program:
    """A program for every rank: a script's path on this machine, or a module's name, and its
    arguments.

    Raises `UsageError`.
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    def __post_init__(self) -> None:
        refuse_zero_bytes(self, "the program's ")


def split_program(words: Sequence[str]) -> tuple[tuple[str, ...], Program]:
    """Return the flags before a program, and the program.

    All words after its name are its arguments. Raises `UsageError` if no program is named, or one
    that starts others, such as torchrun.
    """
    own: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        count = 1 + flag_parser.values_after(rest[0])
        own += rest[:count]
        del rest[:count]
    if rest[:1] == ["--"]:
        del rest[0]
    _refuse_starter(own, rest)
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    target, *args = rest or [""]
    if is_module and not all(part.isidentifier() for part in target.split(".")):
        raise UsageError(
            f"-m {target}: this is not a module's name.", "Write -m package.module."
        )
    if not target:
        raise UsageError("No script is named.", f"Write {USAGE}.")
    return tuple(own), Program(target=target, args=tuple(args), is_module=is_module)


def _refuse_starter(own: Sequence[str], program: Sequence[str]) -> None:
    text = rest = f"{shlex.join(program)} "
    while found := _STARTERS.match(rest):
        rest = rest[found.end() :]
    if rest != text:
        line = f"{shlex.join(own)} {rest or 'SCRIPT'}".strip()
        raise UsageError(
            f"{text.removesuffix(rest)}starts a program, and distmagic does that itself.",
            f"Leave it out: %distributed run {line}",
        )
