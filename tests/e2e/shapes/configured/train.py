"""A program whose settings are its globals. It trains alone, or under torchrun."""
import os
import pickle
import time
from contextlib import nullcontext

import numpy as np
import torch
from model import Config, Model
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = "out"
dataset = "words"
eval_interval = 10
batch_size = 4
block_size = 8
n_embd = 8
max_iters = 1000
learning_rate = 1e-2
backend = "gloo"
device = "cpu"
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec(open("settings.py").read())  # from the command line, or from a file of settings
config = {k: globals()[k] for k in config_keys}

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    seed_offset = int(os.environ["RANK"])
    master_process = seed_offset == 0
else:
    seed_offset, master_process = 0, True
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
ctx = nullcontext()
data_dir = os.path.join("data", dataset)


def get_batch():
    data = np.memmap(os.path.join(data_dir, "train.bin"), dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


with open(os.path.join(data_dir, "meta.pkl"), "rb") as f:
    vocab_size = pickle.load(f)["vocab_size"]
model = Model(Config(vocab_size=vocab_size, block_size=block_size, n_embd=n_embd))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model
iter_num, t0 = 0, time.time()
while True:
    with ctx:
        _, loss = model(*get_batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % eval_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(time.time() - t0) * 1000:.2f}ms")
        torch.save({"model": raw_model.state_dict(), "iter_num": iter_num, "config": config}, os.path.join(out_dir, "ckpt.pt"))
    iter_num += 1
    if iter_num > max_iters:
        break
if ddp:
    destroy_process_group()
