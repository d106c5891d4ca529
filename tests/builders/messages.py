"""Messages of the wire."""

from __future__ import annotations

from distmagic.remote.wire import protocol as p

SHA = "ab" * 32
START = p.StartNode(
    job="j-1", node_rank=1, torchrun=("--nnodes=2",), env={}, defaults={}, cwd="/", call=SHA, code=SHA, endpoint="",
    hosts=("gpu-a",), lead=True, lease_s=60.0,
)  # fmt: skip
