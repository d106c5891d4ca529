"""What each node of a run is told when its agent is started. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distmagic.pack import Payload
from distmagic.plan import NodePlan, Plan
from distmagic.remote import protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What is the same for all nodes. `secret` is the gang channel's, `owner` the notebook that begins the job."""

    job: str
    secret: str
    lease_s: float
    owner: str

    def start(
        self, plan: Plan, node: NodePlan, payload: Payload, joined: Sequence[str], warm: protocol.Warm | None
    ) -> protocol.Start:
        """Return what one node is told. `joined` are the hosts of nodes beyond the plan, up to this one's own."""
        return protocol.Start(
            job=self.job, node_rank=node.node_rank, torchrun=node.torchrun, env=dict(node.env),
            defaults=dict(node.defaults), cwd=node.cwd, call=payload.call.blob.sha256, code=payload.code.blob.sha256,
            endpoint=plan.endpoint, hosts=(*(one.host.name for one in plan.nodes), *joined),
            lead=node.node_rank == 0, lease_s=self.lease_s, max_restarts=plan.max_restarts,
            membership=self._membership(plan, node), keep=plan.keep, owner=self.owner, timeout_s=plan.timeout_s,
            stays=plan.stays, volumes=tuple(volume.blob.sha256 for volume in payload.volumes), warm=warm,
            hang_timeout_s=plan.hang_timeout_s,
        )  # fmt: skip

    def _membership(self, plan: Plan, node: NodePlan) -> protocol.Membership | None:
        if plan.rdzv.max_nodes == 1:
            return None
        return protocol.Membership(
            secret=self.secret, address=node.address, lead_address=plan.nodes[0].address, port=plan.gang_port,
            nodes=len(plan.nodes), min_nodes=plan.min_nodes, lost_after_s=plan.node_lost_after_s,
        )  # fmt: skip
