"""The same from plain Python: one call from function to result; and the one session of this process."""

from __future__ import annotations

import atexit
import inspect
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

from distmagic.connection.prompts import asker_of
from distmagic.errors import RunError, SpecError
from distmagic.payload.pack import Payload, pack_call
from distmagic.render.screen import Screen
from distmagic.request import notebook_place
from distmagic.request.allocation import HostsRequest
from distmagic.request.hosts import Host, Slots, hosts_of, parse_hosts
from distmagic.request.spec import (
    PAYLOAD_LIMIT_BYTES,
    Access,
    JobSpec,
    check_system,
    from_options,
    unknown_option,
)
from distmagic.runner.outcome import Detached, Run
from distmagic.screens.choose import screen_for
from distmagic.session.background import BackgroundRun
from distmagic.session.inside import digest_of
from distmagic.session.place import Place
from distmagic.session.session import Session


@cache
def session() -> Session:
    """Return this process's one session."""
    found = Session()
    atexit.register(found.close)
    return found


def run(  # noqa: PLR0913  # its options are those of the magic, each with a name of its own
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    hosts: str | Sequence[Host | str] | None = None,
    allocation: HostsRequest | None = None,
    nproc_per_node: Slots | None = None,
    nnodes: int | tuple[int, int] | None = None,
    max_restarts: int = 0,
    rdzv_backend: str | None = None,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    master_port: int | None = None,
    local_addr: str | None = None,
    env: Mapping[str, str] | tuple[tuple[str, str], ...] = (),
    cwd: str | None = None,
    sync: str | None = None,
    name: str | None = None,
    fresh: bool = False,
    fetch: Sequence[str] = (),
    devices: Sequence[str | int] = (),
    no_wait: bool = False,
    no_settings: bool = False,
    timeout_s: float | None = None,
    hang_timeout_s: float | None = None,
    grace_s: float = 30.0,
    node_lost_after_s: float = 10.0,
    on_disconnect: str = "stop",
    detach: bool = False,
    background: bool = False,
    access: Access | None = None,
    ssh_config: str | None = None,
    ssh_command: str | None = None,
    python: str | Mapping[str, str] | None = None,
    connect_timeout_s: float | None = None,
    lease_s: float | None = None,
    warm_idle_s: float | None = None,
    cold: bool | None = None,
    setup: str | None = None,
    exec_prefix: str | None = None,
    payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES,
    screen: Screen | None = None,
    **unknown: NoReturn,
) -> Run | Detached | BackgroundRun:
    """Call `fn(*args, **kwargs)` on every rank of a job, from plain Python, and return the `Run`.

    With `background` it returns a `BackgroundRun` at once.

    The options are the flags of `%%distributed`, with underscores; times are in seconds, sizes in bytes:

        kwargs               keyword arguments of fn
        hosts                hosts and their ranks, as after --hosts: "gpu-a:4,gpu-b:2"; or one by one:
                             ["gpu-a:4", "gpu-b:2"]; None: those of the notebook, else DISTMAGIC_HOSTS, else the nodes of
                             the job in which a system has started this program on each, else here
        allocation           nodes of a scheduler in place of hosts: of `distmagic.request.allocation` an `SlurmRequest`
                             for Slurm, or a `SkyRequest` for SkyPilot
        nproc_per_node       ranks a host: a number, "gpu", "cpu" or "auto"; None: one for each GPU, else 1
        nnodes               number of nodes, or (min, max) of an elastic job
        max_restarts         restarts of all ranks after a failure
        rdzv_backend         rendezvous: "static" or "c10d"
        rdzv_endpoint        address at which the nodes meet: "10.0.0.1:29500"
        rdzv_id              name of the job at the rendezvous
        master_port          port on the first host; None: a free one
        local_addr           address that a node announces to the others
        env                  variables of every rank: a dict, or a tuple of pairs
        cwd                  working directory on the hosts; None: one of the run's own
        sync                 folder of this machine that is brought there; only what has changed is sent
        name                 name of the run's working directory; None: that of this script or notebook
        fresh                begin in an empty working directory
        fetch                patterns of files that rank 0 leaves there and that are brought here: ["checkpoints/*.pt"]
        devices              GPUs of each host that the job may use, by number: [0, 1]; else all
        no_wait              raise `PreflightError` at once where another job has some of these devices
        no_settings          begin ranks with the default settings of torch and logging, not with this process's
        timeout_s            end the run after this time
        hang_timeout_s       end the run when no rank advances for this time
        grace_s              time that ranks have to end after an interrupt or a timeout; 0: none
        node_lost_after_s    a host that the others have not heard for this time is lost
        on_disconnect        without the notebook for the length of the lease: "stop" or "keep" going
        detach               return a `Detached` as soon as the job runs; it needs no notebook then
        background           return at once; the run goes on until `run.wait()`, `run.stop()` or the end of this process
        access               the nine options below in one object; those that are given change it
        ssh_config           OpenSSH configuration instead of ~/.ssh/config
        ssh_command          reach hosts with the system's ssh program, such as "ssh"
        python               interpreter of all hosts, or a dict of interpreters by host
        connect_timeout_s    longest time to connect to a host (15)
        lease_s              how long ranks outlive a lost notebook (60)
        warm_idle_s          how long hosts keep torch loaded for the next run (900); 0: not at all
        cold                 start every process anew: nothing is kept loaded, and nothing that is gets used
        setup                shell that hosts run before their Python: "module load cuda"
        exec_prefix          program that starts each host's Python: "apptainer exec --nv image.sif"
        payload_limit_bytes  largest captured data
        screen               where the run is shown; None: what fits here: widgets, a terminal, or plain lines

    Raises what the magic raises: `SpecError`, `PayloadError`, a `HostError` (or `HostErrors`), a `RunError`, which
    carries the `Run`: `error.run`.
    """
    arguments = locals()
    check_system()
    for option in unknown:
        names = inspect.signature(run).parameters
        known = [name for name in names if name not in ("fn", "args", "unknown")]
        raise unknown_option(option, known)
    chosen, usual_access = _place(hosts, allocation)
    spec, access = from_options(_options(arguments), access or usual_access)
    if background and detach:
        raise SpecError("background and detach are both given.", "Keep one of them.")
    call = _Call(
        fn=fn,
        args=args,
        kwargs=kwargs or {},
        limit_bytes=payload_limit_bytes,
        screen=screen,
        in_background=background,
    )
    launch = partial(_launch, call, spec, allocation)
    part = None
    if not chosen and allocation is None:
        part = session().inside.part(os.environ)
    if part is None:
        return launch(chosen, access)
    if background:
        raise part.refusal("background")
    name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', '')}"
    found = part.run(digest_of("function", name), access, spec, launch)
    assert found is not None
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What runs on every rank, and how it is shown."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    limit_bytes: int
    screen: Screen | None
    in_background: bool

    def packed(self) -> Payload:
        """Return the files that travel."""
        return pack_call(
            partial(self.fn, *self.args, **self.kwargs),
            limit_bytes=self.limit_bytes,
            labels={},
            title=_title(self.fn, self.args, self.kwargs),
        )


def _launch(
    call: _Call,
    spec: JobSpec,
    allocation: HostsRequest | None,
    hosts: tuple[Host, ...],
    access: Access,
) -> Run | Detached | BackgroundRun:
    with closing(asker_of()) as asker:
        if call.in_background:
            asker.can_ask = False  # nobody is there for the whole run
        allocated = None
        if allocation is not None:
            allocated = session().allocation(allocation, access, asker, spec)
        place = Place(session(), access, asker, spec, hosts=hosts, allocation=allocated)
        with place.given_up_after_error():
            payload = call.packed()
            screen = call.screen or screen_for(in_background=call.in_background)
            if call.in_background:
                return place.begin(payload, screen)
        try:
            return place.launch(payload, screen)
        except RunError as error:
            # No variable gets a run that fails: `run = distmagic.run(...)` has not come to its end.
            error.hint = _OF_A_RUN.sub("error.run", error.hint)
            raise


_OF_A_RUN = re.compile(r"\brun(?=\.logs\(|\.results\[)")

# Arguments of `run` that are options neither of the job nor of the way to its hosts.
_OF_THE_CALL = (
    "fn",
    "args",
    "kwargs",
    "hosts",
    "allocation",
    "access",
    "payload_limit_bytes",
    "screen",
    "background",
    "unknown",
)


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the job and of the way to its hosts among the arguments of `run`, as `from_options` takes them.

    None leaves an option as `access` has it, or as it is for every job.
    """
    options = {}
    for name, value in arguments.items():
        if value is not None and name not in _OF_THE_CALL:
            options[name] = value
    nnodes = options.get("nnodes")
    if isinstance(nnodes, int):
        options["nnodes"] = (nnodes, nnodes)
    options["fetch"] = tuple(arguments["fetch"])
    options["devices"] = tuple(str(device) for device in arguments["devices"])
    return options


def _place(
    hosts: str | Sequence[Host | str] | None, allocation: HostsRequest | None
) -> tuple[tuple[Host, ...], Access]:
    """Return where a call runs, and the usual way there; () is here, or on the nodes of the allocation.

    A call that says nothing runs as the notebook's cells, else on DISTMAGIC_HOSTS.
    """
    if hosts is not None and allocation is not None:
        raise SpecError("hosts and allocation are both given.", "Keep one of them.")
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


def _title(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return the call as its author would write it: `train(500, lr=0.1)`; large values are cut."""
    name = getattr(fn, "__name__", type(fn).__name__)
    given = [reprlib.repr(value) for value in args]
    given += [f"{key}={reprlib.repr(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(given)})"
