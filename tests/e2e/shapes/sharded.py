"""FSDP2 over one dimension of a mesh, tensor parallel over the other, and a distributed checkpoint that is loaded again."""
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, FOLDER = int(sys.argv[1]), sys.argv[2]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model, optimizer = build()
for _ in range(STEPS):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
before = model(torch.ones(4, 8)).square().mean().item()
states = get_state_dict(model, optimizer)
dcp.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=FOLDER)

model, optimizer = build()
model_state, optimizer_state = get_state_dict(model, optimizer)
dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=FOLDER)
set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
after = model(torch.ones(4, 8)).square().mean().item()
print(f"loaded {after == before} {before < 1.0}")
dist.destroy_process_group()
