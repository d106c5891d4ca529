"""What each node of a run is told when its agent is started. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distmagic.payload.pack import Payload
from distmagic.planning import plan as planning
from distmagic.planning import torchrun
from distmagic.planning.plan import NodePlan, Plan, Reached
from distmagic.remote.wire import protocol
from distmagic.request.hosts import parse_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMessages:
    """What is the same for all nodes. `secret` is the gang channel's, `owner` the notebook that begins the job."""

    job: str
    secret: str
    lease_s: float
    owner: str

    def start(
        self, plan: Plan, node: NodePlan, payload: Payload, warm: protocol.TemplateRequest | None
    ) -> protocol.StartNode:
        """Return what one node is told."""
        is_lead = node.node_rank == 0
        return protocol.StartNode(
            job=self.job, node_rank=node.node_rank, torchrun=node.torchrun, env=dict(node.env),
            defaults=dict(node.defaults), cwd=node.cwd, call=payload.call.blob.sha256, code=payload.code.blob.sha256,
            endpoint=plan.endpoint, hosts=tuple(one.host.name for one in plan.nodes),
            lead=is_lead, lease_s=self.lease_s, max_restarts=plan.max_restarts,
            membership=self._membership(plan, node), keep=plan.keep, owner=self.owner, timeout_s=plan.timeout_s,
            stays=plan.stays, side_files=tuple(side_file.blob.sha256 for side_file in payload.side_files), warm=warm,
            hang_timeout_s=plan.hang_timeout_s, recipe=self._recipe(plan, payload) if is_lead else None,
        )  # fmt: skip

    def _recipe(self, plan: Plan, payload: Payload) -> protocol.JoinTemplate | None:
        if plan.recipe is None:
            return None
        return replace(plan.recipe, sizes=tuple(local.blob.size_bytes for local in payload.blobs))

    def _membership(self, plan: Plan, node: NodePlan) -> protocol.Membership | None:
        if plan.rdzv.max_nodes == 1:
            return None
        return protocol.Membership(
            secret=self.secret, address=node.address, lead_address=plan.nodes[0].address, port=plan.gang_port,
            nodes=len(plan.nodes), min_nodes=plan.min_nodes, lost_after_s=plan.node_lost_after_s,
            max_nodes=plan.rdzv.max_nodes if plan.recipe is not None else 0,
        )  # fmt: skip


def newcomer(lead: protocol.StartNode, hosts: Sequence[str], one: Reached, *, local_cwd: str) -> protocol.StartNode:
    """Return what a host is told that comes to an elastic job as the last of its nodes, whose hosts are `hosts`.

    `lead` is what the first node was told; a newcomer is started by exec. Raises `HostError`.
    """
    recipe, membership = lead.recipe, lead.membership
    assert recipe is not None
    assert membership is not None
    slots = parse_slots(recipe.nproc_per_node, one.host.name) if recipe.nproc_per_node else None
    nproc, address = planning.count_ranks(one.host.slots or slots, one.facts, one.host.name), one.route.address
    return replace(
        lead, node_rank=len(hosts) - 1, hosts=tuple(hosts), lead=False, recipe=None, warm=None,
        torchrun=torchrun.joining(lead.torchrun, nproc_per_node=nproc, local_addr=address),
        defaults=dict((*planning.defaults(one, nproc), *planning.OWN_STORES)),
        cwd=recipe.cwd or planning.default_cwd(one.host, local_cwd), membership=replace(membership, address=address),
    )  # fmt: skip
