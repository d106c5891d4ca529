"""Makes a `Plan` from a `JobSpec` and the facts of the hosts. Pure: ids and ports are arguments."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from distmagic.errors import PreflightError, UsageError
from distmagic.planning import torchrun
from distmagic.remote.wire.protocol import (
    Facts,
    JobTerms,
    JoinTemplate,
    Route,
    TemplateRequest,
    WorkDir,
)
from distmagic.request.access import Access
from distmagic.request.hosts import Host, Slots
from distmagic.request.spec import JobSpec, split_endpoint

# Every round makes a store of its own, where there may be more than one. With one store for all (torch 2.13):
# - a node that comes later waits in vain for its address: the lead writes it in the first round only
#   (`next_rendezvous` in dynamic_rendezvous.py)
# - ranks of a later round find what those of the first left in it, the addresses of dead peers among it
#   (`_create_c10d_store` in distributed/rendezvous.py takes it for new at every attempt)
OWN_STORES = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A host that answered, with its facts and its address as the other nodes dial it."""

    host: Host
    facts: Facts
    route: Route


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """What one host starts. The other hosts dial it at `address`.

    `env` replaces variables of the host's own environment, `defaults` only fills gaps in it. torchrun announces
    `local_addr`, which is another address where the user has said so. `cwd` is "" where ranks begin in the run's own
    working directory.
    """

    host: Host
    node_rank: int
    nproc_per_node: int
    local_addr: str
    torchrun: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    defaults: tuple[tuple[str, str], ...]
    cwd: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole run. `endpoint` is "address port" where node 0 listens, "" where there is never another one.

    The nodes' agents meet at `gang_port` (UDP) of the first node's address. Only an elastic job has a `join_template`, in
    which the payload's sizes are still open. `chose_port`: the port is one that was free, not one that the user named.
    `work` is the working directory on all hosts but the notebook's own machine.
    """

    job: str
    nodes: tuple[NodePlan, ...]
    terms: JobTerms
    endpoint: str
    gang_port: int
    node_lost_after_s: float
    rdzv: torchrun.Rendezvous
    join_template: JoinTemplate | None
    work: WorkDir
    chose_port: bool


def terms_of(spec: JobSpec, *, lease_s: float, owner: str, call: str = "") -> JobTerms:
    """Return the terms that a job asks for: those that are options of it by their names, and what follows from others.

    `owner` is the notebook that begins it, `call` what it runs, as the user wrote it.
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
    """Return the plan of a job on these hosts, in their order. Raises `UsageError` or `PreflightError`.

    `terms` are those of `terms_of`: what the hosts decide of them is put in here. `work` is the job's working directory
    on other hosts. `local_cwd` is the working directory of ranks on this machine, unless the job names one.
    """
    rdzv = _rendezvous(spec, reached, job)
    nodes = tuple(_node(spec, rdzv, i, one, local_cwd) for i, one in enumerate(reached))
    # Without restarts there is one round, so a job of a range of nodes can't do without those that it began with.
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
        endpoint=_dialed(rdzv),
        gang_port=rdzv.port,
        node_lost_after_s=spec.node_lost_after_s,
        rdzv=rdzv,
        join_template=later if can_change else None,
        work=work,
        chose_port=_named_port(spec) is None,
    )


def at_port(plan: Plan, port: int) -> Plan:
    """Return the same plan with another port of the first node, at which all nodes meet."""
    rdzv = replace(plan.rdzv, port=port)
    nodes = []
    for node in plan.nodes:
        words = torchrun.flags(
            rdzv,
            node_rank=node.node_rank,
            nproc_per_node=node.nproc_per_node,
            local_addr=node.local_addr,
        )
        nodes.append(replace(node, torchrun=words))
    return replace(
        plan, nodes=tuple(nodes), rdzv=rdzv, gang_port=port, endpoint=_dialed(rdzv)
    )


def _dialed(rdzv: torchrun.Rendezvous) -> str:
    """Return where the nodes dial the first one, "" where it is the only one."""
    return f"{rdzv.address} {rdzv.port}" if rdzv.max_nodes > 1 else ""


def _rendezvous(
    spec: JobSpec, reached: Sequence[Reached], job: str
) -> torchrun.Rendezvous:
    given = len(reached)
    low, high = spec.nnodes or (given, given)
    if not low <= given <= high:
        wanted = "1 node" if high == 1 else f"{high} nodes"
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
    """Return static, or c10d where the number of nodes may change or several nodes restart. Raises `UsageError`."""
    restarts = spec.max_restarts > 0 and nodes > 1
    if spec.rdzv_backend == "static" and restarts:
        raise UsageError(
            "--rdzv-backend static can't restart ranks on more than one node: the nodes never meet again.",
            "Use --rdzv-backend c10d with --max-restarts, or leave --rdzv-backend out.",
        )
    return spec.rdzv_backend or ("c10d" if spec.is_elastic or restarts else "static")


def _named_port(spec: JobSpec) -> int | None:
    """Return the port that the user has named, None for none."""
    port = split_endpoint(spec.rdzv_endpoint)[1] if spec.rdzv_endpoint else None
    return port or spec.master_port


def _check_endpoint(address: str, reached: Sequence[Reached]) -> None:
    """Raise `UsageError` where a host that isn't the first is to serve the rendezvous: nobody would listen there."""
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
        torchrun=torchrun.flags(
            rdzv, node_rank=rank, nproc_per_node=nproc, local_addr=address
        ),
        env=spec.variables,
        defaults=variables,
        cwd=spec.cwd or default_cwd(one.host, local_cwd),
        address=one.route.address,
    )


def ranks_of(host: Host, facts: Facts, spec: JobSpec) -> int:
    """Return how many ranks a host runs: what was said, else one for each device of `--devices`.

    Raises `PreflightError` for a device that it does not have.
    """
    if spec.devices:
        _check_devices(host, facts, spec.devices)
        facts = replace(facts, gpus=len(spec.devices))
    return count_ranks(host.slots or spec.nproc_per_node, facts, host.name)


def _check_devices(host: Host, facts: Facts, devices: Sequence[str]) -> None:
    missing = [one for one in devices if one.isdecimal() and int(one) >= facts.gpus]
    if not missing and facts.gpus:
        return
    found = (
        f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}" if facts.gpus else "no GPU"
    )
    raise PreflightError(
        host.name,
        f"--devices {','.join(devices)}, but {found} {'were' if facts.gpus > 1 else 'was'} found there.",
        "GPUs are numbered from 0, as in nvidia-smi.",
    )


def count_ranks(slots: Slots | None, facts: Facts, host: str) -> int:
    """Return how many ranks a host runs: a number as it is, `gpu`, `cpu` and `auto` as torchrun means them.

    Nothing said: one rank a GPU, or one. Raises `PreflightError` for `gpu` on a host without one.
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
    """Return the working directory of ranks on a host where the user names none: "" for the run's own."""
    return local_cwd if host.is_local else ""


def defaults(one: Reached, nproc: int) -> tuple[tuple[str, str], ...]:
    """Bind the collectives to the interface that the other nodes dial, and spare users torchrun's thread warning."""
    variables = _threads(nproc)
    name = one.route.interface
    if not name:
        return tuple(variables.items())
    # NCCL takes a name for the beginning of one; with "=" only this interface fits.
    binding = (("GLOO_SOCKET_IFNAME", name), ("NCCL_SOCKET_IFNAME", f"={name}"))
    return (*binding, *variables.items())


def warming(
    spec: JobSpec, access: Access, host: Host, facts: Facts, owner: str
) -> TemplateRequest | None:
    """Return what a host has to load for its ranks of this job; None where all is to be started by exec."""
    if access.cold or not access.warm_idle_s or spec.max_restarts:
        return None
    try:
        nproc = ranks_of(host, facts, spec)
    except PreflightError:
        return None  # there will be no run
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
    """Return, for people, what is run on every host: one torchrun command each, values of `--env` left out."""
    lines = []
    for node, python in zip(plan.nodes, pythons, strict=True):
        ranks = "1 rank" if node.nproc_per_node == 1 else f"{node.nproc_per_node} ranks"
        lines.append(f"# {node.host.name} (node_rank {node.node_rank}, {ranks})")
        variables = [f"{name}=..." for name, _ in node.env]
        for name, value in node.defaults:
            variables.append(shlex.quote(f"{name}={value}"))
        command = [python, "-m", "torch.distributed.run", *node.torchrun]
        words = [*(["env"] if variables else []), *variables, shlex.join(command)]
        cwd = node.cwd
        if not cwd:
            cwd = posixpath.join("~/.distmagic/work", plan.work.name, plan.work.inside)
        home = ""  # a `~` in front is for the shell to expand
        if cwd == "~" or cwd.startswith("~/"):
            home, cwd = "~/", cwd[2:]
        quoted = home + (shlex.quote(cwd) if cwd else "")
        if home:
            quoted = quoted.rstrip("/")
        lines.append(f"cd {quoted} && {' '.join(words)} {program}")
    return "\n".join(lines)
