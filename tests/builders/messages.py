"""Messages of the wire."""

from distmagic.remote.wire import protocol as p

SHA = "ab" * 32
START = p.StartNode(
    job="j-1", node_rank=1, torchrun=("--nnodes=2",), env={}, defaults={}, cwd="/", call=SHA, code=SHA, endpoint="",
    hosts=("gpu-a",), lead=True, terms=p.JobTerms(lease_s=60.0),
)  # fmt: skip
TERMS = p.JobTerms(
    lease_s=60.0, owner="laptop:nb.ipynb", goes_on_alone=True, survives_logout=True, max_restarts=1, timeout_s=90.0,
    hang_timeout_s=60.0, min_nodes=2, max_nodes=4, awaited=("gpu-c",),
    call="train(3)", ranks=8,
)  # fmt: skip
