"""distmagic for plain Python: `distmagic.run` calls a function on every rank; and the one session
of this process.
"""

from __future__ import annotations

import atexit
import difflib
import inspect
import numbers
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypedDict

from distmagic import notebook_place
from distmagic.connection.prompts import asker_of
from distmagic.errors import RunError, UsageError
from distmagic.names import own_origin, work_dir
from distmagic.outcome.detached import Detached
from distmagic.outcome.run import Run
from distmagic.payload.pack import Payload, pack_call
from distmagic.render.screen import Screen
from distmagic.request.access import Access
from distmagic.request.allocation import HostsRequest
from distmagic.request.flag_values import options_of
from distmagic.request.hosts import Host, Hosts, Slots, hosts_of, parse_hosts
from distmagic.request.spec import PAYLOAD_LIMIT_BYTES, JobSpec, check_system
from distmagic.screens.choose import screen_for
from distmagic.session.background import BackgroundRun
from distmagic.session.inside import digest_of
from distmagic.session.place import place_of
from distmagic.session.session import Session
from distmagic.sweeps.sweep import Sweep, begin_sweep, combinations

if TYPE_CHECKING:
    from typing_extensions import Unpack


# The types of options that are checked in this module, as `Options` spells them, and their names
# for a user. Items of a tuple are checked where they are used.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "a string"),
    "bool": (bool, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "Slots": ((numbers.Integral, str), "a whole number or a string"),
}


class Options(TypedDict, total=False):
    """The keyword arguments of `distmagic.run` that are options: fields of `JobSpec` and `Access`.

    None means the default.
    """

    nproc_per_node: Slots | None
    nnodes: int | tuple[int, int] | None
    max_restarts: int
    rdzv_backend: str | None
    rdzv_endpoint: str | None
    rdzv_id: str | None
    master_port: int | None
    local_addr: str | None
    env: Mapping[str, str] | tuple[tuple[str, str], ...]
    sync: str | None
    name: str | None
    fetch: Sequence[str]
    fresh: bool
    devices: Sequence[str | int]
    no_wait: bool
    no_settings: bool
    debug: bool
    cwd: str | None
    track: str | None
    timeout_s: float | None
    hang_timeout_s: float | None
    grace_s: float
    node_lost_after_s: float
    on_disconnect: str
    detach: bool
    python: str | Mapping[str, str] | None
    setup: str | None
    exec_prefix: str | None
    ssh_config: str | None
    ssh_command: str | None
    connect_timeout_s: float | None
    lease_s: float | None
    warm_idle_s: float | None
    cold: bool | None


def from_options(options: Mapping[str, Any], access: Access) -> tuple[JobSpec, Access]:
    """Return the job, and `access` changed by the options.

    None leaves an option as in `access`, or at its default. Raises `UsageError` for a value of a
    wrong type.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        _check_kind(name, value)
    if isinstance(given.get("nnodes"), int):
        given["nnodes"] = (given["nnodes"], given["nnodes"])
    if isinstance(given.get("env"), Mapping):
        given["env"] = tuple(given["env"].items())
    if "fetch" in given:
        given["fetch"] = tuple(given["fetch"])
    if "devices" in given:
        given["devices"] = tuple(str(device) for device in given["devices"])
    python = given.pop("python", None)
    if isinstance(python, Mapping):
        given["pythons"] = tuple(python.items())
    elif python is not None:
        given["pythons"] = (("", python),)  # "": all hosts
    of_access = {one.name for one in fields(Access)} & given.keys()
    way = {name: given.pop(name) for name in of_access}
    return JobSpec(**given), replace(access, **way)


def _check_names(function: Callable[..., Any], options: Iterable[str]) -> None:
    """Raise `UsageError` for a keyword argument that `function` does not take."""
    for option in options:
        if option not in Options.__annotations__:
            own = list(inspect.signature(function).parameters)
            # Never suggest fn or args, or the name of the options.
            raise unknown_option(option, [*own[2:-1], *Options.__annotations__])


def unknown_option(name: str, known: Sequence[str]) -> UsageError:
    """Return the error for an unknown keyword argument; it suggests the most similar known one."""
    close = [one for one in known if one.startswith(name)] or difflib.get_close_matches(
        name, known, n=1
    )
    hint = f"Did you mean {close[0]}?" if close else ""
    return UsageError(f"There is no option {name!r}.", hint)


def _check_kind(name: str, value: object) -> None:
    """Raise `UsageError` unless the value of an option has the type that `Options` declares."""
    annotation = Options.__annotations__[name].__forward_arg__
    known = _KINDS.get(annotation.removesuffix(" | None"))
    if known is None:
        return
    kind, text = known
    is_flag = isinstance(value, bool)  # bool is a subclass of int
    if not isinstance(value, kind) or (is_flag and kind is not bool):
        raise UsageError(
            f"{name}={reprlib.repr(value)}: {text} is required, not {type(value).__name__}."
        )


@cache
def session() -> Session:
    """Return the one session of this process."""
    found = Session()
    atexit.register(found.close)
    return found


def run(  # noqa: PLR0913  # a call, and where it runs
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    hosts: str | Sequence[Host | str] | None = None,
    allocation: HostsRequest | None = None,
    access: Access | None = None,
    background: bool = False,
    payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES,
    screen: Screen | None = None,
    **options: Unpack[Options],
) -> Run | Detached | BackgroundRun:
    """Call `fn(*args, **kwargs)` on every rank of a job, from plain Python, and return the `Run`.

    With `background` it returns a `BackgroundRun` at once, with `detach` a `Detached` as soon as
    the job runs.

    The options are the flags of `%%distributed`, with underscores; times are in seconds, sizes in
    bytes:

        kwargs               keyword arguments of fn
        hosts                hosts and their number of ranks, as after --hosts: "gpu-a:4,gpu-b:2";
                             or a list: ["gpu-a:4", "gpu-b:2"]. None: the notebook's hosts, or else
                             DISTMAGIC_HOSTS, or else the nodes of the job that runs this program,
                             or else this machine
        allocation           nodes of a scheduler instead of hosts, from
                             `distmagic.request.allocation`: a `SlurmRequest` for Slurm, or a
                             `SkyRequest` for SkyPilot
        access               several of the options below in one object; options of the call
                             override it
        background           return at once; the run ends by itself, by `run.stop()`, or with this
                             process
        payload_limit_bytes  limit for the size of the captured data
        screen               where the run is shown; None: widgets, a terminal or plain lines

    Raises the errors of `%%distributed`: `UsageError`, `PayloadError`, a `HostError` (or
    `HostErrors`), or a `RunError`, whose `run` attribute is the `Run`.
    """
    check_system()
    _check_names(run, options)
    chosen, usual_access = _place(hosts, allocation)
    spec, access = from_options(options, access or usual_access)
    if background and spec.detach:
        raise UsageError("background and detach are both given.", "Keep one of them.")
    named = kwargs or {}
    pack = partial(
        pack_call,
        partial(fn, *args, **named),
        limit_bytes=payload_limit_bytes,
        labels={},
        title=_title(fn, args, named),
    )
    launch = partial(_launch, pack, screen, background, spec, allocation)
    part = None
    if not chosen and allocation is None:
        part = session().inside.part(os.environ)
    if part is None:
        return launch(chosen, access)
    if background:
        raise part.refusal("background")
    digest = digest_of("function", _function_name(fn))
    found = part.run(digest, access, spec, launch)
    assert found is not None
    return found


def sweep(
    fn: Callable[..., Any],
    grid: Mapping[str, Iterable[Any]],
    *,
    kwargs: Mapping[str, Any] | None = None,
    hosts: str | Sequence[Host | str] | None = None,
    allocation: HostsRequest | None = None,
    access: Access | None = None,
    payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES,
    **options: Unpack[Options],
) -> Sweep:
    """Call `fn` once for each combination of the values in `grid`, as runs side by side on the
    devices of the hosts.

    `distmagic.sweep(train, {"lr": [0.1, 0.01], "seed": range(3)}, hosts="gpu-a:4,gpu-b:4")` makes
    six runs. Each has `nproc_per_node` ranks (default 1) on one host, one device for each rank, and
    its own working directory. Runs without free devices wait in a queue. The other arguments and
    options are those of `distmagic.run`; every run gets `kwargs`.

    It returns a `Sweep` at once, which shows a table that grows. Raises `UsageError`,
    `PayloadError` or a `HostError`. Errors of single runs are in `Sweep.failed`.
    """
    check_system()
    _check_names(sweep, options)
    chosen, usual_access = _place(hosts, allocation)
    spec, access = from_options(options, access or usual_access)
    if not chosen and allocation is None:
        part = session().inside.part(os.environ)
        if part is not None:
            raise part.refusal("a sweep")
    payloads, directories = {}, {}
    name = spec.name or work_dir(spec).name
    of_all = f"{spec.name or own_origin()} {_function_name(fn)}"
    for number, given in enumerate(combinations(grid)):
        named = {**(kwargs or {}), **given}
        run_name = f"{name}-{number}"
        # Another function, or other arguments, must not continue from these checkpoints.
        digest = digest_of(of_all, repr(sorted(named.items())))
        directories[run_name] = f"{run_name}-{digest[:8]}"
        payloads[run_name] = pack_call(
            partial(fn, **named),
            limit_bytes=payload_limit_bytes,
            labels={},
            title=_title(fn, (), named),
        )
    with closing(asker_of()) as asker:
        where = allocation or chosen
        return begin_sweep(session(), where, access, asker, spec, payloads, directories)


def _tell_options() -> None:
    """Add the options to the signature and the docstring of `run`, for `help`, Tab and
    Shift-Tab.
    """
    signature = inspect.signature(run)
    *parameters, _ = signature.parameters.values()
    usual = JobSpec()  # the defaults of `Access` are in `access`
    lines = []
    for name, flag in {**options_of(JobSpec), **options_of(Access)}.items():
        kind = Options.__annotations__[name].__forward_arg__
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(usual, name, None),
                annotation=kind,
            )
        )
        lines.append(f"        {name:20} {flag.argument or flag.help}\n")
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    own, raises, end = (run.__doc__ or "").partition("\n    Raises ")
    run.__doc__ = own + "".join(lines) + raises + end


_tell_options()


def _launch(
    pack: Callable[[], Payload],
    screen: Screen | None,
    in_background: bool,  # noqa: FBT001  # of `run`
    spec: JobSpec,
    allocation: HostsRequest | None,
    hosts: Hosts,
    access: Access,
) -> Run | Detached | BackgroundRun:
    with closing(asker_of()) as asker:
        if in_background:
            asker.can_ask = False  # the user may be away during the run
        place = place_of(session(), allocation or hosts, access, asker, spec)
        try:
            return place.run(
                lambda: screen or screen_for(in_background=in_background),
                lambda _: pack(),
                in_background=in_background,
            )
        except RunError as error:
            # A failed run gets no variable name: the assignment `run = distmagic.run(...)` has not
            # completed.
            error.hint = _OF_A_RUN.sub("error.run", error.hint)
            raise


_OF_A_RUN = re.compile(r"\brun(?=\.logs\(|\.results\[|\.fetch\()")


def _place(
    hosts: str | Sequence[Host | str] | None, allocation: HostsRequest | None
) -> tuple[Hosts, Access]:
    """Return the hosts of a call and the way to reach them; () means this machine, or the nodes of
    `allocation`.

    A call without hosts runs on the hosts of the notebook's cells, or else on DISTMAGIC_HOSTS.
    """
    if hosts is not None and allocation is not None:
        raise UsageError("hosts and allocation are both given.", "Keep one of them.")
    if hosts is not None:
        named = parse_hosts(hosts) if isinstance(hosts, str) else hosts_of(hosts)
        return named, Access()
    if allocation is not None:
        return (), Access()
    place = notebook_place.current()
    if place is not None:
        return place
    usual = os.environ.get("DISTMAGIC_HOSTS", "")
    return parse_hosts(usual) if usual else (), Access()


def _function_name(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', '')}"


def _title(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return the call as its author would write it: `train(500, lr=0.1)`.

    Large values are shortened.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    given = [reprlib.repr(value) for value in args]
    given += [f"{key}={reprlib.repr(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(given)})"
