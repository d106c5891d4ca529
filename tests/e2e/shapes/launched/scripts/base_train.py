"""A module of a repository, run by `-m`, with its data and checkpoints in one folder that a variable names, as nanochat."""
import argparse
import json
import time

import torch
import torch.distributed as dist

from chat.common import compute_cleanup, compute_init, get_base_dir, print0, tokens

parser = argparse.ArgumentParser()
parser.add_argument("--run", default="dummy")
parser.add_argument("--depth", type=int, default=2)
parser.add_argument("--num_iterations", type=int, default=20)
args = parser.parse_args()
ddp, rank, local_rank, world = compute_init()
data = tokens()
model = torch.nn.Sequential(torch.nn.Embedding(32, 8), *(torch.nn.Linear(8, 8) for _ in range(args.depth)), torch.nn.Linear(8, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(args.num_iterations):
    began = time.time()
    at = (step * world + rank) * 8 % (len(data) - 9)
    loss = torch.nn.functional.cross_entropy(model(data[at : at + 8]), data[at + 1 : at + 9])
    loss.backward()
    if ddp:  # an optimizer that averages by itself, without DistributedDataParallel
        works = [dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, async_op=True) for p in model.parameters()]
        for work in works:
            work.wait()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    done = 100 * step / args.num_iterations
    dt = time.time() - began
    print0(f"step {step:05d}/{args.num_iterations:05d} ({done:.2f}%) | loss: {loss.item():.6f} | lrm: 1.00 | dt: {dt * 1000:.2f}ms | tok/sec: {8 * world / dt:,.0f}")
folder = get_base_dir() / "base_checkpoints" / f"d{args.depth}"
folder.mkdir(parents=True, exist_ok=True)
if rank == 0:
    torch.save(model.state_dict(), folder / f"model_{args.num_iterations:06d}.pt")
    (folder / f"meta_{args.num_iterations:06d}.json").write_text(json.dumps(vars(args)))
torch.save(optimizer.state_dict(), folder / f"optim_{args.num_iterations:06d}_rank{rank}.pt")
compute_cleanup()
