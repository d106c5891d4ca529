"""Makes the `StartNode` messages of a plan, one for each node. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distmagic import sanitize
from distmagic.payload.pack import Payload
from distmagic.planning import plan as planning
from distmagic.planning import torchrun
from distmagic.planning.plan import Plan, Reached
from distmagic.remote.values.settings import VARIABLE
from distmagic.remote.wire import protocol
from distmagic.remote.wire.protocol import JobTerms, WorkDir
from distmagic.request.hosts import parse_slots

_CALL_CHARS = 200  # maximum length of a call in a host's list of jobs


def listed(terms: JobTerms) -> JobTerms:
    """Return the terms for hosts, with the call shortened to one line for their lists of jobs."""
    return replace(terms, call=sanitize.line(terms.call)[:_CALL_CHARS])


def start_messages(
    plan: Plan,
    payload: Payload,
    secret: str,
    warm: Sequence[protocol.TemplateRequest | None],
) -> list[protocol.StartNode]:
    """Return the messages that start a plan's nodes, in their order.

    `secret` authenticates the job's heartbeats, in hex; `warm` has for each node the warm process
    to fork from.
    """
    hosts = tuple(node.host.name for node in plan.nodes)
    sizes = tuple(local.blob.size_bytes for local in payload.blobs)
    own = {VARIABLE: payload.settings[0]} if payload.settings[0] else {}
    work = with_files(plan.work, payload)
    messages = []
    for node, request in zip(plan.nodes, warm, strict=True):
        is_lead = node.node_rank == 0
        membership = None
        if plan.rdzv.max_nodes > 1:
            membership = protocol.Membership(
                secret=secret,
                address=node.address,
                lead_address=plan.nodes[0].address,
                port=plan.rdzv.port,
                nodes=len(plan.nodes),
                lost_after_s=plan.node_lost_after_s,
            )
        join_template = None
        if is_lead and plan.join_template is not None:
            join_template = replace(plan.join_template, sizes=sizes, work=work)
        message = protocol.StartNode(
            job=plan.job,
            node_rank=node.node_rank,
            torchrun=plan.flags_of(node),
            env=dict(node.env) | own,
            defaults=dict(node.defaults),
            cwd=node.cwd,
            call=payload.call.blob.sha256,
            code=payload.code.blob.sha256,
            side_files=tuple(
                local.blob.sha256 for local in payload.blobs[2:]
            ),  # including files of the tree
            endpoint=plan.endpoint,
            hosts=hosts,
            lead=is_lead,
            terms=listed(plan.terms),
            membership=membership,
            warm=request,
            join_template=join_template,
            work=None if node.host.is_local else work,
        )
        messages.append(message)
    return messages


def join_message(
    lead: protocol.StartNode, hosts: Sequence[str], one: Reached, *, local_cwd: str
) -> protocol.StartNode:
    """Return the message that starts one more node of an elastic job.

    `hosts` are those of all its nodes, this one last. `lead` is the message that started the first
    node. A node that joins later is started by exec. Raises `HostError`.
    """
    template, membership = lead.join_template, lead.membership
    assert template is not None
    assert membership is not None
    slots = None
    if template.nproc_per_node:
        slots = parse_slots(template.nproc_per_node, one.host.name)
    nproc = planning.count_ranks(one.host.slots or slots, one.facts, one.host.name)
    address = one.route.address
    return replace(
        lead,
        node_rank=len(hosts) - 1,
        hosts=tuple(hosts),
        lead=False,
        torchrun=torchrun.joining(
            lead.torchrun, nproc_per_node=nproc, local_addr=address
        ),
        defaults=dict((*planning.defaults(one, nproc), *planning.OWN_STORES)),
        cwd=template.cwd or planning.default_cwd(one.host, local_cwd),
        membership=replace(membership, address=address),
        warm=None,
        join_template=None,
        work=None if one.host.is_local else template.work,
    )


def with_files(work: WorkDir, payload: Payload) -> WorkDir:
    """Return a working directory with the list of the payload's files for it, if it has any."""
    tree = payload.tree
    if tree is None:
        return work
    return replace(
        work,
        manifest=tree.listed.blob.sha256,
        files=tree.files,
        size_bytes=tree.size_bytes,
        inside=tree.inside,
    )
