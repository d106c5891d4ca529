"""Makes a `Plan` from a `JobSpec` and facts about the hosts. Pure: IDs and ports are arguments."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace

from distmagic.errors import PreflightError, UsageError
from distmagic.payload.sizes import plural
from distmagic.planning import torchrun
from distmagic.remote.frozen import frozen
from distmagic.remote.wire.protocol import (
    Facts,
    JobTerms,
    JoinTemplate,
    Route,
    TemplateRequest,
    WorkDir,
)
from distmagic.request.access import Access
from distmagic.request.flag_values import Pairs
from distmagic.request.hosts import Host, Slots
from distmagic.request.spec import JobSpec, split_endpoint

# If there may be several rounds, each makes its own store. With one store for all (torch 2.13): - a
# node that joins later waits in vain for the store's address: the lead only writes it in the first
# round (`next_rendezvous` in dynamic_rendezvous.py) - ranks of a later round find the entries of
# the first round in it, including addresses of dead peers (`_create_c10d_store` in
# distributed/rendezvous.py assumes a new store at every attempt)
OWN_STORES = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)


@frozen
class Reached:
    """A host that answered, with the facts about it and its address for the other nodes."""

    host: Host
    facts: Facts
    route: Route


@frozen
class NodePlan:
    """What one host starts."""

    host: Host
    node_rank: int
    nproc_per_node: int
    # the address that torchrun announces; it differs from `address` only if the user has set it
    local_addr: str
    env: Pairs  # replaces variables of the host's own environment
    defaults: Pairs  # variables that are only set if the host has none
    cwd: str  # "" if ranks start in the run's own working directory
    address: str  # the address to which the other hosts connect


@frozen
class Plan:
    """The plan of a whole run.

    The nodes' agents send heartbeats through the rendezvous's port (UDP) of the first node's
    address.
    """

    job: str
    nodes: tuple[NodePlan, ...]
    terms: JobTerms
    node_lost_after_s: float
    rdzv: torchrun.Rendezvous
    # the start message of later nodes, without the payload's sizes; only of an elastic job
    join_template: JoinTemplate | None
    work: WorkDir  # the working directory on all hosts except the notebook machine
    chose_port: bool  # the port is a free one that the user has not named

    @property
    def endpoint(self) -> str:
        """The first node's address and port for the others, "" if it is the only one."""
        return (
            f"{self.rdzv.address} {self.rdzv.port}" if self.rdzv.max_nodes > 1 else ""
        )

    def flags_of(self, node: NodePlan) -> tuple[str, ...]:
        """Return torchrun's flags for one of its nodes."""
        return torchrun.flags(
            self.rdzv,
            node_rank=node.node_rank,
            nproc_per_node=node.nproc_per_node,
            local_addr=node.local_addr,
        )


def terms_of(spec: JobSpec, *, lease_s: float, owner: str, call: str = "") -> JobTerms:
    """Return the terms of a job: options with the same name, and values derived from other options.

    `owner` is the notebook that starts it, `call` what it runs, as the user wrote it.
    """
    options = {}
    for term in fields(JobTerms):
        if hasattr(spec, term.name):
            options[term.name] = getattr(spec, term.name)
    is_kept = spec.on_disconnect == "keep"
    return JobTerms(
        lease_s=lease_s,
        owner=owner,
        goes_on_alone=is_kept,
        survives_logout=spec.detach or is_kept,
        call=call,
        **options,
    )


def make_plan(
    spec: JobSpec,
    reached: Sequence[Reached],
    *,
    job: str,
    terms: JobTerms,
    local_cwd: str,
    work: WorkDir,
) -> Plan:
    """Return the plan of a job on these hosts, in their order.

    `terms` come from `terms_of`; values that depend on the hosts are added to them. `work` is the
    job's working directory on other hosts. `local_cwd` is the working directory of ranks on this
    machine, unless the job names one. Raises `UsageError` or `PreflightError`.
    """
    rdzv = _rendezvous(spec, reached, job)
    nodes = tuple(_node(spec, rdzv, i, one, local_cwd) for i, one in enumerate(reached))
    # Without restarts there is only one round, so even a job with a range of nodes needs all nodes
    # that it started with.
    can_change = spec.is_elastic and spec.max_restarts > 0
    terms = replace(
        terms,
        min_nodes=rdzv.min_nodes if can_change else len(nodes),
        max_nodes=rdzv.max_nodes if can_change else 0,
        awaited=terms.awaited if can_change else (),
        ranks=torchrun.world_size(rdzv, [node.nproc_per_node for node in nodes]),
    )
    later = JoinTemplate(
        sizes=(),
        nproc_per_node=str(spec.nproc_per_node or len(spec.devices) or ""),
        cwd=spec.cwd or "",
    )
    return Plan(
        job=job,
        nodes=nodes,
        terms=terms,
        node_lost_after_s=spec.node_lost_after_s,
        rdzv=rdzv,
        join_template=later if can_change else None,
        work=work,
        chose_port=_named_port(spec) is None,
    )


def at_port(plan: Plan, port: int) -> Plan:
    """Return the plan with another rendezvous port of the first node."""
    return replace(plan, rdzv=replace(plan.rdzv, port=port))


def _rendezvous(
    spec: JobSpec, reached: Sequence[Reached], job: str
) -> torchrun.Rendezvous:
    given = len(reached)
    low, high = spec.nnodes or (given, given)
    if not low <= given <= high:
        wanted = plural(high, "node")
        if low != high:
            wanted = f"{low} to {wanted}"
        hosts = "1 host is" if given == 1 else f"{given} hosts are"
        raise UsageError(
            f"--nnodes asks for {wanted}, but {hosts} given.",
            "List as many hosts with --hosts, or leave --nnodes out.",
        )
    lead = reached[0]
    address = lead.route.address
    if spec.rdzv_endpoint:
        address, _ = split_endpoint(spec.rdzv_endpoint)
    _check_endpoint(address, reached)
    return torchrun.Rendezvous(
        backend=choose_backend(spec, given),
        address=address,
        port=_named_port(spec) or lead.facts.free_port,
        rdzv_id=spec.rdzv_id or job,
        min_nodes=low,
        max_nodes=high,
        max_restarts=spec.max_restarts,
    )


def choose_backend(spec: JobSpec, nodes: int) -> str:
    """Return "c10d" if the number of nodes may change or several nodes may restart, else "static".

    Raises `UsageError`.
    """
    restarts = spec.max_restarts > 0 and nodes > 1
    if spec.rdzv_backend == "static" and restarts:
        raise UsageError(
            "--rdzv-backend static can't restart ranks on more than one node: the nodes never meet again.",
            "Use --rdzv-backend c10d with --max-restarts, or leave --rdzv-backend out.",
        )
    return spec.rdzv_backend or ("c10d" if spec.is_elastic or restarts else "static")


def _named_port(spec: JobSpec) -> int | None:
    """Return the port that the user has named, if any."""
    port = split_endpoint(spec.rdzv_endpoint)[1] if spec.rdzv_endpoint else None
    return port or spec.master_port


def _check_endpoint(address: str, reached: Sequence[Reached]) -> None:
    """Raise `UsageError` if the user's endpoint is on a host that isn't the first: no process would
    listen on it.
    """
    for one in reached:
        if address not in (one.host.name, one.facts.address, one.route.address):
            continue
        if one is reached[0]:
            return
        raise UsageError(
            f"--rdzv-endpoint names {one.host.name}, but it is the first host, {reached[0].host.name}, where the nodes meet.",
            f"List {one.host.name} first.",
        )


def _node(
    spec: JobSpec, rdzv: torchrun.Rendezvous, rank: int, one: Reached, local_cwd: str
) -> NodePlan:
    nproc = ranks_of(one.host, one.facts, spec)
    address = one.route.address
    if spec.local_addr and rank == 0:
        address = spec.local_addr
    variables = defaults(one, nproc)
    meet_once = rdzv.max_nodes == 1 or (
        rdzv.min_nodes == rdzv.max_nodes and not rdzv.max_restarts
    )
    if not meet_once:
        variables += OWN_STORES
    return NodePlan(
        host=one.host,
        node_rank=rank,
        nproc_per_node=nproc,
        local_addr=address,
        env=spec.variables,
        defaults=variables,
        cwd=spec.cwd or default_cwd(one.host, local_cwd),
        address=one.route.address,
    )


def ranks_of(host: Host, facts: Facts, spec: JobSpec) -> int:
    """Return the number of ranks of a host: the user's number, else one for each device of
    `--devices`.

    Raises `PreflightError` for a device that the host does not have.
    """
    if spec.devices:
        _check_devices(host, facts, spec.devices)
        facts = replace(facts, gpus=len(spec.devices))
    return count_ranks(host.slots or spec.nproc_per_node, facts, host.name)


def _check_devices(host: Host, facts: Facts, devices: Sequence[str]) -> None:
    missing = [one for one in devices if one.isdecimal() and int(one) >= facts.gpus]
    if not missing and facts.gpus:
        return
    found = plural(facts.gpus, "GPU") if facts.gpus else "no GPU"
    raise PreflightError(
        host.name,
        f"--devices {','.join(devices)}, but {found} {'were' if facts.gpus > 1 else 'was'} found.",
        "GPUs are numbered from 0, as in nvidia-smi.",
    )


def count_ranks(slots: Slots | None, facts: Facts, host: str) -> int:
    """Return the number of ranks of a host: a given number; `gpu`, `cpu` and `auto` as in torchrun.

    None means one rank for each GPU, or one rank without GPUs. Raises `PreflightError` for `gpu` on
    a host without one.
    """
    if isinstance(slots, int):
        return slots
    if slots == "gpu" and not facts.gpus:
        raise PreflightError(
            host,
            "--nproc-per-node gpu, but no GPU was found.",
            "Use a number, or auto.",
        )
    if slots == "cpu":
        return facts.cpus
    return facts.gpus or (facts.cpus if slots == "auto" else 1)


def default_cwd(host: Host, local_cwd: str) -> str:
    """Return the default working directory of ranks on a host: "" for the run's own."""
    return local_cwd if host.is_local else ""


def defaults(one: Reached, nproc: int) -> Pairs:
    """Return variables that bind collectives to the rendezvous's interface, and avoid torchrun's
    thread warning.
    """
    variables = _threads(nproc)
    name = one.route.interface
    if name:
        # NCCL takes a name as a prefix; with "=" only this interface matches.
        binding = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
        variables = binding | variables
    return tuple(variables.items())


def warming(
    spec: JobSpec, access: Access, host: Host, facts: Facts, owner: str
) -> TemplateRequest | None:
    """Return what a host must load in advance for its ranks of this job; None if everything is
    started by exec.
    """
    if access.cold or not access.warm_idle_s or spec.max_restarts:
        return None
    try:
        nproc = ranks_of(host, facts, spec)
    except PreflightError:
        return None  # no run follows
    return TemplateRequest(
        owner=owner,
        idle_s=access.warm_idle_s,
        lease_s=access.lease_s,
        env=dict(spec.variables),
        defaults=_threads(nproc),
        preload=access.preload,
    )


def _threads(nproc: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1"} if nproc > 1 else {}


def commands(plan: Plan, pythons: Sequence[str], program: str = "<the cell>") -> str:
    """Return a readable list of what runs on every host: one torchrun command each, without values
    of `--env`.
    """
    lines = []
    for node, python in zip(plan.nodes, pythons, strict=True):
        ranks = plural(node.nproc_per_node, "rank")
        lines.append(f"# {node.host.name} (node_rank {node.node_rank}, {ranks})")
        variables = [f"{name}=..." for name, _ in node.env]
        for name, value in node.defaults:
            variables.append(shlex.quote(f"{name}={value}"))
        command = [python, "-m", "torch.distributed.run", *plan.flags_of(node)]
        words = [*(["env"] if variables else []), *variables, shlex.join(command)]
        work = posixpath.join("~/.distmagic/work", plan.work.name, plan.work.inside)
        cwd = node.cwd or work
        home = ""  # the shell expands a leading `~`
        if cwd == "~" or cwd.startswith("~/"):
            home, cwd = "~/", cwd[2:]
        quoted = home + (shlex.quote(cwd) if cwd else "")
        if home:
            quoted = quoted.rstrip("/")
        lines.append(f"cd {quoted} && {' '.join(words)} {program}")
    return "\n".join(lines)
